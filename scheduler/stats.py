"""Counters of the verifier: observed per round, read by `/server_info` and metrics. Pure Python."""

from __future__ import annotations

from collections import Counter
from typing import Any

from sgl_ssd.protocol import Status


class MeanTime:
    """Mean over all observations and an exponential one over the recent ones, in seconds."""

    def __init__(self, weight: float = 0.05) -> None:
        self.count = 0
        self.total = 0.0
        self.longest = 0.0
        self.recent = 0.0
        self.deviation = 0.0
        self._weight = weight

    def add(self, seconds: float) -> None:
        """Observe one duration."""
        self.count += 1
        self.total += seconds
        self.longest = max(self.longest, seconds)
        if self.count == 1:
            self.recent = seconds
            return
        error = seconds - self.recent
        self.recent += self._weight * error
        self.deviation += self._weight * (abs(error) - self.deviation)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0


class SSDStats:
    """What happened since the start. A round is one verify of one request."""

    def __init__(self, num_steps: int) -> None:
        self.rounds = 0
        self.drafted = 0
        self.accepted = 0
        self.drafted_at = [0] * num_steps
        self.accepted_at = [0] * num_steps
        self.outcomes: Counter[Status] = Counter()
        self.reasons: Counter[str] = Counter()
        self.late_answers = 0
        self.stale_answers = 0
        self.invalid_messages = 0
        self.timeouts = 0
        self.verifies = 0
        self.verifies_without_drafts = 0
        self.round_trip = MeanTime()
        self.wait = MeanTime()
        self.period = MeanTime()
        self.outcome_wait = MeanTime()
        self.launch = MeanTime()
        self.restarts = 0

    def observe_round(self, drafted: int, accepted: int) -> None:
        """One request's verify: `drafted` real drafts, of which `accepted` were right."""
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        for position in range(drafted):
            self.drafted_at[position] += 1
        for position in range(accepted):
            self.accepted_at[position] += 1

    def observe_answer(self, status: Status) -> None:
        """One row of a usable answer."""
        self.outcomes[status] += 1

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
            "partial_hits": self.outcomes[Status.PARTIAL],
            "backups": self.outcomes[Status.BACKUP],
            "hit_rate": hits / asked if asked else 0.0,
            "outcomes": {s.name.lower(): self.outcomes[s] for s in Status},
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
            # For differences between two looks: how often, and seconds in all.
            "times": {
                name: [time.count, time.total]
                for name, time in (
                    ("round_trip", self.round_trip),
                    ("round", self.period),
                    ("draft_wait", self.wait),
                    ("outcome_wait", self.outcome_wait),
                    ("launch", self.launch),
                )
            },
        }
