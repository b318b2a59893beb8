"""n-gram continuation against a search by hand."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from sgl_ssd.ngram import MAX_NGRAM, MIN_NGRAM, ngram_continuation


def by_hand(tokens: list[int], limit: int) -> list[int]:
    for n in range(min(MAX_NGRAM, len(tokens) - 1), MIN_NGRAM - 1, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[-n:]:
                text = list(tokens)
                for i in range(limit):
                    text.append(text[start + n + i])
                return text[len(tokens) :]
    return []


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(0, 6))
def test_equals_a_search_by_hand(tokens: list[int], limit: int) -> None:
    expected = by_hand(tokens, limit) if limit else []
    assert ngram_continuation(array("q", tokens), limit) == expected


@given(st.lists(st.integers(0, 2**31 - 1), max_size=12), st.integers(1, 4))
def test_bytes_of_neighbouring_tokens_do_not_make_a_match(tokens: list[int], limit: int) -> None:
    assert ngram_continuation(array("q", tokens), limit) == by_hand(tokens, limit)


def test_the_longest_ending_wins_and_of_its_occurrences_the_latest() -> None:
    text = [1, 2, 3, 9, 2, 3, 7, 1, 2, 3, 8, 5, 2, 3]
    assert ngram_continuation(array("q", text), 2) == [8, 5]
    assert ngram_continuation(array("q", [*text[:-3], 1, 2, 3]), 2) == [8, 1]


def test_looks_no_further_back_than_the_window() -> None:
    text = array("q", [1, 2, 3, 4, *range(100, 200), 1, 2])
    assert ngram_continuation(text, 2) == [3, 4]
    assert ngram_continuation(text, 2, window=50) == []
