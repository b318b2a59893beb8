"""Drafts that cost nothing: a request's own text, searched for what came after this before.

Pure Python.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

MAX_NGRAM = 4
MIN_NGRAM = 2
WINDOW = 16 << 10
"""How far back the search goes, in tokens: it runs on the round's path."""


def ngram_continuation(
    tokens: array[int], limit: int, window: int = WINDOW, shortest: int = MIN_NGRAM
) -> list[int]:
    """What followed the latest earlier occurrence of the text's ending.

    The longest ending of `MAX_NGRAM` down to `shortest` tokens that occurs earlier wins; of its
    occurrences the latest. At most `limit` tokens; [] when none occurs.
    """
    if limit <= 0:
        return []
    text = tokens[-window:] if len(tokens) > window else tokens
    data, width = text.tobytes(), text.itemsize
    for n in range(min(MAX_NGRAM, len(text) - 1), shortest - 1, -1):
        at = _last_occurrence(data, width, n, len(text))
        if at >= 0:
            return _continuation(text, at + n, limit)
    return []


def _last_occurrence(data: bytes, width: int, n: int, length: int) -> int:
    """Start (in tokens) of the last occurrence of the final n tokens before the end; -1: none."""
    needle = data[(length - n) * width :]
    end = (length - 1) * width  # an occurrence may overlap the ending, not be it
    while True:
        at = data.rfind(needle, 0, end)
        if at < 0 or at % width == 0:
            return at // width if at >= 0 else -1
        end = at + len(needle) - 1


def _continuation(text: Sequence[int], start: int, limit: int) -> list[int]:
    """`limit` tokens from `start` on; past the end of the text it goes on with its own output."""
    found = list(text[start : start + limit])
    while len(found) < limit:
        period = len(text) - start
        found.append(found[len(found) - period])
    return found
