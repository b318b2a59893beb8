"""The verifier's metrics, on SGLang's `/metrics`; `docs/metrics.md` lists them.

Import it only where SGLang has set up `prometheus_client` for several processes, which that library
looks for when it is imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.registry import REGISTRY

from sgl_ssd.metrics import TIME_BUCKETS, TimeHistogram
from sgl_ssd.scheduler.draft_fleet import DraftFleet
from sgl_ssd.scheduler.stats import SSDStats

PREFIX = "sglang:ssd_"
COUNTERS = {
    "rounds": "Verifies of a request.",
    "drafted_tokens": "Drafts verified.",
    "accepted_tokens": "Drafts accepted.",
    "late_answers": "Answers after the deadline, or after a newer question.",
    "stale_answers": "Rows of answers for a session or epoch that is no more.",
    "invalid_messages": "Messages of the draft server that were dropped.",
    "pushed_hits": "Rounds whose drafts had been sent ahead of the question.",
    "timeouts": "Verifies that went on when the deadline for drafts had passed.",
    "verifies": "Forwards of the target that verified a batch.",
    "verifies_without_drafts": "Verifies of width 1, which are plain decode steps.",
    "draft_restarts": "Another draft server came up in place of one that was known.",
}
LABELLED_COUNTERS = {
    "drafted_at_position": (("position",), "Drafts verified at this place of the chain."),
    "accepted_at_position": (("position",), "Drafts accepted at this place of the chain."),
    "outcomes": (("accepted",), "Rounds that ended with so many accepted drafts."),
    "predictions": (
        ("accepted", "result"),
        "Outcomes that the draft server was asked about: predicted, in part, or not.",
    ),
    "answers": (("status",), "Rows of usable answers of the draft server."),
    "rounds_without_drafts": (("reason",), "Rounds without drafts although drafting is on."),
}
HISTOGRAMS = {
    "verify": "From the launch of a verify to its outcome on the host.",
    "verifier_idle": "From the outcome of a verify on the host to the launch of the next.",
    "round": "From one question to the next.",
    "round_trip": "From a question to its answer, where that was waited for.",
    "draft_wait": "What a verify waited for drafts.",
    "outcome_wait": "What the host waited for the outcome of a forward.",
    "launch": "Host time to launch a verify.",
    "draft_ahead": "How long before the question the draft's cache was complete.",
    "draft_behind": "How long after the question the draft's cache would have been complete.",
}
GAUGES = {
    "sessions": "Open sessions.",
    "num_steps": "K now.",
    "fan_out": "Sum of the fan-out now: branches of a session.",
    "drafting": "1: drafting is on, 0: off.",
    "draft_up": "1: a draft server answers, 0: none does.",
    "draft_step_seconds": "Time of a build step of the draft server, mean over the last seconds.",
    "draft_build_seconds": "Time to build a session's cache, mean over the last seconds.",
    "draft_jit_seconds": "Time of a just-in-time draft, mean over the last seconds.",
    "draft_kv_total_tokens": "Size of the draft's KV pool.",
    "draft_kv_used_tokens": "Of which sessions and branches hold.",
}
LABELLED_GAUGES = {
    "draft_server_up": (("server",), "1: this draft server answers, 0: it does not."),
    "draft_server_sessions": (("server",), "Open sessions at this draft server."),
    "draft_server_ping_seconds": (
        ("server",),
        "Shortest of the last round trips to this draft server without work.",
    ),
}


class SSDMetrics:
    """Publishes what has been counted since the last time. About 0.2 ms; not for every round."""

    def __init__(self, labels: Mapping[str, str], registry: CollectorRegistry = REGISTRY) -> None:
        """`labels` go with every metric."""
        names, values = list(labels), list(labels.values())

        def make(kind: type, name: str, text: str, more: Iterable[str] = (), **kwargs: Any) -> Any:
            metric = kind(PREFIX + name, text, [*names, *more], registry=registry, **kwargs)
            return metric if more else metric.labels(*values)

        self._values = values
        self._counters = {n: make(Counter, n, text) for n, text in COUNTERS.items()}
        self._labelled = {
            n: make(Counter, n, text, more) for n, (more, text) in LABELLED_COUNTERS.items()
        }
        self._histograms = {
            n: make(_Times, f"{n}_seconds", text, buckets=TIME_BUCKETS)
            for n, text in HISTOGRAMS.items()
        }
        self._gauges = {
            n: make(Gauge, n, text, multiprocess_mode="mostrecent") for n, text in GAUGES.items()
        }
        self._labelled_gauges = {
            n: make(Gauge, n, text, more, multiprocess_mode="mostrecent")
            for n, (more, text) in LABELLED_GAUGES.items()
        }
        self._series: dict[tuple[str, ...], Any] = {}
        self._published: dict[tuple[str, ...], float] = {}
        self._draft_sums: dict[str, tuple[float, float]] = {}
        self._draft_means: dict[str, float] = {}

    def publish(self, stats: SSDStats, fleet: DraftFleet, drafting: bool) -> None:
        """Bring every metric up to date."""
        for name, count in _counts(stats):
            self._raise(self._counters[name], (name,), count)
        for name, more, count in _labelled_counts(stats):
            key = (name, *more)
            series = self._series.get(key)
            if series is None:
                if not count:
                    continue
                series = self._series[key] = self._labelled[name].labels(*self._values, *more)
            self._raise(series, key, count)
        for name, time in stats.times().items():
            self._histograms[name].add_up(time)
        for name, value in self._gauge_values(fleet, drafting):
            self._gauges[name].set(value)
        for server in fleet.clients:
            for name, value in (
                ("draft_server_up", int(server.up)),
                ("draft_server_sessions", len(server.sessions)),
                ("draft_server_ping_seconds", server.ping_ms[0] / 1e3),
            ):
                gauge = self._labelled_gauges[name]
                gauge.labels(*self._values, str(server.index)).set(value)

    def _raise(self, counter: Any, key: tuple[str, ...], count: int) -> None:
        new = count - self._published.get(key, 0)
        if new:
            counter.inc(new)
            self._published[key] = count

    def _gauge_values(self, fleet: DraftFleet, drafting: bool) -> Iterator[tuple[str, float]]:
        yield "sessions", len(fleet.sessions)
        yield "num_steps", fleet.num_steps
        yield "fan_out", sum(fleet.fan_out)
        yield "drafting", int(drafting)
        yield "draft_up", int(fleet.up)
        numbers = fleet.server_stats
        for name, count, seconds in (
            ("draft_step_seconds", "build_steps", "build_step_s"),
            ("draft_build_seconds", "builds", "build_s"),
            ("draft_jit_seconds", "jits", "jit_s"),
        ):
            yield name, self._recent_mean(name, numbers.get(count, 0), numbers.get(seconds, 0))
        total = numbers.get("kv_total", 0)
        yield "draft_kv_total_tokens", total
        free = numbers.get("kv_available", 0) + numbers.get("kv_evictable", 0)
        yield "draft_kv_used_tokens", total - free

    def _recent_mean(self, name: str, count: float, seconds: float) -> float:
        """The mean since the numbers changed last; the draft server sends them once a second."""
        old_count, old_seconds = self._draft_sums.get(name, (0, 0))
        if count < old_count:  # another draft server
            old_count = old_seconds = 0
        if count > old_count:
            self._draft_means[name] = (seconds - old_seconds) / (count - old_count)
        self._draft_sums[name] = (count, seconds)
        return self._draft_means.get(name, 0.0)


class _Times(Histogram):
    """A histogram that takes over counts made elsewhere."""

    _added: tuple[Sequence[int], float] = ((0,) * (len(TIME_BUCKETS) + 1), 0.0)

    def add_up(self, times: TimeHistogram) -> None:
        """Add what `times` has counted since the last call."""
        buckets, total = self._added
        if buckets == times.buckets:
            return
        for bucket, old, new in zip(self._buckets, buckets, times.buckets, strict=True):
            if new > old:
                bucket.inc(new - old)
        self._sum.inc(times.total - total)
        self._added = list(times.buckets), times.total


def _counts(stats: SSDStats) -> Iterator[tuple[str, int]]:
    yield "rounds", stats.rounds
    yield "drafted_tokens", stats.drafted
    yield "accepted_tokens", stats.accepted
    for name in (
        "late_answers", "stale_answers", "invalid_messages", "pushed_hits", "timeouts",
        "verifies", "verifies_without_drafts",
    ):  # fmt: skip
        yield name, getattr(stats, name)
    yield "draft_restarts", stats.restarts


def _labelled_counts(stats: SSDStats) -> Iterator[tuple[str, tuple[str, ...], int]]:
    for position, (drafted, accepted) in enumerate(
        zip(stats.drafted_at, stats.accepted_at, strict=True), 1
    ):
        yield "drafted_at_position", (str(position),), drafted
        yield "accepted_at_position", (str(position),), accepted
    at_least = [stats.rounds, *stats.accepted_at, 0]
    for length in range(len(at_least) - 1):
        yield "outcomes", (str(length),), at_least[length] - at_least[length + 1]
    for result, counts in stats.predictions.items():
        for length, count in enumerate(counts):
            yield "predictions", (str(length), result), count
    for status, count in stats.outcomes.items():
        yield "answers", (status.name.lower(),), count
    for reason, count in stats.reasons.items():
        yield "rounds_without_drafts", (reason,), count
