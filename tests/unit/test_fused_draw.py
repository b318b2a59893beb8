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

import pytest
import torch

pytest.importorskip("triton")

from sgl_ssd import fused_argmax
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
def kernel() -> Iterator[Kernel]:
    """`fused_argmax.noisy_argmax` in a process of its own: Triton reads the variable that makes
    it interpret once, when it is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        first = pool.submit(os.getpid)
        del os.environ["TRITON_INTERPRET"]
        assert first.result() != os.getpid()
        yield lambda *args: pool.submit(fused_argmax.noisy_argmax, *args).result(timeout=120)


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
    assert fused_argmax.split(4, 9000) == (5, 2048) and fused_argmax.split(128, 9000) == (3, 4096)
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


def test_no_rows(kernel: Kernel) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert kernel(torch.zeros(0, 7), torch.zeros(0), none, none).shape == (0,)


@pytest.mark.parametrize("n", [1, 2, 7, 64, 511, 512, 4096])
@pytest.mark.parametrize("vocab", [1, 2048, 2049, 32_000, 151_936, 600_000])
def test_parts_cover_each_row_once(n: int, vocab: int) -> None:
    parts, size = fused_argmax.split(n, vocab)
    assert size % fused_argmax.BLOCK == 0 and 1 <= parts <= fused_argmax.MAX_PARTS
    assert (parts - 1) * size < vocab <= parts * size


COMPILE = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sgl_ssd import fused_argmax as m

TYPES = dict(scores="*bf16", temperatures="*fp32", seeds="*i64", positions="*i64",
             part_best="*fp32", part_token="*i32", tokens="*i64")
SIZES = dict(BLOCK=m.BLOCK, PARTS=m.MAX_PARTS)
for kernel in (m._best_of_part, m._best_of_parts):
    kinds = {n: "constexpr" if n in SIZES else TYPES.get(n, "i32") for n in kernel.arg_names}
    sizes = {n: SIZES[n] for n in kernel.arg_names if n in SIZES}
    asm = compile(ASTSource(kernel, kinds, sizes), target=GPUTarget("cuda", 90, 32)).asm
    assert asm["cubin"] and "lg2.approx" not in asm["ptx"]
"""


def test_it_compiles_for_a_gpu_with_exact_logarithms(tmp_path) -> None:
    """Down to machine code, which needs no GPU: the interpreter accepts more than the compiler."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
