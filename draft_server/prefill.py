"""Prompts on their way in, a chunk at a time, so that a long one never stalls the others."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from sgl_ssd.draft_server.proposals import HostCopy

if TYPE_CHECKING:
    from sgl_ssd.draft_server.engine import Draft, DraftEngine

SHARED_PREFIX = 32
"""Prompts that begin alike for this long wait for each other, to share what one has computed."""


class PrefillQueue:
    """First come, first served; several prompts share a chunk."""

    def __init__(self, engine: DraftEngine, chunk: int) -> None:
        self._engine = engine
        self._chunk = chunk
        self._waiting: deque[Draft] = deque()
        self._short_at = 0
        self._in_flight: deque[tuple[list[tuple[Draft, int, int]], HostCopy]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def runnable(self) -> bool:
        """Whether there is a prompt that could go on: the first is not short of memory."""
        if self._in_flight:
            return True
        return bool(self._waiting) and not (
            self._waiting[0].starved and self._engine.kv.room <= self._short_at
        )

    def add(self, draft: Draft) -> None:
        self._waiting.append(draft)

    def remove(self, draft: Draft) -> None:
        if draft in self._waiting:
            self._waiting.remove(draft)

    def work(self) -> None:
        """Compute at most one chunk of tokens."""
        self._collect()
        if self._in_flight or not self.runnable:
            return
        parts = self._choose()
        if not parts:
            return
        engine = self._engine
        engine._flush_rows()
        rows = np.array([d.kv.row for d, _, _ in parts])
        starts = np.array([s for _, s, _ in parts])
        lengths = np.array([e - s for _, s, e in parts])
        tokens = np.concatenate([np.array(d.tokens[s:e], np.int64) for d, s, e in parts])
        logits = engine.runner.extend(rows, starts, lengths, tokens)
        ids = engine.proposer.propose(
            logits, rows, engine.runner.put(rows), engine.runner.put(starts + lengths)
        )
        engine.stats.prefill_tokens += len(tokens)
        for draft, _, end in parts:
            draft.kv.fed = end
        self._in_flight.append((parts, HostCopy(ids)))
        if engine.runner.device.type == "cpu":
            self._collect()

    def _choose(self) -> list[tuple[Draft, int, int]]:
        """(draft, start, end) of the coming chunk; makes room for it."""
        parts: list[tuple[Draft, int, int]] = []
        left = self._chunk
        heads: set[tuple[str, tuple[int, ...]]] = set()
        for draft in self._waiting:
            if left <= 0:
                break
            head = (draft.extra_key, tuple(draft.tokens[:SHARED_PREFIX]))
            if head in heads and draft.kv is None:
                continue
            heads.add(head)
            if not self._begin(draft) or not self._extend(draft, left):
                self._starve(draft)
                break
            start, end = draft.kv.length, min(len(draft.tokens), draft.kv.length + left)
            draft.starved = False
            parts.append((draft, start, end))
            left -= end - start
        return parts

    def _extend(self, draft: Draft, left: int) -> bool:
        end = min(len(draft.tokens), draft.kv.length + left)
        return self._engine.kv.extend(draft.kv, end)

    def _starve(self, draft: Draft) -> None:
        """`draft` has to wait for memory. Others that wait behind it must not hold any."""
        draft.starved = True
        place = self._waiting.index(draft)
        for other in list(self._waiting)[place + 1 :]:
            if other.kv is not None:
                self._engine._give_back(other, keep=True)
                other.starved = True
        self._short_at = self._engine.kv.room

    def _begin(self, draft: Draft) -> bool:
        """A home row and the cached prefix; False if all rows are taken."""
        if draft.kv is None:
            engine = self._engine
            draft.kv = engine.kv.open()
            if draft.kv is None:
                return False
            engine.proposer.set_session(draft.kv.row, draft.params)
            cached = engine.kv.match(draft.kv, draft.tokens, draft.extra_key)
            engine.stats.prefill_cached_tokens += cached
        return True

    def _collect(self) -> None:
        while self._in_flight and self._in_flight[0][1].ready():
            parts, copy = self._in_flight.popleft()
            for (draft, _, end), ids in zip(parts, copy.get(), strict=True):
                if draft.kv is None or draft not in self._waiting:
                    continue
                draft.kv.length = end
                if end == len(draft.tokens):
                    self._waiting.remove(draft)
                    self._engine.kv.publish(draft.kv, draft.tokens, draft.extra_key)
                    self._engine.prefilled(draft, ids)
