"""Drafting now, for outcomes that were not predicted: plain decode steps on the home rows."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from sgl_ssd.draft_server.drafts import Draft
from sgl_ssd.draft_server.proposals import HostCopy
from sgl_ssd.draft_server.stats import EngineStats
from sgl_ssd.draft_server.steps import Stepper
from sgl_ssd.protocol import Status


class JustInTime:
    """All missing rows of a batch draft together, in as many steps as the longest needs."""

    def __init__(self, stepper: Stepper, stats: EngineStats, cap: int, context_len: int) -> None:
        self._stepper = stepper
        self._kv = stepper.kv
        self._stats = stats
        self._cap = cap
        self._context_len = context_len

    def draft(self, drafts: Sequence[Draft]) -> list[Status]:
        """Give each of `drafts` a chain, in place: BACKUP, or NO_MEMORY where there is no room.

        No build step of theirs may be in flight.
        """
        begin = time.perf_counter()
        steps = [self._make_room(draft) for draft in drafts]
        group: list[tuple[Draft, int]] = []
        lanes = 0
        for draft, count in zip(drafts, steps, strict=True):
            if count == 0:
                continue
            gap = len(draft.tokens) - self._start(draft)
            if group and lanes + gap > self._cap:
                self._run(group)
                group, lanes = [], 0
            group.append((draft, count))
            lanes += gap
        if group:
            self._run(group)
        seconds = time.perf_counter() - begin
        self._stats.jit(sum(s > 0 for s in steps), max(steps), seconds)
        return [Status.BACKUP if s else Status.NO_MEMORY for s in steps]

    def _make_room(self, draft: Draft) -> int:
        """Slots for the new tokens; returns how many there is room for."""
        n = len(draft.tokens)
        steps = min(draft.num_steps, self._context_len - n + 1)
        while steps > 0 and not self._kv.extend(draft.home, n - 1 + steps):
            steps //= 2
        return max(0, steps)

    @staticmethod
    def _start(draft: Draft) -> int:
        """The first position to feed: what has no KV, at least the last token."""
        return min(draft.home.length, len(draft.tokens) - 1)

    def _run(self, group: list[tuple[Draft, int]]) -> None:
        homes = np.array([draft.home.row for draft, _ in group])
        ends = np.array([len(draft.tokens) for draft, _ in group])
        counts = np.array([count for _, count in group])
        stepper = self._stepper
        stepper.flush_rows()
        copies: list[tuple[np.ndarray, HostCopy]] = []
        for j in range(int(counts.max())):
            active = np.flatnonzero(counts > j)
            rows = homes[active]
            if j == 0:
                ids = self._first_step(group, homes, ends)
            else:
                ids = stepper.decode(rows, rows, ends[active] - 1 + j, rows, depths=j)
            copies.append((active, HostCopy(ids)))
        for draft, count in group:
            draft.cache.chain, draft.cache.guesses, draft.cache.given = [], [], 0
            draft.home.length = draft.home.fed = len(draft.tokens) - 1 + count
        for active, copy in copies:
            for place, best in zip(active.tolist(), copy.get(), strict=True):
                cache = group[place][0].cache
                cache.chain.append(int(best[0]))
                cache.guesses.append(best)

    def _first_step(
        self, group: list[tuple[Draft, int]], homes: np.ndarray, ends: np.ndarray
    ) -> torch.Tensor:
        """Feed all that is committed but has no KV, a lane each; the ids after the last of each."""
        stepper = self._stepper
        starts = [self._start(draft) for draft, _ in group]
        sizes = ends - np.array(starts)
        rows = np.repeat(homes, sizes)
        lanes = stepper.scratch + np.arange(len(rows))
        tokens = [draft.tokens[start:] for start, (draft, _) in zip(starts, group, strict=True)]
        stepper.set_tokens(np.stack((lanes, np.concatenate(tokens).astype(np.int64))))
        positions = np.concatenate(
            [np.arange(start, end) for start, end in zip(starts, ends.tolist(), strict=True)]
        )
        ids = stepper.decode(lanes, rows, positions, rows)
        ids = ids[stepper.runner.put(np.cumsum(sizes) - 1)]
        stepper.proposer.next_token[stepper.runner.put(homes)] = ids[:, 0]
        return ids
