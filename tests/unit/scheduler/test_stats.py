"""Counters of the verifier: they add up, and rates lie between 0 and 1."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_ssd.protocol import Status
from sgl_ssd.scheduler.stats import MeanTime, SSDStats

STEPS = 4
ROUNDS = st.lists(
    st.integers(0, STEPS).flatmap(
        lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted))
    )
)


def test_a_fresh_one_is_all_zero_and_json() -> None:
    numbers = SSDStats(STEPS).as_dict()
    assert json.loads(json.dumps(numbers)) == numbers
    assert numbers["accept_length"] == numbers["accept_rate"] == numbers["hit_rate"] == 0.0
    assert numbers["drafted_per_position"] == [0] * STEPS


@settings(max_examples=200, deadline=None, database=None)
@given(rounds=ROUNDS)
def test_rounds_add_up(rounds: list[tuple[int, int]]) -> None:
    stats = SSDStats(STEPS)
    for drafted, accepted in rounds:
        stats.observe_round(drafted, accepted)
    numbers = stats.as_dict()
    assert numbers["rounds"] == len(rounds)
    assert numbers["drafted"] == sum(numbers["drafted_per_position"]) == sum(d for d, _ in rounds)
    assert numbers["accepted"] == sum(numbers["accepted_per_position"]) == sum(a for _, a in rounds)
    for position in range(STEPS):
        assert numbers["drafted_per_position"][position] == sum(d > position for d, _ in rounds)
        assert numbers["accepted_per_position"][position] == sum(a > position for _, a in rounds)
    assert 0.0 <= numbers["accept_rate"] <= 1.0
    if rounds:
        mean = sum(a + 1 for _, a in rounds) / len(rounds)
        assert numbers["accept_length"] == pytest.approx(mean)
        assert 1.0 <= numbers["accept_length"] <= STEPS + 1


@settings(max_examples=200, deadline=None, database=None)
@given(answers=st.lists(st.sampled_from(Status)))
def test_answers_add_up(answers: list[Status]) -> None:
    stats = SSDStats(STEPS)
    for status in answers:
        stats.observe_answer(status)
    numbers = stats.as_dict()
    assert numbers["answers"] == len(answers) == sum(numbers["outcomes"].values())
    assert numbers["hits"] == answers.count(Status.HIT) == numbers["outcomes"]["hit"]
    assert numbers["partial_hits"] == answers.count(Status.PARTIAL)
    assert numbers["backups"] == answers.count(Status.BACKUP)
    predictions = [a for a in answers if a <= Status.EMPTY]
    assert numbers["hit_rate"] == pytest.approx(
        numbers["hits"] / len(predictions) if predictions else 0.0
    )
    assert 0.0 <= numbers["hit_rate"] <= 1.0
    assert set(numbers["outcomes"]) == {s.name.lower() for s in Status}


def test_reasons_are_counted_apart() -> None:
    stats = SSDStats(STEPS)
    for reason in ("late", "miss", "late"):
        stats.observe_no_drafts(reason)
    assert stats.as_dict()["without_drafts"] == {"late": 2, "miss": 1}


def test_the_numbers_are_a_copy() -> None:
    stats = SSDStats(STEPS)
    numbers = stats.as_dict()
    stats.observe_round(4, 4)
    stats.observe_no_drafts("late")
    assert numbers == SSDStats(STEPS).as_dict()


def test_times_are_milliseconds() -> None:
    stats = SSDStats(STEPS)
    stats.round_trip.add(0.002)
    stats.wait.add(0.004)
    numbers = stats.as_dict()
    assert numbers["round_trip_ms"] == pytest.approx(2.0)
    assert numbers["draft_wait_ms"] == pytest.approx(4.0)


def test_mean_time() -> None:
    time = MeanTime(weight=0.5)
    assert time.mean == time.recent == time.deviation == 0.0
    for seconds in (1.0, 3.0, 3.0):
        time.add(seconds)
    assert time.count == 3 and time.total == 7.0 and time.mean == pytest.approx(7 / 3)
    assert time.recent == pytest.approx(2.5)  # 1, 2, 2.5
    assert time.deviation == pytest.approx(1.0)  # 0, then half of 2, then half way to 1


def test_recent_times_follow_a_change_and_the_mean_does_not_at_once() -> None:
    time = MeanTime()
    for _ in range(1000):
        time.add(0.001)
    assert time.recent == pytest.approx(0.001) and time.deviation == pytest.approx(0.0)
    for _ in range(200):
        time.add(0.1)
    assert time.recent == pytest.approx(0.1, rel=0.01) and time.mean < 0.03
