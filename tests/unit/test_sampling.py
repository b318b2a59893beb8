"""The coupled sampler: noise, filters, independence of the batch, and the right distribution.

Statistics use fixed seeds, so a test either always passes or always fails; limits are such that
a right sampler had no more than one chance in 10^5 to fail when the seeds were chosen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from sgl_ssd import sampling
from sgl_ssd.sampling import (
    TOP_K_ALL,
    RowSampling,
    coupled_sample,
    coupled_scores,
    filter_scores,
    gumbel,
    hash_bits,
    request_seed,
)

P_LIMIT = 1e-5
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


def rows_of(
    n: int,
    temperature: float = 1.0,
    top_k: int = TOP_K_ALL,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seeds: Sequence[int] | None = None,
) -> RowSampling:
    """`n` rows alike but for their seeds (default 0..n-1)."""
    seeds = range(n) if seeds is None else seeds
    return RowSampling.of(
        [temperature] * n, [top_k] * n, [top_p] * n, [min_p] * n, list(seeds), "cpu"
    )


def draw(
    logits: torch.Tensor, n: int, rows: RowSampling | None = None, position: int = 7
) -> torch.Tensor:
    """`n` tokens from one row of `logits`, each with a seed of its own."""
    rows = rows_of(n) if rows is None else rows
    return coupled_sample(logits.expand(n, -1), rows, torch.full((n,), position))


def p_value(statistic: float, freedom: int) -> float:
    """Chance of a chi-square statistic at least this great."""
    half = torch.tensor(freedom / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, torch.tensor(statistic / 2, dtype=torch.float64)))


def chi_square(tokens: torch.Tensor, probs: torch.Tensor) -> float:
    """p-value of `tokens` having the distribution `probs`; rare tokens are pooled."""
    expected = probs.double() * len(tokens)
    counts = torch.bincount(tokens, minlength=len(probs)).double()
    assert counts[expected == 0].sum() == 0, "a token of probability 0 was drawn"
    rare = expected < 8
    observed = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    keep = expected > 0
    statistic = ((observed - expected)[keep] ** 2 / expected[keep]).sum()
    return p_value(float(statistic), int(keep.sum()) - 1)


def test_the_statistic_finds_a_wrong_distribution() -> None:
    probs = torch.tensor([0.5, 0.3, 0.2])
    tokens = torch.multinomial(probs, 20_000, True, generator=torch.Generator().manual_seed(0))
    assert chi_square(tokens, probs) > P_LIMIT
    assert chi_square(tokens, torch.tensor([0.48, 0.32, 0.2])) < P_LIMIT


# -- noise -------------------------------------------------------------------------------------


def uniform_of(bits: torch.Tensor) -> torch.Tensor:
    """u in float64, from the definition: the bits as a number from 0 to 2^32-1, plus 1/2."""
    return (bits.double() + 2.0**31 + 0.5) / 2.0**32


EXTREMES = torch.tensor(
    [INT32_MIN, INT32_MIN + 1, -2, -1, 0, 1, 2, INT32_MAX - 1, INT32_MAX, 2**24, -(2**24), 2**30],
    dtype=torch.int32,
)


def test_gumbel_is_finite_at_the_extreme_values() -> None:
    noise = gumbel(EXTREMES)
    assert torch.isfinite(noise).all()
    assert noise.min() == gumbel(EXTREMES[:1]) and noise.max() == gumbel(EXTREMES[8:9])
    # u = 2^-33 and u = 1 - 2^-33
    assert noise.min().item() == pytest.approx(-math.log(33 * math.log(2)), rel=1e-6)
    assert noise.max().item() == pytest.approx(33 * math.log(2), rel=1e-6)


def test_gumbel_equals_its_definition_and_grows_with_u() -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(INT32_MIN, INT32_MAX + 1, (200_000,), generator=generator)
    bits = torch.cat([bits.int(), EXTREMES]).sort().values
    u = uniform_of(bits)
    assert u.min() > 0.0 and u.max() < 1.0
    noise = gumbel(bits)
    torch.testing.assert_close(noise.double(), -torch.log(-torch.log(u)), rtol=2e-6, atol=2e-6)
    assert (noise.diff() >= 0).all()


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (2, 3, 4)])
def test_gumbel_keeps_shapes(shape: tuple[int, ...]) -> None:
    assert gumbel(torch.zeros(shape, dtype=torch.int32)).shape == shape


def bits_at(seeds: Sequence[int], positions: Sequence[int], vocab: int = 4096) -> torch.Tensor:
    return hash_bits(torch.tensor(seeds), torch.tensor(positions), vocab)


def as_bits(values: torch.Tensor) -> torch.Tensor:
    """Every value's 32 bits: float32 [values, 32]."""
    return ((values.flatten().long()[:, None] >> torch.arange(32)) & 1).float()


STREAMS = {
    "positions": bits_at([1] * 64, range(64)),
    "seeds": bits_at(range(64), [5] * 64),
    "large seeds": bits_at([2**62 - 2**40 * i for i in range(64)], [5] * 64),
    "high words": bits_at([i << 32 for i in range(64)], [5] * 64),
    "negative seeds": bits_at([-i - 1 for i in range(64)], [5] * 64),
}


@pytest.mark.parametrize("stream", STREAMS)
def test_every_bit_is_balanced(stream: str) -> None:
    bits = as_bits(STREAMS[stream])
    deviation = (bits.mean(dim=0) - 0.5).abs() * 2 * math.sqrt(len(bits))  # in sigmas
    assert deviation.max() < 5.5


@pytest.mark.parametrize("stream", STREAMS)
def test_neighbours_are_not_correlated(stream: str) -> None:
    """Neither along ids nor along positions or seeds: each bit changes half of the time."""
    values = STREAMS[stream]
    for a, b in ((values[:, :-1], values[:, 1:]), (values[:-1], values[1:])):
        changed = as_bits(a.contiguous() ^ b.contiguous())
        deviation = (changed.mean(dim=0) - 0.5).abs() * 2 * math.sqrt(len(changed))
        assert deviation.max() < 5.5


@pytest.mark.parametrize("stream", STREAMS)
def test_noise_is_uniform_and_independent_of_its_neighbour(stream: str) -> None:
    values = STREAMS[stream]
    bucket = (values.long() + 2**31) >> 28  # the top 4 bits
    one = torch.bincount(bucket.flatten(), minlength=16).double()
    assert p_value(float(((one - one.mean()) ** 2 / one.mean()).sum()), 15) > P_LIMIT
    for a, b in ((bucket[:, :-1], bucket[:, 1:]), (bucket[:-1], bucket[1:])):
        two = torch.bincount((a * 16 + b).flatten(), minlength=256).double()
        assert p_value(float(((two - two.mean()) ** 2 / two.mean()).sum()), 255) > P_LIMIT


def test_one_bit_of_the_input_changes_half_of_the_output() -> None:
    seeds = [12345 ^ (1 << shift) for shift in range(63)] + [12345 - 2**63] + [12345] * 20
    positions = [678] * 64 + [678 ^ (1 << shift) for shift in range(20)]
    flipped, base = bits_at(seeds, positions, 1024), bits_at([12345], [678], 1024)
    for row in flipped:
        assert as_bits(row ^ base[0]).mean().item() == pytest.approx(0.5, abs=0.015)


def test_rows_have_no_common_noise() -> None:
    """All (seed, position) pairs of a busy server give different streams."""
    seeds = torch.tensor([request_seed(0, i) for i in range(40)]).repeat_interleave(100)
    first = hash_bits(seeds, torch.arange(100).repeat(40), 2)
    assert len(torch.unique(first, dim=0)) == 4000


def test_noise_of_an_id_does_not_depend_on_the_vocabulary() -> None:
    seeds, positions = torch.arange(5), torch.arange(5) * 1000
    small, large = hash_bits(seeds, positions, 100), hash_bits(seeds, positions, 151_936)
    assert torch.equal(small, large[:, :100])


def test_the_noise_is_what_it_was() -> None:
    """Another value would change the text of every seeded request: a version's promise."""
    bits = hash_bits(torch.tensor([0, 1, -1, 2**63 - 1]), torch.tensor([0, 5, 100, 2**31]), 3)
    assert bits.tolist() == [
        [-151000792, -30899960, 270963357],
        [359961687, -2031547227, 1405099670],
        [-1247760034, -978888399, 742998542],
        [650674800, 1281917672, -1370496775],
    ]


# -- distribution ------------------------------------------------------------------------------

DRAWS = 20_000
LOGITS = torch.randn(50, generator=torch.Generator().manual_seed(3)) * 2


def kept_probs(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    """What is to be sampled from, written down once more: float64 [vocab]."""
    probs = (logits.double() / temperature).softmax(-1)
    order = probs.argsort(descending=True)
    before, keep = 0.0, []
    for rank, token in enumerate(order.tolist()):
        p = float(probs[token])
        if rank < top_k and before <= top_p and p >= min_p * float(probs[order[0]]):
            keep.append(token)
        before += p
    kept = torch.zeros_like(probs)
    kept[keep] = probs[keep]
    return kept / kept.sum()


SETTINGS = [
    {"temperature": 1.0}, {"temperature": 0.3}, {"temperature": 2.5},
    {"temperature": 1.0, "top_k": 5}, {"temperature": 1.3, "top_k": 2},
    {"temperature": 1.0, "top_p": 0.8}, {"temperature": 1.0, "top_p": 0.05},
    {"temperature": 1.5, "min_p": 0.1}, {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
]  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_tokens_have_the_distribution_of_the_softmax(setting: dict) -> None:
    full = {"top_k": TOP_K_ALL, "top_p": 1.0, "min_p": 0.0, **setting}
    probs = kept_probs(LOGITS, **full)
    tokens = draw(LOGITS, DRAWS, rows_of(DRAWS, **full))
    if (probs > 0).sum() == 1:
        assert (tokens == probs.argmax()).all()
    else:
        assert chi_square(tokens, probs) > P_LIMIT


def test_positions_of_one_request_are_as_good_as_seeds() -> None:
    probs = LOGITS.softmax(-1)
    tokens = coupled_sample(
        LOGITS.expand(DRAWS, -1), rows_of(DRAWS, seeds=[9] * DRAWS), torch.arange(DRAWS)
    )
    assert chi_square(tokens, probs) > P_LIMIT
    pairs = tokens[:-1] * len(probs) + tokens[1:]
    assert chi_square(pairs, torch.outer(probs, probs).flatten()) > P_LIMIT


def test_a_single_likely_token_is_not_always_drawn() -> None:
    """Probabilities down to 1e-4 come out right."""
    probs = torch.tensor([0.999, 0.0007, 0.0002, 0.0001])
    tokens = draw(probs.log(), 400_000)
    assert chi_square(tokens, probs) > P_LIMIT


def test_temperature_zero_takes_the_greatest() -> None:
    logits = torch.randn(64, 100, generator=torch.Generator().manual_seed(0))
    tokens = coupled_sample(logits, rows_of(64, temperature=0.0, top_k=3), torch.arange(64))
    assert torch.equal(tokens, logits.argmax(-1))


def test_greedy_rows_beside_sampled_ones_take_the_greatest() -> None:
    logits = torch.randn(60, 100, generator=torch.Generator().manual_seed(0))
    temperature = [0.0, 1.0, 2.0] * 20
    rows = RowSampling.of(temperature, [1, 5, 100] * 20, [0.1] * 60, [0.5] * 60, [1] * 60, "cpu")
    tokens = coupled_sample(logits, rows, torch.arange(60))
    assert torch.equal(tokens[::3], logits.argmax(-1)[::3])
    assert (tokens != logits.argmax(-1)).any()
    # and its next guesses are the next logits, whatever its filters say
    scores = coupled_scores(logits, rows, torch.arange(60))
    assert torch.equal(scores[::3], logits[::3])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_sampled_in_single_precision(dtype: torch.dtype) -> None:
    logits = torch.randn(200, 100, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows = rows_of(200, top_p=0.9)
    scores = coupled_scores(logits, rows, torch.arange(200))
    assert scores.dtype == torch.float32
    assert torch.equal(scores, coupled_scores(logits.float(), rows, torch.arange(200)))


# -- filters -----------------------------------------------------------------------------------


def test_filtered_tokens_never_win_against_the_greatest_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Excluded ids get the greatest noise there is, the others the least."""
    logits = torch.randn(40, 500, generator=torch.Generator().manual_seed(1))
    rows = rows_of(40, top_k=10, top_p=0.7, min_p=0.05)
    kept = filter_scores(logits, rows) > float("-inf")
    assert 0 < kept.sum() < kept.numel()
    bits = torch.where(kept, INT32_MIN, INT32_MAX).int()
    monkeypatch.setattr(sampling, "hash_bits", lambda *_: bits)
    tokens = coupled_sample(logits, rows, torch.arange(40))
    assert kept.gather(1, tokens[:, None]).all()


def test_masked_tokens_never_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar leaves one id with a hopeless logit: it is taken all the same."""
    logits = torch.full((4, 1000), float("-inf"))
    logits[:, 17] = -300.0
    bits = torch.full((4, 1000), INT32_MAX, dtype=torch.int32)
    bits[:, 17] = INT32_MIN
    monkeypatch.setattr(sampling, "hash_bits", lambda *_: bits)
    for rows in (rows_of(4), rows_of(4, top_p=0.5, top_k=3, min_p=0.3), rows_of(4, 0.0)):
        assert coupled_sample(logits, rows, torch.arange(4)).tolist() == [17] * 4


def test_the_best_token_survives_every_filter() -> None:
    logits = torch.randn(100, 300, generator=torch.Generator().manual_seed(1)) * 5
    rows = rows_of(100, top_k=1, top_p=1e-9, min_p=1.0)
    kept = filter_scores(logits, rows) > float("-inf")
    assert torch.equal(kept.int().argmax(-1), logits.argmax(-1)) and (kept.sum(-1) == 1).all()


def test_a_row_without_filters_loses_nothing_beside_one_with() -> None:
    """In float32 the probabilities before the tail of a large vocabulary sum to more than 1."""
    logits = torch.randn(2, 100_000, generator=torch.Generator().manual_seed(0)) * 3
    rows = RowSampling.of([1.0, 1.0], [5, TOP_K_ALL], [1.0, 1.0], [0.0, 0.0], [0, 0], "cpu")
    kept = filter_scores(logits, rows) > float("-inf")
    assert kept.sum(-1).tolist() == [5, 100_000]


def test_equal_logits_are_kept_up_to_top_k() -> None:
    kept = filter_scores(torch.zeros(3, 50), rows_of(3, top_k=7)) > float("-inf")
    assert (kept.sum(-1) == 7).all()


@pytest.mark.parametrize("scale", [0.5, 3.0, 12.0])
def test_filters_keep_what_sglang_keeps(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against SGLang's torch sampler, for random logits and every mix of filters."""
    from sglang.srt.layers import sampler as sglang_sampler

    n, vocab = 400, 200
    generator = torch.Generator().manual_seed(int(scale * 10))
    logits = torch.randn(n, vocab, generator=generator) * scale

    def pick(values: list) -> list:
        index = torch.randint(len(values), (n,), generator=generator)
        return [values[i] for i in index.tolist()]

    temperature = pick([0.3, 0.7, 1.0, 1.7])
    top_k, top_p = pick([1, 2, 10, 50, 199, 200, TOP_K_ALL]), pick([0.01, 0.3, 0.8, 0.95, 1.0])
    min_p = pick([0.0, 0.01, 0.2, 1.0])
    rows = RowSampling.of(temperature, top_k, top_p, min_p, [0] * n, "cpu")
    scores = logits / rows.temperature[:, None]
    ours = filter_scores(scores, rows) > float("-inf")

    seen = {}

    def multinomial(probs: torch.Tensor, num_samples: int) -> torch.Tensor:
        seen["kept"] = probs > 0
        return torch.zeros(n, num_samples, dtype=torch.int64)

    monkeypatch.setattr(torch, "multinomial", multinomial)
    probs = scores.softmax(-1)
    sglang_sampler.top_k_top_p_min_p_sampling_from_probs_torch(
        probs.clone(), rows.top_k, rows.top_p, rows.min_p, True, None, torch.zeros(n)
    )
    order = probs.sort(dim=-1, descending=True).indices
    theirs = torch.zeros_like(ours).scatter_(1, order, seen["kept"])
    # Tokens on the border of top-p may fall either way, by rounding.
    exact = scores.double().softmax(-1).gather(1, order)
    before = exact.cumsum(-1) - exact
    border = torch.zeros_like(ours).scatter_(1, order, (before - rows.top_p[:, None]).abs() < 1e-6)
    # A probability too small for float32 is dropped by SGLang and harmless here.
    assert not ((ours != theirs) & ~border & (probs > 0)).any()
    assert 0 < ours.sum() < ours.numel() and border[rows.top_p < 1].any(-1).sum() < n / 20


# -- independence of the batch -----------------------------------------------------------------


def mixed_rows(n: int, seed: int = 0) -> RowSampling:
    generator = torch.Generator().manual_seed(seed)

    def pick(values: list) -> list:
        index = torch.randint(len(values), (n,), generator=generator)
        return [values[i] for i in index.tolist()]

    seeds = torch.randint(-(2**62), 2**62, (n,), generator=generator).tolist()
    return RowSampling.of(
        pick([0.0, 0.5, 1.0, 2.0]), pick([1, 5, 40, TOP_K_ALL]), pick([0.5, 0.9, 1.0]),
        pick([0.0, 0.1]), seeds, "cpu",
    )  # fmt: skip


def one_row(rows: RowSampling, i: int) -> RowSampling:
    """Row `i` built from scratch, so that its flags are its own."""
    return RowSampling.of(
        [rows.temperature[i].item()], [rows.top_k[i].item()], [rows.top_p[i].item()],
        [rows.min_p[i].item()], [rows.seed[i].item()], "cpu",
    )  # fmt: skip


def test_a_row_does_not_depend_on_its_batch() -> None:
    n = 80
    rows = mixed_rows(n)
    logits = torch.randn(n, 300, generator=torch.Generator().manual_seed(2)) * 3
    position = torch.arange(n) * 13
    tokens = coupled_sample(logits, rows, position)
    for i in range(n):
        alone = coupled_sample(logits[i : i + 1], one_row(rows, i), position[i : i + 1])
        assert alone.item() == tokens[i].item()
    order = torch.randperm(n, generator=torch.Generator().manual_seed(4))
    shuffled = coupled_sample(logits[order], rows.select(order), position[order])
    assert torch.equal(shuffled, tokens[order])


@pytest.mark.parametrize("width", [1, 2, 5])
def test_a_position_does_not_depend_on_the_width(width: int) -> None:
    n = 30
    rows = mixed_rows(n, seed=width)
    logits = torch.randn(n, width, 300, generator=torch.Generator().manual_seed(5)) * 3
    first = torch.arange(n) * 7
    index = first[:, None] + torch.arange(width)
    wide = coupled_sample(logits.view(n * width, -1), rows.repeat(width), index.flatten())
    single = torch.stack(
        [coupled_sample(logits[:, j], rows, index[:, j]) for j in range(width)], dim=1
    )
    assert torch.equal(wide.view(n, width), single)


def test_repeat_and_select_treat_every_field_alike() -> None:
    rows = mixed_rows(6)
    index = torch.tensor([5, 0, 0, 3])
    for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
        values = getattr(rows, name)
        assert getattr(rows.repeat(3), name).tolist() == [v for v in values.tolist() for _ in "abc"]
        assert getattr(rows.select(index), name).tolist() == values[index].tolist()
    assert rows.repeat(1) is rows


def test_the_same_seed_gives_the_same_token() -> None:
    rows = rows_of(100, seeds=[42] * 100)
    assert (
        len(set(coupled_sample(LOGITS.expand(100, -1), rows, torch.full((100,), 3)).tolist())) == 1
    )


@pytest.mark.parametrize("what", ["seed", "high word of the seed", "position"])
def test_other_seeds_and_positions_give_other_tokens(what: str) -> None:
    flat, n = torch.zeros(1, 1000), 50
    seeds = {"seed": list(range(n)), "high word of the seed": [i << 32 for i in range(n)]}
    rows = rows_of(n, seeds=seeds.get(what, [1] * n))
    position = torch.arange(n) if what == "position" else torch.full((n,), 5)
    assert len(set(coupled_sample(flat.expand(n, -1), rows, position).tolist())) > 40


def test_flags_tell_what_is_off() -> None:
    def flags(**kwargs: float) -> tuple[bool, bool]:
        rows = rows_of(2, **kwargs)  # type: ignore[arg-type]
        return rows.all_greedy, rows.any_filter

    assert flags(temperature=0.0, top_k=3, top_p=0.5, min_p=0.5) == (True, False)
    assert flags(temperature=1.0) == (False, False)
    assert flags(top_k=2**40) == (False, False)
    for one in ({"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}):
        assert flags(**one) == (False, True)


# -- target and draft --------------------------------------------------------------------------


def agreement(p: torch.Tensor, q: torch.Tensor, n: int = 20_000) -> float:
    """How often a draft with logits log q draws the target's token."""
    rows = rows_of(n)
    return float((draw(p.log(), n, rows) == draw(q.log(), n, rows)).double().mean())


def coupled_acceptance(p: torch.Tensor, q: torch.Tensor) -> float:
    """P(same argmax under the same Gumbel noise): sum over v of 1 / sum_w max(p_w/p_v, q_w/q_v)."""
    both = [v for v in range(len(p)) if p[v] > 0 and q[v] > 0]
    return float(sum(1.0 / torch.maximum(p / p[v], q / q[v]).sum() for v in both))


def test_equal_models_always_agree() -> None:
    p = LOGITS.softmax(-1)
    assert agreement(p, p) == 1.0


def test_disjoint_models_never_agree() -> None:
    p, q = torch.tensor([0.5, 0.5, 0.0, 0.0]), torch.tensor([0.0, 0.0, 0.7, 0.3])
    assert agreement(p, q) == 0.0


@pytest.mark.parametrize(
    ("p", "q"),
    [
        ([0.5, 0.5], [0.9, 0.1]), ([0.6, 0.3, 0.1], [0.3, 0.6, 0.1]),
        ([1.0, 0.0, 0.0], [0.2, 0.5, 0.3]), ([0.25] * 4, [0.7, 0.1, 0.1, 0.1]),
    ],
    ids=str,
)  # fmt: skip
def test_acceptance_is_what_theory_says(p: list[float], q: list[float]) -> None:
    a, b, n = torch.tensor(p), torch.tensor(q), 20_000
    expected = coupled_acceptance(a, b)
    sigma = math.sqrt(expected * (1 - expected) / n)
    assert abs(agreement(a, b, n) - expected) < 4.5 * sigma
    # and never better than the best coupling, which accepts the overlap of the two
    assert expected <= float(torch.minimum(a, b).sum()) + 1e-6


def test_acceptance_of_two_random_models() -> None:
    generator = torch.Generator().manual_seed(8)
    p = (torch.randn(30, generator=generator) * 2).softmax(-1)
    q = (p.log() + torch.randn(30, generator=generator) * 0.5).softmax(-1)
    expected = coupled_acceptance(p, q)
    assert abs(agreement(p, q) - expected) < 4.5 * math.sqrt(expected * (1 - expected) / 20_000)


def test_the_next_guesses_are_the_likely_alternatives() -> None:
    """When the draft's token is wrong, its second score is the target's token far above chance."""
    generator = torch.Generator().manual_seed(8)
    p = (torch.randn(50, generator=generator) * 2).softmax(-1)
    q = (p.log() + torch.randn(50, generator=generator) * 0.5).softmax(-1)
    n = 5_000
    rows, position = rows_of(n), torch.full((n,), 7)
    target = draw(p.log(), n, rows)
    top = coupled_scores(q.log().expand(n, -1), rows, position).topk(2).indices
    missed = top[:, 0] != target
    assert missed.any() and (top[missed, 1] == target[missed]).double().mean() > 0.4


# -- seeds of unseeded requests ----------------------------------------------------------------


def test_request_seeds_are_determined_and_fit() -> None:
    for server_seed in (0, 1, -1, 2**31, 2**64 + 5, 123456789):
        for arrival in (0, 1, 10**9):
            seed = request_seed(server_seed, arrival)
            assert -(2**63) <= seed < 2**63 and seed == request_seed(server_seed, arrival)
            torch.tensor([seed], dtype=torch.int64)


def test_request_seeds_do_not_repeat() -> None:
    seeds = {request_seed(server, arrival) for server in range(20) for arrival in range(2000)}
    assert len(seeds) == 40_000


def test_request_seeds_are_spread() -> None:
    values = torch.tensor([request_seed(42, i) for i in range(20_000)])
    bits = ((values[:, None] >> torch.arange(64)) & 1).double()
    assert ((bits.mean(0) - 0.5).abs() * 2 * math.sqrt(len(values))).max() < 5.0
    changed = bits[1:] != bits[:-1]
    assert ((changed.double().mean(0) - 0.5).abs() * 2 * math.sqrt(len(values))).max() < 5.0


def test_unseeded_requests_draw_independently() -> None:
    seeds = [request_seed(7, i) for i in range(DRAWS)]
    tokens = draw(LOGITS, DRAWS, rows_of(DRAWS, seeds=seeds), position=20)
    probs = LOGITS.softmax(-1)
    assert chi_square(tokens, probs) > P_LIMIT
    assert chi_square(tokens[:-1] * 50 + tokens[1:], torch.outer(probs, probs).flatten()) > P_LIMIT
