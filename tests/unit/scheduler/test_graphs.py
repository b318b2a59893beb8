"""The two sets of graphs, and what each of them reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sgl_ssd.scheduler.graphs import PlainDecodeGraphs


class FakeGraphs:
    """As SGLang's runner: new buffers for adapters with every capture, and none but the newest."""

    def __init__(self, runner: Any, attn_backend: Any = None) -> None:
        self.algorithm = runner.spec_algorithm
        if runner.server_args.enable_lora:
            runner.lora_manager.max_bs_in_cuda_graph = 48
            runner.lora_manager.lora_backend.cuda_graph_batch_info = self


def runner(enable_lora: bool | None) -> Any:
    made = SimpleNamespace(
        spec_algorithm="SSD",
        server_args=SimpleNamespace(enable_lora=enable_lora),
        attn_backend="wide backend",
        init_new_workspace=False,
        _get_attention_backend=lambda init_new_workspace: "plain backend",
    )
    if enable_lora:
        made.lora_manager = SimpleNamespace(lora_backend=SimpleNamespace())
    made.decode_cuda_graph_runner = FakeGraphs(made)
    return made


@pytest.mark.parametrize("enable_lora", [True, None])
def test_each_width_has_its_graphs_and_buffers(enable_lora: bool | None) -> None:
    target = runner(enable_lora)
    wide = target.decode_cuda_graph_runner
    plain = PlainDecodeGraphs(target)

    def in_use() -> tuple[Any, ...]:
        used = target.decode_cuda_graph_runner, target.attn_backend
        if not enable_lora:
            return used
        lora = target.lora_manager
        assert lora.max_bs_in_cuda_graph == 48
        return *used, lora.lora_backend.cuda_graph_batch_info

    before = in_use()
    plain.capture()
    assert in_use() == before and target.spec_algorithm == "SSD"
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), plain.active():
            graphs, backend, *buffers = in_use()
            assert backend == "plain backend"
            assert graphs is not wide and graphs.algorithm == SpeculativeAlgorithm.NONE
            assert all(info is graphs for info in buffers)
            1 / 0  # noqa: B018
        assert in_use() == before


def test_without_graphs_nothing_changes() -> None:
    target = SimpleNamespace(decode_cuda_graph_runner=None)
    plain = PlainDecodeGraphs(target)
    plain.capture()
    with plain.active():
        assert vars(target) == {"decode_cuda_graph_runner": None}
