"""The draft engine against plain drafting, and the draft server as a real process.

The oracle is transformers on the same weights with the same sampler: whatever the engine has ready
for a session must be what drafting token by token from its committed text would give.
"""

from __future__ import annotations

import os
import random
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sgl_ssd.config import DraftServerConfig
from sgl_ssd.draft_server.proposals import SamplingParams
from sgl_ssd.protocol import Status
from sgl_ssd.sampling import TOP_K_ALL, RowSampling, coupled_scores

VOCAB = 512
K = 4
FAN_OUT = [4, 3, 2, 2, 4]
NEAR_TIE = 1e-4


@pytest.fixture(scope="module")
def runner(tiny_llama: Path) -> Any:
    """The tiny model in SGLang, on the CPU: one for all tests of this module."""
    from sgl_ssd.draft_server.device import prepare_device

    if os.environ.get("SGLANG_SSD_DEVICE", "cpu") != "cpu":
        pytest.skip("SGLang is on another device in this process")
    prepare_device("cpu", 1)
    from sgl_ssd.draft_server.runner import DraftRunner

    return DraftRunner(
        DraftServerConfig(
            endpoint="ipc:///unused",
            model_path=str(tiny_llama),
            device="cpu",
            dtype="float32",
            max_total_tokens=6000,
            max_sessions=8,
            max_branch_rows=256,
        )
    )


@pytest.fixture(scope="module")
def reference(tiny_llama: Path) -> Iterator[Any]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    with torch.inference_mode():
        yield model


def make_engine(runner: Any, **changes: Any) -> Any:
    from sgl_ssd.draft_server.engine import DraftEngine

    options = dict(
        num_steps=K, fan_out=FAN_OUT, max_branch_rows=256, max_sessions=8, prefill_chunk=16,
        vocab_limit=VOCAB,
    )  # fmt: skip
    return DraftEngine(runner, **{**options, **changes})


@dataclass
class Oracle:
    """Plain drafting."""

    model: Any
    ties: int = 0
    checked: int = 0

    def scores(self, tokens: array, chain: list[int], params: SamplingParams) -> torch.Tensor:
        """Scores of the tokens after the last committed one, and after each of the chain."""
        n = len(tokens)
        logits = self.model(torch.tensor([[*tokens, *chain]])).logits[0, n - 1 :].float()
        if params.bias_ids is not None:
            logits[:, params.bias_ids.tolist()] += torch.from_numpy(params.bias_values)
        logits = logits[:, : params.vocab_limit]
        m = len(logits)
        rows = RowSampling.of(
            [params.temperature] * m, [params.top_k] * m, [params.top_p] * m, [params.min_p] * m,
            [params.seed] * m, "cpu",
        )  # fmt: skip
        return coupled_scores(logits, rows, torch.arange(n, n + m))

    def check(self, tokens: array, chain: list[int], params: SamplingParams) -> None:
        """`chain` is what plain drafting gives, but for near ties."""
        scores = self.scores(tokens, chain, params)
        for token, row in zip(chain, scores, strict=False):
            self.checked += 1
            gap = float(row.max() - row[token])
            if gap > 0:
                assert gap < NEAR_TIE, (len(tokens), chain, gap)
                self.ties += 1

    def check_forks(self, draft: Any) -> None:
        """Branch roots are the best guesses at each depth, the chain's own token left out."""
        cache = draft.cache
        chain = list(cache.chain[: draft.answered])
        scores = self.scores(draft.tokens, chain, draft.params)
        for depth in range(len(chain) + 1):
            roots = [
                int(t)
                for t, k, alive in zip(cache.root, cache.depth, cache.alive, strict=True)
                if alive and k == depth
            ]
            row = scores[depth].clone()
            if depth < len(cache.chain):
                row[cache.chain[depth]] = float("-inf")
            worst = float(row.topk(len(roots)).values[-1]) if roots else 0.0
            for t in roots:
                assert float(row[t]) > worst - NEAR_TIE, (depth, t)


PARAMS = {
    "greedy": lambda r: SamplingParams(vocab_limit=VOCAB),
    "noise": lambda r: SamplingParams(temperature=1.0, seed=r.getrandbits(62), vocab_limit=VOCAB),
    "filters": lambda r: SamplingParams(
        temperature=0.8, top_k=40, top_p=0.95, min_p=0.001, seed=-r.getrandbits(62),
        vocab_limit=VOCAB,
    ),  # fmt: skip
    "bias": lambda r: SamplingParams(
        temperature=r.choice([0.0, 1.0]), top_k=TOP_K_ALL, seed=r.getrandbits(62),
        bias_ids=np.array([3, 77], np.int32), bias_values=np.array([4.0, -100.0], np.float32),
        vocab_limit=VOCAB - 40,
    ),  # fmt: skip
}


@dataclass
class Simulation:
    """Random verifiers: they agree with the draft more or less, are early, late, and give up."""

    engine: Any
    oracle: Oracle
    random: random.Random
    kinds: list[str]
    backup: str = "jit"
    max_len: int = 140
    early: float = 0.3
    max_open: int = 5
    drafts: list[Any] = field(default_factory=list)
    statuses: Counter = field(default_factory=Counter)
    lengths: Counter = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.bases = [[self.random.randrange(VOCAB) for _ in range(60)] for _ in range(3)]

    def open(self) -> None:
        r = self.random
        head = r.choice(self.bases)[: r.randrange(1, 60)]
        prompt = head + [r.randrange(VOCAB) for _ in range(r.randrange(1, 12))]
        params = PARAMS[r.choice(self.kinds)](r)
        name = r.choice(["a", "b"])
        self.drafts.append(self.engine.open(prompt, params, name, K, FAN_OUT))

    def outcome(self, draft: Any) -> list[int]:
        """What the target might have committed."""
        r, cache = self.random, draft.cache
        chain = list(cache.chain[:K])
        dice = r.random()
        alive = np.flatnonzero(cache.alive & (cache.root >= 0)).tolist()
        if dice < 0.55 and alive:
            b = r.choice(alive)
            path = chain[: int(cache.depth[b])] + [int(cache.root[b])]
            if r.random() < 0.2:  # the verifier went on alone for some tokens
                path += cache.tokens[b, : r.randrange(int(cache.length[b]) + 1)].tolist()
            return path
        if dice < 0.7 and chain:
            return chain[: r.randrange(1, len(chain) + 1)]
        if dice < 0.75:
            return []
        path = chain[: r.randrange(len(chain) + 1)]
        return path + [r.randrange(VOCAB) for _ in range(r.choice([1, 1, 1, 2, 5, 40]))]

    def round(self) -> None:
        r, engine = self.random, self.engine
        if (len(self.drafts) < self.max_open and r.random() < 0.3) or not self.drafts:
            self.open()
        steps = r.randrange(6) if r.random() < self.early else 1000
        while engine.busy and steps:
            engine.work()
            steps -= 1
        engine.check_memory(self.drafts)
        asked = [d for d in self.drafts if r.random() < 0.8]
        missed = []
        for draft in asked:
            status = engine.advance(draft, self.outcome(draft))
            if status is None:
                missed.append(draft)
            else:
                self.answered(draft, status)
        for draft, status in zip(missed, engine.backup(missed, self.backup), strict=True):
            self.answered(draft, status)
        for draft in asked:
            engine.plan(draft)
        engine.check_memory(self.drafts)
        for draft in list(self.drafts):
            if len(draft.tokens) > self.max_len or r.random() < 0.02:
                self.drafts.remove(draft)
                engine.close(draft, keep=r.random() < 0.9)
        engine.check_memory(self.drafts)

    def answered(self, draft: Any, status: Status) -> None:
        self.statuses[status] += 1
        chain = list(draft.cache.chain[:K])
        self.lengths[len(chain)] += 1
        if status in (Status.HIT, Status.PARTIAL) or self.backup == "jit":
            self.oracle.check(draft.tokens, chain, draft.params)
        if status in (Status.HIT, Status.PARTIAL, Status.BACKUP):
            assert chain

    def run(self, rounds: int) -> None:
        for i in range(rounds):
            self.round()
            if i % 10 == 0 and self.backup == "jit":
                while self.engine.busy:
                    self.engine.work()
                for draft in self.drafts:
                    if draft.stage.value == "ready":
                        self.oracle.check_forks(draft)

    def finish(self) -> None:
        for draft in self.drafts:
            self.engine.close(draft)
        self.engine.check_memory([])
        kv = self.engine.kv
        assert kv.available == kv.slots.size
        assert kv.radix.protected_size() == 0


@pytest.mark.parametrize(
    ("kinds", "early", "rounds"),
    [
        (["greedy"], 0.3, 250),
        (["noise"], 0.0, 150),
        (["greedy", "noise", "filters", "bias"], 0.4, 200),
    ],
    ids=["greedy", "noise", "mixed"],
)
def test_engine_drafts_what_plain_drafting_does(
    runner: Any, reference: Any, kinds: list[str], early: float, rounds: int
) -> None:
    simulation = Simulation(
        make_engine(runner), Oracle(reference), random.Random(rounds), kinds, early=early
    )
    simulation.run(rounds)
    simulation.finish()
    statuses = simulation.statuses
    assert statuses[Status.HIT] > rounds / 2, statuses
    assert statuses[Status.PARTIAL] > rounds / 10
    assert statuses[Status.BACKUP] > rounds / 10
    assert simulation.oracle.checked > 4 * rounds
    assert simulation.oracle.ties <= simulation.oracle.checked / 200
    assert simulation.engine.stats.prefill_cached_tokens > 0


@pytest.mark.parametrize("backup", ["fast", "none"])
def test_engine_with_a_backup_that_costs_nothing(
    runner: Any, reference: Any, backup: str
) -> None:
    simulation = Simulation(
        make_engine(runner), Oracle(reference), random.Random(7), ["greedy", "noise"], backup
    )
    simulation.run(150)
    simulation.finish()
    assert simulation.statuses[Status.HIT] > 75, simulation.statuses
    assert simulation.statuses[Status.EMPTY] > 0
