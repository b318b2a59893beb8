"""Builds the speculation caches of all sessions: plans branches, runs steps, takes in results."""

from __future__ import annotations

import time
from collections import deque

import numpy as np

from sgl_ssd.draft_server.branches import (
    Feed,
    Fork,
    LateRoots,
    Part,
    StepBatch,
    exclude_on_host,
    fan_out_for,
    make_feed,
    not_a_root,
    plan_forks,
)
from sgl_ssd.draft_server.drafts import Draft, Stage
from sgl_ssd.draft_server.kv import KVSpace
from sgl_ssd.draft_server.proposals import HostCopy
from sgl_ssd.draft_server.stats import EngineStats
from sgl_ssd.draft_server.steps import Stepper

MAX_FEED = 32
"""Known tokens fed in a decode step, a lane each; longer gaps go through prefill."""


class Builder:
    """Sessions under construction take turns; each step serves as many as fit its rows."""

    def __init__(
        self, stepper: Stepper, kv: KVSpace, stats: EngineStats, cap: int, context_len: int
    ) -> None:
        self._stepper = stepper
        self._kv = kv
        self._stats = stats
        self.cap = cap
        self.context_len = context_len
        self._builds: deque[Draft] = deque()
        self._in_flight: deque[tuple[StepBatch, HostCopy, float]] = deque()
        self._stepped_at = 0.0
        self._built: dict[Draft, None] = {}  # in order, each once

    @property
    def busy(self) -> bool:
        return bool(self._builds or self._in_flight)

    # -- planning ------------------------------------------------------------------------------

    def plan(self, draft: Draft, budget: int) -> None:
        """Get ready to build the cache for the round that the chain is verified in.

        At most `budget` branches hang in the cache afterwards.
        """
        cache, kv, n = draft.cache, draft.home, len(draft.tokens)
        if draft.feed is None:  # a feed not launched yet refers to branches by index
            cache.compact()
        # One guess is the chain's own token; a sampled one stands there twice.
        limit = min(cache.width - (cache.top_m > 0), draft.params.vocab_limit) - 1
        ahead = len(cache.chain) - draft.answered
        fan_out = fan_out_for(draft.fan_out, draft.answered, budget - (ahead > 0), limit)
        wanted = fan_out_for(draft.fan_out, draft.answered, len(draft.fan_out) * limit, limit)
        self._stats.branches_short_of_rows += sum(wanted) - sum(fan_out)
        if ahead > 0 and not cache.top_m:
            # The chain goes on by itself: a branch behind its end keeps growing. (A sampled chain
            # would go on from a sample, which is no guess.)
            fan_out += [0] * (ahead - 1) + [1]
        # Feeding the chain's last draft yields the guesses behind it.
        end = min(n + len(cache.chain), self.context_len)
        feeding = (
            draft.feed is None  # one that is not launched yet has branches of its own
            and kv.fed == kv.length < end
            and end - kv.length <= MAX_FEED
            and self._kv.extend(kv, end)
        )
        added = self._add_branches(draft, plan_forks(cache, fan_out, late=feeding))
        if any(fork.late for fork in added):
            draft.feed = make_feed(draft.tokens, cache.chain, kv.length, end, draft.generation)
            self._attach_late(draft, draft.feed, added)
        draft.built_at, draft.planned_at = None, time.monotonic()
        if draft.feed is None and cache.complete:
            draft.built_at = draft.planned_at
            self._built[draft] = None
        elif not draft.building:
            draft.building = True
            self._builds.append(draft)

    def take_coming(self, draft: Draft) -> None:
        """Wait for steps in flight, and lengthen the chain with what they bring for it."""
        self.collect(wait=True)
        draft.cache.take_coming()

    def _add_branches(self, draft: Draft, forks: list[Fork]) -> list[Fork]:
        """Hang up as many of `forks`, shallow ones first, as there are rows and slots for."""
        n, kv, steps = len(draft.tokens), draft.home, draft.num_steps
        usable = []
        for fork in forks:
            # Late forks start a step after the others and take one more at the end. News that comes
            # before that finds them a token shorter; mostly there is the time, and the step is
            # small. Where acceptance is high every other chain comes from a late fork.
            goal = min(steps, self.context_len - n - fork.depth)
            if goal > 0:
                usable.append((fork, goal))
        rows, stats = self._kv.take_rows(kv, len(usable)), self._stats
        stats.branches_short_of_rows += len(usable) - len(rows)
        usable = usable[: len(rows)]
        slots = None
        while usable and slots is None:
            slots = self._kv.alloc(sum(goal for _, goal in usable))
            if slots is None:
                usable = usable[: len(usable) // 2]
        stats.branches += len(usable)
        stats.branches_short_of_memory += len(rows) - len(usable)
        kv.idle_rows += rows[len(usable) :]
        if slots is None:
            return []
        cache = draft.cache
        depth = np.array([fork.depth for fork, _ in usable])
        root = np.array([fork.root for fork, _ in usable])
        goals = np.array([goal for _, goal in usable])
        row = np.array(rows[: len(usable)])
        own = np.zeros((len(usable), cache.num_steps), np.int32)
        own[np.arange(cache.num_steps) < goals[:, None]] = slots
        cache.add(depth, root, row, n + depth, goals, own)
        self._kv.queue_branches(kv, row, n + depth, goals, own, stable=min(kv.length, n))
        return [fork for fork, _ in usable]

    def _attach_late(self, draft: Draft, feed: Feed, added: list[Fork]) -> None:
        cache, first = draft.cache, len(draft.cache.depth) - len(added)
        by_depth: dict[int, list[int]] = {}
        for i, fork in enumerate(added):
            if fork.late:
                by_depth.setdefault(fork.depth, []).append(first + i)
        for depth, members in by_depth.items():
            branches = np.array(members)
            own = not_a_root(cache, depth)
            position = len(draft.tokens) - 1 + depth
            feed.late.append(LateRoots(position, own, branches, cache.row[branches]))

    def take_built(self) -> list[Draft]:
        """Sessions whose caches have been completed since the last call."""
        built = [draft for draft in self._built if draft.built_at is not None]
        self._built.clear()
        return built

    def ahead(self, draft: Draft) -> float:
        """Seconds since the draft's build was complete; negative: until it will be."""
        if draft.built_at is not None:
            return time.monotonic() - draft.built_at
        cache = draft.cache
        left = int(((cache.goal - cache.length) * cache.alive).max(initial=0))
        return -(left + (draft.feed is not None)) * self._stats.step_time.mean

    # -- steps ---------------------------------------------------------------------------------

    def work(self) -> None:
        """Take in what is complete, then launch a step if one may be."""
        self.collect()
        if self._builds and len(self._in_flight) < (1 if self._stepper.synchronous else 2):
            self._launch()
            if self._stepper.synchronous:
                self.collect()

    def _launch(self) -> None:
        started = time.perf_counter()
        batch = StepBatch(self.cap, self._stepper.scratch)
        for _ in range(len(self._builds)):
            draft = self._builds[0]
            if draft.stage is Stage.READY:
                part = batch.add(draft, draft.feed)
                if part is None and batch.full:
                    break
                if part is not None:
                    self._mark_launched(draft, part)
            self._builds.popleft()
            if draft.stage is Stage.READY and (draft.feed or draft.cache.unlaunched):
                self._builds.append(draft)
            else:
                draft.building = False
        if batch.size:
            begin = time.perf_counter()
            self._in_flight.append((batch, self._stepper.run(batch), begin))
            self._stats.launch_s += time.perf_counter() - started

    def _mark_launched(self, draft: Draft, part: Part) -> None:
        cache = draft.cache
        cache.launched[part.branches] += 1
        cache.in_flight += 1
        if part.feed:
            draft.home.fed = part.feed.end
            for late in part.feed.late:
                cache.waiting[late.branches] = False
            draft.feed = None

    def collect(self, wait: bool = False) -> None:
        """Take in the results of steps that are complete; with `wait` of all that were launched."""
        while self._in_flight and (wait or self._in_flight[0][1].ready()):
            batch, copy, begin = self._in_flight.popleft()
            ids = copy.get()
            now = time.perf_counter()
            # The device runs one step after the other: the second of two in flight has waited.
            self._stats.step(batch.size, max(begin, self._stepped_at), now)
            self._stepped_at = now
            for part in batch.parts:
                self._store(part, ids[part.offset :])

    def _store(self, part: Part, ids: np.ndarray) -> None:
        draft, cache = part.draft, part.draft.cache
        cache.in_flight -= 1
        if draft.stage is not Stage.READY:
            return
        if part.feed and part.feed.generation == draft.generation:
            self._store_feed(draft, part.feed, ids)
        if len(part.branches):
            lanes = ids[part.num_feed : part.num_feed + len(part.branches)]
            cache.store(part.branches, part.step, lanes)
        if draft.built_at is None and draft.feed is None and cache.complete:
            draft.built_at = time.monotonic()
            self._built[draft] = None
            self._stats.build(len(cache.depth), draft.planned_at, draft.built_at)

    def _store_feed(self, draft: Draft, feed: Feed, ids: np.ndarray) -> None:
        n, cache = len(draft.tokens), draft.cache
        for position in range(feed.start, feed.end):
            depth = position + 1 - n
            if depth >= 0 and depth == len(cache.guesses):
                cache.guesses.append(ids[position - feed.start])
        draft.home.length = max(draft.home.length, feed.end)
        for late in feed.late:
            guesses = ids[late.position - feed.start][: cache.width]
            roots = exclude_on_host(guesses, late.excluded)
            cache.name_roots(late.branches, np.array(roots[: len(late.branches)]))
