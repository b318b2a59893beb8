"""The draft engine against plain drafting, and the draft server as a real process.

The oracle is transformers on the same weights with the same sampler: whatever the engine has ready
for a session must be what drafting token by token from its committed text would give.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from servers import free_port
from sgl_ssd import protocol
from sgl_ssd.config import DraftServerConfig
from sgl_ssd.draft_server.proposals import SamplingParams
from sgl_ssd.protocol import Status
from sgl_ssd.sampling import TOP_K_ALL, RowSampling, coupled_scores
from sgl_ssd.transport import ZmqClient, private_ipc_endpoint, remove_private_ipc
from sgl_ssd.vocabulary import read_vocabulary

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
        temperature=0.8,
        top_k=40,
        top_p=0.95,
        min_p=0.001,
        seed=-r.getrandbits(62),
        vocab_limit=VOCAB,
    ),  # fmt: skip
    "bias": lambda r: SamplingParams(
        temperature=r.choice([0.0, 1.0]),
        top_k=TOP_K_ALL,
        seed=r.getrandbits(62),
        bias_ids=np.array([3, 77], np.int32),
        bias_values=np.array([4.0, -100.0], np.float32),
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
            status = engine.advance(draft, self.outcome(draft), patient=r.random() < 0.5)
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
def test_engine_with_a_backup_that_costs_nothing(runner: Any, reference: Any, backup: str) -> None:
    simulation = Simulation(
        make_engine(runner), Oracle(reference), random.Random(7), ["greedy", "noise"], backup
    )
    simulation.run(150)
    simulation.finish()
    assert simulation.statuses[Status.HIT] > 75, simulation.statuses
    assert simulation.statuses[Status.EMPTY] > 0


class SlowCopy:
    """Results that reach the host some time after the step, as from a GPU."""

    random = random.Random(11)

    def __init__(self, ids: torch.Tensor) -> None:
        self._ids = ids.clone()

    def ready(self) -> bool:
        return self.random.random() < 0.4

    def get(self) -> np.ndarray:
        return self._ids.numpy()


@pytest.mark.parametrize(("early", "backup"), [(0.0, "jit"), (0.9, "jit"), (0.9, "none")])
def test_steps_in_flight_while_news_arrives(
    runner: Any, reference: Any, monkeypatch: pytest.MonkeyPatch, early: float, backup: str
) -> None:
    """What a GPU does: the engine is a step or two ahead of what the host knows."""
    for module in ("steps", "just_in_time"):
        monkeypatch.setattr(f"sgl_ssd.draft_server.{module}.HostCopy", SlowCopy)
    engine = make_engine(runner)
    engine.stepper.synchronous = False
    simulation = Simulation(
        engine, Oracle(reference), random.Random(21), ["greedy", "noise"], backup, early=early
    )
    simulation.run(250)
    simulation.finish()
    assert simulation.statuses[Status.HIT] > 80, simulation.statuses
    assert simulation.statuses[Status.PARTIAL] > 30


class DelayedCopy(SlowCopy):
    """Results that are there two looks later."""

    def __init__(self, ids: torch.Tensor) -> None:
        super().__init__(ids)
        self._looks = 0

    def ready(self) -> bool:
        self._looks += 1
        return self._looks > 2


@pytest.mark.parametrize("backup", ["none", "jit"])
def test_a_target_faster_than_the_prefill_is_caught_up_with(
    runner: Any, reference: Any, monkeypatch: pytest.MonkeyPatch, backup: str
) -> None:
    """The text grows by a token in every turn, and each forward takes several turns."""
    for module in ("steps", "just_in_time"):
        monkeypatch.setattr(f"sgl_ssd.draft_server.{module}.HostCopy", DelayedCopy)
    engine = make_engine(runner)
    engine.stepper.synchronous = False
    oracle, params = Oracle(reference), SamplingParams(vocab_limit=VOCAB)
    prompt = [random.Random(3).randrange(VOCAB) for _ in range(50)]
    draft = engine.open(prompt, params, "", K, FAN_OUT)
    statuses: list[Status] = []
    for turn in range(60):
        engine.work()
        # The second best, which is no draft of the model's but among its guesses.
        scores = oracle.scores(draft.tokens, [], params)[0]
        status = engine.advance(draft, [int(scores.topk(2).indices[turn % 2])])
        if status is None:
            status = engine.backup([draft], backup)[0]
        if status is not Status.PREFILLING:
            oracle.check(draft.tokens, list(draft.cache.chain[:K]), params)
        engine.plan(draft)
        statuses.append(status)
    assert Status.PREFILLING not in statuses[20:], statuses
    while engine.busy:  # the target pauses
        engine.work()
    scores = oracle.scores(draft.tokens, list(draft.cache.chain[:1]), params)[0]
    assert engine.advance(draft, [int(scores.topk(2).indices[1])]) is Status.HIT
    oracle.check(draft.tokens, list(draft.cache.chain[:K]), params)
    engine.close(draft)
    engine.check_memory([])


def test_steps_in_flight_count_for_a_target_faster_than_a_build(
    runner: Any, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target that agrees with the draft: nearly every step brings a token. Of a round's the bonus
    token is one, so a draft less than there are steps can be answered."""
    monkeypatch.setattr("sgl_ssd.draft_server.steps.HostCopy", DelayedCopy)
    engine = make_engine(runner)
    engine.stepper.synchronous = False
    oracle, params = Oracle(reference), SamplingParams(vocab_limit=VOCAB)
    prompt = [random.Random(5).randrange(VOCAB) for _ in range(20)]
    draft = engine.open(prompt, params, "", K, FAN_OUT)
    while engine.busy:
        engine.work()
    drafted, statuses, before = [], [], 0
    for _ in range(30):
        chain = list(draft.cache.chain[: draft.answered])
        bonus = int(oracle.scores(draft.tokens, chain, params)[-1].argmax())
        status = engine.advance(draft, [*chain, bonus])
        statuses.append(status)
        drafted.append(len(draft.cache.chain))
        oracle.check(draft.tokens, list(draft.cache.chain), params)
        engine.plan(draft)
        before = before or engine.stats.step_time.count
        for _ in range(6):
            engine.work()
    steps = (engine.stats.step_time.count - before) / 30
    assert 2 < steps < K, "every build is cut short"
    assert set(statuses[1:]) == {Status.HIT}, statuses
    assert sum(drafted[1:]) / 29 > steps - 1.6, (steps, drafted)
    engine.close(draft)
    engine.check_memory([])


def test_a_first_draft_that_comes_too_late_is_ahead_for_the_next_round(
    runner: Any, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sgl_ssd.draft_server.steps.HostCopy", DelayedCopy)
    engine = make_engine(runner)
    engine.stepper.synchronous = False
    oracle, params = Oracle(reference), SamplingParams(vocab_limit=VOCAB)
    draft = engine.open(
        [random.Random(6).randrange(VOCAB) for _ in range(20)], params, "", K, FAN_OUT
    )
    while draft.stage.value == "prefill":
        engine.work()
    engine.work()  # a step is launched, its result is not there
    best = int(oracle.scores(draft.tokens, [], params)[0].argmax())
    assert draft.cache.in_flight and not draft.cache.length.max()
    assert engine.advance(draft, [best], patient=False) is Status.EMPTY
    assert draft.chain == []
    engine.check_memory([draft])
    engine.plan(draft)
    assert draft.answered == 0 and 1 <= len(draft.chain) <= 2
    oracle.check(draft.tokens, draft.chain, params)
    engine.check_memory([draft])
    while engine.busy:
        engine.work()
    first = draft.chain[0]
    assert engine.advance(draft, [first], patient=False) is Status.HIT
    assert len(draft.chain) >= 2
    oracle.check(draft.tokens, draft.chain[:K], params)
    engine.close(draft)
    engine.check_memory([])


def watch_positions(runner: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(lanes, greatest position) of every forward from now on."""
    seen: list[tuple[int, int]] = []
    decode, extend = runner.decode, runner.extend

    def watched_decode(step: Any, shared: Any) -> Any:
        seen.append((step.shape[1], int(step[2].max())))
        return decode(step, shared)

    def watched_extend(rows: Any, starts: Any, lengths: Any, tokens: Any) -> Any:
        seen.append((0, int((starts + lengths).max()) - 1))
        return extend(rows, starts, lengths, tokens)

    monkeypatch.setattr(runner, "decode", watched_decode)
    monkeypatch.setattr(runner, "extend", watched_extend)
    return seen


def test_nothing_is_fed_at_or_beyond_the_context_limit(
    runner: Any, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "context_len", 48)
    seen = watch_positions(runner, monkeypatch)
    simulation = Simulation(
        make_engine(runner), Oracle(reference), random.Random(3), ["greedy", "noise"], max_len=60
    )
    simulation.run(200)
    simulation.finish()
    assert max(position for _, position in seen) == 47
    assert simulation.statuses[Status.CONTEXT] > 10, simulation.statuses
    assert simulation.statuses[Status.HIT] > 50
    # Near the limit speculations get shorter instead of being refused.
    assert simulation.lengths[1] and simulation.lengths[2]


@pytest.mark.parametrize(("slots", "some"), [(700, 40), (300, 10), (90, 0)])
def test_a_pool_that_is_too_small_costs_drafts_only(
    runner: Any, reference: Any, monkeypatch: pytest.MonkeyPatch, slots: int, some: int
) -> None:
    monkeypatch.setattr(runner, "num_slots", slots)
    simulation = Simulation(
        make_engine(runner), Oracle(reference), random.Random(slots), ["greedy", "noise"],
        max_open=8, max_len=110,
    )  # fmt: skip
    simulation.run(150)
    assert simulation.statuses[Status.HIT] >= some, simulation.statuses
    if slots < 700:
        assert simulation.statuses[Status.NO_MEMORY] > 0
    # What is left is served once the others are gone.
    *others, last = simulation.drafts
    for draft in others:
        simulation.engine.close(draft)
    simulation.drafts = [last]
    while simulation.engine.busy:
        simulation.engine.work()
    assert last.stage.value in ("ready", "too large")
    simulation.finish()


def test_rows_of_a_step_stay_within_the_cap(
    runner: Any, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch_positions(runner, monkeypatch)
    engine = make_engine(runner, max_branch_rows=12)
    simulation = Simulation(engine, Oracle(reference), random.Random(5), ["greedy"], early=0.0)
    simulation.max_open = 4
    simulation.run(120)
    simulation.finish()
    one_long_gap = 40
    assert max(lanes for lanes, _ in seen) <= max(12, one_long_gap)
    assert engine.stats.step_rows / engine.stats.step_time.count <= 12
    assert simulation.statuses[Status.HIT] > 30


def run_until_idle(engine: Any) -> None:
    while engine.busy:
        engine.work()


def test_prefixes_are_shared_within_a_namespace_only(runner: Any) -> None:
    engine = make_engine(runner)
    prompt = [random.Random(1).randrange(VOCAB) for _ in range(100)]
    params = SamplingParams(vocab_limit=VOCAB)

    def computed(tokens: list[int], name: str) -> int:
        before = engine.stats.prefill_tokens
        draft = engine.open(tokens, params, name, K, FAN_OUT)
        run_until_idle(engine)
        engine.close(draft)
        return engine.stats.prefill_tokens - before

    assert computed(prompt, "a") == 100
    assert computed(prompt, "a") == 1
    assert computed(prompt[:70] + [1, 2, 3], "a") == 3
    assert computed(prompt, "b") == 100
    # Siblings that come at the same time share too: the first one computes, the others wait for it.
    before = engine.stats.prefill_tokens
    drafts = [engine.open(prompt, params, "c", K, FAN_OUT) for _ in range(4)]
    run_until_idle(engine)
    assert engine.stats.prefill_tokens - before == 103
    for draft in drafts:
        engine.close(draft)
    engine.check_memory([])


def test_a_session_keeps_what_it_drafted_when_it_closes(runner: Any) -> None:
    """A next turn on top of the first one's answer computes only what is new."""
    engine = make_engine(runner)
    params = SamplingParams(vocab_limit=VOCAB)
    draft = engine.open(list(range(50)), params, "", K, FAN_OUT)
    run_until_idle(engine)
    for _ in range(10):
        engine.advance(draft, [])
        engine.advance(draft, draft.chain[:K])
        engine.plan(draft)
        run_until_idle(engine)
    text = draft.tokens.tolist()
    engine.close(draft)
    before = engine.stats.prefill_tokens
    again = engine.open([*text, 7, 8], params, "", K, FAN_OUT)
    run_until_idle(engine)
    assert len(text) > 70 and engine.stats.prefill_tokens - before <= 4
    engine.close(again)
    engine.check_memory([])


def test_long_contexts(runner: Any, reference: Any) -> None:
    """Prefixes of more columns than are sent to the device one by one."""
    r = random.Random(0)
    engine = make_engine(runner, prefill_chunk=512)
    oracle = Oracle(reference)
    params = SamplingParams(temperature=1.0, seed=1, vocab_limit=VOCAB)
    drafts = [
        engine.open([r.randrange(VOCAB) for _ in range(n)], params, "", K, FAN_OUT)
        for n in (1500, 1800)
    ]
    run_until_idle(engine)
    for _ in range(3):
        for draft in drafts:
            branch = r.choice(np.flatnonzero(draft.cache.alive).tolist())
            path = [*draft.chain[: draft.cache.depth[branch]], int(draft.cache.root[branch])]
            assert engine.advance(draft, path) is Status.HIT
            oracle.check(draft.tokens, draft.chain, params)
            engine.plan(draft)
        run_until_idle(engine)
    for draft in drafts:
        oracle.check_forks(draft)
        engine.close(draft)
    engine.check_memory([])


def test_fewer_steps_at_run_time(runner: Any, reference: Any) -> None:
    engine, oracle, r = make_engine(runner), Oracle(reference), random.Random(2)
    params = SamplingParams(vocab_limit=VOCAB)
    draft = engine.open(list(range(20)), params, "", K, FAN_OUT)
    run_until_idle(engine)
    hits = 0
    for i in range(60):
        draft.num_steps = r.randrange(1, K + 1)
        draft.fan_out = [3] * (draft.num_steps + 1)
        alive = np.flatnonzero(draft.cache.alive).tolist()
        branch = r.choice(alive)
        path = [*draft.chain[: draft.cache.depth[branch]], int(draft.cache.root[branch])]
        status = engine.advance(draft, path)
        assert status in (Status.HIT, Status.PARTIAL), i
        hits += status is Status.HIT
        oracle.check(draft.tokens, draft.chain, params)
        engine.plan(draft)
        run_until_idle(engine)
        engine.check_memory([draft])
    assert hits > 40
    engine.close(draft)


def test_ids_beyond_the_drafts_embedding_are_survived(runner: Any) -> None:
    """The target's vocabulary may be padded further than the draft's."""
    engine = make_engine(runner)
    draft = engine.open([1, 2, VOCAB + 50, 4], SamplingParams(vocab_limit=VOCAB), "", K, FAN_OUT)
    run_until_idle(engine)
    assert engine.advance(draft, [VOCAB + 3]) is None
    assert engine.backup([draft], "jit") == [Status.BACKUP]
    assert max(draft.chain) < VOCAB
    engine.close(draft)
    engine.check_memory([])


# -- the process -----------------------------------------------------------------------------------


class Wire:
    """A verifier by hand."""

    def __init__(self, endpoint: str, name: str) -> None:
        self.channel = ZmqClient(endpoint, name.encode())
        self.name = name
        self.round_id = 0

    def send(self, message: protocol.Message) -> None:
        assert self.channel.send(protocol.encode(message))

    def ask(self, message: protocol.Message, timeout_s: float = 20.0) -> Any:
        self.send(message)
        frames = self.channel.recv(timeout_s)
        assert frames is not None, f"no answer to {type(message).__name__}"
        return protocol.decode(frames)

    def hello(self, fingerprint: str, num_steps: int = K) -> Any:
        return self.ask(
            protocol.Hello(
                verifier=self.name, num_steps=num_steps, context_len=2048, vocab_size=VOCAB,
                vocab_hash=fingerprint, max_running_requests=8,
            )
        )  # fmt: skip

    def open(self, sid: int, epoch: int, prompt: list[int]) -> None:
        self.send(
            protocol.Open(
                sid=sid, epoch=epoch, seed=1, temperature=0.0, top_k=TOP_K_ALL, top_p=1.0,
                min_p=0.0, num_prompt=len(prompt), prompt=np.array(prompt, np.int32),
                bias_ids=np.zeros(0, np.int32), bias_values=np.zeros(0, np.float32),
            )
        )  # fmt: skip

    def round(self, *rows: tuple[int, int, int, list[int]]) -> list[tuple[Status, int, list[int]]]:
        """(status, have_len, drafts) of each (sid, epoch, base_len, tokens)."""
        self.round_id += 1
        tokens = [t for row in rows for t in row[3]]
        answer = self.ask(
            protocol.Speculate(
                round_id=self.round_id, num_rows=len(rows), num_tokens=len(tokens),
                rows=np.array([(*r[:3], len(r[3])) for r in rows], np.int64),
                tokens=np.array(tokens, np.int32),
            )
        )  # fmt: skip
        assert isinstance(answer, protocol.Speculations) and answer.round_id == self.round_id
        return [
            (Status(status), have, drafts[:num])
            for (_, _, have, status, num), drafts in zip(
                answer.rows.tolist(), answer.tokens.tolist(), strict=True
            )
        ]

    def stats(self) -> dict[str, float]:
        pong = self.ask(protocol.Ping(nonce=self.round_id))
        assert isinstance(pong, protocol.Pong)
        return pong.stats


def start(endpoint: str, model: Path, log: Path, *flags: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [
            sys.executable, "-m", "sgl_ssd.draft_server", "--endpoint", endpoint, "--model-path",
            str(model), "--device", "cpu", "--num-steps", str(K), "--fan-out",
            ",".join(map(str, FAN_OUT)), "--max-total-tokens", "5000", "--max-sessions", "8",
            "--die-with-parent", *flags,
        ],
        stdout=log.open("wb"),
        stderr=subprocess.STDOUT,
    )  # fmt: skip


def wait_for_line(process: subprocess.Popen[bytes], log: Path, seconds: float = 200) -> str:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for line in log.read_text().splitlines():
            if line.startswith("draft server ready: "):
                return line
        assert process.poll() is None, log.read_text()
        time.sleep(0.2)
    raise AssertionError(f"not ready:\n{log.read_text()}")


@pytest.mark.integration
@pytest.mark.slow
def test_a_real_draft_server(tiny_llama: Path, tmp_path: Path, reference: Any) -> None:
    endpoint, log, port = private_ipc_endpoint(), tmp_path / "log", free_port()
    process = start(endpoint, tiny_llama, log, "--http-port", str(port), "--lease-s", "5")
    try:
        line = wait_for_line(process, log)
        assert endpoint in line and "K=4" in line
        speak(endpoint, tiny_llama, Oracle(reference), port)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0, log.read_text()
        assert "Traceback" not in log.read_text()
    finally:
        process.kill()
        process.wait()
        remove_private_ipc(endpoint)


def speak(endpoint: str, model: Path, oracle: Oracle, port: int) -> None:
    fingerprint = read_vocabulary(str(model)).fingerprint
    a, b = Wire(endpoint, "a"), Wire(endpoint, "b")
    assert a.ask(protocol.Ping(nonce=1)).code == "hello_first"
    assert a.hello("another one").code == "pair_mismatch"
    assert a.hello(fingerprint, K + 1).code == "pair_mismatch"
    ready = a.hello(fingerprint)
    assert isinstance(ready, protocol.Ready)
    assert (ready.num_steps, ready.fan_out, ready.device) == (K, FAN_OUT, "cpu")
    assert isinstance(b.hello(fingerprint), protocol.Ready)

    # A session whose verifier agrees with the draft half of the time.
    params = SamplingParams(vocab_limit=VOCAB)
    r = random.Random(0)
    text = array("q", [r.randrange(VOCAB) for _ in range(40)])
    for peer in (a, b):
        peer.open(7, 0, text.tolist())
    while a.round((7, 0, 40, []))[0][0] is Status.PREFILLING:
        time.sleep(0.01)
    new: list[int] = []
    statuses: Counter = Counter()
    for i in range(60):
        base = len(text) - len(new)
        ((status, have, drafts),) = a.round((7, 0, base, new))
        statuses[status] += 1
        assert have == len(text)
        oracle.check(text, drafts, params)
        best = oracle.scores(text, drafts, params)
        agreed = r.randrange(len(drafts) + 1) if i % 2 else len(drafts)
        # The target's token after that: the draft's next guess, or its third, or an odd one.
        order = best[agreed].argsort(descending=True).tolist()
        guess = [t for t in order if drafts[agreed : agreed + 1] != [t]]
        new = drafts[:agreed] + [guess[r.choice([0, 0, 1, 200])]]
        text.extend(new)
        b.stats()  # renews its lease
        time.sleep(0.03)
    assert statuses[Status.HIT] > 25 and statuses[Status.BACKUP] > 3, statuses
    stats = a.stats()
    assert stats["hits"] == statuses[Status.HIT] and stats["sessions"] == 2

    # What is wrong is dropped and counted.
    for frames in ([b""], [b"{}", b"x"], [b"\xff" * 100] * 3, [b'{"type":"Close","v":1}']):
        a.channel.send(frames)
    assert a.stats()["malformed"] == 4
    assert a.round((7, 0, 40, [1] * 5))[0][0] is Status.UNKNOWN
    assert a.round((7, 0, 9999, [1]))[0][:2] == (Status.NEED, len(text) - len(new))
    assert a.round((8, 0, 0, [1]), (7, 1, 40, []))[1][0] is Status.UNKNOWN

    # An epoch, a close and a flush each give everything back; the other verifier is untouched.
    a.open(7, 3, text.tolist())
    a.open(9, 0, [5])
    assert a.stats()["sessions"] == 3
    a.send(protocol.Close(sid=7, epoch=3))
    assert a.round((7, 3, 40, []))[0][0] is Status.UNKNOWN
    a.send(protocol.Flush())
    assert a.stats()["sessions"] == 1
    assert b.round((7, 0, 40, []))[0][0] is Status.PARTIAL
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
        assert answer.read() == b"ok\n"
    # b falls silent; its lease ends.
    deadline = time.monotonic() + 15
    while (stats := a.stats())["sessions"] and time.monotonic() < deadline:
        time.sleep(0.2)
    assert stats["sessions"] == 0 and stats["expired_peers"] == 1
    assert stats["kv_available"] + stats["kv_evictable"] == stats["kv_total"] == 5000


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--endpoint", "tcp://0.0.0.0:1"], "loopback"),
        (["--fan-out", "1,2"], "--fan-out"),
        (["--num-steps", "0"], "must lie in"),
        (["--prefill-chunk", "0"], "--prefill-chunk"),
    ],
)
def test_flags_that_cannot_work_end_the_start_with_one_line(
    flags: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from sgl_ssd.draft_server.__main__ import main

    args = ["--endpoint", "ipc:///nowhere/draft", "--model-path", "model", *flags]
    assert main(args) == 2
    error = capsys.readouterr().err
    assert word in error and error.count("\n") == 1
