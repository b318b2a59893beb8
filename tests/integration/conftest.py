"""Servers on the bundled pair, shared by the integration tests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from servers import ServerProcess
from sgl_ssd.models import TARGET_PATH

MAX_STEPS = 12
# What plain SGLang and ours serve alike. This parser thinks only when it is told to.
SERVED = ["--device", "cpu", "--dtype", "float32", "--enable-custom-logit-processor"]
SERVED += ["--tool-call-parser", "qwen25", "--reasoning-parser", "mimo"]
SERVED += ["--enable-return-hidden-states"]
HELD_OUT = Path(__file__).parents[2] / "benchmarks" / "pairs" / "held_out.jsonl"


@pytest.fixture(scope="session")
def tokenizer():
    """Tokenizer of the bundled pair."""
    return AutoTokenizer.from_pretrained(TARGET_PATH)


@pytest.fixture(scope="session")
def held_out(tokenizer) -> list[list[int]]:
    """Token ids of texts that neither model was trained on."""
    rows = [json.loads(line) for line in HELD_OUT.read_text().splitlines()]
    texts = [row["text"] for row in rows if "text" in row]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


@pytest.fixture(scope="session")
def prompts(held_out) -> list[list[int]]:
    """64 prompts of many lengths, 1 to 1500 tokens; different beginnings."""
    lengths = [1, 2, 3, 5, 9, 16, 17, 40, 64, 65, 100, 150, 250, 400, 700, 1500]
    flat = [token for ids in held_out for token in ids]
    while len(flat) < 64 * 1600:
        flat += flat
    return [flat[i * 1531 : i * 1531 + lengths[i % len(lengths)]] for i in range(64)]


@pytest.fixture(scope="session")
def ssd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Target and draft server on the bundled pair in fp32; K up to 12, set it while it runs."""
    log = tmp_path_factory.mktemp("ssd-server") / "server.log"
    args = [*SERVED, "--speculative-num-steps", str(MAX_STEPS), "--enable-metrics"]
    env = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
    with ServerProcess("sgl_ssd.launch_server", args, log=log, env=env) as server:
        yield server
        server.assert_ends_cleanly()


@pytest.fixture(scope="session")
def plain_bundled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Plain SGLang on the bundled target, without the overlap loop, whose penalties lag."""
    log = tmp_path_factory.mktemp("plain-bundled") / "server.log"
    args = [*SERVED, "--model-path", str(TARGET_PATH), "--disable-overlap-schedule"]
    with ServerProcess("sglang.launch_server", args, log=log) as server:
        yield server
