"""What the draft server measures for the planner."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from sgl_ssd.draft_server.measured import ENOUGH, GuessRanks, StepTimes
from sgl_ssd.draft_server.speculation_cache import Walk


def test_steps_lie_on_a_line():
    times = StepTimes()
    assert times.summary() == {}
    for rows in (8, 20, 50, 100) * 20:
        times.add(rows, 0.002 + 1e-5 * rows)
    found = times.summary()
    assert found["step_row_ms"] == pytest.approx(0.01)
    assert found["step_ms"] == pytest.approx(2 + 0.01 * found["step_rows"])


def test_a_line_needs_different_rows_and_never_falls():
    alike, falling = StepTimes(), StepTimes()
    for i in range(100):
        alike.add(16, 0.002 + 0.001 * (i % 2))
        falling.add(8 + i, 0.003 - 1e-5 * i)
    assert alike.summary()["step_row_ms"] == falling.summary()["step_row_ms"] == 0


def test_old_steps_are_forgotten():
    times = StepTimes()
    for ms in (1, 5):
        for rows in (10, 20) * 1500:
            times.add(rows, ms / 1e3)
    assert times.summary()["step_ms"] == pytest.approx(5, rel=0.05)


def test_ranks_give_the_misses_of_every_fan_out_however_guesses_were_cut():
    """Rank r has probability 2^-r, of 1, 2 or 8 guesses: F guesses miss 2^-F."""
    ranks, rng = GuessRanks(), np.random.default_rng(1)
    for i in range(30_000):
        rank, guesses = int(rng.geometric(0.5)) - 1, (1, 2, 8)[i % 3]
        ranks.add(rank if rank < guesses else -1, guesses)
    found = ranks.summary()
    for size in (1, 2, 4):
        assert found[f"missed_of_{size}"] == pytest.approx(2.0**-size, abs=0.03)


def test_few_outcomes_say_nothing():
    ranks = GuessRanks()
    for _ in range(ENOUGH - 1):
        ranks.add(0, 4)
    assert ranks.summary() == {}
    ranks.add(-1, 4)
    assert set(ranks.summary()) == {"missed_of_1"}


@pytest.mark.parametrize(
    ("walk", "counted"),
    [
        (Walk(0, 2, 0, True), (1, 1)),  # second guess at depth 0
        (Walk(1, -1, 0, False), (1, 0)),  # a miss among two guesses at depth 1
        (Walk(2, 4, 0, True), (0, 0)),  # after full acceptance
        (Walk(2, -1, 0, False), (0, 0)),  # likewise; the chain goes on, but elsewhere
        (Walk(1, -1, 0, True), (0, 0)),  # the news ends on the trunk
    ],
)
def test_only_rejected_drafts_count(walk: Walk, counted: tuple[int, int]):
    cache = SimpleNamespace(
        chain=[7, 8, 9],
        alive=np.array([True, False, True, True, True, True]),
        depth=np.array([0, 0, 0, 1, 2, 1]),
    )
    ranks = GuessRanks()
    ranks.observe(cache, walk, answered=2)
    assert (ranks._tried[1], ranks._found[1]) == counted
