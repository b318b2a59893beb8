"""What was sent ahead answers as the draft server's own walk would."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sgl_ssd.scheduler.entries import Entries

sys.path.insert(0, str(Path(__file__).parents[1] / "draft_server"))
from test_speculation_cache import SMALL, K, build, paths, trees  # noqa: E402


def entries(chain: list[int]) -> Entries:
    keys = np.array([[0, 7, 2], [1, 7, 1], [2, 9, 3]], np.int32)
    tokens = np.array([[1, 2, 0], [3, 0, 0], [4, 5, 6]], np.int32)
    return Entries(10, chain, keys, tokens)


def test_an_outcome_is_found_by_accepted_drafts_and_bonus_token() -> None:
    sent = entries([5, 6])
    assert sent.find([7]) == [1, 2]
    assert sent.find([5, 7]) == [3]
    assert sent.find([5, 6, 9]) == [4, 5, 6]


def test_anything_else_is_not_found() -> None:
    sent = entries([5, 6])
    assert sent.find([]) == []  # no news
    assert sent.find([8]) == []  # not predicted
    assert sent.find([6, 7]) == []  # another chain
    assert sent.find([5, 9]) == []  # predicted elsewhere
    assert sent.find([5, 6, 9, 1]) == []  # further than the chain
    assert entries([5]).find([5, 6, 9]) == []  # the chain is shorter


@given(trees(), st.data())
def test_finds_what_a_hit_on_the_draft_server_answers(tree, data) -> None:
    chain = tree[0]
    cache, _ = build(tree)
    steps = data.draw(st.integers(1, K))
    answered = data.draw(st.integers(0, len(chain)))
    keys, tokens = cache.entries(steps, answered)
    assert keys.dtype == tokens.dtype == np.int32 and tokens.shape == (len(keys), steps)
    sent = Entries(0, chain[:answered], keys, tokens)
    path = data.draw(st.sampled_from(paths(tree)) | st.lists(SMALL, min_size=1, max_size=K + 1))
    path = path[: data.draw(st.integers(0, len(path)))]
    walk = cache.walk(path)
    expected: list[int] = []
    if walk.complete and walk.branch >= 0 and walk.inside == 0 and walk.trunk <= answered:
        cache.reroot(walk)
        expected = cache.chain[:steps]
    elif path and walk.complete and walk.branch < 0 and walk.trunk == answered + 1:
        cache.reroot(walk)  # the chain went on by itself
        if len(cache.chain) < steps:
            cache.promote(steps - len(cache.chain) - 1)
        expected = cache.chain[:steps]
    assert sent.find(path) == expected
