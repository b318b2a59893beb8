"""The target's forward over the last committed token and the drafts of every row.

With CUDA graphs a verify is launched in two parts. All that the drafts do not change (slots,
positions, attention's plan, the graph's static inputs) depends on tensors of the forward before,
so it can be queued on the device while the host still waits for that forward's outcome. What is
left between the outcome and the launch is to copy the drafts in and to replay the graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from sgl_ssd.scheduler.graphs import PlainDecodeGraphs
from sgl_ssd.scheduler.inputs import VerifyInput


@dataclass(frozen=True)
class PreparedVerify:
    """A verify of `chain` int64 [bs, K+1], of which only the tokens are still missing."""

    chain: torch.Tensor
    batch: ForwardBatch


class TargetForward:
    """Runs SGLang's batches on the target: `width` = K+1 tokens a row, fewer, or one."""

    def __init__(self, target_worker: Any, width: int, device: str) -> None:
        self._worker = target_worker
        self._runner = target_worker.model_runner
        self._plain = PlainDecodeGraphs(self._runner)
        self._last_position = self._runner.model_config.context_len - 1
        self._wide = width
        self._device = device
        self._was_wide = True

    def capture(self) -> None:
        """Capture graphs for batches without drafts, where SGLang has captured those with."""
        self._plain.capture()

    def prepare(self, batch: Any) -> PreparedVerify | None:
        """Queue what a verify of K+1 tokens a row needs besides its tokens.

        None where there is no graph for that, or none is to be expected: after a forward without
        drafts. What is prepared and not run costs some microseconds of the device.
        """
        graphs = self._runner.decode_cuda_graph_runner
        if graphs is None or not self._was_wide:
            return None
        chain = torch.empty((len(batch.reqs), self._wide), dtype=torch.int64, device=self._device)
        chain[:, 0] = batch.spec_info.bonus_tokens
        self._describe(batch, chain)
        self._worker.set_hicache_consumer(batch.hicache_consumer_index)
        prepared = ForwardBatch.init_new(
            batch, self._runner, return_hidden_states_before_norm=False
        )
        if not graphs.can_run_graph(prepared):
            return None
        graphs.load_batch(prepared)
        prepared.mark_forward_metadata_ready()
        return PreparedVerify(chain, prepared)

    def __call__(
        self, batch: Any, bonus: torch.Tensor, drafts: torch.Tensor, prepared: PreparedVerify | None
    ) -> tuple[torch.Tensor, Any, bool]:
        """Verify `drafts` int64 [bs, width - 1] (on the host) behind `bonus` int64 [bs], the last
        committed tokens, whose KV goes behind `batch.seq_lens` tokens.

        Returns the chain int64 [bs, width] that was verified, SGLang's output with logits
        [bs * width, V], and whether a graph was replayed.
        """
        width = drafts.shape[1] + 1
        self._was_wide = width > 1
        if prepared is not None and width == self._wide:
            chain = prepared.chain
            chain[:, 1:].copy_(self._pinned(drafts), non_blocking=True)
            result = self._worker.forward_batch_generation(
                None, forward_batch=prepared.batch, is_verify=True
            )
            return chain, result.logits_output, result.can_run_cuda_graph
        if width == 1:
            chain = bonus[:, None]
            result = self._decode(batch, chain)
        else:
            there = self._pinned(drafts).to(self._device, non_blocking=True)
            chain = torch.cat((bonus[:, None], there), dim=1)
            self._describe(batch, chain)
            result = self._worker.forward_batch_generation(batch, is_verify=True)
        return chain, result.logits_output, result.can_run_cuda_graph

    def _describe(self, batch: Any, chain: torch.Tensor) -> None:
        """Make `batch` one that verifies `chain`."""
        width = chain.shape[1]
        columns = self._place(batch, chain)
        # Columns without a real draft may lie beyond the context; their result is not used.
        positions = columns.clamp(max=self._last_position).flatten()
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.spec_info = VerifyInput(
            draft_token=batch.input_ids, positions=positions, draft_token_num=width
        )

    def _decode(self, batch: Any, chain: torch.Tensor) -> Any:
        """One token a row: what plain decoding runs."""
        self._place(batch, chain)
        seq_lens = batch.seq_lens
        batch.forward_mode = ForwardMode.DECODE
        batch.spec_info = None
        batch.seq_lens = seq_lens + 1
        if batch.seq_lens_cpu is not None:
            batch.seq_lens_cpu = batch.seq_lens_cpu + 1
            batch.seq_lens_sum = None
        with self._plain.active():
            result = self._worker.forward_batch_generation(batch, is_verify=True)
        batch.seq_lens = seq_lens
        return result

    def _place(self, batch: Any, chain: torch.Tensor) -> torch.Tensor:
        """Give `batch` its tokens and their KV slots; returns their positions, [bs, width]."""
        columns = batch.seq_lens[:, None] + torch.arange(chain.shape[1], device=self._device)
        slots = batch.req_to_token_pool.req_to_token[batch.req_pool_indices[:, None], columns]
        batch.out_cache_loc = slots.reshape(-1).to(torch.int64)
        batch.input_ids = chain.flatten()
        return columns

    def _pinned(self, host: torch.Tensor) -> torch.Tensor:
        return host if self._device.startswith("cpu") else host.pin_memory()
