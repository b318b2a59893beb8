"""Times counted into buckets, cheap enough for every round. Pure Python.

Both servers observe into these; what they expose in Prometheus's text format is made from them
when somebody asks, or once a second.
"""

from __future__ import annotations

from bisect import bisect_left

TIME_BUCKETS = (
    0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03,
    0.05, 0.075, 0.1, 0.2, 0.5, 1.0,
)  # fmt: skip
"""Upper bounds in seconds: from a hit on one host to a deadline that is over."""


class TimeHistogram:
    """How often, how long in all, and how many within each of `TIME_BUCKETS` (and beyond)."""

    __slots__ = ("buckets", "count", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.buckets = [0] * (len(TIME_BUCKETS) + 1)

    def add(self, seconds: float) -> None:
        """Observe one duration."""
        self.count += 1
        self.total += seconds
        self.buckets[bisect_left(TIME_BUCKETS, seconds)] += 1

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0
