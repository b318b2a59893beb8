"""Drafts for rejection verification: what is sent is what was drawn from, wherever it went."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sgl_ssd.draft_server.branches import FIRST_ID, exclude_on_host, not_a_root, plan_forks
from sgl_ssd.draft_server.proposals import Proposer, SamplingParams, excluding
from sgl_ssd.draft_server.sampled import unpack
from sgl_ssd.draft_server.speculation_cache import SpeculationCache
from sgl_ssd.rejection import DRAFT_STREAM, ProposalRows, draw, propose, uniform
from sgl_ssd.sampling import RowSampling

VOCAB, WIDTH, TOP_M = 300, 6, 8
CPU = torch.device("cpu")
GREEDY = SamplingParams()
COUPLED = SamplingParams(temperature=1.0, seed=3)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=5, top_m=TOP_M)
SAGUARO = SamplingParams(
    temperature=1.2, top_k=20, seed=-7, top_m=4, saguaro_c=0.3, fan_out=(3, 2, 1)
)
BIASED = SamplingParams(
    temperature=1.0, seed=1, top_m=TOP_M, vocab_limit=200,
    bias_ids=np.array([17], np.int32), bias_values=np.array([100.0], np.float32),
)  # fmt: skip


def proposer(params: list[SamplingParams]) -> Proposer:
    made = Proposer(CPU, VOCAB, len(params), 4, WIDTH)
    for i, p in enumerate(params):
        made.set_session(i, p)
    return made


def columns(
    params: list[SamplingParams], logits: torch.Tensor, depths: np.ndarray | int = 0
) -> np.ndarray:
    at = np.arange(len(params))
    ids = torch.from_numpy(at)
    return proposer(params).propose(logits, at, at + 40, ids, ids + 41, depths).numpy()


def logits_for(count: int, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("depth", [0, 1, 2, 7])
@pytest.mark.parametrize("params", [SAMPLED, SAGUARO], ids=["plain", "saguaro"])
def test_columns_hold_what_was_drawn_from(params: SamplingParams, depth: int) -> None:
    logits = logits_for(1)
    row = columns([params], logits, np.array([depth]))[0]
    assert row.shape == (WIDTH + 2 * params.top_m,)
    rows = RowSampling.of(
        [params.temperature], [params.top_k], [params.top_p], [0.0], [params.seed], CPU
    )
    fan_out = (params.fan_out or (0,))[min(depth, len(params.fan_out) - 1)]
    how = ProposalRows(
        torch.tensor([fan_out]), torch.tensor([params.saguaro_c]), torch.tensor([params.top_m]),
        fan_out, params.top_m,
    )  # fmt: skip
    want_ids, want_probs = propose(logits / params.temperature, rows, how)
    ids, probs = unpack([row], WIDTH, params.top_m)
    assert ids.dtype == np.int32 and probs.dtype == np.float32
    assert np.array_equal(ids, want_ids.numpy())
    assert probs.tobytes() == want_probs.numpy().tobytes()  # to the bit
    u = uniform(torch.tensor([params.seed]), torch.tensor([41]), DRAFT_STREAM)
    assert row[0] == draw(want_ids, want_probs, u).item()
    assert row[1:WIDTH].tolist() == logits[0].topk(WIDTH - 1).indices.tolist()


def test_sessions_of_all_kinds_share_a_step() -> None:
    params = [GREEDY, SAGUARO, COUPLED, SAMPLED, BIASED]
    logits = logits_for(5)
    together = columns(params, logits, np.arange(5))
    assert together.shape == (5, WIDTH + 2 * TOP_M)
    for i, p in enumerate(params):
        at, one = np.array([i]), torch.tensor([i])
        alone = (
            proposer(params)
            .propose(logits[i : i + 1], at, at + 40, one, one + 41, np.array([i]))
            .numpy()[0]
        )
        known = WIDTH + 2 * p.top_m
        assert together[i, :WIDTH].tolist() == alone[:WIDTH].tolist()
        if p.sampled:
            a, b = (unpack([x], WIDTH, p.top_m) for x in (together[i], alone[:known]))
            assert np.array_equal(a[0][a[1] > 0], b[0][b[1] > 0])
            assert np.allclose(a[1], b[1], atol=1e-7)


def test_bias_and_vocabulary_count_before_the_proposal() -> None:
    ids, probs = unpack(list(columns([BIASED], logits_for(1))), WIDTH, TOP_M)
    assert ids[0, 0] == 17 and probs[0, 0] == 1.0
    assert (ids[probs > 0] < 200).all()


def test_greedy_requests_are_never_sampled() -> None:
    assert not SamplingParams(temperature=0.0, top_m=8).sampled
    assert SamplingParams(temperature=0.1, top_m=8).sampled
    assert columns([SamplingParams(top_m=8)], logits_for(1)).shape == (1, WIDTH)


def test_a_vocabulary_smaller_than_the_proposal() -> None:
    made = Proposer(CPU, 5, 1, 4, 4)
    made.set_session(0, SamplingParams(temperature=1.0, top_m=TOP_M))
    at, one = np.array([0]), torch.tensor([0])
    out = made.propose(torch.zeros(1, 5), at, at, one, one + 1).numpy()
    ids, probs = unpack(list(out), 4, TOP_M)
    assert (probs > 0).sum() == 5 and abs(float(probs.sum()) - 1) < 1e-6


def test_draws_follow_the_proposal() -> None:
    count = 4000
    params = [SamplingParams(temperature=1.0, seed=s, top_m=3, top_k=3) for s in range(count)]
    logits = torch.full((count, VOCAB), -50.0)
    logits[:, 9], logits[:, 4], logits[:, 30] = 1.0, 0.5, 0.0
    rows = columns(params, logits)
    ids, probs = unpack(list(rows), WIDTH, 3)
    for token, p in zip(ids[0].tolist(), probs[0].tolist(), strict=True):
        seen = float((rows[:, 0] == token).mean())
        assert abs(seen - p) < 4 * (p * (1 - p) / count) ** 0.5


# -- in the cache ------------------------------------------------------------------------------


def lane(own: int, best: list[int], top_m: int = 2) -> np.ndarray:
    """Columns of one lane, whose proposal gives `own` 3/4."""
    bits = np.array([0.75, 0.25], np.float32).view(np.int32).astype(np.int64)
    pairs = [own, int(bits[0]), own + 1000, int(bits[1])]
    return np.array([own, *best, *pairs], np.int64)


def sampled_cache(num_steps: int = 3) -> SpeculationCache:
    """A chain 10, 11 with guesses at both depths and after it."""
    cache = SpeculationCache(num_steps, 4, top_m=2)
    cache.chain = [10, 11]
    cache.guesses = [lane(10, [20, 10, 21]), lane(11, [22, 23, 24]), lane(12, [25, 26, 27])]
    return cache


def hang(cache: SpeculationCache, depth: int, root: int, tokens: list[int]) -> None:
    goal = np.array([len(tokens)])
    slots = np.zeros((1, cache.num_steps), np.int32)
    one = np.ones(1, np.int64)
    branch = cache.add(depth * one, root * one, 5 * one, 90 * one, goal, slots)
    for step, token in enumerate(tokens):
        more_columns = np.pad(lane(token, [1, 2, 3]), (0, 6))  # another session has larger ones
        cache.store(branch, np.array([step]), more_columns[None])


def owners(cache: SpeculationCache, count: int) -> list[int]:
    """The likeliest token of each proposal, which is the one that it was made for."""
    ids, probs = cache.proposals(count)
    assert probs.dtype == np.float32 and ids.dtype == np.int32
    return [int(ids[i, probs[i].argmax()]) for i in range(count)]


def test_proposals_stay_with_their_tokens() -> None:
    cache = sampled_cache()
    assert owners(cache, 2) == [10, 11]
    cache.reroot(cache.walk([10]))
    assert cache.chain == [11] and owners(cache, 1) == [11]
    cache.promote(3)
    assert cache.chain == [11, 12] and owners(cache, 2) == [11, 12]


def test_proposals_of_an_adopted_branch() -> None:
    for path, chain in (([10, 20], [30, 31, 32]), ([10, 20, 30], [31, 32])):
        cache = sampled_cache()
        hang(cache, 1, 20, [30, 31, 32])
        cache.reroot(cache.walk(path))
        assert cache.chain == chain and owners(cache, len(chain)) == chain


def test_promoted_branches_bring_their_proposals() -> None:
    cache = sampled_cache(num_steps=5)
    hang(cache, 2, 12, [40, 41])
    cache.promote(2)
    assert cache.chain == [10, 11, 12, 40, 41] and owners(cache, 5) == cache.chain


def test_tokens_from_the_text_are_certain_even_if_the_model_agrees() -> None:
    """Else a coincidence would decide how a draft is verified."""
    cache = sampled_cache()
    cache.given = 2
    ids, probs = cache.proposals(2)
    assert probs.tolist() == [[1.0, 0.0]] * 2 and ids[:, 0].tolist() == [10, 11]
    cache.promote(3)  # the model goes on where the text's tokens end
    ids, probs = cache.proposals(3)
    assert probs[:, 0].tolist() == [1.0, 1.0, 0.75]
    cache.reroot(cache.walk([10]))
    assert cache.given == 1
    cache.reroot(cache.walk([99]))
    assert cache.given == 0 and cache.chain == []


def test_forks_are_the_likeliest_tokens() -> None:
    cache = sampled_cache()
    assert [(f.depth, f.root) for f in plan_forks(cache, [2, 2, 3], late=False)] == [
        (0, 20), (0, 21),  # the chain's own token is left out, twice
        (1, 22), (1, 23),
        (2, 25), (2, 26), (2, 27),  # nothing is excluded there, and the sample stands apart
    ]  # fmt: skip
    assert not_a_root(cache, 1) == 11 and not_a_root(cache, 2) == FIRST_ID
    assert not_a_root(SpeculationCache(2, 4), 0) == -1


def test_the_first_id_is_left_out_on_both_sides() -> None:
    ids = torch.tensor([[9, 4, 9, 2], [7, 8, 7, 6], [3, 2, 1, 0]])
    out = excluding(ids, torch.tensor([FIRST_ID, 7, -1]))
    assert out[0, :3].tolist() == [4, 9, 2] == exclude_on_host(ids[0].numpy(), FIRST_ID)
    assert out[1, :2].tolist() == [8, 6] == exclude_on_host(ids[1].numpy(), 7)
    assert out[2].tolist() == [3, 2, 1, 0]


def test_noise_of_the_draft_is_its_own() -> None:
    """Coupled and sampled sessions of one seed must not draw alike."""
    count = 2000
    logits = torch.zeros(count, VOCAB)
    a = columns([SamplingParams(temperature=1.0, seed=s) for s in range(count)], logits)[:, 0]
    b = columns(
        [SamplingParams(temperature=1.0, seed=s, top_m=VOCAB) for s in range(count)], logits
    )[:, 0]
    assert (a == b).mean() < 5 / VOCAB
