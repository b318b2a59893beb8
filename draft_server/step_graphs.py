"""Decode steps as one copy to the device and one replay.

SGLang's replay of a decode graph first copies each input into a buffer of its own and plans
attention: some forty operations, which take the host about as long as a small draft's forward takes
a GPU. Where that plan needs the device only (Triton's attention), it is recorded into the graph
here, together with looking up the lanes' tokens and KV slots.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch

ROWS = 4
UNUSED = -1
"""Position of a lane that only fills up a graph."""


class StepGraphs:
    """The inputs of a decode step, and SGLang's decode graphs, which begin with reading them.

    `inputs` int64 [4, N], by lane: its entry of `next_token`, its row of `req_to_token`, position,
    and session (which the graph leaves to whoever draws).
    """

    def __init__(
        self,
        attention: Any,
        max_lanes: int,
        next_token: torch.Tensor,
        req_to_token: torch.Tensor,
    ) -> None:
        self._attention = attention
        self._next_token = next_token
        self._req_to_token = req_to_token
        self._inputs = torch.zeros(ROWS * max_lanes, dtype=torch.int64, device=next_token.device)
        self._graphs: Any = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Every decode graph that SGLang captures meanwhile begins with `_prepare`."""
        self._attention.init_forward_metadata_in_graph = self._prepare
        try:
            yield
        finally:
            del self._attention.init_forward_metadata_in_graph

    def use(self, graphs: Any) -> None:
        """Replay `graphs`, SGLang's runner that captured them."""
        self._graphs = graphs

    def _inputs_of(self, lanes: int) -> torch.Tensor:
        """Each graph reads its inputs in one piece."""
        return self._inputs[: ROWS * lanes].view(ROWS, lanes)

    def _prepare(self, batch: Any) -> None:
        """From the inputs to those of the model and of attention; static shapes, no host."""
        lanes, rows, positions, _ = self._inputs_of(batch.batch_size)
        there = positions.clamp(min=0)
        batch.input_ids.copy_(self._next_token[lanes])
        batch.req_pool_indices.copy_(rows)
        batch.positions.copy_(there)
        batch.seq_lens.copy_(there + 1)
        # A lane that is not used writes to slot 0, which belongs to nobody.
        batch.out_cache_loc.copy_(self._req_to_token[rows, there] * (positions >= 0))
        self._attention.init_forward_metadata_out_graph(batch)

    def load(self, step: np.ndarray) -> torch.Tensor:
        """Send `step` int64 [4, N] (see `inputs`) to the device; the same there."""
        n = step.shape[1]
        size = self._graphs.capture_bs[bisect_left(self._graphs.capture_bs, n)]
        host = torch.zeros((ROWS, size), dtype=torch.int64, pin_memory=self._inputs.is_cuda)
        padded = host.numpy()
        padded[:, :n] = step
        padded[2, n:] = UNUSED
        inputs = self._inputs_of(size)
        inputs.copy_(host, non_blocking=True)
        return inputs[:, :n]

    def replay(self, num_lanes: int) -> torch.Tensor:
        """The step that was loaded: logits [N, V], valid until the next one."""
        sizes = self._graphs.capture_bs
        key = self._graphs._make_graph_key(sizes[bisect_left(sizes, num_lanes)])
        output = self._graphs.backend.replay(key, None)
        return cast(torch.Tensor, output.next_token_logits[:num_lanes])


def can_plan_in_graphs(attention: Any) -> bool:
    """Whether the plan of this attention backend takes no part of the host."""
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    return type(attention) is TritonAttnBackend and not attention.sliding_window_size
