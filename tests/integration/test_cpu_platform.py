"""Plain SGLang on this package's CPU platform: exact, overlapped, quiet when idle, ends cleanly."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch

from servers import ServerProcess

pytestmark = [pytest.mark.integration, pytest.mark.slow]

PROMPTS = [
    "The quick brown fox",
    "def function(",
    "a",
    "checks what it wrote; " * 40,
    "The quick brown fox jumps over the lazy dog, and then",
    "éèà 世界 \N{SNOWMAN}",
]
NEW_TOKENS = 48


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> dict[str, list[int]]:
    """Greedy continuations by transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    outputs = {}
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.inference_mode():
            full = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
        outputs[prompt] = full[0, ids.shape[1] :].tolist()
    return outputs


def _greedy(server: ServerProcess, prompt: str) -> list[int]:
    answer = server.generate(prompt, temperature=0, max_new_tokens=NEW_TOKENS)
    return list(answer["output_ids"])


def test_greedy_equals_transformers(
    plain_server: ServerProcess, expected: dict[str, list[int]]
) -> None:
    for prompt in PROMPTS:
        assert _greedy(plain_server, prompt) == expected[prompt], prompt


def test_greedy_equals_transformers_when_concurrent(
    plain_server: ServerProcess, expected: dict[str, list[int]]
) -> None:
    _check_concurrent(plain_server, expected)


def _check_concurrent(server: ServerProcess, expected: dict[str, list[int]]) -> None:
    prompts = PROMPTS * 3
    with ThreadPoolExecutor(len(prompts)) as pool:
        outputs = list(pool.map(lambda prompt: _greedy(server, prompt), prompts))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output == expected[prompt], prompt


def test_runs_overlapped_with_cpu_defaults(plain_server: ServerProcess) -> None:
    info = plain_server.get("/server_info")
    assert info["disable_overlap_schedule"] is False
    assert info["device"] == "cpu"
    assert info["dtype"] == "float32"
    assert info["attention_backend"] == "torch_native"
    assert info["sampling_backend"] == "pytorch"
    assert info["grammar_backend"] == "llguidance"
    assert info["sleep_on_idle"] is True
    assert info["max_total_num_tokens"] == 65536  # 64 Ki tokens of 1 KiB: 64 MiB


def test_regex_is_obeyed(plain_server: ServerProcess) -> None:
    pattern = "(cat|dog){1,4}!"
    answer = plain_server.generate("The", temperature=1, max_new_tokens=40, regex=pattern)
    assert re.fullmatch(pattern, answer["text"])
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"


def test_sampling_varies(plain_server: ServerProcess) -> None:
    texts = {
        plain_server.generate("The", temperature=1.0, max_new_tokens=12)["text"] for _ in range(8)
    }
    assert len(texts) >= 7


def test_penalties_change_the_text(plain_server: ServerProcess) -> None:
    """Also: the penalty helpers, compiled by SGLang, run here without a compiler."""
    common = {"temperature": 0, "max_new_tokens": 64, "ignore_eos": True}
    plain = plain_server.generate("The", **common)
    penalised = plain_server.generate(
        "The", frequency_penalty=2.0, repetition_penalty=1.5, min_new_tokens=4, **common
    )
    assert len(penalised["output_ids"]) == 64
    assert penalised["output_ids"] != plain["output_ids"]


def test_logprobs_add_up(plain_server: ServerProcess) -> None:
    body = {
        "text": "The quick",
        "sampling_params": {"temperature": 0, "max_new_tokens": 4},
        "return_logprob": True,
        "top_logprobs_num": 512,
    }
    meta = plain_server.post("/generate", body)["meta_info"]
    for top in meta["output_top_logprobs"]:
        total = sum(torch.tensor([entry[0] for entry in top]).exp().tolist())
        assert total == pytest.approx(1.0, abs=1e-4)


def test_idle_server_sleeps(plain_server: ServerProcess) -> None:
    plain_server.generate("The", temperature=0, max_new_tokens=4)
    time.sleep(2.0)
    family = plain_server.processes()
    before = sum(_cpu_seconds(process) for process in family)
    time.sleep(4.0)
    used = sum(_cpu_seconds(process) for process in family) - before
    assert used < 0.15 * 4.0


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def test_two_ranks_and_pages(
    tiny_llama: Path, tmp_path: Path, expected: dict[str, list[int]]
) -> None:
    """Tensor parallelism over gloo, and the paged allocator without Triton."""
    args = ["--model-path", str(tiny_llama), "--device", "cpu", "--dtype", "float32"]
    args += ["--tp", "2", "--page-size", "16", "--chunked-prefill-size", "64"]
    with ServerProcess("sglang.launch_server", args, log=tmp_path / "server.log") as server:
        assert server.get("/server_info")["tp_size"] == 2
        _check_concurrent(server, expected)
        server.assert_ends_cleanly()


def test_logits_do_not_depend_on_the_way_a_token_is_fed(tiny_llama: Path) -> None:
    """Decoded, verified, prefilled in chunks, alone or in a batch: the same."""
    script = Path(__file__).with_name("cpu_runner_probe.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tiny_llama)],
        env={**os.environ, "SGLANG_SSD_DEVICE": "cpu"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    differences = json.loads(done.stdout.splitlines()[-1])
    scale = differences.pop("scale")
    # Exactly 0 with MKL on x86-64; plain padding-free kernels reach about 1e-5 of the scale.
    assert {name: d for name, d in differences.items() if d > 1e-6 * scale} == {}
