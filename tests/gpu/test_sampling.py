"""The draw on a GPU, fused and with torch operations: `python -m pytest tests/gpu -m gpu -s`."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from sgl_ssd.sampling import (
    FUSED_ENV,
    TOP_K_ALL,
    RowSampling,
    coupled_sample,
    coupled_scores,
    noisy_argmax,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

SIZES = [(1, 128_256), (5, 151_936), (64, 32_000), (257, 4099), (3, 1)]


def rows_on(device: str, n: int, **filters: float) -> RowSampling:
    """`n` rows, every third one greedy."""
    return RowSampling.of(
        [0.0 if i % 3 == 0 else 0.2 + (i % 17) / 10 for i in range(n)],
        [int(filters.get("top_k", TOP_K_ALL))] * n,
        [filters.get("top_p", 1.0)] * n,
        [filters.get("min_p", 0.0)] * n,
        [i * 0x1234_5678_9ABC for i in range(n)],
        device,
    )


def logits_of(n: int, vocab: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(n, vocab, generator=generator) * 3
    logits[torch.rand(n, vocab, generator=generator) < 0.2] = float("-inf")
    logits[:, 0] = 0.0
    return logits


@pytest.mark.parametrize("fused", ["1", "0"])
@pytest.mark.parametrize("filters", [{}, {"top_k": 50, "top_p": 0.9, "min_p": 0.02}])
@pytest.mark.parametrize(("n", "vocab"), SIZES)
def test_tokens_equal_those_of_the_cpu(monkeypatch, fused, filters, n, vocab):
    monkeypatch.setenv(FUSED_ENV, fused)
    logits, position = logits_of(n, vocab), torch.arange(n) + (1 << 33)
    scores = coupled_scores(logits, rows_on("cpu", n, **filters), position)
    want = scores.argmax(dim=-1)
    got = coupled_sample(logits.cuda(), rows_on("cuda", n, **filters), position.cuda()).cpu()
    gap = scores.gather(1, want[:, None]) - scores.gather(1, got[:, None])
    assert float(gap.max()) < 1e-5


def test_excluded_tokens_and_ties():
    """-inf never wins, whatever the noise; of equals the lowest id does."""
    n, vocab = 2000, 20_000
    scores = torch.full((n, vocab), float("-inf"), device="cuda")
    only = torch.randint(0, vocab, (n,), device="cuda")
    scores[torch.arange(n, device="cuda"), only] = -1e30
    seed = torch.arange(n, device="cuda")
    assert torch.equal(noisy_argmax(scores, torch.ones(n, device="cuda"), seed, seed), only)
    ties = torch.zeros(64, vocab, device="cuda")
    ties[:, [1234, 1235, 15_000]] = 1.0
    greedy = noisy_argmax(ties, torch.zeros(64, device="cuda"), seed[:64], seed[:64])
    assert greedy.tolist() == [1234] * 64


def _time_us(call: Callable[[], object]) -> float:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(50):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / 50 * 1e6


def test_the_fused_draw_is_faster(monkeypatch):
    for n, vocab in ((8, 151_936), (64, 151_936)):
        logits = torch.randn(n, vocab, device="cuda")
        rows, position = rows_on("cuda", n), torch.arange(n, device="cuda")
        times = {}
        for fused in ("1", "0"):
            monkeypatch.setenv(FUSED_ENV, fused)
            times[fused] = _time_us(lambda: coupled_sample(logits, rows, position))  # noqa: B023
        print(f"\n[{n}, {vocab}]: fused {times['1']:.0f} us, eager {times['0']:.0f} us")
        assert times["1"] < times["0"]
