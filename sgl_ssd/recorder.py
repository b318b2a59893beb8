"""Spans of rounds, recorded by both servers, and the trace file they end in.

A file is in Chrome's trace format, one event a line, which Perfetto and `chrome://tracing` open
and `sgl_ssd.timeline` reads; it is of use also when the process was killed while writing it.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Iterable
from typing import Any

import orjson

from sgl_ssd.protocol import MAX_SPANS, SpanKind

logger = logging.getLogger(__name__)

Span = tuple[int, float, float, int, int]
"""`SpanKind`, begin and end in seconds of the monotonic clock, round id or 0, a count."""

VERIFIER, DRAFT = 1, 2
PROCESSES = {VERIFIER: "verifier", DRAFT: "draft server"}
TRACKS = {
    (VERIFIER, 1): "target",
    (VERIFIER, 2): "host",
    (VERIFIER, 3): "wire",
    (DRAFT, 1): "answers",
    (DRAFT, 2): "draft model",
    (DRAFT, 3): "caches",
}
_PLACES: dict[int, tuple[int, int, str, str]] = {
    # kind: process, track, name, what the count is of
    SpanKind.VERIFY: (VERIFIER, 1, "verify", "tokens"),
    SpanKind.PREFILL: (VERIFIER, 1, "prefill", "rows"),
    SpanKind.OUTCOME_WAIT: (VERIFIER, 2, "wait for target", "rows"),
    SpanKind.DRAFT_WAIT: (VERIFIER, 2, "wait for drafts", "rows"),
    SpanKind.LAUNCH: (VERIFIER, 2, "launch", "rows"),
    SpanKind.HOST: (VERIFIER, 2, "host work", "rows"),
    SpanKind.ROUND_TRIP: (VERIFIER, 3, "round trip", "rows"),
    SpanKind.ANSWER: (DRAFT, 1, "answer", "rows"),
    SpanKind.ADOPT: (DRAFT, 1, "adopt", "rows"),
    SpanKind.BACKUP: (DRAFT, 1, "backup", "rows"),
    SpanKind.PUSH: (DRAFT, 1, "send ahead", "entries"),
    SpanKind.BUILD_STEP: (DRAFT, 2, "build step", "rows"),
    SpanKind.DRAFT_PREFILL: (DRAFT, 2, "prefill", "tokens"),
    SpanKind.BUILD: (DRAFT, 3, "build", "branches"),
}
MAX_EVENTS = 2_000_000  # in one file: some 200 MB
SAME_CLOCK_S = 50e-6
_PAIRS = 256


class Recorder:
    """The newest spans of one process, up to `MAX_SPANS`. One thread adds and drains."""

    def __init__(self) -> None:
        self._spans: deque[Span] = deque(maxlen=MAX_SPANS)

    def add(self, kind: int, begin: float, end: float, round_id: int = 0, count: int = 0) -> None:
        """One span; seconds of `time.monotonic` (on Linux `time.perf_counter` is the same)."""
        self._spans.append((kind, begin, end, round_id, count))

    def drain(self) -> list[Span]:
        """All spans since the last call."""
        spans = list(self._spans)
        self._spans.clear()
        return spans


class ClockOffset:
    """Seconds to add to the draft server's clock to get the verifier's.

    A question leaves at t0 and its answer arrives at t3 of the verifier's clock; the draft server
    has it from t1 to t2 of its own. On one host both read the same clock, and t0 <= t1, t2 <= t3
    hold as they are. Otherwise the offset that puts the quickest exchange in the middle is wrong
    by at most half of what that spent on the wire.
    """

    def __init__(self) -> None:
        self._asked: dict[int, tuple[float, float]] = {}
        self._answered: dict[int, tuple[float, float]] = {}
        self._best = float("inf")
        self._shared = True
        self._estimate = 0.0

    @property
    def seconds(self) -> float:
        return 0.0 if self._shared else self._estimate

    def add(self, spans: Iterable[Span]) -> list[tuple[int, float, float, float, float]]:
        """Take in spans of either process; the exchanges now known from both ends:
        (round id, t0, t1, t2, t3)."""
        found = []
        for kind, begin, end, round_id, _ in spans:
            if kind == SpanKind.ROUND_TRIP:
                mine, other = self._asked, self._answered
            elif kind == SpanKind.ANSWER:
                mine, other = self._answered, self._asked
            else:
                continue
            if round_id not in other:
                mine[round_id] = begin, end
                if len(mine) > _PAIRS:
                    del mine[next(iter(mine))]
                continue
            pair = other.pop(round_id)
            (t0, t3), (t1, t2) = (
                ((begin, end), pair) if kind == SpanKind.ROUND_TRIP else (pair, (begin, end))
            )
            found.append((round_id, t0, t1, t2, t3))
            self._learn(t0, t1, t2, t3)
        return found

    def _learn(self, t0: float, t1: float, t2: float, t3: float) -> None:
        if t0 - t1 > SAME_CLOCK_S or t2 - t3 > SAME_CLOCK_S:
            self._shared = False
        wire = (t3 - t0) - (t2 - t1)
        # The best is forgotten slowly, since clocks drift apart.
        self._best *= 1.001
        if wire <= self._best:
            self._best, self._estimate = wire, ((t0 - t1) + (t3 - t2)) / 2


class TraceFile:
    """Writes spans from a thread of its own. Raises `OSError` when `path` cannot be written."""

    def __init__(self, path: str, draft_servers: int = 1) -> None:
        self.path = os.path.abspath(path)
        self.events = 0
        self._file = open(self.path, "wb")  # noqa: SIM115 - closed by the thread
        self._spans: queue.SimpleQueue[tuple[list[Span], int | None] | None] = queue.SimpleQueue()
        self._offsets = [ClockOffset() for _ in range(draft_servers)]
        self._origin: float | None = None
        self._thread = threading.Thread(target=self._run, name="trace", daemon=True)
        self._thread.start()

    @property
    def full(self) -> bool:
        """Whether it takes no more spans."""
        return self.events >= MAX_EVENTS

    @property
    def closed(self) -> bool:
        """Whether everything is in the file, or could not be written."""
        return not self._thread.is_alive()

    def add(self, spans: list[Span], server: int | None = None) -> None:
        """Spans of the verifier, or of the draft server of that index; returns at once."""
        if spans and not (self.full or self.closed):
            self._spans.put((spans, server))

    def close(self) -> None:
        """End the file, in its own time."""
        self._spans.put(None)

    def _run(self) -> None:
        try:
            with self._file as file:
                file.write(b"[\n" + b",\n".join(map(orjson.dumps, _names(len(self._offsets)))))
                while (some := self._spans.get()) is not None:
                    file.write(b"".join(b",\n" + orjson.dumps(e) for e in self._events(*some)))
                    file.flush()
                file.write(b"\n]\n")
        except OSError as e:  # closing writes what is buffered, so that it can fail as well
            logger.warning("timeline: %s ends early: %s", self.path, e)
        else:
            logger.info("timeline: %s written", self.path)

    def _events(self, spans: list[Span], server: int | None) -> list[dict[str, Any]]:
        if self._origin is None:
            self._origin = min(begin for _, begin, *_ in spans)
        # Each server has a clock of its own; round ids tell which of them was asked.
        offsets = self._offsets if server is None else [self._offsets[server]]
        exchanges = [(offset, exchange) for offset in offsets for exchange in offset.add(spans)]
        events = []
        for kind, begin, end, round_id, count in spans:
            process, track, name, unit = _PLACES[kind]
            shift = 0.0
            if process == DRAFT:
                shift = self._offsets[server or 0].seconds
                process += server or 0
            args = {unit: count} | ({"round": round_id} if round_id else {})
            events.append(self._event(process, track, name, begin + shift, end + shift, args))
        for offset, (round_id, t0, t1, t2, t3) in exchanges:
            t1, t2 = t1 + offset.seconds, t2 + offset.seconds
            for name, begin, end in (("question", t0, t1), ("answer", t2, t3)):
                args = {"round": round_id}
                events.append(self._event(VERIFIER, 3, name, begin, max(begin, end), args))
        self.events += len(events)
        return events

    def _event(
        self, process: int, track: int, name: str, begin: float, end: float, args: dict[str, int]
    ) -> dict[str, Any]:
        assert self._origin is not None
        return {
            "name": name, "ph": "X", "pid": process, "tid": track,
            "ts": round(1e6 * (begin - self._origin), 1), "dur": round(1e6 * (end - begin), 1),
            "args": args,
        }  # fmt: skip


def _names(draft_servers: int) -> list[dict[str, Any]]:
    """The events that name processes and tracks."""
    named = [(pid, 0, "process_name", name) for pid, name in PROCESSES.items()]
    named += [(pid, tid, "thread_name", name) for (pid, tid), name in TRACKS.items()]
    for more in range(1, draft_servers):
        named.append((DRAFT + more, 0, "process_name", f"{PROCESSES[DRAFT]} {more}"))
        named += [
            (DRAFT + more, tid, "thread_name", name)
            for (pid, tid), name in TRACKS.items()
            if pid == DRAFT
        ]
    return [
        {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
        for pid, tid, what, name in named
    ]
