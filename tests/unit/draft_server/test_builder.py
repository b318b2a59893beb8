"""When a cache counts as built. The steps themselves are tested with a model."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np

from sgl_ssd.draft_server.branches import StepBatch
from sgl_ssd.draft_server.builder import Builder
from sgl_ssd.draft_server.drafts import Draft, Stage
from sgl_ssd.draft_server.kv import KVSpace
from sgl_ssd.draft_server.proposals import SamplingParams
from sgl_ssd.draft_server.speculation_cache import SpeculationCache
from sgl_ssd.draft_server.stats import EngineStats

K, WIDTH, CAP = 2, 8, 16
PARAMS = SamplingParams(
    temperature=0.0, top_k=1, top_p=1.0, min_p=0.0, seed=0, bias_ids=None, bias_values=None,
    vocab_limit=100, top_m=0, saguaro_c=1.0, fan_out=(2, 2, 2),
)  # fmt: skip


@dataclass
class Step:
    """A step on a device: complete when the test says so."""

    ids: np.ndarray
    done: bool = False

    def ready(self) -> bool:
        return self.done

    def get(self) -> np.ndarray:
        return self.ids


class PretendedStepper:
    """Every lane draws the ids 20, 21, .."""

    scratch, synchronous = 100, False

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def run(self, batch: StepBatch) -> Step:
        self.steps.append(Step(np.tile(np.arange(20, 20 + WIDTH), (batch.size, 1))))
        return self.steps[-1]


class Bench:
    def __init__(self) -> None:
        self.kv = KVSpace(200, 40, 64, 4, CAP)
        self.stepper: Any = PretendedStepper()
        self.stats = EngineStats()
        self.builder = Builder(self.stepper, self.kv, self.stats, CAP, context_len=60)

    def draft(self) -> Draft:
        """A session of three tokens that has no drafts yet, only guesses for the next one."""
        cache = SpeculationCache(K, WIDTH)
        cache.guesses = [np.arange(10, 10 + WIDTH)]
        one = Draft(array("q", [1, 2, 3]), PARAMS, "peer/1/", K, [2, 2, 2], cache, Stage.READY)
        one.kv = self.kv.open()
        assert one.kv is not None and self.kv.extend(one.kv, 3)
        one.kv.length = one.kv.fed = 3
        return one

    def complete(self) -> None:
        """Let every step that was launched end, and those after it."""
        for _ in range(2 * K):
            for step in self.stepper.steps:
                step.done = True
            self.builder.work()


def test_a_complete_cache_is_told_of_once() -> None:
    bench = Bench()
    draft = bench.draft()
    bench.builder.plan(draft, budget=4)
    assert bench.builder.take_built() == []
    bench.complete()
    assert draft.cache.complete and draft.built_at is not None
    assert bench.builder.take_built() == [draft]
    assert bench.builder.take_built() == []
    keys, tokens = draft.entries(K)
    assert keys.tolist() == [[0, 10, K], [0, 11, K]] and tokens.tolist() == [[20, 20]] * 2


def test_what_a_step_for_dropped_branches_brings_completes_nothing() -> None:
    bench = Bench()
    draft = bench.draft()
    bench.builder.plan(draft, budget=4)
    bench.builder.work()
    assert bench.stepper.steps and not bench.stepper.steps[0].done
    bench.kv.free(draft.cache.drop_branches().freed)
    bench.builder.plan(draft, budget=0)  # there is nothing to build
    built_at = draft.built_at
    assert bench.builder.take_built() == [draft]
    bench.complete()
    assert bench.builder.take_built() == [] and draft.built_at == built_at
    assert bench.stats.build_time.count == 0


def test_a_cache_that_was_built_twice_since_is_told_of_once() -> None:
    bench = Bench()
    draft = bench.draft()
    for _ in range(2):
        bench.builder.plan(draft, budget=0)
    assert bench.builder.take_built() == [draft]


def test_a_plan_before_its_feed_is_launched_leaves_no_branch_behind() -> None:
    """Asked again without news, with more rows than before."""
    bench = Bench()
    draft = bench.draft()
    draft.cache.chain, draft.answered = [10], 1
    bench.builder.plan(draft, budget=2)
    assert draft.feed is not None and draft.cache.waiting.any()
    bench.builder.plan(draft, budget=8)
    bench.complete()
    assert draft.cache.complete and not draft.cache.waiting.any()
    assert not bench.builder.busy
    assert len(set(zip(draft.cache.depth.tolist(), draft.cache.root.tolist(), strict=True))) == len(
        draft.cache.root
    )
