"""Counters. Updated by the loop, read by `Pong`, `/stats` and `/metrics`."""

from __future__ import annotations

from dataclasses import dataclass, field

from sgl_ssd.draft_server.measured import GuessRanks, StepTimes
from sgl_ssd.metrics import TimeHistogram
from sgl_ssd.protocol import SpanKind, Status
from sgl_ssd.recorder import Recorder


@dataclass
class EngineStats:
    """What the engine did. Times in seconds, sums since the start."""

    step_time: TimeHistogram = field(default_factory=TimeHistogram)
    build_time: TimeHistogram = field(default_factory=TimeHistogram)  # of a session's cache
    jit_time: TimeHistogram = field(default_factory=TimeHistogram)
    launch_s: float = 0.0  # host time to issue build steps
    step_rows: int = 0
    jit_rows: int = 0
    jit_tokens: int = 0  # of the longest row
    prefill_tokens: int = 0
    prefill_cached_tokens: int = 0
    # Of the branches that the fan-out asked for:
    branches: int = 0  # planned
    branches_short_of_rows: int = 0  # left out, all rows of a step being taken
    branches_short_of_memory: int = 0  # left out, for want of KV slots
    starved: int = 0  # how often a prompt had to wait for memory

    step_times: StepTimes = field(default_factory=StepTimes)
    ranks: GuessRanks = field(default_factory=GuessRanks)
    recorders: list[Recorder] = field(default_factory=list)  # of verifiers that write a timeline

    def step(self, rows: int, begin: float, end: float) -> None:
        """A build step over `rows` lanes is complete; seconds on the monotonic clock."""
        self.step_rows += rows
        self.step_time.add(end - begin)
        self.step_times.add(rows, end - begin)
        self.record(SpanKind.BUILD_STEP, begin, end, rows)

    def build(self, branches: int, begin: float, end: float) -> None:
        """The cache of a session is complete."""
        self.build_time.add(end - begin)
        self.record(SpanKind.BUILD, begin, end, branches)

    def jit(self, rows: int, tokens: int, seconds: float) -> None:
        """A just-in-time draft of `rows` sessions is complete, at most `tokens` for each."""
        self.jit_rows += rows
        self.jit_tokens += tokens
        self.jit_time.add(seconds)

    def record(self, kind: SpanKind, begin: float, end: float, count: int) -> None:
        """A span for the timelines that are being written."""
        for recorder in self.recorders:
            recorder.add(kind, begin, end, count=count)

    def summary(self) -> dict[str, float]:
        """Flat numbers; `_s` are sums of seconds, `_ms` means in milliseconds."""
        steps, builds, jits = self.step_time, self.build_time, self.jit_time
        return {
            "build_steps": steps.count,
            "build_step_s": steps.total,
            "build_step_ms": 1e3 * steps.mean,
            "builds": builds.count,
            "build_s": builds.total,
            "launch_ms": 1e3 * self.launch_s / max(1, steps.count),
            "branch_rows": self.step_rows / max(1, steps.count),
            "jits": jits.count,
            "jit_s": jits.total,
            "jit_ms": 1e3 * jits.mean,
            "jit_tokens": self.jit_tokens / max(1, jits.count),
            **self.step_times.summary(),
            **self.ranks.summary(),
            "prefill_tokens": self.prefill_tokens,
            "prefill_cached_tokens": self.prefill_cached_tokens,
            "branches": self.branches,
            "branches_short_of_rows": self.branches_short_of_rows,
            "branches_short_of_memory": self.branches_short_of_memory,
            "starved": self.starved,
        }


@dataclass
class ServerStats:
    """What the server answered and refused."""

    rounds: int = 0
    rows: int = 0
    hits: int = 0
    partials: int = 0
    misses: int = 0
    backups: int = 0
    empty: int = 0
    prefilling: int = 0
    need: int = 0
    unknown: int = 0
    context: int = 0
    no_memory: int = 0
    malformed: int = 0
    refused: int = 0
    expired_peers: int = 0
    expired_sessions: int = 0  # their Close was lost
    unanswered: int = 0  # rounds that a newer one replaced before they were answered
    unsent: int = 0  # messages that the peer's queue had no room for
    pushes: int = 0  # messages with complete caches, ahead of the question
    pushed_entries: int = 0
    idle_seconds: float = 0.0  # in which there was nothing to do

    def count(self, status: Status) -> None:
        """One row was answered with `status`."""
        name = _COUNTERS[status]
        setattr(self, name, getattr(self, name) + 1)


_COUNTERS = {
    Status.HIT: "hits",
    Status.PARTIAL: "partials",
    Status.BACKUP: "backups",
    Status.EMPTY: "empty",
    Status.PREFILLING: "prefilling",
    Status.NEED: "need",
    Status.UNKNOWN: "unknown",
    Status.CONTEXT: "context",
    Status.NO_MEMORY: "no_memory",
}
