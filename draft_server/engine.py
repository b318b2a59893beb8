"""The draft engine: prefill, branch decode, adoption of outcomes, just-in-time drafting.

The server drives it: `open`, `advance` with news, `backup` for what was not predicted, `plan` for
the next round, and `work` (one decode step over all sessions, one chunk of prefill) in between.
"""

from __future__ import annotations

import enum
import time
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from sgl_ssd.draft_server.backup import ngram_continuation
from sgl_ssd.draft_server.branches import (
    Feed,
    Fork,
    LateRoots,
    Part,
    StepBatch,
    exclude_on_host,
    fan_out_for,
    make_feed,
    plan_forks,
)
from sgl_ssd.draft_server.kv import KVSpace, SessionKV
from sgl_ssd.draft_server.prefill import PrefillQueue
from sgl_ssd.draft_server.proposals import HostCopy, Proposer, SamplingParams, excluding
from sgl_ssd.draft_server.runner import DraftRunner, Lanes
from sgl_ssd.draft_server.speculation_cache import Reroot, SpeculationCache, Walk
from sgl_ssd.draft_server.stats import EngineStats
from sgl_ssd.protocol import Status

MAX_FEED = 32
"""Known tokens fed in a decode step, a lane each; longer gaps go through prefill."""


class Stage(enum.Enum):
    """Where a session is."""

    PREFILL = "prefill"
    READY = "ready"
    CONTEXT = "context"
    CLOSED = "closed"


@dataclass(eq=False)
class Draft:
    """One session as the engine knows it. `tokens` are the committed ones, prompt and output."""

    tokens: array[int]
    params: SamplingParams
    extra_key: str
    num_steps: int
    fan_out: list[int]
    cache: SpeculationCache
    stage: Stage = Stage.PREFILL
    kv: SessionKV | None = None
    starved: bool = False
    answered: int = 0
    generation: int = 0
    feed: Feed | None = None
    building: bool = False
    built_at: float = field(default_factory=time.monotonic)


class DraftEngine:
    """See the module. Belongs to one thread."""

    def __init__(
        self,
        runner: DraftRunner,
        *,
        num_steps: int,
        fan_out: Sequence[int],
        max_branch_rows: int,
        max_sessions: int,
        prefill_chunk: int,
        vocab_limit: int | None = None,
    ) -> None:
        self.runner = runner
        self.num_steps = num_steps
        self.context_len = runner.context_len
        self.vocab_limit = min(vocab_limit or runner.vocab_size, runner.vocab_size)
        self.kv = KVSpace(
            runner.num_slots, runner.num_rows, runner.row_width, max_sessions, max_branch_rows
        )
        self.cap = max(1, self.kv.max_branches)
        self.width = min(max(*fan_out, 7) + 1, self.vocab_limit)
        scratch = runner.num_rows
        self.proposer = Proposer(
            runner.device, runner.vocab_size, runner.num_rows, scratch + self.cap + MAX_FEED,
            self.width,
        )  # fmt: skip
        self._scratch = scratch
        self._run_ahead = 1 if runner.device.type == "cpu" else 2
        self.stats = EngineStats()
        self._ready = 0
        self._queue = PrefillQueue(self, prefill_chunk)
        self._builds: deque[Draft] = deque()
        self._in_flight: deque[tuple[StepBatch, HostCopy, float]] = deque()

    # -- lifecycle -----------------------------------------------------------------------------

    def open(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        extra_key: str,
        num_steps: int,
        fan_out: Sequence[int],
    ) -> Draft:
        """A session with these committed tokens; its prompt is prefilled by `work`."""
        draft = Draft(
            array("q", tokens), params, extra_key, num_steps, list(fan_out),
            SpeculationCache(self.num_steps, self.width),
        )  # fmt: skip
        if len(draft.tokens) > self.context_len:
            draft.stage = Stage.CONTEXT
        else:
            self._queue.add(draft)
        return draft

    def close(self, draft: Draft, keep: bool = True) -> None:
        """Give back all that the session holds; with `keep` its KV stays as a cached prefix."""
        self._queue.remove(draft)
        if draft.stage is Stage.READY:
            self._ready -= 1
        draft.stage = Stage.CLOSED
        draft.generation += 1
        draft.feed = None
        if draft.kv is None:
            return
        self._release(draft, draft.cache.clear())
        self._give_back(draft, keep)

    def prefilled(self, draft: Draft, guesses: np.ndarray) -> None:
        """The prefill queue is done: KV for every token; `guesses` [width] for the next one."""
        draft.stage = Stage.READY
        self._ready += 1
        draft.cache.guesses = [guesses]
        draft.answered = 0
        self.plan(draft)

    # -- news ----------------------------------------------------------------------------------

    def advance(self, draft: Draft, new: Sequence[int]) -> Status | None:
        """`new` tokens are committed: adopt what was drafted for them.

        Returns the status of the speculation that is now in `draft.cache.chain`, or None after a
        miss, which wants a backup.
        """
        if draft.stage is not Stage.READY:
            draft.tokens.extend(new)
            if len(draft.tokens) > self.context_len:
                self._leave(draft, Stage.CONTEXT)
            if draft.stage is Stage.CONTEXT:
                return Status.CONTEXT
            return Status.NO_MEMORY if draft.starved else Status.PREFILLING
        walk = Walk(0, -1, 0, True)
        if new:
            walk = draft.cache.walk(new)
            if self._worth_waiting(draft, walk):
                self._collect(wait=True)
                walk = draft.cache.walk(new)
            self._adopt(draft, walk, new)
        if len(draft.tokens) > self.context_len:
            self._leave(draft, Stage.CONTEXT)
            return Status.CONTEXT
        if len(draft.tokens) - draft.kv.length > MAX_FEED:
            self._leave(draft, Stage.PREFILL)
            return Status.PREFILLING
        if not walk.complete:
            return None
        if walk.branch < 0 and len(draft.cache.chain) < draft.num_steps:
            self._promote(draft)
        if not draft.cache.chain:
            return None
        return Status.HIT if walk.branch >= 0 and walk.inside == 0 else Status.PARTIAL

    def _worth_waiting(self, draft: Draft, walk: Walk) -> bool:
        """Whether the end of the walk was found, and its first draft is on its way."""
        if not walk.complete or walk.branch < 0:
            return False
        length = draft.cache.length[walk.branch]
        return bool(walk.inside == length < draft.cache.launched[walk.branch])

    def _adopt(self, draft: Draft, walk: Walk, new: Sequence[int]) -> None:
        end_of_trunk = len(draft.tokens) + walk.trunk
        change = draft.cache.reroot(walk)
        draft.tokens.extend(new)
        if walk.branch >= 0:
            self.kv.append(draft.kv, end_of_trunk, change.moved)
        elif not walk.complete:
            self.kv.trim(draft.kv, end_of_trunk)
        if walk.branch >= 0 or not walk.complete:
            draft.generation += 1
        if draft.feed is not None:  # not launched yet: planned anew
            draft.feed = None
        self._release(draft, change)

    def _promote(self, draft: Draft) -> None:
        start = len(draft.tokens) + len(draft.cache.chain)
        room = draft.num_steps - len(draft.cache.chain) - 1
        before = len(draft.cache.chain)
        change = draft.cache.promote(max(0, room))
        if len(draft.cache.chain) > before:
            draft.feed = None
        if len(change.moved):
            draft.generation += 1
            self.kv.append(draft.kv, start, change.moved)
        self._release(draft, change)

    def _release(self, draft: Draft, change: Reroot) -> None:
        self.kv.free(change.freed)
        draft.kv.idle_rows += change.rows.tolist()

    def _leave(self, draft: Draft, stage: Stage) -> None:
        """From READY to a stage in which nothing is drafted."""
        if draft.stage is Stage.READY:
            self._ready -= 1
            self._release(draft, draft.cache.clear())
            self.kv.trim(draft.kv, min(draft.kv.length, len(draft.tokens)))
            draft.generation += 1
            draft.feed = None
        self._queue.remove(draft)
        draft.stage = stage
        if stage is Stage.PREFILL:
            self._queue.add(draft)
        elif draft.kv is not None:
            self._give_back(draft, keep=True)

    def _give_back(self, draft: Draft, keep: bool) -> None:
        known = min(draft.kv.length, len(draft.tokens))
        self.kv.close(draft.kv, draft.tokens[:known], draft.extra_key, keep)
        draft.kv = None

    # -- backup --------------------------------------------------------------------------------

    def backup(self, drafts: Sequence[Draft], kind: str) -> list[Status]:
        """Speculations for sessions whose outcome was not predicted, in place; their statuses."""
        if kind == "jit":
            return self._just_in_time(drafts)
        statuses = []
        for draft in drafts:
            if kind == "fast":
                found = ngram_continuation(draft.tokens, draft.num_steps)
                draft.cache.chain = found
            statuses.append(Status.BACKUP if draft.cache.chain else Status.EMPTY)
        return statuses

    def _just_in_time(self, drafts: Sequence[Draft]) -> list[Status]:
        """Draft on the home rows now: the missing rows of a batch in one batch of decode steps."""
        begin = time.perf_counter()
        self._collect(wait=True)
        steps = [self._make_room(draft) for draft in drafts]
        runnable = [(d, s) for d, s in zip(drafts, steps, strict=True) if s > 0]
        group: list[tuple[Draft, int]] = []
        lanes = 0
        for draft, count in runnable:
            gap = len(draft.tokens) - draft.kv.length
            if group and lanes + gap > self.cap:
                self._draft_now(group)
                group, lanes = [], 0
            group.append((draft, count))
            lanes += gap
        if group:
            self._draft_now(group)
        self.stats.jit(len(runnable), time.perf_counter() - begin)
        return [Status.BACKUP if s > 0 else Status.NO_MEMORY for s in steps]

    def _make_room(self, draft: Draft) -> int:
        """Slots for a just-in-time draft; returns how many tokens there is room for."""
        n = len(draft.tokens)
        steps = min(draft.num_steps, self.context_len - n + 1)
        while steps > 0 and not self.kv.extend(draft.kv, n - 1 + steps):
            steps //= 2
        return steps

    def _draft_now(self, group: list[tuple[Draft, int]]) -> None:
        self._flush_rows()
        homes = np.array([d.kv.row for d, _ in group])
        ends = np.array([len(d.tokens) for d, _ in group])
        counts = np.array([s for _, s in group])
        copies: list[tuple[np.ndarray, HostCopy]] = []
        for j in range(int(counts.max())):
            active = np.flatnonzero(counts > j)
            rows = homes[active]
            if j:
                ids = self._forward(rows, rows, ends[active] - 1 + j, rows)
                last = None
            else:
                starts = [min(d.kv.length, len(d.tokens) - 1) for d, _ in group]
                gaps = [np.arange(a, n) for a, n in zip(starts, ends.tolist(), strict=True)]
                sizes = np.array([len(g) for g in gaps])
                last = np.cumsum(sizes) - 1
                all_rows = np.repeat(homes, sizes)
                lanes = self._scratch + np.arange(len(all_rows))
                known = [d.tokens[a:] for a, (d, _) in zip(starts, group, strict=True)]
                self._set_tokens(np.stack((lanes, np.concatenate(known).astype(np.int64))))
                ids = self._forward(lanes, all_rows, np.concatenate(gaps), all_rows)
                ids = ids[self.runner.put(last)]
            self.proposer.next_token[self.runner.put(rows)] = ids[:, 0]
            copies.append((active, HostCopy(ids)))
        for draft, count in group:
            draft.cache.chain, draft.cache.guesses = [], []
            draft.kv.length = draft.kv.fed = len(draft.tokens) - 1 + count
        for active, copy in copies:
            for place, ids in zip(active.tolist(), copy.get(), strict=True):
                cache = group[place][0].cache
                cache.chain.append(int(ids[0]))
                cache.guesses.append(ids)

    # -- building ------------------------------------------------------------------------------

    def plan(self, draft: Draft) -> None:
        """Get ready to build the cache for the round that `draft.cache.chain` is verified in."""
        if draft.stage is not Stage.READY:
            return
        cache, kv, n = draft.cache, draft.kv, len(draft.tokens)
        cache.compact()
        draft.answered = min(len(cache.chain), draft.num_steps)
        budget = self.cap // max(1, self._ready) - 1
        limit = min(self.width, draft.params.vocab_limit) - 1
        fan_out = fan_out_for(draft.fan_out, draft.answered, budget, limit)
        # Feeding the last verified draft yields the guesses after full acceptance.
        end = min(n + draft.answered, self.context_len)
        feeding = kv.fed == kv.length < end
        if feeding and end - kv.length > MAX_FEED:
            feeding = False
        if feeding and not self.kv.extend(kv, end):
            feeding = False
        forks = plan_forks(cache, fan_out, late=feeding)
        added = self._add_branches(draft, forks)
        if feeding and any(f.late for f in added):
            draft.feed = make_feed(draft.tokens, cache.chain, kv.length, end, draft.generation)
            self._attach_late(draft, added)
        if draft.feed or not cache.complete:
            if not draft.building:
                draft.building = True
                self._builds.append(draft)
        else:
            draft.built_at = time.monotonic()

    def _add_branches(self, draft: Draft, forks: list[Fork]) -> list[Fork]:
        """Rows and slots for as many of `forks` as there are; hang them up in the cache."""
        n = len(draft.tokens)
        goals = []
        for fork in forks:
            steps = max(1, draft.num_steps - 1) if fork.late else draft.num_steps
            goals.append(min(steps, self.context_len - n - fork.depth))
        usable = [(f, g) for f, g in zip(forks, goals, strict=True) if g > 0]
        rows = self.kv.take_rows(draft.kv, len(usable))
        usable = usable[: len(rows)]
        slots = None
        while usable:
            slots = self.kv.alloc(sum(g for _, g in usable))
            if slots is not None:
                break
            usable = usable[: len(usable) // 2]  # shallow forks come first
        draft.kv.idle_rows += rows[len(usable) :]
        if not usable or slots is None:
            return []
        goal = np.array([g for _, g in usable])
        own = np.zeros((len(usable), self.num_steps), np.int32)
        own[np.arange(self.num_steps) < goal[:, None]] = slots
        depth = np.array([f.depth for f, _ in usable])
        row = np.array(rows[: len(usable)])
        root = np.array([f.root for f, _ in usable])
        start = n + depth
        draft.cache.add(depth, root, row, start, goal, own)
        stable = min(draft.kv.length, n)
        self.kv.queue_branches(draft.kv, row, start, goal, own, stable)
        return [f for f, _ in usable]

    def _attach_late(self, draft: Draft, added: list[Fork]) -> None:
        cache, first = draft.cache, len(draft.cache.depth) - len(added)
        by_depth: dict[int, list[int]] = {}
        for i, fork in enumerate(added):
            if fork.late:
                by_depth.setdefault(fork.depth, []).append(first + i)
        for depth, members in by_depth.items():
            branches = np.array(members)
            own = cache.chain[depth] if depth < len(cache.chain) else -1
            position = len(draft.tokens) - 1 + depth
            draft.feed.late.append(LateRoots(position, own, branches, cache.row[branches]))

    # -- working -------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether `work` has something to do."""
        return bool(self._builds or self._in_flight or self._queue.runnable)

    @property
    def starved(self) -> bool:
        """Whether a prompt waits for memory."""
        return len(self._queue) > 0

    def summary(self) -> dict[str, float]:
        """The engine's numbers, flat."""
        return {
            **self.stats.summary(),
            "kv_total": self.kv.slots.size,
            "kv_available": self.kv.slots.available_size(),
            "kv_evictable": self.kv.radix.evictable_size(),
            "ready_sessions": self._ready,
            "prefill_queue": len(self._queue),
        }

    def work(self) -> None:
        """One decode step over everything that is being built, then one chunk of prefill."""
        self._collect()
        if self._builds and len(self._in_flight) < self._run_ahead:
            self._launch()
            if self._run_ahead == 1:
                self._collect()
        self._queue.work()

    def _launch(self) -> None:
        batch = StepBatch(self.cap, self._scratch)
        for _ in range(len(self._builds)):
            draft = self._builds.popleft()
            if draft.stage is not Stage.READY:
                draft.building = False
                continue
            if not batch.add(draft, draft.feed):
                self._builds.appendleft(draft)
                break
            more = draft.cache.launched < draft.cache.goal
            if batch.parts and batch.parts[-1].draft is draft:
                self._mark_launched(draft, batch.parts[-1])
                more = draft.cache.launched < draft.cache.goal
            if (more & draft.cache.alive).any() or draft.feed:
                self._builds.append(draft)
            else:
                draft.building = False
        if not batch.size:
            return
        begin = time.perf_counter()
        self._flush_rows()
        known = batch.known_tokens()
        if known is not None:
            self._set_tokens(known)
        lanes, rows, positions, sessions = batch.packed()
        ids = self._forward(lanes, rows, positions, sessions)
        self.proposer.next_token[self.runner.put(lanes)] = ids[:, 0]
        late = batch.late_roots()
        if late is not None:
            excluded = batch.excluded()
            roots = ids if excluded is None else excluding(ids, self.runner.put(excluded))
            lane, rank, row = self.runner.put(late)
            self.proposer.next_token[row] = roots[lane, rank]
        self._in_flight.append((batch, HostCopy(ids), begin))

    def _mark_launched(self, draft: Draft, part: Part) -> None:
        cache = draft.cache
        cache.launched[part.branches] += 1
        cache.in_flight += 1
        if part.feed:
            draft.kv.fed = part.feed.end
            for late in part.feed.late:
                cache.waiting[late.branches] = False
            draft.feed = None

    def _collect(self, wait: bool = False) -> None:
        while self._in_flight and (wait or self._in_flight[0][1].ready()):
            batch, copy, begin = self._in_flight.popleft()
            ids = copy.get()
            self.stats.step(batch.size, time.perf_counter() - begin)
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
        if cache.complete and not draft.feed:
            draft.built_at = time.monotonic()

    def _store_feed(self, draft: Draft, feed: Feed, ids: np.ndarray) -> None:
        n, cache = len(draft.tokens), draft.cache
        for position in range(feed.start, feed.end):
            depth = position + 1 - n
            if depth >= 0 and depth == len(cache.guesses):
                cache.guesses.append(ids[position - feed.start])
        draft.kv.length = max(draft.kv.length, feed.end)
        for late in feed.late:
            roots = exclude_on_host(ids[late.position - feed.start], late.excluded)
            cache.name_roots(late.branches, np.array(roots[: len(late.branches)]))

    def _forward(
        self, lanes: np.ndarray, rows: np.ndarray, positions: np.ndarray, sessions: np.ndarray
    ) -> torch.Tensor:
        """One decode step (all int64 [N]); returns the best ids of each lane: int64 [N, width]."""
        packed = self.runner.put(np.stack((lanes, rows, positions, sessions)))
        tokens = self.proposer.next_token[packed[0]]
        logits = self.runner.decode(Lanes(packed[1], packed[2], positions), tokens)
        return self.proposer.propose(logits, sessions, packed[3], packed[2] + 1)

    def _set_tokens(self, known: np.ndarray) -> None:
        lanes, tokens = self.runner.put(known)
        self.proposer.next_token[lanes] = tokens

    def _flush_rows(self) -> None:
        self.runner.write_rows(self.kv.take_writes())

    # -- checks --------------------------------------------------------------------------------

    def check_memory(self, drafts: Sequence[Draft]) -> None:
        """Every KV slot has exactly one owner; `drafts` are all that are open.

        Raises `MemoryAccountingError`. For tests and for `--check-memory`: reads every slot.
        """
        self._collect(wait=True)
        held = [
            x
            for d in drafts
            if d.kv is not None
            for x in (d.kv.slots[d.kv.protected : d.kv.allocated], d.cache.all_slots())
        ]
        self.kv.check(held)
