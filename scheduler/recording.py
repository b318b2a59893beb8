"""A timeline of both processes while it is being written."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from sgl_ssd.protocol import Spans
from sgl_ssd.recorder import Recorder, TraceFile
from sgl_ssd.scheduler.draft_fleet import DraftFleet
from sgl_ssd.scheduler.stats import SSDStats

logger = logging.getLogger(__name__)

FLUSH_S = 1.0
LAST_S = 3.0  # longest wait for the last spans of draft servers


class Recording:
    """Collects spans from `stats.recorder` and from the draft server; a thread writes them.

    Raises `OSError` when `path` cannot be written.
    """

    def __init__(
        self,
        path: str,
        stats: SSDStats,
        client: DraftFleet,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.file = TraceFile(path, len(client.clients))
        self._stats = stats
        self._client = client
        self._clock = clock
        self._flush_at = 0.0
        self._stop_by: float | None = None
        self._last_to_come = 0  # draft servers whose last spans are out
        self._recorder = stats.recorder = Recorder()
        client.record(self._on_spans)
        logger.info("timeline: writing %s", self.file.path)

    @property
    def state(self) -> str:
        """on, closing, or off."""
        if self._stop_by is None:
            return "on"
        return "off" if self.file.closed else "closing"

    def tick(self) -> None:
        """Hand over what has come; call it often."""
        now = self._clock()
        if self._stop_by is not None:
            if now > self._stop_by:
                self._close()
        elif now >= self._flush_at:
            self._flush_at = now + FLUSH_S
            self.file.add(self._recorder.drain())
            if self.file.full:
                logger.warning("timeline: %s is full", self.file.path)
            if self.file.full or self.file.closed:
                self.stop()

    def stop(self) -> None:
        """Record no more; the file is complete once `state` is off."""
        if self._stop_by is not None:
            return
        self._stats.recorder = None
        self.file.add(self._recorder.drain())
        self._stop_by = self._clock() + LAST_S
        self._last_to_come = self._client.stop_recording()
        if not self._last_to_come:
            self._close()

    def _on_spans(self, message: Spans, server: int) -> None:
        self.file.add(self._recorder.drain())
        self.file.add(spans_of(message), server)
        if message.last and self._stop_by is not None:
            self._last_to_come -= 1
            if self._last_to_come <= 0:
                self._close()

    def _close(self) -> None:
        self._client.record(None)
        self._stop_by = float("inf")
        self.file.close()


def spans_of(message: Spans) -> list[Any]:
    """The spans of a message, as the recorder on this side has them."""
    marks, times = message.marks.tolist(), message.times.tolist()
    return [
        (kind, begin, max(begin, end), round_id, count)
        for (kind, round_id, count), (begin, end) in zip(marks, times, strict=True)
    ]
