"""Counters of the verifier: observed per round, read by `/server_info` and metrics. Pure Python."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from sgl_ssd.metrics import TimeHistogram
from sgl_ssd.protocol import Status

if TYPE_CHECKING:
    from sgl_ssd.recorder import Recorder

_RESULTS = {Status.HIT: "hit", Status.PARTIAL: "partial"}
_RESULTS |= {Status.BACKUP: "miss", Status.EMPTY: "miss"}


class MeanTime(TimeHistogram):
    """Also an exponential mean over the recent observations, in seconds."""

    __slots__ = ("_weight", "deviation", "longest", "recent")

    def __init__(self, weight: float = 0.05) -> None:
        super().__init__()
        self.longest = 0.0
        self.recent = 0.0
        self.deviation = 0.0
        self._weight = weight

    def add(self, seconds: float) -> None:
        """Observe one duration."""
        super().add(seconds)
        self.longest = max(self.longest, seconds)
        if self.count == 1:
            self.recent = seconds
            return
        error = seconds - self.recent
        self.recent += self._weight * error
        self.deviation += self._weight * (abs(error) - self.deviation)


class SSDStats:
    """What happened since the start. A round is one verify of one request."""

    def __init__(self, num_steps: int) -> None:
        self.rounds = 0
        self.drafted = 0
        self.accepted = 0
        self.drafted_at = [0] * num_steps
        self.accepted_at = [0] * num_steps
        self.outcomes: Counter[Status] = Counter()
        # Outcomes that were asked about, by accepted length: predicted, in part, or not.
        self.predictions = {r: [0] * (num_steps + 1) for r in ("hit", "partial", "miss")}
        self.reasons: Counter[str] = Counter()
        self.late_answers = 0
        self.stale_answers = 0
        self.invalid_messages = 0
        self.timeouts = 0
        self.pushed_hits = 0
        self.verifies = 0
        self.verifies_without_drafts = 0
        self.round_trip = MeanTime()
        self.wait = MeanTime()
        self.period = MeanTime()
        self.outcome_wait = MeanTime()
        self.launch = MeanTime()
        self.verify = MeanTime()
        self.idle = MeanTime()
        self.ahead = TimeHistogram()
        self.behind = TimeHistogram()
        self.restarts = 0
        self.recorder: Recorder | None = None  # of a timeline, while one is written

    def observe_round(self, drafted: int, accepted: int) -> None:
        """One request's verify: `drafted` real drafts, of which `accepted` were right."""
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        for position in range(drafted):
            self.drafted_at[position] += 1
        for position in range(accepted):
            self.accepted_at[position] += 1

    def observe_answer(self, status: Status, accepted: int = 0) -> None:
        """One row of a usable answer, to news of `accepted` drafts and a bonus token."""
        self.outcomes[status] += 1
        result = _RESULTS.get(status)
        if result is not None:
            self.predictions[result][accepted] += 1

    def observe_no_drafts(self, reason: str) -> None:
        """A request was verified without drafts although drafting is on."""
        self.reasons[reason] += 1

    def as_dict(self) -> dict[str, Any]:
        """For `/server_info`; counts are totals, times are milliseconds."""
        hits = self.outcomes[Status.HIT]
        answers = sum(self.outcomes.values())
        asked = hits + sum(self.outcomes[s] for s in (Status.PARTIAL, Status.BACKUP, Status.EMPTY))
        return {
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "accept_length": (self.accepted + self.rounds) / self.rounds if self.rounds else 0.0,
            "accept_rate": self.accepted / self.drafted if self.drafted else 0.0,
            "drafted_per_position": list(self.drafted_at),
            "accepted_per_position": list(self.accepted_at),
            "answers": answers,
            "hits": hits,
            "pushed_hits": self.pushed_hits,
            "partial_hits": self.outcomes[Status.PARTIAL],
            "backups": self.outcomes[Status.BACKUP],
            "hit_rate": hits / asked if asked else 0.0,
            "outcomes": {s.name.lower(): self.outcomes[s] for s in Status},
            "asked_per_length": [
                sum(counts) for counts in zip(*self.predictions.values(), strict=True)
            ],
            "hits_per_length": list(self.predictions["hit"]),
            "partial_hits_per_length": list(self.predictions["partial"]),
            "without_drafts": dict(self.reasons),
            "late_answers": self.late_answers,
            "stale_answers": self.stale_answers,
            "invalid_messages": self.invalid_messages,
            "timeouts": self.timeouts,
            "verifies": self.verifies,
            "verifies_without_drafts": self.verifies_without_drafts,
            "round_trip_ms": self.round_trip.mean * 1e3,
            "round_ms": self.period.mean * 1e3,
            "draft_wait_ms": self.wait.mean * 1e3,
            "draft_wait_max_ms": self.wait.longest * 1e3,
            "outcome_wait_ms": self.outcome_wait.mean * 1e3,
            "launch_ms": self.launch.mean * 1e3,
            "verify_ms": self.verify.mean * 1e3,
            "verifier_idle_ms": self.idle.mean * 1e3,
            "restarts": self.restarts,
            # For differences between two looks: how often, and seconds in all.
            "times": {name: [time.count, time.total] for name, time in self.times().items()},
        }

    def times(self) -> dict[str, TimeHistogram]:
        """All that is timed, by name."""
        return {
            "round_trip": self.round_trip,
            "round": self.period,
            "draft_wait": self.wait,
            "outcome_wait": self.outcome_wait,
            "launch": self.launch,
            "verify": self.verify,
            "verifier_idle": self.idle,
            "draft_ahead": self.ahead,
            "draft_behind": self.behind,
        }
