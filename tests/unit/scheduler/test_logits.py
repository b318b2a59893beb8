"""From logits to tokens: a verify of any width does what plain decoding does at each position."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.sampling.penaltylib import (
    BatchedFrequencyPenalizer,
    BatchedMinNewTokensPenalizer,
    BatchedPenalizerOrchestrator,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
)
from sglang.srt.sampling.sampling_params import SamplingParams

from sgl_ssd.scheduler.logits import (
    OutputCounts,
    TargetSampler,
    count_accepted,
    has_count_penalty,
)

VOCAB, POOL, EOS = 60, 12, 1
NO_INFO = SimpleNamespace(logit_bias=None, has_custom_logit_processor=False)


def make_req(row: int, output: list[int], prompt_len: int = 5, **params: Any) -> Any:
    """A request as far as the sampler looks at it; `output` is all that is committed."""
    return SimpleNamespace(
        rid=f"r{row}",
        ssd_seed=1000 + row,
        req_pool_idx=row,
        origin_input_ids=[3] * prompt_len,
        output_ids=list(output),
        tokenizer=SimpleNamespace(eos_token_id=EOS, additional_stop_token_ids={2}),
        sampling_params=SamplingParams(max_new_tokens=100, **params),
    )


class Dice:
    """Random values from one seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def ids(self, *shape: int, low: int = 0, high: int = VOCAB) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def logits(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator) * 3

    def pick(self, values: list) -> Any:
        return values[int(self.ids(1, high=len(values)))]


def sampler_for(reqs: list[Any]) -> TargetSampler:
    sampler = TargetSampler(POOL, VOCAB, "cpu")
    sampler.begin(reqs)
    return sampler


def first_indices(reqs: list[Any], offset: int = 0) -> torch.Tensor:
    """Absolute index of the token drawn at position 0, plus `offset`."""
    return torch.tensor([len(r.origin_input_ids) + len(r.output_ids) + offset for r in reqs])


# -- counts ------------------------------------------------------------------------------------


def counted(tokens: list[int]) -> list[int]:
    counts = Counter(tokens)
    return [counts[t] for t in range(VOCAB)]


def counts_of(counts: OutputCounts, row: int) -> list[int]:
    return counts.at_positions(torch.tensor([row]), torch.zeros(1, 1, dtype=torch.int64))[
        0, 0
    ].tolist()


@pytest.mark.parametrize("output", [[], [4], [4, 4, 4, 0, VOCAB - 1]])
def test_rebuild_counts_the_output(output: list[int]) -> None:
    counts = OutputCounts(POOL, VOCAB, "cpu")
    counts.rebuild(3, [7, 7, 7])
    counts.rebuild(3, output)
    assert counts_of(counts, 3) == counted(output)
    assert counts_of(counts, 2) == counts_of(counts, 4) == [0] * VOCAB


@settings(max_examples=100, deadline=None, database=None)
@given(data=st.data())
def test_counts_follow_any_course(data: Any) -> None:
    """Rebuilds, and runs of which only the first tokens are committed, against a plain list."""
    token = st.integers(0, 5)
    counts, truth = OutputCounts(4, 6, "cpu"), {row: [] for row in range(4)}
    for _ in range(data.draw(st.integers(1, 6))):
        if data.draw(st.booleans()):
            row = data.draw(st.integers(0, 3))
            truth[row] = data.draw(st.lists(token, max_size=5))
            counts.rebuild(row, truth[row])
            continue
        rows = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True))
        width = data.draw(st.integers(1, 4))
        runs = [data.draw(st.lists(token, min_size=width, max_size=width)) for _ in rows]
        lengths = [data.draw(st.integers(0, width)) for _ in rows]
        counts.add(torch.tensor(rows), torch.tensor(runs), torch.tensor(lengths))
        for row, run, length in zip(rows, runs, lengths, strict=True):
            truth[row] = truth[row] + run[:length]
    chain = torch.zeros(4, 1, dtype=torch.int64)
    table = counts.at_positions(torch.arange(4), chain)[:, 0]
    for row in range(4):
        expected = Counter(truth[row])
        assert table[row].tolist() == [expected[t] for t in range(6)]


@pytest.mark.parametrize("width", [1, 2, 5])
def test_counts_at_a_position_include_the_drafts_before_it(width: int) -> None:
    dice = Dice(width)
    counts = OutputCounts(POOL, VOCAB, "cpu")
    outputs = [dice.ids(20, high=8).tolist() for _ in range(3)]
    rows = torch.tensor([5, 0, 9])
    for row, output in zip(rows.tolist(), outputs, strict=True):
        counts.rebuild(row, output)
    chain = dice.ids(3, width, high=8)
    table = counts.at_positions(rows, chain)
    for i, output in enumerate(outputs):
        for j in range(width):
            # column 0 is the last committed token, which the output has already
            assert table[i, j].tolist() == counted(output + chain[i, 1 : j + 1].tolist())
    assert counts_of(counts, 5) == counted(outputs[0]), "asking changes nothing"


# -- one verify is as many decodes -------------------------------------------------------------


def random_params(dice: Dice) -> dict[str, Any]:
    return {
        "temperature": dice.pick([0.0, 0.7, 1.0, 1.8]),
        "top_k": dice.pick([-1, 3, 20]),
        "top_p": dice.pick([1.0, 0.8]),
        "min_p": dice.pick([0.0, 0.05]),
        "frequency_penalty": dice.pick([0.0, 0.0, 0.9, -1.3]),
        "presence_penalty": dice.pick([0.0, 0.0, 1.1, -0.4]),
        "repetition_penalty": dice.pick([1.0, 1.0, 1.5, 0.6]),
        "min_new_tokens": dice.pick([0, 0, 8, 100]),
        "stop_token_ids": dice.pick([None, [7], [7, 9]]),
    }


def random_batch(dice: Dice, bs: int) -> tuple[list[Any], Any]:
    reqs = []
    for row in range(bs):
        output = dice.ids(int(dice.ids(1, low=1, high=12)), high=10).tolist()
        reqs.append(make_req(row, output, prompt_len=row + 1, **random_params(dice)))
    bias = torch.where(dice.ids(bs, VOCAB, high=10) == 0, dice.logits(bs, VOCAB), 0.0)
    info = SimpleNamespace(logit_bias=dice.pick([None, bias]), has_custom_logit_processor=False)
    return reqs, info


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("width", [2, 5])
def test_a_verify_equals_as_many_single_decodes(seed: int, width: int) -> None:
    """Every penalty, filter and bias, at positions behind drafts that repeat tokens."""
    dice, bs = Dice(seed), 8
    reqs, info = random_batch(dice, bs)
    chain = dice.ids(bs, width, high=10)
    chain[:, 0] = torch.tensor([r.output_ids[-1] for r in reqs])
    logits = dice.logits(bs, width, VOCAB)
    mask = dice.ids(bs, width, VOCAB, high=8) == 0

    def grammar(part: torch.Tensor) -> Any:
        return SimpleNamespace(apply=lambda rows: rows.masked_fill_(part, float("-inf")))

    wide_logits = logits.view(-1, VOCAB).clone()
    wide = sampler_for(reqs).sample(
        wide_logits, reqs, info, chain, first_indices(reqs), grammar(mask.view(-1, VOCAB))
    )
    assert wide.shape == (bs, width)
    for j in range(width):
        grown = []
        for i, req in enumerate(reqs):
            history = req.output_ids + chain[i, 1 : j + 1].tolist()
            grown.append(SimpleNamespace(**{**vars(req), "output_ids": history}))
        part = logits[:, j].clone()
        single = sampler_for(grown).sample(
            part, grown, info, chain[:, j : j + 1], first_indices(grown), grammar(mask[:, j])
        )
        assert torch.equal(part, wide_logits.view(bs, width, VOCAB)[:, j])
        assert torch.equal(single[:, 0], wide[:, j])


@pytest.mark.parametrize("seed", range(4))
def test_rows_do_not_depend_on_their_neighbours(seed: int) -> None:
    dice, bs, width = Dice(seed), 8, 4
    reqs, info = random_batch(dice, bs)
    chain, logits = dice.ids(bs, width, high=10), dice.logits(bs, width, VOCAB)
    together = sampler_for(reqs).sample(
        logits.view(-1, VOCAB).clone(), reqs, info, chain, first_indices(reqs), None
    )
    for i, req in enumerate(reqs):
        bias = None if info.logit_bias is None else info.logit_bias[i : i + 1]
        alone = sampler_for([req]).sample(
            logits[i].clone(), [req], SimpleNamespace(**{**vars(info), "logit_bias": bias}),
            chain[i : i + 1], first_indices([req]), None,
        )  # fmt: skip
        assert torch.equal(alone[0], together[i])


def test_a_whole_generation_equals_plain_decoding() -> None:
    """Rounds of a drafting that is right now and then, against one token at a time."""
    params = {
        "temperature": 1.0, "frequency_penalty": 0.8, "presence_penalty": 0.5,
        "repetition_penalty": 1.2, "min_new_tokens": 12, "top_p": 0.95,
    }  # fmt: skip
    table = Dice(0).logits(40, VOCAB)

    def logits_at(index: int, previous: int) -> torch.Tensor:
        return table[index] + 0.3 * table[previous % 40]

    def prefill(req: Any) -> TargetSampler:
        sampler = sampler_for([req])
        chain = torch.zeros(1, 1, dtype=torch.int64)
        logits = logits_at(len(req.origin_input_ids), 3)[None].clone()
        token = sampler.sample(logits, [req], NO_INFO, chain, first_indices([req]), None)
        sampler.accept([req], token, torch.ones(1, dtype=torch.int32))
        req.output_ids.append(int(token))
        return sampler

    def verify(req: Any, sampler: TargetSampler, drafts: list[int]) -> list[int]:
        chain = torch.tensor([[req.output_ids[-1], *drafts]])
        index = int(first_indices([req]))
        rows = [logits_at(index + j, t) for j, t in enumerate(chain[0].tolist())]
        tokens = sampler.sample(
            torch.stack(rows), [req], NO_INFO, chain, first_indices([req]), None
        )
        length = count_accepted(tokens, chain, torch.tensor([len(drafts)]))
        sampler.accept([req], tokens, length)
        return tokens[0, : int(length)].tolist()

    plain = make_req(0, [], **params)
    sampler = prefill(plain)
    while len(plain.output_ids) < 30:
        plain.output_ids += verify(plain, sampler, [])
    expected = plain.output_ids

    drafted = make_req(0, [], **params)
    sampler, rounds = prefill(drafted), 0
    while len(drafted.output_ids) < 30:
        n = len(drafted.output_ids)
        drafts = expected[n : n + 4]
        if rounds % 3 and len(drafts) > 2:
            drafts[rounds % 3] = (drafts[rounds % 3] + 1) % VOCAB
        drafted.output_ids += verify(drafted, sampler, drafts)
        rounds += 1
    assert drafted.output_ids[:30] == expected[:30]
    assert rounds < 15 and len(set(expected)) > 5
    assert counts_of(sampler.counts, 0) == counted(drafted.output_ids)


# -- against SGLang's own penalizers -------------------------------------------------------------


class Batch:
    """As much of a ScheduleBatch as the penalizers look at."""

    def __init__(self, reqs: list[Any]) -> None:
        self.reqs, self.device = reqs, "cpu"


def sglang_penalized(logits: torch.Tensor, reqs: list[Any]) -> torch.Tensor:
    """What SGLang's plain decode makes of one position, having seen each output token in turn."""
    rows = []
    for i, req in enumerate(reqs):
        batch = Batch([req])
        orchestrator = BatchedPenalizerOrchestrator(
            VOCAB, batch,
            {BatchedFrequencyPenalizer, BatchedMinNewTokensPenalizer, BatchedPresencePenalizer,
             BatchedRepetitionPenalizer},
        )  # fmt: skip
        for token in req.output_ids:
            orchestrator.cumulate_output_tokens(torch.tensor([token]))
        row = logits[i : i + 1].clone()
        orchestrator.accumulate_additive_penalties(row)
        scaling = orchestrator.accumulate_scaling_penalties()
        if scaling is not None:
            row = torch.where(row < 0, row * scaling, row / scaling)
        rows.append(row)
    return torch.cat(rows)


@pytest.mark.parametrize("seed", range(8))
def test_penalized_logits_are_those_of_sglang(seed: int) -> None:
    dice, bs = Dice(100 + seed), 10
    reqs, _ = random_batch(dice, bs)
    logits = dice.logits(bs, VOCAB)
    ours = logits.clone()
    chain = torch.tensor([[r.output_ids[-1]] for r in reqs])
    sampler_for(reqs).sample(ours, reqs, NO_INFO, chain, first_indices(reqs), None)
    expected = sglang_penalized(logits, reqs)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    assert not torch.equal(ours, logits)


@pytest.mark.parametrize(
    "params",
    [
        {"frequency_penalty": 0.5}, {"presence_penalty": -0.5}, {"repetition_penalty": 1.5},
        {"repetition_penalty": 0.5}, {"min_new_tokens": 9},
        {"min_new_tokens": 3}, {"min_new_tokens": 4},
        {"frequency_penalty": 2.0, "min_new_tokens": 9, "repetition_penalty": 0.5},
    ],
    ids=str,
)  # fmt: skip
def test_each_penalty_is_sglangs(params: dict[str, Any]) -> None:
    reqs = [make_req(0, [5, 5, 6], **params), make_req(1, [5, 5, 6])]
    logits = Dice(1).logits(2, VOCAB)
    ours = logits.clone()
    chain = torch.tensor([[6], [6]])
    sampler_for(reqs).sample(ours, reqs, NO_INFO, chain, first_indices(reqs), None)
    torch.testing.assert_close(ours, sglang_penalized(logits, reqs), rtol=1e-5, atol=1e-5)
    assert torch.equal(ours[1], logits[1]), "the other row is untouched"


def test_stop_tokens_are_forbidden_exactly_until_min_new_tokens() -> None:
    """Counted in tokens, at each position of one verify."""
    req = make_req(0, [5, 6], min_new_tokens=4, stop_token_ids=[7])
    logits = torch.zeros(4, VOCAB)
    chain = torch.tensor([[6, 8, 9, 10]])
    sampler_for([req]).sample(logits, [req], NO_INFO, chain, first_indices([req]), None)
    for position, forbidden in enumerate([True, True, False, False]):  # the 3rd, 4th, 5th, 6th
        for stop in (7, EOS, 2):
            assert bool(torch.isneginf(logits[position, stop])) is forbidden
        assert torch.isfinite(logits[position]).sum() == VOCAB - 3 * forbidden


@pytest.mark.parametrize("stops", [[10**6], [-1], [VOCAB], [2**70], [7, -(2**70), VOCAB]])
def test_stop_tokens_outside_the_vocabulary_are_harmless(stops: list[int]) -> None:
    """They come from a client, and SGLang does not check them."""
    req = make_req(0, [5], min_new_tokens=10, stop_token_ids=stops)
    logits = torch.zeros(1, VOCAB)
    chain = torch.tensor([[5]])
    sampler_for([req]).sample(logits, [req], NO_INFO, chain, first_indices([req]), None)
    expected = {EOS, 2} | ({7} & set(stops))
    assert set(torch.isneginf(logits[0]).nonzero().flatten().tolist()) == expected


@pytest.mark.parametrize("tokenizer", [None, SimpleNamespace(eos_token_id=None)])
def test_min_new_tokens_without_an_end_token(tokenizer: Any) -> None:
    req = make_req(0, [5], min_new_tokens=10)
    req.tokenizer = tokenizer
    logits = torch.zeros(1, VOCAB)
    chain = torch.tensor([[5]])
    sampler_for([req]).sample(logits, [req], NO_INFO, chain, first_indices([req]), None)
    assert torch.isfinite(logits).all()


# -- order, bias and parameters ------------------------------------------------------------------


def test_bias_comes_after_penalties_and_mask() -> None:
    req = make_req(0, [5, 5], frequency_penalty=1.0, repetition_penalty=2.0)
    bias = torch.zeros(1, VOCAB)
    bias[0, 5], bias[0, 6] = 10.0, 100.0
    info = SimpleNamespace(logit_bias=bias, has_custom_logit_processor=False)

    def forbid(rows: torch.Tensor) -> None:
        rows[:, 6] = float("-inf")

    logits = torch.full((2, VOCAB), 1.0)
    chain = torch.tensor([[5, 5]])
    grammar = SimpleNamespace(apply=forbid)
    sampler_for([req]).sample(logits, [req], info, chain, first_indices([req]), grammar)
    # (1 - 2 * 1) * 2 + 10, and one occurrence more behind the draft
    assert logits[:, 5].tolist() == [8.0, 6.0]
    assert torch.isneginf(logits[:, 6]).all(), "a bias does not bring back what a grammar forbids"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_banned_token_never_comes(temperature: float) -> None:
    dice, bs, width = Dice(5), 6, 64
    reqs = [make_req(i, [5], temperature=temperature) for i in range(bs)]
    logits = dice.logits(bs * width, VOCAB)
    logits[:, 9] = 50.0
    bias = torch.zeros(bs, VOCAB)
    bias[:, 9] = -100.0
    info = SimpleNamespace(logit_bias=bias, has_custom_logit_processor=False)
    chain = dice.ids(bs, width)
    tokens = sampler_for(reqs).sample(logits, reqs, info, chain, first_indices(reqs), None)
    assert not (tokens == 9).any()


def test_greedy_is_said_in_two_ways() -> None:
    logits = Dice(2).logits(3, VOCAB)
    reqs = [
        make_req(0, [5], temperature=0.0),
        make_req(1, [5], temperature=2.0, top_k=1),
        make_req(2, [5], temperature=1.0, min_p=1.0),
    ]
    chain = torch.full((3, 1), 5)
    tokens = sampler_for(reqs).sample(
        logits.clone(), reqs, NO_INFO, chain, first_indices(reqs), None
    )
    assert tokens[:, 0].tolist() == logits.argmax(-1).tolist()
    assert sampler_for(reqs).rows(reqs).temperature.tolist() == [0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    "change", [{"temperature": 2.0}, {"top_k": 2}, {"top_p": 0.1}, {"min_p": 0.9}], ids=str
)
def test_a_request_id_that_is_used_again_brings_its_own_parameters(change: dict) -> None:
    """Clients choose request ids, and may use one twice with the same seed."""
    sampler = TargetSampler(POOL, VOCAB, "cpu")
    sampler.rows([make_req(0, [])])
    fresh = TargetSampler(POOL, VOCAB, "cpu").rows([make_req(0, [], **change)])
    again = sampler.rows([make_req(0, [], **change)])
    for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
        assert torch.equal(getattr(again, name), getattr(fresh, name)), name
    assert (again.all_greedy, again.any_filter) == (fresh.all_greedy, fresh.any_filter)


def test_parameters_are_cached_while_the_batch_stays_the_same() -> None:
    sampler = TargetSampler(POOL, VOCAB, "cpu")
    reqs = [make_req(0, []), make_req(1, [], temperature=0.5)]
    rows = sampler.rows(reqs)
    assert sampler.rows(list(reqs)) is rows
    assert sampler.rows(reqs[::-1]) is not rows
    assert sampler.rows(reqs[:1]).temperature.tolist() == [1.0]


def test_half_precision_logits_keep_their_type() -> None:
    dice = Dice(3)
    reqs, info = random_batch(dice, 6)
    info.logit_bias = None
    logits = dice.logits(12, VOCAB).bfloat16()
    tokens = sampler_for(reqs).sample(
        logits, reqs, info, dice.ids(6, 2, high=10), first_indices(reqs), None
    )
    assert logits.dtype == torch.bfloat16 and tokens.dtype == torch.int64


def test_a_table_is_made_only_when_it_is_needed() -> None:
    sampler = sampler_for([make_req(0, [5])])
    reqs = [make_req(0, [5], temperature=0.5, min_new_tokens=3)]
    sampler.begin(reqs)
    sampler.accept(reqs, torch.tensor([[5]]), torch.tensor([1]))
    assert sampler.counts._counts is None


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, False), ({"min_new_tokens": 5}, False), ({"frequency_penalty": 0.1}, True),
        ({"presence_penalty": -0.1}, True), ({"repetition_penalty": 1.1}, True),
    ],
    ids=str,
)  # fmt: skip
def test_has_count_penalty(params: dict, expected: bool) -> None:
    assert has_count_penalty(SamplingParams(max_new_tokens=100, **params)) is expected


# -- acceptance ----------------------------------------------------------------------------------


def accepted_by_hand(tokens: list[int], chain: list[int], num_drafts: int) -> int:
    """Draft j sits at chain[j + 1] and is right if it is the target's token at position j."""
    for j in range(num_drafts):
        if chain[j + 1] != tokens[j]:
            return j + 1
    return num_drafts + 1


@settings(max_examples=500, deadline=None, database=None)
@given(data=st.data())
def test_count_accepted(data: Any) -> None:
    bs, width = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    matrix = st.lists(st.integers(0, 1), min_size=width, max_size=width)
    tokens = data.draw(st.lists(matrix, min_size=bs, max_size=bs))
    chain = data.draw(st.lists(matrix, min_size=bs, max_size=bs))
    lens = data.draw(st.lists(st.integers(0, width - 1), min_size=bs, max_size=bs))
    result = count_accepted(torch.tensor(tokens), torch.tensor(chain), torch.tensor(lens))
    assert result.dtype == torch.int32
    expected = [accepted_by_hand(t, c, n) for t, c, n in zip(tokens, chain, lens, strict=True)]
    assert result.tolist() == expected


def test_padding_that_happens_to_be_right_is_not_accepted() -> None:
    tokens = torch.tensor([[7, 0, 0, 9]])
    chain = torch.tensor([[3, 7, 0, 0]])
    for real, expected in ((0, 1), (1, 2), (2, 3), (3, 4)):
        assert count_accepted(tokens, chain, torch.tensor([real])).tolist() == [expected]
