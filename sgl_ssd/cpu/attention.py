"""SGLang's `torch_native` attention backend, vectorised and able to verify drafts.

Registered under the same name: SGLang decides by that name whether Triton kernels may be launched
(`support_triton` in srt/utils/common.py), so a new name would launch them on the CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from sgl_ssd.cpu import paged_attention

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class TorchAttentionBackend(TorchNativeAttnBackend):
    """Adds TARGET_VERIFY to `torch_native` and replaces its loops over requests.

    In TARGET_VERIFY every request has `seq_lens` tokens in the cache and
    `spec_info.draft_token_num` new ones, whose slots are in `req_to_token` at positions
    `seq_lens ..`; only a linear chain is supported (causal among the drafts).
    """

    def __init__(self, model_runner: Any, *, invariant: bool = False) -> None:
        super().__init__(model_runner)
        self._invariant = invariant and model_runner.dtype == torch.float32
        self._plan: paged_attention.Plan | None = None

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        self._plan = self._make_plan(forward_batch)

    def _make_plan(self, batch: ForwardBatch) -> paged_attention.Plan | None:
        """The plan of this forward, or None where the stock implementation has to serve."""
        if batch.forward_mode.is_idle() or batch.encoder_lens is not None:
            return None
        if self.use_sliding_window_kv_pool:
            return None
        if batch.forward_mode.is_decode():
            prefix_lens = (batch.seq_lens - 1).tolist()
            widths = [1] * len(prefix_lens)
        elif batch.forward_mode.is_target_verify():
            prefix_lens = batch.seq_lens.tolist()
            widths = [batch.spec_info.draft_token_num] * len(prefix_lens)
        else:
            prefix_lens = batch.extend_prefix_lens.tolist()
            widths = batch.extend_seq_lens.tolist()
        return paged_attention.plan(
            self.req_to_token_pool.req_to_token,
            batch.req_pool_indices,
            prefix_lens,
            widths,
            invariant=self._invariant,
        )

    def _run_sdpa_forward_extend(
        self, query: torch.Tensor, output: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        # Not causal: encoders and cross-attention, which have no rows in the paged cache.
        if self._plan is None or not kwargs.get("causal", False):
            return super()._run_sdpa_forward_extend(query, output, *args, **kwargs)
        return self._attend(query, output, *args, **kwargs)

    def _run_sdpa_forward_decode(
        self, query: torch.Tensor, output: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if self._plan is None or kwargs.get("is_cross_attn", False):
            return super()._run_sdpa_forward_decode(query, output, *args, **kwargs)
        return self._attend(query, output, *args, **kwargs)

    def _attend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *_args: Any,
        scaling: float | None = None,
        sliding_window_size: int | None = None,
        **_kwargs: Any,
    ) -> torch.Tensor:
        plan = self._plan
        if plan is None:
            raise RuntimeError("attention ran before init_forward_metadata")
        paged_attention.attend(plan, query, output, k_cache, v_cache, scaling, sliding_window_size)
        return output
