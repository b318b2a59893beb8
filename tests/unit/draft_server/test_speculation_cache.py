"""The tree walk against a model that knows only what each path means."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_ssd.draft_server.speculation_cache import UNKNOWN_ROOT, SpeculationCache

K = 3
WIDTH = 4
SMALL = st.integers(0, 3)  # few tokens, so that paths meet


@dataclass(frozen=True)
class BranchModel:
    depth: int
    root: int
    tokens: tuple[int, ...]
    goal: int


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[BranchModel], bool]:
    """A chain, branches that differ from it, and whether the tail's guesses are known."""
    chain = draw(st.lists(SMALL, max_size=K))
    branches, seen = [], set()
    for _ in range(draw(st.integers(0, 6))):
        depth, root = draw(st.integers(0, len(chain))), draw(SMALL)
        if (depth, root) in seen or (depth < len(chain) and chain[depth] == root):
            continue
        seen.add((depth, root))
        tokens = tuple(draw(st.lists(SMALL, max_size=K)))
        branches.append(BranchModel(depth, root, tokens, draw(st.integers(len(tokens), K))))
    return chain, branches, draw(st.booleans())


def ids_for(token: int) -> np.ndarray:
    return np.array([token, *(t for t in range(WIDTH) if t != token)])


def build(
    tree: tuple[list[int], list[BranchModel], bool],
) -> tuple[SpeculationCache, dict[int, list[int]]]:
    """The cache of a tree, and each branch's slots by index."""
    chain, branches, tail = tree
    cache = SpeculationCache(K, WIDTH)
    cache.chain = list(chain)
    cache.guesses = [ids_for(t) for t in chain] + ([ids_for(0)] if tail else [])
    slots, counter = {}, itertools.count(1)
    if branches:
        own = np.zeros((len(branches), K), np.int32)
        for i, branch in enumerate(branches):
            slots[i] = [next(counter) for _ in range(branch.goal)]
            own[i, : branch.goal] = slots[i]
        depth = np.array([b.depth for b in branches])
        added = cache.add(
            depth, np.array([b.root for b in branches]), 100 + np.arange(len(branches)),
            50 + depth, np.array([b.goal for b in branches]), own,
        )  # fmt: skip
        for i, branch in zip(added.tolist(), branches, strict=True):
            for step, token in enumerate(branch.tokens):
                cache.launched[i] = step + 1
                cache.store(np.array([i]), np.array([step]), ids_for(token)[None])
    return cache, slots


def paths(tree: tuple[list[int], list[BranchModel], bool]) -> list[tuple[int, ...]]:
    """Every path from the root to a leaf of the tree."""
    chain, branches, _ = tree
    leaves = [tuple(chain)]
    leaves += [(*chain[: b.depth], b.root, *b.tokens) for b in branches]
    return leaves


@given(trees(), st.lists(SMALL, max_size=8))
def test_walk_finds_the_longest_known_prefix(tree: tuple, path: list[int]) -> None:
    cache, _ = build(tree)
    walk = cache.walk(path)
    known = {leaf[:i] for leaf in paths(tree) for i in range(len(leaf) + 1)}
    longest = max(i for i in range(len(path) + 1) if tuple(path[:i]) in known)
    assert walk.matched == longest
    assert walk.complete == (longest == len(path))


@given(trees(), st.data())
def test_what_lies_below_a_complete_walk_is_the_new_trunk(tree: tuple, data: st.DataObject) -> None:
    leaf = data.draw(st.sampled_from(paths(tree)))
    path = leaf[: data.draw(st.integers(0, len(leaf)))]
    cache, _ = build(tree)
    walk = cache.walk(path)
    assert walk.complete
    cache.reroot(walk)
    below = {p[len(path) :] for p in paths(tree) if p[: len(path)] == path}
    trunk = tuple(cache.chain)
    assert trunk in {b[: len(trunk)] for b in below}
    # The branches that are left are the paths below, each once.
    chain, branches, _ = tree
    expected = (
        {
            (b.depth - len(path), b.root): b.tokens
            for b in branches
            if walk.branch < 0 and b.depth >= len(path)
        }
    )  # fmt: skip
    left = {
        key: tuple(cache.tokens[b, : cache.length[b]].tolist()) for key, b in cache.index.items()
    }
    assert left == expected
    if walk.branch >= 0:
        assert len(cache.guesses) == len(cache.chain)
        assert [int(g[0]) for g in cache.guesses] == cache.chain


@settings(max_examples=200)
@given(trees(), st.lists(st.lists(SMALL, max_size=5), max_size=4), st.booleans())
def test_every_slot_has_one_owner(tree: tuple, news: list[list[int]], promote: bool) -> None:
    cache, slots = build(tree)
    total = sorted(s for own in slots.values() for s in own)
    given_away: list[int] = []
    rows: list[int] = []
    for path in news:
        change = cache.reroot(cache.walk(path))
        given_away += [*change.moved.tolist(), *change.freed.tolist()]
        rows += change.rows.tolist()
        if promote:
            change = cache.promote(K - 1)
            given_away += [*change.moved.tolist(), *change.freed.tolist()]
            rows += change.rows.tolist()
        assert sorted([*given_away, *cache.all_slots().tolist()]) == total
        assert cache.slots_held() == len(cache.all_slots())
        cache.compact()
        assert sorted([*given_away, *cache.all_slots().tolist()]) == total
    change = cache.clear()
    assert sorted([*given_away, *change.freed.tolist()]) == total
    assert sorted([*rows, *change.rows.tolist()]) == [100 + i for i in slots]


@given(trees(), st.data())
def test_moved_slots_hold_the_tokens_that_became_committed_or_trunk(
    tree: tuple, data: st.DataObject
) -> None:
    chain, branches, _ = tree
    leaf = data.draw(st.sampled_from(paths(tree)))
    wrong = data.draw(st.lists(st.just(99), max_size=2))
    path = [*leaf[: data.draw(st.integers(0, len(leaf)))], *wrong]
    cache, slots = build(tree)
    walk = cache.walk(path)
    change = cache.reroot(walk)
    if walk.branch < 0:
        assert not len(change.moved)
        return
    branch = branches[walk.branch]
    # Slot i holds the KV of the root (i = 0) or of drafted token i - 1.
    held = len(branch.tokens) if walk.complete else min(1 + walk.inside, len(branch.tokens))
    assert change.moved.tolist() == slots[walk.branch][:held]


@given(trees(), st.data())
def test_what_steps_in_flight_bring_goes_on_with_the_trunk(
    tree: tuple, data: st.DataObject
) -> None:
    cache, slots = build(tree)
    for b, branch in enumerate(tree[1]):
        cache.launched[b] = data.draw(st.integers(len(branch.tokens), branch.goal))
    cache.in_flight = 1
    launched = cache.launched.copy()
    walk = cache.walk(data.draw(st.sampled_from(paths(tree))))
    change = cache.reroot(walk)
    before, b = list(cache.chain), walk.branch
    start = len(tree[1][b].tokens) if b >= 0 else 0
    assert cache.coming == (b >= 0 and launched[b] > start)
    if not cache.coming:
        cache.take_coming()
        assert cache.chain == before
        return
    assert change.moved.tolist() == slots[b][: launched[b]]
    late = list(range(start, int(launched[b])))
    for step in late:  # the trunk is a branch no more, but for the step that was launched
        cache.compact()
        cache.store(np.array([b]), np.array([step]), ids_for(step)[None])
    cache.take_coming()
    assert cache.chain == before + late and not cache.coming
    assert [int(g[0]) for g in cache.guesses] == cache.chain


def test_what_comes_for_a_trunk_that_is_left_is_not_taken() -> None:
    cache, _ = build(([], [BranchModel(0, 1, (2,), 3)], False))
    cache.launched[0], cache.in_flight = 3, 1
    cache.reroot(cache.walk([1]))
    assert cache.coming and cache.chain == [2]
    cache.reroot(cache.walk([0]))
    assert not cache.coming
    cache.take_coming()
    assert cache.chain == []


@given(trees(), st.integers(0, K - 1))
def test_promote_goes_on_with_the_best_guess(tree: tuple, limit: int) -> None:
    chain, branches, tail = tree
    cache, slots = build(tree)
    change = cache.promote(limit)
    if not tail:
        assert cache.chain == chain and not len(change.moved)
        return
    branch = next((b for b in branches if (b.depth, b.root) == (len(chain), 0)), None)
    taken = branch.tokens[:limit] if branch else ()
    assert cache.chain == [*chain, 0, *taken]
    assert len(cache.guesses) == len(chain) + 1 + len(taken)
    assert (len(chain), 0) not in cache.index
    if branch:
        own = slots[branches.index(branch)]
        assert change.moved.tolist() == own[: len(taken)]
        assert sorted(change.freed.tolist()) == own[len(taken) :]


def test_late_roots_are_found_once_they_are_named() -> None:
    cache = SpeculationCache(K, WIDTH)
    slots = np.array([[1, 2, 0], [3, 4, 0]], np.int32)
    two = np.array([2, 2])
    added = cache.add(np.zeros(2, int), np.full(2, UNKNOWN_ROOT), np.array([7, 8]), two, two, slots)
    assert not len(cache.runnable()) and not cache.complete
    assert not cache.walk([5]).complete
    cache.waiting[added] = False
    assert cache.runnable().tolist() == [0, 1]
    cache.name_roots(added, np.array([5, 6]))
    assert cache.walk([6]).branch == 1


def test_branches_keep_their_index_while_a_step_is_in_flight() -> None:
    cache, _ = build(([1, 2], [BranchModel(0, 3, (0,), 2), BranchModel(2, 3, (1,), 2)], False))
    cache.in_flight = 1
    cache.reroot(cache.walk([1]))
    cache.compact()
    assert cache.alive.tolist() == [False, True]
    cache.store(np.array([0, 1]), np.array([1, 1]), np.stack([ids_for(2), ids_for(2)]))
    assert cache.tokens[1].tolist()[:2] == [1, 2]
    cache.in_flight = 0
    cache.compact()
    assert cache.alive.tolist() == [True] and cache.index == {(1, 3): 0}
