"""Prompts on their way in, a chunk at a time, so that a long one never stalls the others."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable

import numpy as np

from sgl_ssd.draft_server.builder import MAX_FEED
from sgl_ssd.draft_server.drafts import Draft
from sgl_ssd.draft_server.proposals import HostCopy
from sgl_ssd.draft_server.stats import EngineStats
from sgl_ssd.draft_server.steps import Stepper
from sgl_ssd.protocol import SpanKind

SHARED_PREFIX = 32
"""Prompts that begin alike for this long wait for each other, to share what one has computed."""

MAX_GAP = MAX_FEED // 2
"""Tokens that the first decode step feeds: half of what it may, since more come meanwhile."""

Chunk = tuple[Draft, int, int, bool]
"""A session, the first and the end of the positions to compute, whether that ends its text."""


class PrefillQueue:
    """Verifiers take turns, a prompt each; each one's own prompts come in order of arrival.

    Several prompts share a chunk of at most `chunk` tokens.

    A prompt is done with its last chunk, though no more than `MAX_GAP` tokens may lack KV by then:
    the target commits on meanwhile, and a fast one would never be caught up with.

    `done` gets each finished session and its guesses for the next token, None while tokens lack KV;
    `give_back` takes a session's KV away again (its cached part is found when its turn comes).
    """

    def __init__(
        self,
        stepper: Stepper,
        stats: EngineStats,
        chunk: int,
        done: Callable[[Draft, np.ndarray | None], None],
        give_back: Callable[[Draft, bool], None],
    ) -> None:
        self._stepper = stepper
        self._kv = stepper.kv
        self._stats = stats
        self._chunk = chunk
        self._done = done
        self._give_back = give_back
        self._waiting: deque[Draft] = deque()
        self._short_at = 0  # what was free when the first in the queue found too little
        self._in_flight: tuple[list[Chunk], HostCopy, float] | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def runnable(self) -> bool:
        """Whether there is a prompt that could go on: the first is not short of memory."""
        if self._in_flight:
            return True
        return bool(self._waiting) and not (
            self._waiting[0].starved and self._kv.room <= self._short_at
        )

    def add(self, draft: Draft) -> None:
        """`draft`'s tokens without KV are to be computed."""
        rounds: Counter[str] = Counter()
        mine = 1 + sum(other.owner == draft.owner for other in self._waiting)
        for i, other in enumerate(self._waiting):
            rounds[other.owner] += 1
            if rounds[other.owner] > mine:
                self._waiting.insert(i, draft)
                return
        self._waiting.append(draft)

    def remove(self, draft: Draft) -> None:
        """Forget `draft`, if it is here."""
        if draft in self._waiting:
            self._waiting.remove(draft)

    def work(self) -> None:
        """Compute at most one chunk of tokens."""
        self._collect()
        if self._in_flight or not self.runnable:
            return
        chunks = self._choose()
        if not chunks:
            return
        rows = np.array([draft.home.row for draft, *_ in chunks])
        starts = np.array([start for _, start, _, _ in chunks])
        lengths = np.array([end - start for _, start, end, _ in chunks])
        tokens = np.concatenate([np.array(d.tokens[a:b], np.int64) for d, a, b, _ in chunks])
        for draft, _, end, _ in chunks:
            draft.home.fed = end
        begin = time.perf_counter()
        self._in_flight = (chunks, self._stepper.extend(rows, starts, lengths, tokens), begin)
        self._stats.prefill_tokens += len(tokens)
        if self._stepper.synchronous:
            self._collect()

    def _choose(self) -> list[Chunk]:
        """What to compute now; rows and slots for it are taken."""
        chunks: list[Chunk] = []
        left = self._chunk
        heads: set[tuple[str, bytes]] = set()
        for draft in list(self._waiting):
            if left <= 0:
                break
            head = (draft.extra_key, draft.tokens[:SHARED_PREFIX].tobytes())
            if draft.kv is None and head in heads:
                continue
            heads.add(head)
            if not self._make_room(draft, left):
                self._starve(draft)
                break
            start, end = draft.home.length, min(len(draft.tokens), draft.home.length + left)
            draft.starved = False
            chunks.append((draft, start, end, end == len(draft.tokens)))
            left -= end - start
        return chunks

    def _make_room(self, draft: Draft, left: int) -> bool:
        """A home row, the cached prefix, and slots for the coming chunk."""
        if draft.kv is None:
            draft.kv = self._kv.open()
            if draft.kv is None:
                return False
            self._stepper.proposer.set_session(draft.kv.row, draft.params)
            cached = self._kv.match(draft.kv, draft.tokens, draft.extra_key)
            self._stats.prefill_cached_tokens += cached
        return self._kv.extend(draft.kv, min(len(draft.tokens), draft.kv.length + left))

    def _starve(self, draft: Draft) -> None:
        """`draft` has to wait for memory. Those behind it must not hold any meanwhile."""
        draft.starved = True
        self._stats.starved += 1
        for other in list(self._waiting)[self._waiting.index(draft) + 1 :]:
            if other.kv is not None:
                self._give_back(other, True)
            other.starved = True
        self._short_at = self._kv.room

    def _collect(self) -> None:
        if not self._in_flight or not self._in_flight[1].ready():
            return
        chunks, copy, begin = self._in_flight
        self._in_flight = None
        count = sum(end - start for _, start, end, _ in chunks)
        self._stats.record(SpanKind.DRAFT_PREFILL, begin, time.perf_counter(), count)
        for (draft, _, end, last), guesses in zip(chunks, copy.get(), strict=True):
            if draft not in self._waiting or draft.kv is None:
                continue  # closed meanwhile
            draft.kv.length = end
            gap = len(draft.tokens) - end
            if last and gap <= MAX_GAP:
                self._waiting.remove(draft)
                self._kv.publish(draft.kv, draft.tokens[:end], draft.extra_key)
                self._done(draft, None if gap else guesses)
