"""The draw on a GPU, fused and with torch operations: `python -m pytest tests/gpu -m gpu -s`."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from sgl_ssd import fused_draw
from sgl_ssd.draft_server.proposals import Proposer, SamplingParams
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


def rows_on(device: str, n: int, least: float = 0.0, **filters: float) -> RowSampling:
    """`n` rows of temperatures from `least` on, every third one greedy if that is 0."""
    return RowSampling.of(
        [max(least, 0.0 if i % 3 == 0 else 0.2 + (i % 17) / 10) for i in range(n)],
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


# -- the best of a row: the draft's proposals --------------------------------------------------

BEST_SIZES = [(1, 128_256), (32, 128_256), (256, 128_256), (24, 151_936)]
WIDTH = 10


def check_best(got: torch.Tensor, scores: torch.Tensor) -> None:
    """`got` int64 [N, W] are the best of `scores`, but where two are closer than 1e-5."""
    best, ids = scores.topk(got.shape[1], dim=-1)
    torch.testing.assert_close(scores.gather(1, got), best, rtol=0, atol=1e-5)
    ordered = got.sort(dim=-1).values
    assert (ordered[:, 1:] > ordered[:, :-1]).all(), "an id came twice"
    assert int((got != ids).sum()) <= max(4, got.numel() // 100)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "vocab"), BEST_SIZES)
def test_the_best_equal_those_of_torch(n, vocab, dtype):
    logits = logits_of(n, vocab).to(dtype).cuda()
    # Equal logits, of which bfloat16 has many, are in no order with torch: all its rows are drawn.
    rows = rows_on("cuda", n, least=0.5 if dtype == torch.bfloat16 else 0.0)
    position = torch.arange(n, device="cuda") + (1 << 33)
    got = fused_draw.noisy_topk(logits, rows.temperature, rows.seed, position, WIDTH)
    check_best(got, coupled_scores(logits, rows, position))
    first = noisy_argmax(logits, rows.temperature, rows.seed, position)
    assert torch.equal(got[:, 0], first), "the draft's noise is the target's"


def test_the_best_in_order_of_ids_among_equals():
    logits = torch.zeros(3, 128_256, device="cuda")
    logits[0, 5::1000] = 1.0
    logits[1] = float("nan")
    logits[2] = float("-inf")
    logits[2, 128_255] = -1e30
    zeros = torch.zeros(3, dtype=torch.int64, device="cuda")
    limit = torch.tensor([128_256, 4, 200_000], dtype=torch.int32, device="cuda")
    temperature = torch.zeros(3, device="cuda")
    got = fused_draw.noisy_topk(logits, temperature, zeros, zeros, 6, limit=limit).tolist()
    assert got == [list(range(5, 6005, 1000)), [0, 1, 2, 3, 0, 0], [128_255, 0, 1, 2, 3, 4]]


def test_a_graph_replays_it_with_other_inputs():
    n, vocab, num_sessions = 24, 128_256, 7
    table = rows_on("cuda", num_sessions)
    limit = torch.full((num_sessions,), vocab, dtype=torch.int32, device="cuda")
    logits = torch.empty(n, vocab, device="cuda")
    places = torch.zeros(n, dtype=torch.int64, device="cuda")
    position = torch.zeros(n, dtype=torch.int64, device="cuda")

    def draw() -> torch.Tensor:
        return fused_draw.noisy_topk(
            logits, table.temperature, table.seed, position, WIDTH, places=places, limit=limit
        )

    draw()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = draw()
    for turn in range(3):
        logits.copy_(logits_of(n, vocab + turn)[:, :vocab])
        places.copy_((torch.arange(n) * (turn + 1)) % num_sessions)
        position.copy_(torch.arange(n) + 1000 * turn)
        table.temperature[3] = 0.5 + turn
        table.seed[4] = -(1 << 62) + turn
        limit[5] = 100_000 + turn
        graph.replay()
        allowed = torch.arange(vocab, device="cuda") < limit[places][:, None]
        check_best(
            got, coupled_scores(logits.where(allowed, -torch.inf), table.select(places), position)
        )


def test_the_draft_proposes_the_same_fused_and_eager(monkeypatch):
    """With an odd and an even number of rows: columns of a packed upload lie at odd places."""
    vocab = 128_256
    params = [
        SamplingParams(),
        SamplingParams(temperature=0.8, seed=-(2**61) + 3, vocab_limit=vocab - 256),
        SamplingParams(
            temperature=1.0, seed=5, bias_ids=np.array([7], np.int32),
            bias_values=np.array([30.0], np.float32),
        ),
    ]  # fmt: skip
    for n in (8, 13):
        logits, got = logits_of(n, vocab).cuda(), {}
        sessions, positions = np.arange(n) % 3, np.arange(n) + 50
        packed = torch.from_numpy(np.stack((positions + 1, sessions))).cuda()
        for fused in ("1", "0"):
            monkeypatch.setenv(FUSED_ENV, fused)
            made = Proposer(torch.device("cuda"), vocab, 3, 4, WIDTH)
            for i, p in enumerate(params):
                made.set_session(i, p)
            got[fused] = made.propose(logits, sessions, positions, packed[1], packed[0])
        assert int((got["1"] != got["0"]).sum()) <= 2


def _graph_us(call: Callable[[], object]) -> float:
    """Time on the GPU alone, without the host's for launching."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            call()
    return _time_us(graph.replay) / 20


def test_the_best_are_found_faster():
    for n, vocab in BEST_SIZES:
        logits = torch.randn(n, vocab, device="cuda") * 3
        rows, position = rows_on("cuda", n), torch.arange(n, device="cuda")
        rows.temperature.fill_(1.0)

        def fused() -> object:
            return fused_draw.noisy_topk(logits, rows.temperature, rows.seed, position, WIDTH)  # noqa: B023

        def eager() -> object:
            return coupled_scores(logits, rows, position).topk(WIDTH)  # noqa: B023

        call_us, gpu_us, eager_us = _time_us(fused), _graph_us(fused), _time_us(eager)
        topk_us = _time_us(lambda: logits.topk(WIDTH))  # noqa: B023
        rows.temperature.zero_()
        print(
            f"\n[{n}, {vocab}], {WIDTH} best: fused {call_us:.0f} us a call, {gpu_us:.0f} us on "
            f"the GPU, greedy {_graph_us(fused):.0f} us; eager {eager_us:.0f} us; torch.topk "
            f"without noise {topk_us:.0f} us"
        )
        assert call_us < eager_us
