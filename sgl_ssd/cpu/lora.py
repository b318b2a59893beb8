"""LoRA adapters on a plain CPU: takes the place of SGLang's `torch_native` LoRA backend.

SGLang's own pins memory for CUDA, computes an adapter's product over as many rows as there happen
to be (see `invariance`), and does not know that the last layer sees only some tokens of a prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.lora.backend.base_backend import BaseLoRABackend
from sglang.srt.lora.utils import generate_sequence_lengths, get_lm_head_pruned_lens
from torch.overrides import TorchFunctionMode

from sgl_ssd.cpu.invariance import pad_rows


@dataclass
class Group:
    """The rows of one adapter."""

    slot: int
    """Its place in the weight buffers."""
    rank: int
    scaling: float
    rows: torch.Tensor
    """int64 [n], in ascending order."""


class AdapterRows:
    """Which adapter each row of a layer's input belongs to.

    `slots` int [rows]; `ranks` and `scalings` by slot, a rank of 0 for the model without adapter.
    """

    has_active_lora = False  # set by SGLang, for other backends

    def __init__(
        self, slots: torch.Tensor, ranks: Sequence[int], scalings: Sequence[float]
    ) -> None:
        self.slots, self._ranks, self._scalings = slots, ranks, scalings
        self.groups = [
            Group(slot, ranks[slot], scalings[slot], (slots == slot).nonzero().squeeze(1))
            for slot in slots.unique().tolist()
            if ranks[slot] > 0
        ]

    def part(self, first: int, last: int) -> AdapterRows:
        """The rows `first`..`last` - 1 alone."""
        return AdapterRows(self.slots[first:last], self._ranks, self._scalings)


def shrink(
    rows: AdapterRows, weights: torch.Tensor, product: Callable[[Group], torch.Tensor], count: int
) -> torch.Tensor:
    """`product` of each group, scaled, in the group's rows: [count, weights.shape[1]].

    Rows without an adapter, and columns beyond an adapter's rank, are 0.
    """
    out = torch.zeros(count, weights.shape[1], dtype=weights.dtype)
    for group in rows.groups:
        scaled = product(group) * group.scaling
        out[group.rows, : scaled.shape[1]] = scaled
    return out


def expand(
    rows: AdapterRows,
    weights: torch.Tensor,
    x: torch.Tensor,
    offsets: list[int],
    base: torch.Tensor | None,
) -> torch.Tensor:
    """`base` plus each group's product, in place.

    `weights` [slots, out, largest rank]; `x` [rows, slices x largest rank], a group's slices lie
    side by side in its first columns; slice i goes to the columns offsets[i]..offsets[i+1].
    """
    if base is None:
        base = torch.zeros(x.shape[0], offsets[-1], dtype=x.dtype)
    for group in rows.groups:
        given = pad_rows(x[group.rows])
        for i, (start, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
            columns = given[:, i * group.rank : (i + 1) * group.rank]
            delta = columns @ weights[group.slot, start:end, : group.rank].T
            base[:, start:end].index_add_(0, group.rows, delta[: len(group.rows)])
    return base


class TorchLoRABackend(BaseLoRABackend):
    """Products of adapters in plain torch; in fp32 a row is the same whatever stands beside it."""

    name = "torch_native"
    batch_info: AdapterRows

    def __init__(self, max_loras_per_batch: int, device: torch.device, **_: Any) -> None:
        super().__init__(max_loras_per_batch, device)
        self._last_rows: AdapterRows | None = None

    def prepare_lora_batch(
        self,
        forward_batch: Any,
        weight_indices: list[int],
        lora_ranks: list[int],
        scalings: list[float],
        use_cuda_graph: bool,
        use_prefill_cuda_graph: bool = False,
    ) -> None:
        """`weight_indices`: the slot of each request; ranks and scalings by slot."""

        def rows(lengths: torch.Tensor) -> AdapterRows:
            slots = torch.tensor(weight_indices).repeat_interleave(lengths)
            return AdapterRows(slots, lora_ranks, scalings)

        self.batch_info = rows(generate_sequence_lengths(forward_batch, device="cpu"))
        pruned = get_lm_head_pruned_lens(forward_batch)
        self._last_rows = None if pruned is None else rows(torch.tensor(pruned))

    def _rows(self, kwargs: dict[str, Any]) -> AdapterRows:
        """The last layer, which alone speaks of pruning, sees only some tokens of a prefill."""
        last = self._last_rows
        if last is None or "pruned_batch_info" not in kwargs:
            return self.batch_info
        if self._lm_head_pass_idx is None:
            return last
        size = envs.SGLANG_LOGPROB_CHUNK_SIZE.get()
        return last.part(self._lm_head_pass_idx * size, (self._lm_head_pass_idx + 1) * size)

    def _shrink(
        self, x: torch.Tensor, weights: torch.Tensor, slices: int, rows: AdapterRows
    ) -> torch.Tensor:
        def product(group: Group) -> torch.Tensor:
            down = weights[group.slot, : slices * group.rank]
            return (pad_rows(x[group.rows]) @ down.T)[: len(group.rows)]

        return shrink(rows, weights, product, x.shape[0])

    def run_lora_a_embedding(
        self, input_ids: torch.Tensor, weights: torch.Tensor, vocab_size: int, **_: Any
    ) -> torch.Tensor:
        def product(group: Group) -> torch.Tensor:
            return weights[group.slot, : group.rank].T[input_ids[group.rows]]

        return shrink(self.batch_info, weights, product, input_ids.shape[0])

    def run_lora_a_sgemm(
        self, x: torch.Tensor, weights: torch.Tensor, stack_num: int = 1, **kwargs: Any
    ) -> torch.Tensor:
        return self._shrink(x, weights, stack_num, self._rows(kwargs))

    def run_lora_b_sgemm(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        output_offset_cpu: torch.Tensor,
        base_output: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        return expand(self._rows(kwargs), weights, x, output_offset_cpu.tolist(), base_output)

    def run_qkv_lora(
        self,
        x: torch.Tensor,
        qkv_lora_a: torch.Tensor,
        qkv_lora_b: torch.Tensor,
        output_offset_cpu: torch.Tensor,
        base_output: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        offsets, rows = output_offset_cpu.tolist(), self.batch_info
        small = self._shrink(x, qkv_lora_a, len(offsets) - 1, rows)
        return expand(rows, qkv_lora_b, small, offsets, base_output)

    def run_gate_up_lora(
        self, x: torch.Tensor, gate_up_lora_a: torch.Tensor, gate_up_lora_b: torch.Tensor, **kw: Any
    ) -> torch.Tensor:
        return self.run_qkv_lora(x, gate_up_lora_a, gate_up_lora_b, **kw)


class _Unpinned(TorchFunctionMode):
    """Host memory as it is: there is no CUDA to pin it for."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.pin_memory:
            return args[0]
        kwargs = kwargs or {}
        return func(*args, **{name: kwargs[name] for name in kwargs if name != "pin_memory"})


def manager_init(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Around `LoRAManager.__init__`, whose layers pin small tensors."""
    with _Unpinned():
        original(*args, **kwargs)


def register() -> None:
    """Put the backend in SGLang's place for its name."""
    from sglang.srt.lora.backend.lora_registry import register_lora_backend

    register_lora_backend(TorchLoRABackend.name)(lambda: TorchLoRABackend)
