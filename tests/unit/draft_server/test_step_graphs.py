"""What a graph of a whole step reads and writes, with a graph that is only pretended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sgl_ssd.draft_server.step_graphs import StepGraphs

SIZES = [1, 2, 4, 8]


class PretendedGraphs:
    """Captures what SGLang would: a batch of static buffers, and the hook that fills them in."""

    def __init__(self, attention: Any) -> None:
        self.capture_bs = SIZES
        self.backend = self
        self._batches = {
            n: SimpleNamespace(
                batch_size=n, input_ids=torch.zeros(n, dtype=torch.int64),
                req_pool_indices=torch.zeros(n, dtype=torch.int64),
                positions=torch.zeros(n, dtype=torch.int64),
                seq_lens=torch.ones(n, dtype=torch.int64),
                out_cache_loc=torch.zeros(n, dtype=torch.int64),
            )
            for n in SIZES
        }  # fmt: skip
        self._hook = attention.init_forward_metadata_in_graph
        self.replayed: list[Any] = []

    def _make_graph_key(self, size: int) -> int:
        return size

    def replay(self, key: int, batch: Any) -> Any:
        self._hook(self._batches[key])
        self.replayed.append(self._batches[key])
        return SimpleNamespace(next_token_logits=torch.arange(key)[:, None])


class Attention:
    """Notes the lengths it plans for."""

    def __init__(self) -> None:
        self.planned: list[list[int]] = []

    def init_forward_metadata_in_graph(self, batch: Any) -> None:
        raise AssertionError("not ours")

    def init_forward_metadata_out_graph(self, batch: Any) -> None:
        self.planned.append(batch.seq_lens.tolist())


@pytest.fixture
def bench() -> Any:
    attention = Attention()
    next_token = torch.arange(20) + 100
    table = torch.arange(60, dtype=torch.int32).view(6, 10) + 1  # slot 0 belongs to nobody
    steps = StepGraphs(attention, 8, next_token, table)
    with steps.recording():
        graphs = PretendedGraphs(attention)
    with pytest.raises(AssertionError):
        attention.init_forward_metadata_in_graph(None)
    steps.use(graphs)
    return SimpleNamespace(steps=steps, graphs=graphs, attention=attention, next_token=next_token)


@pytest.mark.parametrize(("lanes", "size"), [(1, 1), (3, 4), (4, 4), (5, 8), (8, 8)])
def test_a_step_is_filled_up_to_the_next_graph(bench: Any, lanes: int, size: int):
    step = np.stack(
        (np.arange(lanes) + 2, np.arange(lanes) % 6, np.arange(lanes)[::-1], np.full(lanes, 3))
    )
    on_device = bench.steps.load(step)
    assert on_device.tolist() == step.tolist()
    assert bench.steps.replay(lanes).tolist() == [[i] for i in range(lanes)]
    (batch,) = bench.graphs.replayed
    assert batch.batch_size == size
    unused = size - lanes
    assert batch.input_ids[:lanes].tolist() == [102 + i for i in range(lanes)]
    assert batch.req_pool_indices[:lanes].tolist() == step[1].tolist()
    assert batch.positions.tolist() == step[2].tolist() + [0] * unused
    assert batch.seq_lens.tolist() == (step[2] + 1).tolist() + [1] * unused
    slots = [1 + 10 * (i % 6) + p for i, p in enumerate(step[2].tolist())]
    assert batch.out_cache_loc.tolist() == slots + [0] * unused
    assert bench.attention.planned == [batch.seq_lens.tolist()]


def test_tokens_are_looked_up_when_the_graph_runs(bench: Any):
    step = np.array([[4], [1], [2], [0]])
    bench.steps.load(step)
    bench.next_token[4] = 7
    bench.steps.replay(1)
    assert bench.graphs.replayed[0].input_ids.tolist() == [7]
