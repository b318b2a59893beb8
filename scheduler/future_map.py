"""SGLang's cross-iteration relay, of which SSD needs the bonus tokens only."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.overlap_utils import FutureMap


class SSDFutureMap(FutureMap):
    """The stock relay records streams on its index tensor, which CPU tensors do not have."""

    def _resolve_spec_extras(self, batch: Any) -> None:
        draft_input = batch.spec_info
        if draft_input is None or draft_input.future_indices.shape[0] == 0:
            return
        # `future_indices` are the batch's own req_pool_indices, which the overlap loop keeps
        # alive for two iterations.
        draft_input.bonus_tokens = self.output_tokens_buf[draft_input.future_indices]
