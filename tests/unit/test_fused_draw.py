"""The fused draw: in Triton's interpreter it says what the torch reference says, and it compiles.

`tests/gpu/test_sampling.py` asks the same of a real card.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from sgl_ssd import fused_draw
from sgl_ssd.draft_server import proposals
from sgl_ssd.draft_server.proposals import Proposer, SamplingParams
from sgl_ssd.sampling import (
    TOP_K_ALL,
    RowSampling,
    coupled_scores,
    filtered_scores,
    gumbel,
    hash_bits,
    noisy_argmax,
)

Kernel = Callable[..., torch.Tensor]
INF = float("inf")
# (position, token id) where seed 0 has these bits; found by trying all in order.
EXTREMES = {
    2**31 - 1: (118453, 16265),  # u nearest 1: the greatest noise there is
    -(2**31): (9976, 14947),  # u nearest 0: the least
    0: (383764, 6914),  # both sides of u = 1/2
    -1: (52086, 6041),
}


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Callable]:
    """Calls a function in a process of its own: Triton reads the variable that makes it interpret
    once, when it is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        first = pool.submit(os.getpid)
        del os.environ["TRITON_INTERPRET"]
        assert first.result() != os.getpid()
        yield lambda *args: pool.submit(*args).result(timeout=120)


@pytest.fixture(scope="module")
def kernel(interpreter: Callable) -> Kernel:
    """As `sampling.noisy_argmax` draws on CUDA."""
    return lambda *args: interpreter(fused_draw.noisy_topk, *args, 1)[:, 0]


@pytest.fixture(scope="module")
def topk(interpreter: Callable) -> Kernel:
    return lambda *args: interpreter(fused_draw.noisy_topk, *args)


def random_rows(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Temperatures (every third row greedy), seeds and positions over their whole ranges."""
    generator = torch.Generator().manual_seed(seed)
    temperature = torch.rand(n, generator=generator) * 2 + 0.05
    temperature[::3] = 0
    seeds = torch.randint(-(2**63), 2**63 - 1, (n,), generator=generator)
    return temperature, seeds, torch.randint(0, 2**33, (n,), generator=generator)


def check(kernel: Kernel, logits: torch.Tensor, *rows: torch.Tensor) -> None:
    """Equal tokens, but where the reference's two scores are closer than 1e-5."""
    got, want = kernel(logits, *rows), noisy_argmax(logits, *rows)
    assert got.dtype == torch.int64 and got.shape == want.shape
    temperature, seeds, positions = rows
    n = len(want)
    how = RowSampling.of(
        temperature.tolist(), [TOP_K_ALL] * n, [1.0] * n, [0.0] * n, seeds.tolist(), "cpu"
    )
    scores = coupled_scores(logits, how, positions)
    gap = scores.gather(1, want[:, None]) - scores.gather(1, got[:, None])
    assert float(gap.max()) < 1e-5
    assert int((got != want).sum()) <= 1  # near ties are rare


@pytest.mark.parametrize(
    ("n", "vocab"), [(1, 128_256), (3, 50_257), (9, 2049), (40, 513), (2, 2048), (3, 1)]
)
def test_tokens_equal_the_reference(kernel: Kernel, n: int, vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(n, vocab, generator=generator) * 3
    logits[torch.rand(n, vocab, generator=generator) < 0.2] = -INF
    logits[:, 0] = 0.0  # something is always left
    check(kernel, logits, *random_rows(n, vocab))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits(kernel: Kernel, dtype: torch.dtype) -> None:
    logits = torch.randn(12, 700, generator=torch.Generator().manual_seed(1)).to(dtype)
    check(kernel, logits, *random_rows(12, 1))


def test_rows_may_have_any_stride(kernel: Kernel) -> None:
    padded = torch.randn(6, 640, generator=torch.Generator().manual_seed(2))
    check(kernel, padded[:, :601], *random_rows(6, 2))
    check(kernel, padded[:1].expand(6, -1), *random_rows(6, 3))
    check(kernel, padded[:, :20].t(), *random_rows(20, 4))


def test_rows_of_one_token_give_it_whatever_the_noise(kernel: Kernel) -> None:
    vocab = 5000
    logits = torch.full((8, vocab), -INF)
    only = torch.tensor([0, 1, 2047, 2048, 4095, 4096, 4998, 4999])
    logits[torch.arange(8), only] = -1e30
    temperature, seeds, positions = random_rows(8, 5)
    assert torch.equal(kernel(logits, temperature, seeds, positions), only)


def test_rows_without_a_number_give_a_token_of_the_vocabulary(kernel: Kernel) -> None:
    logits = torch.full((3, 3000), -INF)
    logits[1] = float("nan")
    logits[2, 2500] = 1.0
    logits[2, 7] = float("nan")
    temperature = torch.tensor([1.0, 1.0, 0.5])
    zeros = torch.zeros(3, dtype=torch.int64)
    assert kernel(logits, temperature, zeros, zeros).tolist() == [0, 0, 2500]


def test_of_equals_the_lowest_id_wins(kernel: Kernel) -> None:
    """Within a block, across the blocks of a program, across programs; greedy, so without noise."""
    logits = torch.zeros(4, 9000)
    for row, places in enumerate(([5, 6], [2047, 2048], [100, 2148], [8000, 8999])):
        logits[row, places] = 4.0
    many = logits.repeat(32, 1)  # so many rows that a program takes several blocks
    assert fused_draw.split(4, 9000) == (5, 1) and fused_draw.split(128, 9000) == (3, 2)
    for scores in (logits, many):
        zeros = torch.zeros(len(scores), dtype=torch.int64)
        tokens = kernel(scores, torch.zeros(len(scores)), zeros, zeros)
        assert tokens[:4].tolist() == [5, 2047, 100, 8000]
        assert torch.equal(tokens, tokens[:4].repeat(len(scores) // 4))


@pytest.mark.parametrize("bits", EXTREMES)
def test_extreme_hash_values(kernel: Kernel, bits: int) -> None:
    position, token = EXTREMES[bits]
    one = torch.ones(1)
    seed, place = torch.zeros(1, dtype=torch.int64), torch.tensor([position])
    vocab = token + 2
    found = hash_bits(seed, place, vocab)
    assert int(found[0, token]) == bits
    noise = gumbel(found)[0]
    # The kernel's noise for this id lies within 1e-5 of the reference's: a rival that is so much
    # worse loses, and one that is so much better wins.
    rival = token + 1
    scores = torch.full((1, vocab), -INF)
    scores[0, token] = 0.0
    for margin, winner in ((1e-5, rival), (-1e-5, token)):
        scores[0, rival] = noise[token] - noise[rival] + margin
        assert int(kernel(scores, one, seed, place)) == winner
    # Excluded, it never wins, however great its noise.
    scores[0, token] = -INF
    scores[0, rival] = -1e30
    assert int(kernel(scores, one, seed, place)) == rival


def test_filters_and_greedy_rows(kernel: Kernel) -> None:
    """What `coupled_sample` hands over when there are filters: scaled scores, excluded at -inf."""
    n, vocab = 24, 1001
    logits = torch.randn(n, vocab, generator=torch.Generator().manual_seed(6)) * 2
    rows = RowSampling.of(
        [0.0 if i % 4 == 0 else 0.3 + i / 10 for i in range(n)],
        [TOP_K_ALL if i % 3 else 7 for i in range(n)],
        [1.0 if i % 5 else 0.7 for i in range(n)],
        [0.05 * (i % 2) for i in range(n)],
        list(range(n)),
        "cpu",
    )
    scores = filtered_scores(logits, rows)
    position = torch.arange(n)
    tokens = kernel(scores, (rows.temperature > 0).float(), rows.seed, position)
    assert torch.equal(tokens, coupled_scores(logits, rows, position).argmax(dim=-1))


def test_no_rows(topk: Kernel) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert topk(torch.zeros(0, 7), torch.zeros(0), none, none, 3).shape == (0, 3)


# -- the best of a row -------------------------------------------------------------------------


def check_best(
    got: torch.Tensor,
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    width: int,
    places: torch.Tensor | None = None,
    limit: torch.Tensor | None = None,
) -> int:
    """`got` is what torch says, but for scores closer than 1e-5. How many ids differ."""
    n, vocab = logits.shape
    assert got.shape == (n, width) and got.dtype == torch.int64
    if places is not None:
        temperature, seeds = temperature[places], seeds[places]
        limit = None if limit is None else limit[places]
    drawn = (temperature > 0)[:, None]
    scaled = logits.float() / torch.where(drawn, temperature[:, None], 1.0)
    scores = torch.where(drawn, scaled + gumbel(hash_bits(seeds, positions, vocab)), scaled)
    scores[scores.isnan()] = -INF
    differ = 0
    for row in range(n):
        end = vocab if limit is None else min(vocab, int(limit[row]))
        kept = min(width, end)
        values, ids = scores[row, :end].sort(descending=True, stable=True)
        want, mine = ids[:kept], got[row, :kept]
        assert got[row, kept:].tolist() == [0] * (width - kept)
        assert len(set(mine.tolist())) == kept and (mine < end).all() and (mine >= 0).all()
        if not drawn[row]:
            assert mine.tolist() == want.tolist()
        torch.testing.assert_close(scores[row, mine], values[:kept], rtol=0, atol=1e-5)
        differ += int((mine != want).sum())
    return differ


@pytest.mark.parametrize(
    ("n", "vocab", "width"),
    [
        (1, 128_256, 8),
        (3, 50_257, 10),
        (130, 9000, 10),  # several blocks for a program
        (9, 2049, 16),
        (40, 513, 3),
        (2, 2048, 7),
        (5, 129, 5),
        (3, 6, 16),
        (3, 1, 2),
    ],
)
def test_the_best_equal_the_reference(topk: Kernel, n: int, vocab: int, width: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(n, vocab, generator=generator) * 3
    logits[torch.rand(n, vocab, generator=generator) < 0.2] = -INF
    rows = random_rows(n, vocab)
    assert check_best(topk(logits, *rows, width), logits, *rows, width) <= 2  # near ties are rare


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_take_their_parameters_from_tables(topk: Kernel, dtype: torch.dtype) -> None:
    logits = torch.randn(20, 3000, generator=torch.Generator().manual_seed(3)).to(dtype)
    temperature, seeds, _ = random_rows(6, 3)
    positions = torch.arange(20) + 2**32
    places = torch.tensor([[5, 0, 3, 3, 1] * 4, [2] * 20]).t().contiguous()[:, 0]  # a column
    limit = torch.tensor([3000, 2048, 1 << 30, 129, 128, 2999], dtype=torch.int32)
    rows = (temperature, seeds, positions, 8, places, limit)
    assert check_best(topk(logits, *rows), logits, *rows) <= 1


def test_the_best_of_rows_of_any_stride(topk: Kernel) -> None:
    padded = torch.randn(6, 640, generator=torch.Generator().manual_seed(2))
    for logits in (padded[:, :601], padded[:1].expand(6, -1), padded[:, :20].t()):
        rows = random_rows(len(logits), 3)
        assert check_best(topk(logits, *rows, 5), logits, *rows, 5) <= 1


def test_the_best_may_all_be_neighbours(topk: Kernel) -> None:
    """A group holds all of the best; or each of the best is alone in its group."""
    for step in (1, fused_draw.GROUP, fused_draw.BLOCK):
        logits = torch.zeros(1, 16 * fused_draw.BLOCK)
        places = 7 + step * torch.arange(16)
        logits[0, places] = torch.arange(16) + 1.0
        zeros = torch.zeros(1, dtype=torch.int64)
        best = topk(logits, torch.zeros(1), zeros, zeros, 16)[0]
        assert best.tolist() == places.flip(0).tolist()


def test_of_equal_scores_the_lowest_ids_come_first(topk: Kernel) -> None:
    logits = torch.zeros(4, 9000)
    logits[0, 100::1000] = 1.0
    logits[1, ::2] = -0.0  # equals 0
    logits[2] = -INF
    logits[2, 8999] = -1e30
    logits[3, 1::2] = float("nan")
    zeros = torch.zeros(4, dtype=torch.int64)
    got = topk(logits, torch.zeros(4), zeros, zeros, 10).tolist()
    assert got[0] == [*range(100, 9000, 1000), 0]
    assert got[1] == list(range(10))
    assert got[2] == [8999, *range(9)]
    assert got[3] == list(range(0, 20, 2))


@pytest.mark.parametrize("bits", EXTREMES)
def test_the_best_of_extreme_hash_values(topk: Kernel, bits: int) -> None:
    position, token = EXTREMES[bits]
    vocab = token + 9
    zeros = torch.zeros(1, dtype=torch.int64)
    rows = (torch.ones(1), zeros, torch.tensor([position]))
    noise = gumbel(hash_bits(*rows[1:], vocab))
    # Without noise all would be equal but this one, which lands in the middle of the best.
    logits = -noise
    logits[0, token] = 8.0 - noise[0, token]
    logits[0, token + 1 :] = torch.arange(4.0, 12.0) - noise[0, token + 1 :] + 0.5
    want = [token + 8, token + 7, token + 6, token + 5, token, token + 4, token + 3]
    assert topk(logits, *rows, 7)[0].tolist() == want


def test_too_few_scores_give_ids_of_the_vocabulary(topk: Kernel) -> None:
    logits = torch.full((3, 300), -INF)
    logits[:, [290, 4]] = torch.tensor([2.0, 1.0])
    logits[1] = float("nan")
    logits[2, :] = INF
    limit = torch.tensor([300, 150, 5], dtype=torch.int32)
    zeros = torch.zeros(3, dtype=torch.int64)
    rows = (torch.zeros(3), zeros, zeros, 8, None, limit)
    assert topk(logits, *rows).tolist() == [
        [290, 4, 0, 1, 2, 3, 5, 6],
        [0, 1, 2, 3, 4, 5, 6, 7],
        [0, 1, 2, 3, 4, 0, 0, 0],
    ]


@settings(max_examples=40, deadline=None)
@given(
    vocab=st.integers(1, 600),
    width=st.integers(1, 16),
    temperatures=st.lists(st.sampled_from([0.0, 1e-3, 0.5, 1.0, 3.0]), min_size=1, max_size=4),
    limits=st.lists(st.integers(0, 700), min_size=4, max_size=4),
    values=st.lists(
        st.sampled_from([-INF, INF, float("nan"), -0.0, 0.0, 1.0, -1e30, 5.5]) | st.floats(-9, 9),
        min_size=1,
        max_size=9,
    ),
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 2**40),
)
def test_the_best_of_anything(
    topk: Kernel, vocab, width, temperatures, limits, values, seed, position
) -> None:
    n = len(temperatures)
    generator = torch.Generator().manual_seed(seed % 2**31)
    logits = torch.tensor(values)[torch.randint(len(values), (n, vocab), generator=generator)]
    rows = (
        torch.tensor(temperatures), torch.full((n,), seed), torch.full((n,), position), width,
        None, torch.tensor(limits[:n], dtype=torch.int32),
    )  # fmt: skip
    check_best(topk(logits, *rows), logits, *rows)


# -- the draft's use of it ---------------------------------------------------------------------


def propose(
    params: list[SamplingParams], logits: torch.Tensor, sessions: np.ndarray, positions: np.ndarray
) -> torch.Tensor:
    made = Proposer(torch.device("cpu"), logits.shape[1], len(params), 4, 9)
    for i, p in enumerate(params):
        made.set_session(i, p)
    made.warm_up()
    device = torch.from_numpy(sessions), torch.from_numpy(positions + 1)
    return made.propose(logits, sessions, positions, *device)


def propose_fused(*args) -> torch.Tensor:
    proposals.fuses = lambda scores: True
    return propose(*args)


GREEDY = SamplingParams()
DRAWN = SamplingParams(temperature=0.8, seed=-(2**61) + 3, vocab_limit=2900)
BIASED = SamplingParams(
    temperature=1.5,
    seed=8,
    bias_ids=np.array([2999, 17], np.int32),
    bias_values=np.array([9.0, -100.0], np.float32),
)
FILTERED = SamplingParams(temperature=1.0, top_k=30, seed=2)
REJECTION = SamplingParams(temperature=1.0, seed=4, top_m=12)


@pytest.mark.parametrize(
    "params",
    [
        [GREEDY] * 3,
        [DRAWN] * 3,
        [GREEDY, DRAWN, BIASED],
        [GREEDY, DRAWN, FILTERED],
        [DRAWN, REJECTION, GREEDY],
    ],
    ids=["greedy", "drawn", "mixed", "filtered", "rejection"],
)
def test_the_draft_proposes_the_same(interpreter: Callable, params: list[SamplingParams]) -> None:
    generator = torch.Generator().manual_seed(len(set(map(id, params))))
    logits = 3 * torch.randn(12, 3000, generator=generator)
    sessions = np.array([0, 1, 2, 2] * 3)
    args = (params, logits, sessions, np.arange(12) + 100)
    assert torch.equal(interpreter(propose_fused, *args), propose(*args))


@pytest.mark.parametrize("n", [1, 2, 7, 64, 511, 512, 4096])
@pytest.mark.parametrize("vocab", [1, 2048, 2049, 32_000, 151_936, 600_000])
def test_parts_cover_each_row_once(n: int, vocab: int) -> None:
    parts, blocks = fused_draw.split(n, vocab)
    size = blocks * fused_draw.BLOCK
    assert (parts - 1) * size < vocab <= parts * size
    assert fused_draw.BLOCK % fused_draw.GROUP == 0


COMPILE = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sgl_ssd import fused_draw as m

TYPES = dict(scores="*bf16", temperatures="*fp32", seeds="*i64", positions="*i64",
             maxima="*fp32", tokens="*i64", limits="*i32", places="*i64")
ARGMAX = dict(BLOCK=m.BLOCK, GROUPS=2048, WIDTH=1, SLOTS=1, limits=None, places=None)
TOPK = dict(BLOCK=m.BLOCK, GROUPS=1024, WIDTH=10, SLOTS=16)
for values in (ARGMAX, TOPK):
    for kernel in (m._group_maxima, m._best_of_groups):
        kinds = {n: "constexpr" if n in values else TYPES.get(n, "i32") for n in kernel.arg_names}
        fixed = {n: values[n] for n in kernel.arg_names if n in values}
        source = ASTSource(kernel, kinds, fixed)
        compiled = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
        assert compiled.asm["cubin"] and "lg2.approx" not in compiled.asm["ptx"]
"""


def test_it_compiles_for_a_gpu_with_exact_logarithms(tmp_path) -> None:
    """Down to machine code, which needs no GPU: the interpreter accepts more than the compiler."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
