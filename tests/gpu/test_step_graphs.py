"""Graphs of whole draft steps on a GPU: `python -m pytest tests/gpu -m gpu -s`."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch

from sgl_ssd.config import DraftServerConfig
from sgl_ssd.models import DRAFT_PATH

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
K = 6


@pytest.fixture(scope="module")
def engine() -> Any:
    from sgl_ssd.draft_server.device import prepare_device

    prepare_device("cuda", None)
    from sgl_ssd.draft_server.engine import DraftEngine
    from sgl_ssd.draft_server.runner import DraftRunner

    config = DraftServerConfig(
        endpoint="ipc:///unused", model_path=str(DRAFT_PATH), device="cuda", num_steps=K,
        fan_out=[4] * (K + 1), mem_fraction_static=0.9, max_total_tokens=20_000, max_sessions=8,
        max_branch_rows=64,
    )  # fmt: skip
    return DraftEngine(
        DraftRunner(config), num_steps=K, fan_out=[4] * (K + 1), max_branch_rows=64,
        max_sessions=8, prefill_chunk=512,
    )  # fmt: skip


def _open(engine: Any, seed: int = 0) -> Any:
    from sgl_ssd.draft_server.proposals import SamplingParams

    prompt = np.random.default_rng(seed).integers(10, 400, 60)
    draft = engine.open(prompt, SamplingParams(), "", K, [4] * (K + 1))
    while engine.busy:
        engine.work()
    return draft


@pytest.mark.parametrize("lanes", [1, 3, 5, 33, 64])
def test_a_graph_computes_what_an_eager_step_does(engine: Any, lanes: int):
    draft, runner = _open(engine), engine.stepper.runner
    assert runner._step_graphs is not None and runner.graph_rows == 64
    positions = 59 - np.arange(lanes) % 40
    entries = engine.stepper.scratch + np.arange(lanes)
    tokens = np.array([draft.tokens[p] for p in positions])
    engine.stepper.set_tokens(np.stack((entries, tokens)))
    row = np.full(lanes, draft.home.row)
    step = np.stack((entries, row, positions, row))
    # Every lane feeds the token that is there already: nothing of the KV changes.
    found = runner.decode(step)[0].float().clone()
    graphs, runner._step_graphs = runner._step_graphs, None
    theirs, runner._runner.decode_cuda_graph_runner = runner._runner.decode_cuda_graph_runner, None
    try:
        expected = runner.decode(step)[0].float()
    finally:
        runner._step_graphs, runner._runner.decode_cuda_graph_runner = graphs, theirs
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    assert float((found - expected).abs().max()) < 0.05 * float(expected.abs().max())
    engine.close(draft)


def test_host_time_of_a_step(engine: Any):
    """Printed; asserted is only that it is a graph that runs."""
    draft, runner = _open(engine, 1), engine.stepper.runner
    lanes = 24
    row = np.full(lanes, draft.home.row)
    step = np.stack((engine.stepper.scratch + np.arange(lanes), row, np.full(lanes, 40), row))
    times = {}
    for name in ("whole step", "SGLang's replay"):
        graphs = runner._step_graphs
        if name != "whole step":
            runner._step_graphs = None
        for count in (3, 50):
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(count):
                runner.decode(step)
            times[name] = (time.perf_counter() - started) / count * 1e6
            torch.cuda.synchronize()
        runner._step_graphs = graphs
    print("\nhost time to issue a step of 24 lanes:", {k: f"{v:.0f} us" for k, v in times.items()})
    engine.close(draft)
