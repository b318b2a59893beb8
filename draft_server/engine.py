"""The draft engine: sessions from prompt to close, news adopted, misses backed up.

The server drives it: `open`, `advance` with news, `backup` for what was not predicted, `plan` for
the next round, and `work` (one decode step over all sessions, one chunk of prefill) in between.
"""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Sequence

import numpy as np

from sgl_ssd.draft_server.builder import MAX_FEED, Builder
from sgl_ssd.draft_server.drafts import Draft, Stage
from sgl_ssd.draft_server.just_in_time import JustInTime
from sgl_ssd.draft_server.kv import KVSpace
from sgl_ssd.draft_server.prefill import PrefillQueue
from sgl_ssd.draft_server.proposals import SamplingParams
from sgl_ssd.draft_server.runner import DraftRunner
from sgl_ssd.draft_server.speculation_cache import Reroot, SpeculationCache, Walk
from sgl_ssd.draft_server.stats import EngineStats
from sgl_ssd.draft_server.steps import Stepper
from sgl_ssd.ngram import ngram_continuation
from sgl_ssd.protocol import Status
from sgl_ssd.recorder import Recorder

logger = logging.getLogger(__name__)

MIN_WIDTH = 8
_STATUS = {
    Stage.PREFILL: Status.PREFILLING,
    Stage.CONTEXT: Status.CONTEXT,
    Stage.TOO_LARGE: Status.NO_MEMORY,
}


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
        self.num_steps = num_steps
        self.context_len = runner.context_len
        self.vocab_limit = min(vocab_limit or runner.vocab_size, runner.vocab_size)
        self.kv = KVSpace(
            runner.num_slots, runner.num_rows, runner.row_width, max_sessions, max_branch_rows
        )
        self.cap = max(1, self.kv.max_branches)
        # The chain's own token besides; where it is sampled it stands first and among the best.
        self.width = min(max(*fan_out, MIN_WIDTH - 1) + 2, self.vocab_limit)
        self.stats = EngineStats()
        self.stepper = Stepper(runner, self.kv, self.width, max_scratch=self.cap + MAX_FEED)
        self._builder = Builder(self.stepper, self.kv, self.stats, self.cap, self.context_len)
        self._just_in_time = JustInTime(self.stepper, self.stats, self.cap, self.context_len)
        self._queue = PrefillQueue(
            self.stepper, self.stats, prefill_chunk, self.prefilled, self._give_back
        )
        self._ready: Counter[str] = Counter()  # sessions by owner

    # -- lifecycle -----------------------------------------------------------------------------

    def open(
        self,
        tokens: Sequence[int] | np.ndarray,
        params: SamplingParams,
        extra_key: str,
        num_steps: int,
        fan_out: Sequence[int],
    ) -> Draft:
        """A session with these committed tokens; its prompt is prefilled by `work`."""
        top_m = params.top_m if params.sampled else 0
        cache = SpeculationCache(self.num_steps, self.width, top_m)
        text = array("q")
        text.frombytes(np.asarray(tokens, np.int64).tobytes())
        draft = Draft(text, params, extra_key, num_steps, list(fan_out), cache)
        stage = self._stage_for(len(draft.tokens))
        if stage is Stage.PREFILL:
            self._queue.add(draft)
        draft.stage = stage
        return draft

    def close(self, draft: Draft, keep: bool = True) -> None:
        """Give back all that the session holds; with `keep` its KV stays as a cached prefix."""
        self._leave(draft, Stage.CLOSED, keep)

    def prefilled(self, draft: Draft, guesses: np.ndarray | None) -> None:
        """The prefill queue is done; `guesses` [width] for the next token if every one has KV."""
        draft.stage = Stage.READY
        logger.debug("a prompt of %d tokens is in", len(draft.tokens))
        self._ready[draft.owner] += 1
        draft.cache.guesses = [] if guesses is None else [guesses]
        self.plan(draft)

    def _stage_for(self, length: int) -> Stage:
        """What becomes of a text of `length` tokens whose KV is to be computed."""
        if length > self.context_len:
            return Stage.CONTEXT
        return Stage.TOO_LARGE if length > self.kv.slots.size else Stage.PREFILL

    def _leave(self, draft: Draft, stage: Stage, keep: bool = True) -> None:
        """To a stage in which nothing is drafted."""
        if draft.stage is Stage.READY:
            self._ready[draft.owner] -= 1
            self._ready += Counter()  # forgets who has none
            self._release(draft, draft.cache.clear())
            self.kv.trim(draft.home, min(draft.home.length, len(draft.tokens)))
            draft.generation += 1
            draft.feed = None
        self._queue.remove(draft)
        draft.stage = stage
        if stage is Stage.PREFILL:
            self._queue.add(draft)
        elif draft.kv is not None:
            self._give_back(draft, keep)

    def _give_back(self, draft: Draft, keep: bool) -> None:
        kv = draft.home
        known = min(kv.length, len(draft.tokens))
        self.kv.close(kv, draft.tokens[:known], draft.extra_key, keep)
        draft.kv = None

    # -- news ----------------------------------------------------------------------------------

    def advance(self, draft: Draft, new: Sequence[int], patient: bool = True) -> Status | None:
        """`new` tokens are committed: adopt what was drafted for them.

        Where the first draft is only on its way, it is waited for if `patient`; otherwise it comes
        too late for this round and is ahead for the next one.

        Returns the status of the speculation that is now in `draft.chain`, or None after a miss,
        which wants a backup.
        """
        if draft.stage is not Stage.READY:
            return self._wait(draft, new)
        draft.ahead_s = self._builder.ahead(draft)
        if draft.cache.coming:  # nothing was planned since the last news
            self._builder.take_coming(draft)
        walk = self._walk(draft, new, patient)
        if new:
            self.stats.ranks.observe(draft.cache, walk, draft.answered)
            self._adopt(draft, walk, new)
        stage = self._stage_for(len(draft.tokens))
        if stage is not Stage.PREFILL or len(draft.tokens) - draft.home.length > MAX_FEED:
            self._leave(draft, stage)
            return _STATUS[stage]
        if not walk.complete:
            return None
        if walk.branch < 0 and len(draft.chain) < draft.num_steps:
            self._promote(draft)
            if not draft.chain and patient:
                self._grow(draft)
        if not draft.chain:
            return None if patient or not draft.cache.growing else Status.EMPTY
        if walk.branch >= 0:
            return Status.HIT if walk.inside == 0 else Status.PARTIAL
        # The bonus token was the chain's own next one.
        return Status.HIT if new and walk.trunk == draft.answered + 1 else Status.PARTIAL

    def _wait(self, draft: Draft, new: Sequence[int]) -> Status:
        """News for a session that is not ready: its text grows."""
        draft.tokens.extend(new)
        stage = self._stage_for(len(draft.tokens))
        if draft.stage is not stage:
            self._leave(draft, stage)
        if stage is Stage.PREFILL and draft.starved:
            return Status.NO_MEMORY
        return _STATUS[stage]

    def _walk(self, draft: Draft, new: Sequence[int], patient: bool) -> Walk:
        cache = draft.cache
        walk = cache.walk(new)
        if patient and walk.complete and walk.branch >= 0:
            length, launched = cache.length[walk.branch], cache.launched[walk.branch]
            if walk.inside == length < launched:  # found, and its first draft is on its way
                self._builder.collect(wait=True)
                walk = cache.walk(new)
        return walk

    def _adopt(self, draft: Draft, walk: Walk, new: Sequence[int]) -> None:
        end_of_trunk = len(draft.tokens) + walk.trunk
        change = draft.cache.reroot(walk)
        draft.tokens.extend(new)
        if walk.branch >= 0:
            self.kv.append(draft.home, end_of_trunk, change.moved)
        elif not walk.complete:
            self.kv.trim(draft.home, end_of_trunk)
            # What a feed in flight computes will not be taken in any more, but for the device it is
            # there: steps run in order.
            draft.home.length = draft.home.fed
        if walk.branch >= 0 or not walk.complete:
            draft.generation += 1
        draft.feed = None  # planned anew
        self._release(draft, change)

    def _promote(self, draft: Draft) -> None:
        """A trunk that is short goes on where the draft's best guess went on."""
        before = len(draft.chain)
        change = draft.cache.promote(draft.num_steps - before - 1)
        if len(draft.chain) > before:
            draft.feed = None
        if len(change.moved):
            draft.generation += 1
            self.kv.append(draft.home, len(draft.tokens) + before, change.moved)
        self._release(draft, change)

    def _grow(self, draft: Draft) -> None:
        """Lengthen the chain with what steps in flight bring for it.

        They are as far as steps that would be launched instead.
        """
        if draft.cache.growing:
            self._builder.take_coming(draft)
            if len(draft.chain) < draft.num_steps:
                self._promote(draft)

    def _release(self, draft: Draft, change: Reroot) -> None:
        self.kv.free(change.freed)
        draft.home.idle_rows += change.rows.tolist()

    # -- drafting ------------------------------------------------------------------------------

    def backup(self, drafts: Sequence[Draft], kind: str) -> list[Status]:
        """Speculations for sessions whose outcome was not predicted, in place; their statuses.

        `kind`: jit (draft now), fast (n-grams of the session's text), none.
        """
        if not drafts:
            return []
        if kind == "jit":
            self._builder.collect(wait=True)
            for draft in drafts:
                # Branches for a chain of none, planned when there was nothing else: with a chain
                # they would be others, and their feed is not the one that comes.
                self._release(draft, draft.cache.drop_branches())
                draft.feed = None
            return self._just_in_time.draft(drafts)
        for draft in drafts:
            if kind == "fast":
                draft.cache.chain = ngram_continuation(draft.tokens, draft.num_steps)
                draft.cache.given = len(draft.cache.chain)
        return [Status.BACKUP if draft.chain else Status.EMPTY for draft in drafts]

    def plan(self, *drafts: Draft) -> None:
        """Get ready to build the caches for the round that each `draft.chain` is verified in."""
        ready = [draft for draft in drafts if draft.stage is Stage.READY]
        for draft in ready:
            draft.answered = min(len(draft.chain), draft.num_steps)
            self._grow(draft)
        # No step goes off before all are planned: one with few sessions takes nearly as long as one
        # with all of them, and the device is what everybody waits for.
        for draft in ready:
            self._builder.plan(draft, budget=max(0, self._rows_for(draft) - 1))

    def take_built(self) -> list[Draft]:
        """Sessions whose caches have been completed since the last call."""
        return [
            draft
            for draft in self._builder.take_built()
            if draft.stage is Stage.READY and not draft.cache.coming
        ]

    def _rows_for(self, draft: Draft) -> int:
        """Rows of a step for a session: owners share evenly, and leave what they cannot use."""
        left, mine = self.cap, self._ready[draft.owner]
        useful = 1 + sum(draft.fan_out)  # for a session; those of others are much alike
        counts = sorted(self._ready.values())
        for i, count in enumerate(counts):
            share = left // (len(counts) - i)
            if count == mine:
                return share // mine
            left -= min(share, count * useful)
        return left

    @property
    def recorders(self) -> list[Recorder]:
        """Whoever is in here gets spans of build steps, builds and prefills."""
        return self.stats.recorders

    @property
    def busy(self) -> bool:
        """Whether `work` has something to do."""
        return self._builder.busy or self._queue.runnable

    @property
    def starved(self) -> bool:
        """Whether a prompt waits for memory."""
        return len(self._queue) > 0

    def work(self) -> None:
        """One decode step over everything that is being built, then one chunk of prefill."""
        self._builder.work()
        self._queue.work()

    # -- numbers and checks --------------------------------------------------------------------

    def summary(self) -> dict[str, float]:
        """The engine's numbers, flat."""
        return {
            **self.stats.summary(),
            "kv_total": self.kv.slots.size,
            "kv_available": self.kv.slots.available_size(),
            "kv_evictable": self.kv.radix.evictable_size(),
            "ready_sessions": sum(self._ready.values()),
            "prefill_queue": len(self._queue),
        }

    def check_memory(self, drafts: Sequence[Draft]) -> None:
        """Every KV slot has exactly one owner; `drafts` are all that are open.

        Raises `MemoryAccountingError`. For tests: it looks at every slot.
        """
        self.kv.check(self.held(drafts))

    @staticmethod
    def held(drafts: Sequence[Draft]) -> list[np.ndarray]:
        """The KV slots that sessions and their branches own."""
        return [
            slots
            for draft in drafts
            if draft.kv is not None
            for slots in (
                draft.kv.slots[draft.kv.protected : draft.kv.allocated],
                draft.cache.all_slots(),
            )
        ]
