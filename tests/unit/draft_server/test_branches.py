"""Which forks are planned, and how lanes are laid out in a step."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import numpy as np
import pytest

from sgl_ssd.draft_server.branches import (
    LateRoots,
    StepBatch,
    exclude_on_host,
    fan_out_for,
    make_feed,
    plan_forks,
    shared_context,
)
from sgl_ssd.draft_server.speculation_cache import UNKNOWN_ROOT, SpeculationCache

K, WIDTH = 3, 6


@pytest.mark.parametrize(
    ("answered", "budget", "limit", "expected"),
    [
        (3, 99, 99, [4, 3, 2, 5]),
        (0, 99, 99, [5]),  # nothing but the bonus token: the greatest entry
        (2, 99, 99, [4, 3, 5]),
        (3, 8, 99, [3, 2, 1, 2]),
        (3, 0, 99, [0, 0, 0, 0]),
        (3, -1, 99, [0, 0, 0, 0]),
        (1, 99, 2, [2, 2]),
    ],
)
def test_fan_out_for_a_chain(answered: int, budget: int, limit: int, expected: list[int]) -> None:
    fitted = fan_out_for([4, 3, 2, 5], answered, budget, limit)
    if budget == 8:
        assert sum(fitted) == 8 and len(fitted) == 4
    else:
        assert fitted == expected


def cache_with(chain: list[int], known: int) -> SpeculationCache:
    """`known` depths have guesses 10k .. 10k+5 of which the chain's token may be one."""
    cache = SpeculationCache(K, WIDTH)
    cache.chain = chain
    cache.guesses = [10 * k + np.arange(WIDTH) for k in range(known)]
    return cache


def test_known_forks_are_the_best_guesses_without_the_chains_own() -> None:
    forks = plan_forks(cache_with([0, 12], 3), [2, 3, 2], late=False)
    assert [(f.depth, f.root) for f in forks] == [
        (0, 1), (0, 2), (1, 10), (1, 11), (1, 13), (2, 20), (2, 21),
    ]  # fmt: skip


def test_depths_without_guesses_wait_for_the_feed() -> None:
    forks = plan_forks(cache_with([0, 10], 2), [1, 1, 2], late=True)
    assert [(f.depth, f.root, f.rank) for f in forks] == [
        (0, 1, 0), (1, 11, 0), (2, UNKNOWN_ROOT, 0), (2, UNKNOWN_ROOT, 1),
    ]  # fmt: skip
    assert len(plan_forks(cache_with([0, 10], 2), [1, 1, 2], late=False)) == 2


def test_forks_that_are_there_are_not_planned_again() -> None:
    cache = cache_with([0], 2)
    one = np.array([1])
    cache.add(np.array([0]), np.array([2]), one, one, one, np.ones((1, K), np.int32))
    forks = plan_forks(cache, [3, 1], late=False)
    assert [(f.depth, f.root) for f in forks] == [(0, 1), (0, 3), (1, 10)]


def test_exclude_on_host_keeps_the_order() -> None:
    assert exclude_on_host(np.array([4, 2, 9]), 2) == [4, 9]
    assert exclude_on_host(np.array([4, 2, 9]), UNKNOWN_ROOT) == [4, 2, 9]


def test_feed_runs_from_the_text_into_the_chain() -> None:
    feed = make_feed(array("q", [5, 6, 7]), [8, 9], 1, 4, generation=2)
    assert feed.tokens.tolist() == [6, 7, 8]
    assert make_feed(array("q", [5, 6, 7]), [8, 9], 4, 5, 0).tokens.tolist() == [9]


def session(row: int) -> SimpleNamespace:
    """A session with text of 4 tokens, chain [1, 2], one branch each at depths 0 and 2."""
    cache = SpeculationCache(K, WIDTH)
    cache.chain = [1, 2]
    depth = np.array([0, 2])
    cache.add(
        depth, np.array([30, UNKNOWN_ROOT]), np.array([row + 1, row + 2]), 4 + depth,
        np.array([3, 2]), np.array([[11, 12, 13], [14, 15, 0]], np.int32),
    )  # fmt: skip
    kv = SimpleNamespace(row=row, slots=np.arange(100, 110, dtype=np.int32))
    return SimpleNamespace(cache=cache, kv=kv)


def test_a_step_holds_feeds_then_branches_and_gives_late_roots_their_rows() -> None:
    batch = StepBatch(cap=16, scratch=1000)
    draft = session(5)
    feed = make_feed(array("q", [0, 0, 0, 7]), [1, 2], 3, 6, 0)
    feed.late.append(LateRoots(5, UNKNOWN_ROOT, np.array([1]), np.array([7])))
    part = batch.add(draft, feed)
    assert part is not None and part.num_feed == 3 and part.branches.tolist() == [0]
    lanes, rows, positions, sessions = batch.packed()
    assert lanes.tolist() == [1000, 1001, 1002, 6]
    assert rows.tolist() == [5, 5, 5, 6]
    assert positions.tolist() == [3, 4, 5, 4]
    assert sessions.tolist() == [5] * 4
    assert batch.known_tokens().tolist() == [[1000, 1001, 1002, 6], [7, 1, 2, 30]]
    assert batch.late_roots().tolist() == [[2], [0], [7]]
    assert batch.excluded() is None


def test_sessions_that_do_not_fit_wait() -> None:
    batch = StepBatch(cap=3, scratch=1000)
    for row in (5, 15):
        feed = make_feed(array("q", [0, 0, 0, 7]), [1, 2], 4, 5, 0)
        part = batch.add(session(row), feed)
    assert part is None and batch.full and batch.size == 2
    done = session(25)
    done.cache.launched[:] = done.cache.goal
    assert StepBatch(3, 1000).add(done, None) is None


def test_shared_context_shows_each_lane_its_own_past() -> None:
    draft = session(5)
    cache = draft.cache
    cache.waiting[:] = False
    cache.launched[:] = [2, 1]
    part = StepBatch(16, 1000).add(draft, make_feed(array("q", [0] * 4), [1, 2], 5, 6, 0))
    context = shared_context(part)
    seen = [context.slots[row].tolist() for row in context.visible]
    assert seen == [
        [100, 101, 102, 103, 104, 105],  # the feed of position 5
        [100, 101, 102, 103, 11, 12, 13],  # third token of the branch at position 4
        [100, 101, 102, 103, 104, 105, 14, 15],  # second token of the branch at position 6
    ]
