"""SGLang's `ModelRunner` without SGLang's scheduler: the only place that runs the draft model.

It knows rows of `req_to_token`, positions and tokens; nothing of sessions or speculation.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state_wrapper import ParallelState
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.server_args import PortArgs, ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sgl_ssd.config import DraftServerConfig
from sgl_ssd.draft_server.branches import SharedContext
from sgl_ssd.draft_server.kv import RowCopy, RowWrite
from sgl_ssd.draft_server.step_graphs import StepGraphs, can_plan_in_graphs
from sgl_ssd.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Lanes:
    """Where each lane of a step is: int64 [N], on the device; see `DraftRunner.decode`."""

    rows: torch.Tensor
    positions: torch.Tensor
    positions_host: np.ndarray
    shared: Sequence[SharedContext] = ()


def graph_sizes(cap: int) -> list[int]:
    """Batch sizes to capture: 1, 2, 4, then multiples of 8, coarser from 64 on, up to `cap`."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, 4097, 32)]
    return sorted({s for s in sizes if s < cap} | {cap})


class DraftRunner:
    """The draft model, its KV pool and the row table.

    Raises `ConfigError` for a model or device that cannot serve as a draft.
    """

    def __init__(self, config: DraftServerConfig) -> None:
        args = _server_args(config)
        _publish(args)
        model_config = ModelConfig.from_server_args(args)
        runner = ModelRunner(
            model_config=model_config,
            mem_fraction_static=args.mem_fraction_static,
            gpu_id=config.base_gpu_id,
            ps=ParallelState.trivial(gpu_id=config.base_gpu_id),
            nccl_port=PortArgs.init_new(args).nccl_port,
            server_args=args,
        )
        runner.alloc_memory_pool()
        if getattr(runner, "is_hybrid_swa", False) or mambaish_config(model_config) is not None:
            raise ConfigError(
                f"--model-path {config.model_path}: a draft needs one plain KV pool for all layers "
                "(no recurrent layers, no separate sliding-window pool)"
            )
        runner.init_attention_backends()
        self._tree_attention = None
        if str(runner.device) == "cpu":
            from sgl_ssd.draft_server.attention import use_tree_attention

            self._tree_attention = use_tree_attention(runner)
        self.reads_shared = self._tree_attention is not None
        self._runner = runner
        self.graph_rows = 0
        self._step_graphs: StepGraphs | None = None
        self._eager_told = False
        self.device = torch.device(runner.device)
        self.model_path = config.model_path
        self.vocab_size = int(model_config.vocab_size)
        self.context_len = int(model_config.context_len)
        self.num_slots = int(runner.max_total_num_tokens)
        self._req_to_token = runner.req_to_token_pool.req_to_token
        self.num_rows, self.row_width = self._req_to_token.shape
        self._flat_rows = self._req_to_token.view(-1)

    def capture_graphs(self, next_token: torch.Tensor) -> None:
        """Capture decode graphs where the device has any; call it once, before the first forward.

        `next_token` int64 [lanes] stays the table of the token that each lane is fed next.
        Afterwards `graph_rows` says how many rows a step may have to replay a graph.
        """
        runner = self._runner
        self._next_token = next_token
        steps = None
        if self.device.type == "cuda" and can_plan_in_graphs(runner.attn_backend):
            most = max(runner.server_args.cuda_graph_bs_decode)
            steps = StepGraphs(runner.attn_backend, most, next_token, self._req_to_token)
        with steps.recording() if steps is not None else nullcontext():
            runner.init_cuda_graphs()
        graphs = runner.decode_cuda_graph_runner
        if graphs is None:
            return
        self.graph_rows = max(graphs.capture_bs)
        if steps is not None:
            steps.use(graphs)
            self._step_graphs = steps

    def put(self, array: np.ndarray) -> torch.Tensor:
        """`array` on the device, without waiting for it."""
        tensor = torch.from_numpy(array)
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def write_rows(self, writes: Sequence[RowWrite | RowCopy]) -> None:
        """Carry out what `KVSpace.take_writes` returned."""
        for write in writes:
            if isinstance(write, RowWrite):
                self._flat_rows[self.put(write.flat)] = self.put(write.slots)
            else:
                columns = slice(write.start, write.end)
                self._req_to_token[self.put(write.rows), columns] = self._req_to_token[
                    write.home, columns
                ]

    @torch.inference_mode()
    def decode(
        self, step: np.ndarray, shared: Sequence[SharedContext] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Feed each lane its next token.

        `step` int64 [4, N]: by lane its entry of the table of next tokens, its row of
        `req_to_token`, whose slots up to and including the position are filled, that position, and
        a number for whoever draws. Several lanes may share a row at different positions: the KV of
        all lanes of a step is written before any of them attends, so a run of known tokens can be
        fed in one step. `shared`, if given, says the same as the rows in a form that attention on
        the CPU reads faster.

        Returns logits [N, V] and `step` on the device, both valid until the next forward.
        """
        n = step.shape[1]
        if self._step_graphs is not None and n <= self.graph_rows:
            on_device = self._step_graphs.load(step)
            return self._step_graphs.replay(n), on_device
        on_device = self.put(step)
        lanes = Lanes(on_device[1], on_device[2], step[2], shared)
        return self._decode(lanes, self._next_token[on_device[0]]), on_device

    def _decode(self, lanes: Lanes, tokens: torch.Tensor) -> torch.Tensor:
        """Without a graph of ours: feed one token (int64 [N]) a lane; logits [N, V]."""
        seq_lens = lanes.positions + 1
        seq_lens_cpu = torch.from_numpy(lanes.positions_host + 1)
        n = len(lanes.positions_host)
        batch = _batch(
            forward_mode=ForwardMode.DECODE,
            batch_size=n,
            input_ids=tokens,
            req_pool_indices=lanes.rows,
            seq_lens=seq_lens,
            out_cache_loc=self._req_to_token[lanes.rows, lanes.positions].to(torch.int64),
            seq_lens_sum=int(lanes.positions_host.sum()) + n,
            seq_lens_cpu=seq_lens_cpu,
            positions=lanes.positions,
            orig_seq_lens=seq_lens.to(torch.int32),
            num_token_non_padded_cpu=n,
        )
        if self._tree_attention is None:
            return self._forward(batch, may_replay=n <= self.graph_rows)
        # The way to the model without what `ModelRunner.forward` does for other devices and modes,
        # which takes as long as a tiny model's forward itself.
        backend = self._tree_attention
        with forward_context(ForwardContext(attn_backend=backend)):
            backend.plan_decode(batch, lanes.shared)
            output = self._runner.model.forward(batch.input_ids, batch.positions, batch)
        return cast(torch.Tensor, output.next_token_logits)

    @torch.inference_mode()
    def extend(
        self, rows: np.ndarray, starts: np.ndarray, lengths: np.ndarray, tokens: np.ndarray
    ) -> torch.Tensor:
        """Feed `lengths[i]` known tokens to row i from position `starts[i]` on.

        rows, starts, lengths int64 [B]; tokens int64 [sum of lengths]. Returns the logits after
        each row's last token: [B, V].
        """
        ends = starts + lengths
        offsets = np.concatenate(([0], np.cumsum(lengths)[:-1]))
        positions = np.arange(len(tokens)) + np.repeat(starts - offsets, lengths)
        row_of_token, position = self.put(np.repeat(rows, lengths)), self.put(positions)
        as_int32 = [self.put(x.astype(np.int32)) for x in (lengths, starts, offsets, ends)]
        batch = _batch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=len(rows),
            input_ids=self.put(tokens),
            req_pool_indices=self.put(rows),
            seq_lens=self.put(ends),
            out_cache_loc=self._req_to_token[row_of_token, position].to(torch.int64),
            seq_lens_sum=int(ends.sum()),
            seq_lens_cpu=torch.from_numpy(ends),
            positions=position,
            orig_seq_lens=as_int32[3],
            num_token_non_padded_cpu=len(tokens),
            extend_num_tokens=len(tokens),
            extend_seq_lens=as_int32[0],
            extend_prefix_lens=as_int32[1],
            extend_start_loc=as_int32[2],
            extend_prefix_lens_cpu=starts.tolist(),
            extend_seq_lens_cpu=lengths.tolist(),
            extend_logprob_start_lens_cpu=[0] * len(rows),
        )
        return self._forward(batch)

    def _forward(self, batch: ForwardBatch, may_replay: bool = False) -> torch.Tensor:
        output = self._runner.forward(batch)
        if may_replay and not output.can_run_graph and not self._eager_told:
            self._eager_told = True
            logger.warning("a draft step of %d rows ran without its graph", batch.batch_size)
        return cast(torch.Tensor, output.logits_output.next_token_logits)


def _batch(**fields: Any) -> ForwardBatch:
    return ForwardBatch(
        spec_algorithm=SpeculativeAlgorithm.NONE,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        return_logprob=False,
        **fields,
    )


def _server_args(config: DraftServerConfig) -> ServerArgs:
    rows = config.max_sessions + config.max_branch_rows
    options: dict[str, Any] = dict(
        model_path=config.model_path,
        trust_remote_code=config.trust_remote_code,
        dtype=config.dtype,
        context_length=config.context_length,
        page_size=1,
        max_running_requests=rows,
        max_total_tokens=config.max_total_tokens,
        mem_fraction_static=config.mem_fraction_static,
        # Triton's plans its work on the device, which a step's graph can do by itself.
        attention_backend=config.attention_backend
        or (None if config.device == "cpu" else "triton"),
        base_gpu_id=config.base_gpu_id,
        chunked_prefill_size=config.prefill_chunk,
        disable_overlap_schedule=True,
        disable_hybrid_swa_memory=True,
        skip_server_warmup=True,
        log_level=config.log_level,
    )
    if config.device != "auto":
        options["device"] = config.device
    if config.device == "cpu":
        options["disable_cuda_graph"] = True
    else:
        options["cuda_graph_backend_prefill"] = "disabled"
        options["cuda_graph_bs_decode"] = graph_sizes(config.max_branch_rows)
    return ServerArgs(**options)


def _publish(args: ServerArgs) -> None:
    """SGLang's layers read its arguments from a place of their own."""
    from sglang.srt.server_args import set_global_server_args_for_scheduler

    set_global_server_args_for_scheduler(args)
