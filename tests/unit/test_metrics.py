"""Times in buckets."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_ssd.metrics import TIME_BUCKETS, TimeHistogram


def test_a_fresh_one_is_all_zero() -> None:
    times = TimeHistogram()
    assert (times.count, times.total, times.mean, sum(times.buckets)) == (0, 0.0, 0.0, 0)


@settings(max_examples=200, deadline=None, database=None)
@given(seconds=st.lists(st.floats(0.0, 10.0) | st.sampled_from(TIME_BUCKETS), min_size=1))
def test_each_bucket_holds_what_is_at_most_its_bound(seconds: list[float]) -> None:
    times = TimeHistogram()
    for s in seconds:
        times.add(s)
    assert times.count == sum(times.buckets) == len(seconds)
    assert times.total == pytest.approx(sum(seconds))
    assert times.mean == pytest.approx(sum(seconds) / len(seconds))
    for i, bound in enumerate(TIME_BUCKETS):
        assert sum(times.buckets[: i + 1]) == sum(s <= bound for s in seconds)
