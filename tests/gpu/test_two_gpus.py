"""A target on two GPUs, its draft on the host's CPU: `python -m pytest tests/gpu -m gpu -s`."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from parity.harness import configure, send_all, ssd_state
from servers import ServerProcess
from sgl_ssd.models import DRAFT_PATH, TARGET_PATH

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
HELD_OUT = Path(__file__).parents[2] / "benchmarks" / "pairs" / "held_out.jsonl"


@pytest.fixture(scope="module")
def bodies() -> list[dict]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TARGET_PATH)
    rows = [json.loads(line) for line in HELD_OUT.read_text().splitlines()]
    texts = [row["text"] for row in rows if "text" in row][:16]
    sampling = {"max_new_tokens": 100, "ignore_eos": True}
    return [
        {
            "input_ids": tokenizer(text, add_special_tokens=False)["input_ids"][:100],
            "sampling_params": sampling | {"sampling_seed": i, "temperature": 0.8 * (i % 2)},
        }
        for i, text in enumerate(texts)
    ]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("ranks") / "server.log"
    args = ["--model-path", str(TARGET_PATH), "--speculative-draft-model-path", str(DRAFT_PATH)]
    args += ["--tp-size", "2", "--ssd-draft-device", "cpu", "--attention-backend", "triton"]
    args += ["--cuda-graph-backend-prefill", "disabled", "--skip-server-warmup"]
    args += ["--mem-fraction-static", "0.5", "--max-total-tokens", "50000"]
    args += ["--cuda-graph-max-bs", "8", "--ssd-draft-max-total-tokens", "20000"]
    args += ["--disable-custom-all-reduce"]
    with ServerProcess("sgl_ssd.launch_server", args, log=log, ready_path="/health") as server:
        assert "target on GPUs 0, 1; draft on the host's CPU" in log.read_text()
        yield server


def test_ranks_agree_with_drafts_from_the_cpu(ranks, bodies):
    configure(ranks, ssd_drafting=0)
    off = send_all(ranks, bodies, 8)
    again = send_all(ranks, bodies, 8)
    configure(ranks, ssd_drafting=1)
    before = ssd_state(ranks)
    on = send_all(ranks, bodies, 8)
    after = ssd_state(ranks)

    def same(a: list, b: list) -> int:
        return sum(x["output_ids"] == y["output_ids"] for x, y in zip(a, b, strict=True))

    print(f"\noff twice {same(off, again)}/16 equal, on {same(off, on)}/16 equal to off")
    counts = {k: after[k] - before[k] for k in ("drafted", "accepted", "hits", "backups")}
    print(counts)
    assert counts["hits"] > 0 and counts["accepted"] > 0
    assert same(off, on) >= 8  # bf16: near ties fall differently in forwards of another width


def test_the_draft_is_killed(ranks, bodies):
    configure(ranks, ssd_drafting=1)
    drafts = [
        p
        for p in psutil.Process(ranks.process.pid).children(recursive=True)
        if "sgl_ssd.draft_server" in " ".join(p.cmdline()) or "draft_server" in p.name()
    ]
    assert drafts
    os.kill(drafts[0].pid, signal.SIGKILL)
    answers = send_all(ranks, bodies, 8)
    assert [len(a["output_ids"]) for a in answers] == [100] * 16
    deadline = time.monotonic() + 90
    hits = ssd_state(ranks)["hits"]
    while ssd_state(ranks)["hits"] == hits:
        assert time.monotonic() < deadline, "no drafts since"
        send_all(ranks, bodies[:4], 4)
