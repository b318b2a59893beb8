"""Pairs that do not quite fit: another context length, padded vocabularies.

The drafts are the target's own weights, so each of them is right wherever there is one.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from parity.harness import Body, compare, configure, send_all, ssd_state
from servers import ServerProcess
from tiny_model import make_tiny_llama, resize, write_tokenizer

pytestmark = pytest.mark.integration

NUM_TOKENS = 440  # that have a text; both models have rows for more
TARGET_CONTEXT, DRAFT_CONTEXT = 256, 64


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Path]:
    """The same model by (vocab_size, context_length)."""
    folder = tmp_path_factory.mktemp("models")
    whole = make_tiny_llama(folder / "whole", seed=3)
    write_tokenizer(whole, NUM_TOKENS)
    bare = resize(whole, folder / "bare", vocab_size=NUM_TOKENS, context_length=TARGET_CONTEXT)
    sizes = [(512, TARGET_CONTEXT), (448, DRAFT_CONTEXT)]
    return {
        (vocab, context): resize(
            bare, folder / f"{vocab}-{context}", vocab_size=vocab, context_length=context
        )
        for vocab, context in sizes
    }


def start(target: Path, draft: Path, log: Path, *more: str) -> ServerProcess:
    args = ["--model-path", str(target), "--speculative-draft-model-path", str(draft)]
    args += ["--device", "cpu", "--dtype", "float32", "--speculative-num-steps", "4", *more]
    return ServerProcess("sgl_ssd.launch_server", args, log=log)


@pytest.fixture(scope="module")
def short_draft(models: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A draft of a quarter of the target's context, and of a smaller padded vocabulary."""
    log = tmp_path_factory.mktemp("short-draft") / "server.log"
    target, draft = models[512, TARGET_CONTEXT], models[448, DRAFT_CONTEXT]
    with start(target, draft, log) as server:
        configure(server, ssd_fan_out=3, ssd_backup=2)
        yield server


def prompt(length: int) -> list[int]:
    draw = random.Random(length)
    return [draw.randrange(2, NUM_TOKENS) for _ in range(length)]


def bodies_of(lengths: list[int], max_new_tokens: int, **params: Any) -> list[Body]:
    sampling = {"max_new_tokens": max_new_tokens, "temperature": 0.0, "ignore_eos": True, **params}
    return [
        {"input_ids": prompt(n), "sampling_params": sampling | {"sampling_seed": n}}
        for n in lengths
    ]


def check(server: ServerProcess, bodies: list[Body]) -> dict[str, Any]:
    """The text is the same with drafts and without; returns what the counters have gained."""
    configure(server, ssd_drafting=0)
    want = send_all(server, bodies, 3)
    configure(server, ssd_drafting=1)
    before = ssd_state(server)
    got = send_all(server, bodies, 3)
    after = ssd_state(server)
    configure(server, ssd_drafting=0)
    compare(server, bodies, want, got).check()
    gained = {n: after[n] - before[n] for n in ("drafted", "accepted", "hits", "invalid_messages")}
    gained["context"] = after["without_drafts"].get("context", 0) - before["without_drafts"].get(
        "context", 0
    )
    return gained


def test_a_request_outgrows_the_context_of_the_draft(short_draft):
    """Up to the border drafts are right; beyond it there are none, and nothing else changes."""
    inside = check(short_draft, bodies_of([10, 20], 40))
    assert inside["accepted"] >= 40 and inside["context"] == 0
    across = check(short_draft, bodies_of([10, 60, 63, 64, 65], 100))
    assert across["accepted"] >= 30 and across["context"] > 100
    beyond = check(short_draft, bodies_of([65, 100, 200], 50))
    assert beyond["drafted"] == 0 and beyond["context"] > 100
    for gained in (inside, across, beyond):
        assert gained["invalid_messages"] == 0
        # Drafts are the target's own: what is drafted is right, but for the end of a request.
        assert gained["accepted"] >= 0.8 * gained["drafted"]


def test_both_context_lengths_are_named_at_the_start(short_draft):
    log = short_draft.log.read_text()
    assert f"context of the draft {DRAFT_CONTEXT} tokens, of the target {TARGET_CONTEXT}" in log


def test_json_without_a_reasoning_parser(short_draft):
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})
    for form in ({"json_schema": schema}, {"json_schema": json.dumps({"type": "object"})}):
        for temperature in (0.0, 1.0):
            check(short_draft, bodies_of([12, 30], 24, temperature=temperature, **form))
