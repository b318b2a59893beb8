"""Rejection verification is exact: sums over whole vocabularies, and over all ends of a round."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_ssd.rejection import (
    ACCEPT_STREAM,
    DRAFT_STREAM,
    ProposalRows,
    Proposals,
    draw,
    kept,
    propose,
    residual,
    uniform,
    verify,
)
from sgl_ssd.sampling import TOP_K_ALL, RowSampling, coupled_sample, filtered_scores

VOCAB = 8
EXACT = 1e-6
"""Largest total variation that float32 may leave."""

FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.2},
    "all": {"top_k": 5, "top_p": 0.9, "min_p": 0.05},
    "one token": {"top_k": 2, "top_p": 0.01},
}
CS = [1.0, 0.5, 0.1, 1e-6]


def sampling(count: int, temperature: float = 1.0, seed: int = 1, **filters: Any) -> RowSampling:
    return RowSampling.of(
        [temperature] * count, [filters.get("top_k", TOP_K_ALL)] * count,
        [filters.get("top_p", 1.0)] * count, [filters.get("min_p", 0.0)] * count,
        [seed] * count, "cpu",
    )  # fmt: skip


def how(count: int, fan_out: int, c: float, top_m: int) -> ProposalRows:
    return ProposalRows(
        torch.full((count,), fan_out), torch.full((count,), c), torch.full((count,), top_m),
        fan_out, top_m,
    )  # fmt: skip


def target(logits: torch.Tensor, rows: RowSampling) -> torch.Tensor:
    """What the verifier takes for the target's distribution: float32 [N, V]."""
    return filtered_scores(logits, rows).softmax(-1)


def dense(ids: torch.Tensor, probs: torch.Tensor, vocab: int = VOCAB) -> torch.Tensor:
    return torch.zeros((len(ids), vocab), dtype=probs.dtype).scatter_add(1, ids, probs)


def outcome(
    p: torch.Tensor, drawn: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Distribution of the token at a drafted position, and the chance that the draft is kept.

    `drawn` float [N, V] is what drafts are really sampled from, `ids` and `probs` what the verifier
    is told. float64 sums over all drafts, of the verifier's own float32 numbers.
    """
    told, p64 = dense(ids, probs, p.shape[1]).double(), p.double()
    chance = torch.where(told > 0, (p64 / told.clamp_min(1e-300)).clamp_max(1), 0.0)
    rest = residual(p, ids, probs).double()
    rest = torch.where(rest.sum(1, keepdim=True) > 0, rest, p64)
    stays = drawn.double() * chance
    lost = drawn.double().sum(1, keepdim=True) - stays.sum(1, keepdim=True)
    return stays + lost * rest / rest.sum(1, keepdim=True), stays.sum(1)


def variation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(0.5 * (a.double() - b.double()).abs().sum(-1).max())


def pair(count: int, seed: int, spread: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a target and of a draft that is near it: float32 [count, VOCAB] each."""
    generator = torch.Generator().manual_seed(seed)
    z = 1.5 * torch.randn(count, VOCAB, generator=generator)
    return z, z + spread * torch.randn(count, VOCAB, generator=generator)


# -- one position ------------------------------------------------------------------------------


@pytest.mark.parametrize("top_m", range(1, VOCAB + 1))
@pytest.mark.parametrize("c", CS)
@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
def test_a_position_is_distributed_as_the_target(filters: Any, c: float, top_m: int) -> None:
    z, zq = pair(200, 1)
    rows = sampling(200, 0.8, **filters)
    p = target(z / 1.0, rows)
    for fan_out in (0, 1, 3, VOCAB):
        ids, probs = propose(zq / 0.8, rows, how(200, fan_out, c, top_m))
        out, chance = outcome(p, dense(ids, probs), ids, probs)
        assert variation(out, p) < EXACT
        assert float(chance.max()) <= 1 + EXACT


def test_a_deterministic_draft_is_a_proposal_of_one_token() -> None:
    z, _ = pair(500, 2)
    p = target(z, sampling(500))
    ids = torch.randint(VOCAB, (500, 1), generator=torch.Generator().manual_seed(1))
    probs = torch.ones(500, 1)
    out, chance = outcome(p, dense(ids, probs), ids, probs)
    assert variation(out, p) < EXACT
    assert torch.allclose(chance, p.double().gather(1, ids)[:, 0])


def test_the_likeliest_token_is_not_favoured() -> None:
    """A draft that is always the target's best token leaves its chance as it was."""
    p = torch.tensor([[0.6, 0.4]])
    ids, probs = torch.tensor([[0]]), torch.ones(1, 1)
    out, _ = outcome(p, dense(ids, probs, 2), ids, probs)
    assert torch.allclose(out, p.double())


def _unscaled(zq: torch.Tensor, rows: RowSampling, c: float, top_m: int) -> torch.Tensor:
    return dense(*propose(zq, rows, how(len(zq), 2, 1.0, top_m)))


def _all_of(zq: torch.Tensor, rows: RowSampling) -> tuple[torch.Tensor, torch.Tensor]:
    return propose(zq, rows, how(len(zq), 2, 0.4, VOCAB))


WRONG: dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {
    "sample without Saguaro, send with it": lambda zq, rows, ids, probs: (
        _unscaled(zq, rows, 0.4, 4), ids, probs,
    ),
    "sample from all, send the best": lambda zq, rows, ids, probs: (
        dense(*_all_of(zq, rows)), ids, probs,
    ),
    "send without normalising": lambda zq, rows, ids, probs: (
        dense(ids, probs), ids, _all_of(zq, rows)[1][:, :4],
    ),
    "send in bfloat16": lambda zq, rows, ids, probs: (
        dense(ids, probs), ids, probs.bfloat16().float(),
    ),
    "sample before filters": lambda zq, rows, ids, probs: (
        dense(*propose(zq, sampling(len(zq)), how(len(zq), 2, 0.4, VOCAB))), ids, probs,
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG.values(), ids=WRONG)
def test_the_classic_mistakes_are_seen(mistake: Any) -> None:
    """What is told must be what was drawn from, to the bit: the sums above would notice."""
    z, zq = pair(400, 3)
    rows = sampling(400, 1.0, top_k=6)
    p = target(z, rows)
    ids, probs = propose(zq, rows, how(400, 2, 0.4, 4))
    assert variation(outcome(p, dense(ids, probs), ids, probs)[0], p) < EXACT
    drawn, ids, probs = mistake(zq, rows, ids, probs)
    assert variation(outcome(p, drawn, ids, probs)[0], p) > 100 * EXACT


# -- a whole round -----------------------------------------------------------------------------


@pytest.mark.parametrize("c", CS)
@pytest.mark.parametrize("top_m", [1, 2, 4])
@pytest.mark.parametrize("how_drafted", ["hit", "given", "miss"])
def test_all_outcomes_of_a_round(how_drafted: str, top_m: int, c: float) -> None:
    """The next tokens after any prefix, summed over every draft and every end of a round.

    Order-1 models over 4 tokens, K = 2. A round commits 1 to 3 tokens; the others come from rounds
    without drafts, as after a miss.
    """
    vocab, steps = 4, 2
    generator = torch.Generator().manual_seed(top_m)
    z = torch.randn(vocab, vocab, generator=generator)
    rows = sampling(vocab, 1.0, top_p=0.95)
    p = target(z, rows).double()
    ids, probs = propose(
        z + torch.randn(vocab, vocab, generator=generator), rows, how(vocab, 2, c, top_m)
    )
    if how_drafted == "given":  # an n-gram's continuation: one token each, nothing drawn
        ids, probs = (torch.arange(vocab)[:, None] + 1) % vocab, torch.ones(vocab, 1)
    told = dense(ids, probs, vocab).double()
    told /= told.sum(1, keepdim=True)
    rest = residual(p.float(), ids, probs).double()
    rest = torch.where(rest.sum(1, keepdim=True) > 0, rest, p)
    rest /= rest.sum(1, keepdim=True)

    def at(previous: int, left: int, depth: int) -> torch.Tensor:
        """Joint distribution of the next `left` tokens: [vocab ** left]."""
        if left == 0:
            return torch.ones(1, dtype=torch.float64)
        out = torch.zeros(vocab, vocab ** (left - 1), dtype=torch.float64)
        for token in range(vocab):
            no_draft = at(token, left - 1, steps)
            if depth == steps:
                out[token] += p[previous, token] * no_draft
                continue
            keep = (p[previous] / told[previous].clamp_min(1e-300)).clamp_max(1)
            keep = torch.where(told[previous] > 0, keep, 0.0)
            out[token] += told[previous, token] * keep[token] * at(token, left - 1, depth + 1)
            lost = 1 - float((told[previous] * keep).sum())
            out[token] += lost * rest[previous, token] * no_draft
        return out.reshape(-1)

    for previous in range(vocab):
        got = at(previous, steps + 1, steps if how_drafted == "miss" else 0)
        want = torch.tensor(
            [
                p[previous, x] * p[x, y] * p[y, w]
                for x, y, w in itertools.product(range(vocab), repeat=3)
            ]
        )
        assert variation(got, want) < EXACT


# -- drawing a draft ---------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31), top_m=st.integers(1, VOCAB + 3), fan_out=st.integers(0, VOCAB),
    c=st.floats(1e-12, 1.0), temperature=st.floats(0.05, 20.0), top_k=st.integers(1, VOCAB),
    top_p=st.floats(0.01, 1.0), min_p=st.floats(0.0, 1.0), spread=st.floats(0.0, 10.0),
)  # fmt: skip
def test_random_pairs(
    seed: int, top_m: int, fan_out: int, c: float, temperature: float, top_k: int, top_p: float,
    min_p: float, spread: float,
) -> None:  # fmt: skip
    z, zq = pair(16, seed, spread)
    rows = sampling(16, temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    p = target(z, rows)
    ids, probs = propose(zq / temperature, rows, how(16, fan_out, c, top_m))
    assert ids.shape[1] == min(top_m, VOCAB)
    assert bool((probs >= 0).all()) and torch.allclose(probs.sum(1), torch.ones(16), atol=1e-6)
    assert all(len(set(row)) == len(row) for row in ids.tolist())
    filtered = filtered_scores(zq, rows).isneginf()
    assert not bool((filtered & (dense(ids, probs) > 0)).any())
    u = uniform(torch.arange(16), torch.full((16,), 3), DRAFT_STREAM)
    token = draw(ids, probs, u)
    assert bool((dense(ids, probs).gather(1, token[:, None]) > 0).all())
    assert variation(outcome(p, dense(ids, probs), ids, probs)[0], p) < 2 * EXACT


def test_draw_gives_each_token_its_share_of_the_unit_interval() -> None:
    _, zq = pair(1, 4)
    ids, probs = propose(zq, sampling(1), how(1, 2, 0.3, 5))
    edges = (probs.double().cumsum(1) / probs.double().sum())[0].tolist()
    eps = 1e-12
    for i, edge in enumerate(edges):
        below = draw(ids, probs, torch.tensor([edge - eps], dtype=torch.float64))
        assert below.item() == ids[0, i]
        if i + 1 < len(edges):
            above = draw(ids, probs, torch.tensor([edge + eps], dtype=torch.float64))
            assert above.item() == ids[0, i + 1]
    ends = torch.tensor([2.0**-33, 1 - 2.0**-33], dtype=torch.float64)
    assert draw(ids[:1], probs, ends[:1]) == ids[0, 0] and draw(ids, probs, ends[1:]) == ids[0, -1]


def test_draw_never_takes_a_token_without_mass() -> None:
    ids = torch.tensor([[4, 7, 2, 0]]).repeat(2, 1)
    probs = torch.tensor([[0.5, 0.5, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    top = torch.full((2,), 1 - 2.0**-33, dtype=torch.float64)
    assert draw(ids, probs, top).tolist() == [7, 4]


def test_proposals_take_the_few_that_saguaro_leaves() -> None:
    """The best M after weighing down are not the best M before."""
    scores = torch.tensor([[0.5, 0.3, 0.1, 0.06, 0.04]]).log()
    ids, probs = propose(scores, sampling(1), how(1, 2, 0.1, 2))
    assert ids.tolist() == [[2, 3]]
    assert torch.allclose(probs, torch.tensor([[0.625, 0.375]]))
    ids, _ = propose(scores, sampling(1), how(1, 2, 0.5, 2))
    assert ids.tolist() == [[0, 1]]


def test_rows_make_their_own_proposals() -> None:
    _, zq = pair(3, 5)
    rows = RowSampling.of(
        [1.0] * 3, [TOP_K_ALL, 2, TOP_K_ALL], [1.0] * 3, [0.0] * 3, [0] * 3, "cpu"
    )
    mixed = ProposalRows(
        torch.tensor([0, 3, 1]), torch.tensor([1.0, 0.5, 0.2]), torch.tensor([4, 4, 1]), 3, 4
    )
    ids, probs = propose(zq, rows, mixed)
    assert (probs > 0).sum(1).tolist() == [4, 2, 1]
    for i in range(3):
        alone = ProposalRows(
            mixed.fan_out[i : i + 1], mixed.saguaro_c[i : i + 1], mixed.top_m[i : i + 1], 3, 4
        )
        one = propose(zq[i : i + 1], rows.select(torch.tensor([i])), alone)
        assert torch.equal(dense(*one), dense(ids[i : i + 1], probs[i : i + 1]))


# -- verify ------------------------------------------------------------------------------------


def test_uniform_streams() -> None:
    position = torch.arange(50_000)
    seed = torch.full_like(position, 42)
    a, b = uniform(seed, position, ACCEPT_STREAM), uniform(seed, position, DRAFT_STREAM)
    for u in (a, b):
        assert float(u.min()) > 0 and float(u.max()) < 1
        assert abs(float(u.mean()) - 0.5) < 0.005 and abs(float(u.var()) - 1 / 12) < 0.002
    assert abs(float(torch.corrcoef(torch.stack((a, b)))[0, 1])) < 0.02
    assert torch.equal(a, uniform(seed, position, ACCEPT_STREAM))


def test_equal_probabilities_are_always_kept() -> None:
    u = torch.tensor([2.0**-33, 1 - 2.0**-33], dtype=torch.float64)
    p = torch.tensor([0.3, 0.3])
    assert kept(p, p, u).tolist() == [True, True]
    assert kept(torch.zeros(2), p, u).tolist() == [False, False]


def test_verify_draws_the_joint_distribution_of_a_round() -> None:
    """`verify` itself, with its own noise: 300,000 rounds of K = 2 over 5 tokens."""
    vocab, steps, n = 5, 2, 300_000
    generator = torch.Generator().manual_seed(9)
    z = torch.randn(vocab, vocab, generator=generator)
    zq = z + torch.randn(vocab, vocab, generator=generator)
    seed = torch.randint(-(2**62), 2**62, (n,), generator=generator)
    rows = RowSampling(
        torch.ones(n), torch.full((n,), 4, dtype=torch.int32), torch.ones(n), torch.zeros(n),
        seed, all_greedy=False, any_filter=True,
    )  # fmt: skip
    first = torch.full((n,), 7)
    chain = torch.zeros(n, steps + 1, dtype=torch.int64)
    all_ids, all_probs = propose(zq, sampling(vocab), how(vocab, 2, 0.5, 3))
    for j in range(steps):
        at = chain[:, j]
        u = uniform(seed, first + j, DRAFT_STREAM)
        chain[:, j + 1] = draw(all_ids[at], all_probs[at], u)
    lens = torch.where(torch.arange(n) % 4 == 0, 1, 2)  # some rows have one draft only
    logits = z[chain].view(-1, vocab)
    index = (first[:, None] + torch.arange(steps + 1)).view(-1)
    own = coupled_sample(logits, rows.repeat(steps + 1), index).view(n, -1)
    told = Proposals(torch.arange(n), all_ids[chain[:, :-1]], all_probs[chain[:, :-1]])
    tokens, count = verify(logits, rows, first, chain, lens, own, told)
    assert bool((count >= 1).all()) and bool((count <= lens + 1).all())
    # Rounds that end early go on with what a round without drafts would draw.
    text = tokens.clone()
    p = target(z, sampling(vocab, top_k=4))
    for j in range(1, steps + 1):
        fresh = torch.multinomial(p[text[:, j - 1]], 1, generator=generator)[:, 0]
        text[:, j] = torch.where(j < count, text[:, j], fresh)
    code = (text[:, 0] * vocab + text[:, 1]) * vocab + text[:, 2]
    seen = torch.bincount(code, minlength=vocab**3).double()
    want = n * (p[0][:, None, None] * p[:, :, None] * p[None]).reshape(-1).double()
    assert float(seen[want == 0].sum()) == 0
    few = want < 5
    chi2 = float(((seen - want)[~few] ** 2 / want[~few]).sum())
    freedom = int((~few).sum()) - 1
    assert chi2 < freedom + 4 * (2 * freedom) ** 0.5, (chi2, freedom)
    assert 0.2 < float((count == lens + 1).double().mean()) < 0.9


def test_verify_leaves_alone_what_it_is_not_asked_about() -> None:
    z, zq = pair(6, 11)
    rows = sampling(2, 0.7, seed=5)
    ids, probs = propose(zq / 0.7, sampling(6, 0.7), how(6, 0, 1.0, 4))
    chain = torch.tensor([[1, 2, 3], [0, int(ids[3, 0]), int(ids[4, 0])]])
    own = torch.tensor([[7, 7, 7], [5, 6, 7]])
    first, lens = torch.tensor([10, 20]), torch.tensor([2, 2])
    told = Proposals(torch.tensor([1]), ids[None, 3:5], probs[None, 3:5])
    logits = z.clone()
    tokens, count = verify(logits, rows, first, chain, lens, own, told)
    assert torch.equal(logits, z)
    assert tokens.shape == (1, 3) and count.dtype == torch.int32
    kept_ones = int(count[0]) - 1
    assert tokens[0, :kept_ones].tolist() == chain[1, 1 : 1 + kept_ones].tolist()
    if kept_ones == 2:
        assert tokens[0, 2] == own[1, 2]
    again = verify(logits, rows, first, chain, lens, own, told)
    assert torch.equal(again[0], tokens) and torch.equal(again[1], count)


def test_a_forbidden_draft_is_replaced_by_an_allowed_token() -> None:
    """A grammar gives the draft probability 0; the residual never yields a masked token."""
    n = 500
    logits = torch.zeros(n, 2, 4)
    logits[:, 0, 1] = float("-inf")
    rows = RowSampling.of(
        [1.0] * n, [TOP_K_ALL] * n, [1.0] * n, [0.0] * n, list(range(n)), "cpu"
    )  # fmt: skip
    chain = torch.tensor([[0, 1]]).repeat(n, 1)
    told = Proposals(
        torch.arange(n), torch.tensor([[[1, 2]]]).repeat(n, 1, 1),
        torch.tensor([[[0.9, 0.1]]]).repeat(n, 1, 1),
    )  # fmt: skip
    own = torch.zeros(n, 2, dtype=torch.int64)
    ones = torch.ones(n, dtype=torch.int64)
    tokens, count = verify(logits.view(-1, 4), rows, ones, chain, ones, own, told)
    assert bool((count == 1).all())
    assert set(tokens[:, 0].tolist()) == {0, 2, 3}
