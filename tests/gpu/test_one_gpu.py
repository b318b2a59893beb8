"""Both servers on one GPU, with CUDA graphs: `python -m pytest tests/gpu -m gpu -s`."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from parity.harness import compare, configure, send_all, ssd_state
from servers import ServerProcess
from sgl_ssd.models import DRAFT_PATH, TARGET_PATH
from sgl_ssd.sampling import TOP_K_ALL, RowSampling, coupled_scores

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

COMMON = ["--attention-backend", "triton", "--cuda-graph-backend-prefill", "disabled"]
COMMON += ["--mem-fraction-static", "0.3", "--skip-server-warmup", "--cuda-graph-max-bs", "16"]
COMMON += ["--max-total-tokens", "200000"]
HELD_OUT = Path(__file__).parents[2] / "benchmarks" / "pairs" / "held_out.jsonl"


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TARGET_PATH)
    rows = [json.loads(line) for line in HELD_OUT.read_text().splitlines()]
    texts = [row["text"] for row in rows if "text" in row]
    return [tokenizer(text, add_special_tokens=False)["input_ids"][:100] for text in texts[:16]]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("plain") / "server.log"
    args = ["--model-path", str(TARGET_PATH), *COMMON]
    with ServerProcess("sglang.launch_server", args, log=log, ready_path="/health") as server:
        yield server


@pytest.fixture(scope="module")
def ssd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("ssd") / "server.log"
    args = ["--model-path", str(TARGET_PATH), "--speculative-draft-model-path", str(DRAFT_PATH)]
    args += [*COMMON, "--speculative-num-steps", "7", "--ssd-draft-base-gpu-id", "0"]
    args += ["--ssd-allow-shared-gpu"]
    args += ["--ssd-draft-mem-fraction-static", "0.3", "--ssd-draft-attention-backend", "triton"]
    args += ["--ssd-draft-max-total-tokens", "200000", "--ssd-max-branch-rows", "128"]
    with ServerProcess("sgl_ssd.launch_server", args, log=log, ready_path="/health") as server:
        print(server.tail(20))
        assert re.search(r"draft server ready: .*graphs up to \d+ rows", log.read_text())
        yield server


def _bodies(prompts, tokens, **sampling):
    params = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True, **sampling}
    return [
        {"input_ids": ids, "sampling_params": params | {"sampling_seed": i}}
        for i, ids in enumerate(prompts)
    ]


def _speed(server: ServerProcess, ids: list[int], tokens: int) -> float:
    """Tokens per second at batch 1, from the slope of the time over the length."""
    times = {}
    for count in (64, 64 + tokens):
        body = _bodies([ids], count)[0]
        server.post("/generate", body)
        started = time.perf_counter()
        server.post("/generate", body)
        times[count] = time.perf_counter() - started
    return tokens / (times[64 + tokens] - times[64])


def test_sampler_agrees_across_devices():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 32000, generator=generator) * 3
    n = logits.shape[0]
    position = torch.arange(n)
    rows = [
        RowSampling.of([0.8] * n, [top_k] * n, [top_p] * n, [min_p] * n, list(range(n)), device)
        for device in ("cpu", "cuda")
        for top_k, top_p, min_p in ((TOP_K_ALL, 1.0, 0.0), (50, 0.9, 0.02))
    ]
    for cpu, gpu in ((rows[0], rows[2]), (rows[1], rows[3])):
        a = coupled_scores(logits, cpu, position)
        b = coupled_scores(logits.cuda(), gpu, position.cuda()).cpu()
        x, y = a.argmax(-1), b.argmax(-1)
        gap = (a.gather(1, x[:, None]) - a.gather(1, y[:, None])).abs().max()
        assert float(gap) < 1e-5


def test_parity_and_speed(plain, ssd, prompts):
    bodies = _bodies(prompts, 200)
    want = send_all(plain, bodies, 8)
    configure(ssd, ssd_drafting=0)
    off = send_all(ssd, bodies, 8)
    plain_speed = _speed(plain, prompts[0], 400)
    off_speed = _speed(ssd, prompts[0], 400)
    report = compare(ssd, bodies, want, off, "off")
    print("\nplain vs drafting off:", report.compared, "ties", report.ties, report.differences[:3])
    for steps, fan_out in ((4, 4), (7, 6)):
        configure(ssd, ssd_drafting=1, ssd_num_steps=steps, ssd_fan_out=fan_out)
        before = ssd_state(ssd)
        got = send_all(ssd, bodies, 8)
        speed = _speed(ssd, prompts[0], 400)
        after = ssd_state(ssd)
        configure(ssd, ssd_drafting=0)
        same = sum(a["output_ids"] == b["output_ids"] for a, b in zip(off, got, strict=True))
        print(
            f"K={steps} F={fan_out}: {same}/16 outputs equal to drafting off, "
            f"tokens/s plain {plain_speed:.0f}, off {off_speed:.0f}, on {speed:.0f}"
        )
        delta = {
            k: round(after[k] - before[k], 3)
            for k in (
                "rounds",
                "drafted",
                "accepted",
                "hits",
                "partial_hits",
                "backups",
                "timeouts",
            )
        }
        times = {
            k: round(after[k], 3)
            for k in ("round_trip_ms", "round_ms", "draft_wait_ms", "accept_length", "hit_rate")
        }
        print(delta, times)
        time.sleep(2)
        print({k: round(v, 3) for k, v in ssd_state(ssd)["draft_stats"].items()})
        assert after["hits"] > before["hits"]
        assert after["accepted"] > before["accepted"]
        assert same >= 12  # bf16: near ties may fall differently in forwards of another width


def test_same_seed_same_text(ssd, prompts):
    bodies = _bodies(prompts, 100, temperature=0.8, top_p=0.95)
    configure(ssd, ssd_drafting=1, ssd_num_steps=4, ssd_fan_out=4)
    first, second = send_all(ssd, bodies, 8), send_all(ssd, bodies, 1)
    same = sum(a["output_ids"] == b["output_ids"] for a, b in zip(first, second, strict=True))
    print(f"\nT=0.8: {same}/16 equal between 8 at a time and one by one")
    assert same >= 10
