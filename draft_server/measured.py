"""What the planner needs to know of this machine and this pair, from what goes on anyway."""

from __future__ import annotations

import numpy as np

from sgl_ssd.draft_server.speculation_cache import SpeculationCache, Walk
from sgl_ssd.fan_out import MAX_FAN_OUT

FORGET = 0.998  # a step: the last 500 count most
HALVE_AT = 4000  # outcomes
ENOUGH = 30


class StepTimes:
    """A straight line through the times of recent steps, by rows."""

    def __init__(self) -> None:
        self._sums = np.zeros(5)  # 1, rows, s, rows^2, rows * s

    def add(self, rows: int, seconds: float) -> None:
        """A step over `rows` rows took `seconds`."""
        self._sums *= FORGET
        self._sums += (1.0, rows, seconds, rows * rows, rows * seconds)

    def summary(self) -> dict[str, float]:
        """Mean rows and milliseconds, and milliseconds a further row (0 where rows are alike)."""
        n, x, y, xx, xy = self._sums.tolist()
        if n < 1:
            return {}
        x, y, xx, xy = x / n, y / n, xx / n, xy / n
        spread = xx - x * x
        slope = max(0.0, (xy - x * y) / spread) if spread > 1.0 else 0.0
        slope = min(slope, y / max(1.0, x))  # no step takes less than no time
        return {"step_rows": x, "step_ms": 1e3 * y, "step_row_ms": 1e3 * slope}


class GuessRanks:
    """Which guess the bonus token was, where a draft was rejected.

    A depth with F guesses tells of a miss only that the token was not among the first F, so the
    share missed by F guesses is the product of those missed by each guess among the outcomes that
    came to it (Kaplan and Meier).
    """

    def __init__(self) -> None:
        self._tried = np.zeros(MAX_FAN_OUT)
        self._found = np.zeros(MAX_FAN_OUT)

    def observe(self, cache: SpeculationCache, walk: Walk, answered: int) -> None:
        """News that `walk` follows in `cache`, before it is taken over. The first `answered`
        drafts of the chain were verified."""
        if walk.trunk >= answered or (walk.branch < 0 and walk.complete):
            return  # no draft was rejected
        guesses = np.flatnonzero(cache.alive & (cache.depth == walk.trunk))
        rank = int(np.searchsorted(guesses, walk.branch)) if walk.branch >= 0 else -1
        self.add(rank, len(guesses))

    def add(self, rank: int, guesses: int) -> None:
        """The token was guess number `rank`, from 0, of so many; -1: none of them."""
        self._tried[: rank + 1 if rank >= 0 else guesses] += 1
        if rank >= 0:
            self._found[rank] += 1
        if self._tried[0] > HALVE_AT:
            self._tried /= 2
            self._found /= 2

    def summary(self) -> dict[str, float]:
        """`missed_of_F` for F = 1, 2, 4 .. as far as enough outcomes tell."""
        missed = np.cumprod(1 - self._found / np.maximum(self._tried, 1))
        sizes = (2**i for i in range(MAX_FAN_OUT.bit_length()))
        return {
            f"missed_of_{size}": float(missed[size - 1])
            for size in sizes
            if self._tried[size - 1] >= ENOUGH
        }
