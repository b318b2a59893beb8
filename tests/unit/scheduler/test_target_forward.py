"""The two parts of a verify's launch: what is queued before the drafts are known, and after."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from sgl_ssd.scheduler.inputs import DraftInput
from sgl_ssd.scheduler.target_forward import TargetForward

WIDTH, CONTEXT = 4, 64


class FakeGraphs:
    """As SGLang's runner of decode graphs: what it loads is what a replay reads."""

    def __init__(self, fits: bool = True) -> None:
        self.loaded: list[Any] = []
        self._fits = fits

    def can_run_graph(self, batch: Any) -> bool:
        return self._fits

    def load_batch(self, batch: Any) -> None:
        self.loaded.append(batch)


class FakeTarget:
    """Says what it was to run: mode, tokens, positions and slots at the time of the launch."""

    def __init__(self, graphs: FakeGraphs | None) -> None:
        self.model_runner = SimpleNamespace(
            decode_cuda_graph_runner=graphs, model_config=SimpleNamespace(context_len=CONTEXT)
        )
        self.consumers: list[int] = []
        self.ran: list[dict[str, Any]] = []

    def set_hicache_consumer(self, index: int) -> None:
        self.consumers.append(index)

    def forward_batch_generation(
        self, batch: Any, forward_batch: Any = None, is_verify: bool = False
    ) -> Any:
        assert is_verify
        run = forward_batch if batch is None else batch
        positions = None if run.spec_info is None else run.spec_info.positions.tolist()
        self.ran.append({
            "planned": batch is None and run.ready, "mode": run.forward_mode,
            "tokens": run.input_ids.tolist(), "positions": positions,
            "slots": run.out_cache_loc.tolist(), "lens": run.seq_lens.tolist(),
        })  # fmt: skip
        return SimpleNamespace(logits_output="logits", can_run_cuda_graph=batch is None)


@pytest.fixture(autouse=True)
def _describes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """What SGLang makes of a batch: the same tensors, and a mark for attention that is planned."""

    def init_new(batch: Any, runner: Any, *, return_hidden_states_before_norm: bool) -> Any:
        made = SimpleNamespace(**vars(batch), ready=False)
        made.mark_forward_metadata_ready = lambda: setattr(made, "ready", True)
        return made

    monkeypatch.setattr(ForwardBatch, "init_new", init_new)


def batch_of(lens: list[int]) -> Any:
    """Row i of the table holds the slots 100 i, 100 i + 1, .."""
    rows = torch.arange(len(lens)).flip(0)
    bonus, seq_lens = torch.tensor([7 + i for i in range(len(lens))]), torch.tensor(lens)
    return SimpleNamespace(
        reqs=[object()] * len(lens), seq_lens=seq_lens, seq_lens_cpu=None, seq_lens_sum=None,
        req_pool_indices=rows, hicache_consumer_index=3, forward_mode=ForwardMode.DECODE,
        spec_info=DraftInput(bonus_tokens=bonus, new_seq_lens=seq_lens),
        req_to_token_pool=SimpleNamespace(
            req_to_token=torch.arange(100)[None, :] + 100 * torch.arange(len(lens))[:, None]
        ),
    )  # fmt: skip


def verify(forward: TargetForward, batch: Any, drafts: list[list[int]], early: bool) -> Any:
    bonus = batch.spec_info.bonus_tokens
    prepared = forward.prepare(batch) if early else None
    tokens = torch.tensor(drafts, dtype=torch.int64).reshape(len(batch.reqs), -1)
    return prepared, forward(batch, bonus, tokens, prepared)


def test_a_prepared_verify_is_the_same_as_one_that_is_not():
    drafts = [[1, 2, 3], [4, 5, 6]]
    ran = []
    for early in (True, False):
        graphs = FakeGraphs()
        target = FakeTarget(graphs)
        forward = TargetForward(target, WIDTH, "cpu")
        batch = batch_of([10, 62])
        prepared, (chain, logits, graph) = verify(forward, batch, drafts, early)
        assert chain.tolist() == [[7, 1, 2, 3], [8, 4, 5, 6]]
        assert logits == "logits" and graph is early
        assert len(graphs.loaded) == len(target.consumers) == early
        if early:
            assert graphs.loaded == [prepared.batch] and target.consumers == [3]
        ran.append(target.ran)
    assert ran[0][0].pop("planned") and not ran[1][0].pop("planned")
    assert ran[0] == ran[1]
    assert ran[0][0] == {
        "mode": ForwardMode.TARGET_VERIFY, "tokens": [7, 1, 2, 3, 8, 4, 5, 6],
        "positions": [10, 11, 12, 13, 62, 63, 63, 63], "lens": [10, 62],
        "slots": [110, 111, 112, 113, 62, 63, 64, 65],
    }  # fmt: skip


def test_without_drafts_what_was_prepared_is_left_and_the_next_is_not_prepared():
    graphs = FakeGraphs()
    target = FakeTarget(graphs)
    forward = TargetForward(target, WIDTH, "cpu")
    forward._plain.active = lambda: torch.no_grad()  # type: ignore[method-assign]
    batch = batch_of([10, 20])
    prepared, (chain, _, graph) = verify(forward, batch, [[], []], early=True)
    assert prepared is not None and not graph
    assert chain.tolist() == [[7], [8]]
    assert target.ran[0]["mode"] == ForwardMode.DECODE and target.ran[0]["lens"] == [11, 21]
    assert target.ran[0]["slots"] == [110, 20] and batch.seq_lens.tolist() == [10, 20]
    assert forward.prepare(batch_of([11, 21])) is None
    verify(forward, batch_of([11, 21]), [[1, 2, 3], [0, 0, 0]], early=False)
    assert forward.prepare(batch_of([12, 22])) is not None


@pytest.mark.parametrize("graphs", [None, FakeGraphs(fits=False)])
def test_without_a_graph_nothing_is_prepared(graphs: FakeGraphs | None):
    target = FakeTarget(graphs)
    forward = TargetForward(target, WIDTH, "cpu")
    prepared, (chain, _, _) = verify(forward, batch_of([10]), [[1, 2]], early=True)
    assert prepared is None and not target.ran[0]["planned"]
    assert chain.tolist() == [[7, 1, 2]]
