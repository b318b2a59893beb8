"""How long rounds take, by the size of the batch. Pure Python."""

from __future__ import annotations


def size_class(rows: int) -> int:
    """1, 2, 4, 8 ..: the largest power of two that is not above `rows`."""
    return 1 << (rows.bit_length() - 1)


class RoundTimes:
    """Time from the launch of one verify to that of the next.

    Only where both have the same rows and nothing ran in between, so that it is the time of a
    round. Sums by `size_class` of the batch: with drafts [rounds, tokens in the forward, seconds,
    seconds of it waited for drafts], without [rounds, rows, seconds].
    """

    def __init__(self) -> None:
        self.drafted: dict[int, list[float]] = {}
        self.plain: dict[int, list[float]] = {}
        self._last: tuple[float, int, int, float] | None = None

    def launched(self, now: float, rows: int, width: int, waited: float) -> float | None:
        """A verify of `width` tokens a row begins; `waited` seconds for drafts since the start.

        Returns the seconds of the round before it if they say something.
        """
        last, self._last = self._last, (now, rows, width, waited)
        if last is None or last[1] != rows:
            return None
        then, _, width, waited_then = last
        seconds = now - then
        if width > 1:
            cell = self.drafted.setdefault(size_class(rows), [0, 0, 0.0, 0.0])
            cell[1] += rows * width
            cell[3] += waited - waited_then
        else:
            cell = self.plain.setdefault(size_class(rows), [0, 0, 0.0])
            cell[1] += rows
        cell[0] += 1
        cell[2] += seconds
        return seconds

    def interrupted(self) -> None:
        """Something else ran: the time to the next verify is no round's."""
        self._last = None

    def as_dict(self) -> dict[str, dict[str, list[float]]]:
        """For `/server_info`; see `sgl_ssd.measurements.from_server`."""
        return {
            "forwards": {str(size): list(cell) for size, cell in self.drafted.items()},
            "plain_forwards": {str(size): list(cell) for size, cell in self.plain.items()},
        }
