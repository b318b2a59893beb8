"""Fixtures of all tests: a tiny model and a plain SGLang server on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from servers import ServerProcess
from tiny_model import make_tiny_llama


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random Llama in fp32 (2 layers, vocabulary 512) with a byte-level tokenizer."""
    return make_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def plain_server(
    tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """Plain SGLang on the CPU, overlap scheduler on, no speculation: what others compare with."""
    log = tmp_path_factory.mktemp("plain-server") / "server.log"
    args = ["--model-path", str(tiny_llama), "--device", "cpu"]
    with ServerProcess("sglang.launch_server", args, log=log) as server:
        yield server
        server.assert_ends_cleanly()
