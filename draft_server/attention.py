"""Attention on the CPU that reads what branches share once.

All lanes of a session attend to one set of keys, each under its own mask: the KV of the committed
text is gathered once a session and layer instead of once a branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from sgl_ssd.cpu import paged_attention
from sgl_ssd.cpu.attention import TorchAttentionBackend
from sgl_ssd.draft_server.branches import SharedContext


@dataclass
class _Group:
    """Lanes of one session."""

    lanes: slice
    slots: torch.Tensor  # int64 [M]
    visible: torch.Tensor  # bool [N, M]
    masks: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)

    def mask(self, dtype: torch.dtype) -> torch.Tensor:
        """Additive [N, M], shared by all layers of the forward."""
        if dtype not in self.masks:
            bias = torch.zeros(self.visible.shape, dtype=dtype)
            self.masks[dtype] = bias.masked_fill_(~self.visible, float("-inf"))
        return self.masks[dtype]


class TreeAttentionBackend(TorchAttentionBackend):
    """`torch_native` for decode steps whose lanes are described by `SharedContext`s.

    Other forwards, and layers with a sliding window, attend row by row as usual.
    """

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self._groups: list[_Group] = []
        self._has_window = bool(getattr(model_runner, "sliding_window_size", None))

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self._groups = []
        super().init_forward_metadata(forward_batch)

    def plan_decode(self, forward_batch: Any, shared: Sequence[SharedContext]) -> None:
        """In place of `init_forward_metadata`; without `shared` the same."""
        if not shared or self._has_window:
            self.init_forward_metadata(forward_batch)
            return
        self._plan = paged_attention.Plan([])
        self._groups = [
            _Group(
                slice(s.first, s.first + len(s.visible)),
                torch.from_numpy(s.slots),
                torch.from_numpy(s.visible),
            )
            for s in shared
        ]

    def _attend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *args: Any,
        scaling: float | None = None,
        sliding_window_size: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        if not self._groups:
            return super()._attend(
                query, output, k_cache, v_cache, *args,
                scaling=scaling, sliding_window_size=sliding_window_size, **kwargs,
            )  # fmt: skip
        heads, dim = query.shape[1:]
        kv_heads = k_cache.shape[1]
        shape = (kv_heads, heads // kv_heads)
        for group in self._groups:
            n = group.visible.shape[0]
            # [kv heads, group, N, dim] against [kv heads, group (stride 0), M, dim]
            q = query[group.lanes].view(n, *shape, dim).permute(1, 2, 0, 3)
            key = k_cache[group.slots].to(query.dtype).transpose(0, 1)[:, None]
            value = v_cache[group.slots].to(query.dtype).transpose(0, 1)[:, None]
            out = scaled_dot_product_attention(
                q,
                key.expand(-1, shape[1], -1, -1),
                value.expand(-1, shape[1], -1, -1),
                attn_mask=group.mask(query.dtype),
                scale=scaling,
            )
            output[group.lanes] = out.permute(2, 0, 1, 3).reshape(n, heads, -1)
        return output


def use_tree_attention(model_runner: Any) -> TreeAttentionBackend | None:
    """Put it into `model_runner` (before its graphs are set up), if `torch_native` is there."""
    if type(model_runner.attn_backend) is not TorchAttentionBackend:
        return None
    backend = TreeAttentionBackend(model_runner)
    model_runner.attn_backend = model_runner.decode_attn_backend = backend
    return backend
