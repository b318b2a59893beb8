"""A session's speculation cache as the draft server has sent it ahead of the question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Entries:
    """What comes after the first `base` committed tokens, for each outcome that was predicted.

    Attributes:
        chain: the drafts under verification.
        keys: int32 [N, 3], for each entry: drafts accepted, bonus token, length of its speculation.
        tokens: int32 [N, K], the speculations.
    """

    base: int
    chain: list[int]
    keys: np.ndarray
    tokens: np.ndarray

    def find(self, news: Sequence[int]) -> list[int]:
        """The speculation for the outcome `news`, the tokens from index `base` on; empty if it was
        not predicted, or if it is no outcome of this chain."""
        accepted = len(news) - 1
        if not 0 <= accepted <= len(self.chain) or list(news[:-1]) != self.chain[:accepted]:
            return []
        found = np.flatnonzero((self.keys[:, 0] == accepted) & (self.keys[:, 1] == news[-1]))
        if not found.size:
            return []
        drafts: list[int] = self.tokens[found[0], : self.keys[found[0], 2]].tolist()
        return drafts
