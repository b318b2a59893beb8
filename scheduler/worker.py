"""The verifier's worker: one forward of the target, with drafts from another process.

One decode of a batch, in time:
  1. the outcome of the forward before reaches the host, goes to the draft server as news;
  2. the drafts for it are there, sent ahead or as an answer (or the deadline passes);
  3. the target runs over the last committed token and the drafts of every row;
  4. its own tokens are drawn at every position, and drafts are kept while they agree.
Steps 1 and 2 are all that lies between two forwards; SGLang's overlap loop does the rest of its
host work while the target computes.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask

from sgl_ssd.config import VerifierConfig
from sgl_ssd.errors import ConfigError, DraftUnavailableError
from sgl_ssd.protocol import SpanKind
from sgl_ssd.scheduler import hooks
from sgl_ssd.scheduler.draft_client import make_hello
from sgl_ssd.scheduler.draft_fleet import DraftFleet
from sgl_ssd.scheduler.exchange import DraftExchange
from sgl_ssd.scheduler.grammar import GrammarRow
from sgl_ssd.scheduler.inputs import DraftInput
from sgl_ssd.scheduler.logits import TargetSampler, count_accepted
from sgl_ssd.scheduler.outcomes import OutcomeCopier
from sgl_ssd.scheduler.recording import Recording
from sgl_ssd.scheduler.stats import SSDStats
from sgl_ssd.scheduler.target_forward import TargetForward
from sgl_ssd.scheduler.tuner import Tuner
from sgl_ssd.transport import private_folder
from sgl_ssd.vocabulary import read_vocabulary

logger = logging.getLogger(__name__)

TRACE_FILE = "ssd_trace.json"
PAUSE_S = 0.5  # a longer time between two forwards is no part of a round


class SSDWorker(BaseSpecWorker):
    """Drives the target model for SGLang's scheduler; holds no draft model."""

    def __init__(
        self, server_args: Any, gpu_id: int, ps: Any, nccl_port: int, target_worker: Any
    ) -> None:
        super().__init__()
        config = VerifierConfig.from_environment()
        if config is None:
            raise ConfigError(
                "the SSD algorithm needs its draft server: start with "
                "`python -m sgl_ssd.launch_server` instead of `sglang.launch_server`"
            )
        self.config = config
        self.server_args = server_args
        self.ps = ps
        self._target_worker = target_worker
        self._runner = target_worker.model_runner
        _refuse_expert_adapters(self._runner)
        self.device = server_args.device
        self.num_steps = server_args.speculative_num_steps
        self.speculative_num_draft_tokens = self.num_steps + 1
        self.stats = SSDStats(self.num_steps)
        self.sampler: TargetSampler | None = None
        self._target = TargetForward(
            target_worker, self.speculative_num_draft_tokens, str(self.device)
        )
        self._copy_outcome = OutcomeCopier(self.device)
        self._context_len = self._runner.model_config.context_len
        self._returned_at = 0.0  # when the last forward was launched
        self.recording: Recording | None = None
        self.client = self._connect() if ps.tp_rank == 0 else None
        self.tuner = Tuner(
            self.stats, self.client, self.num_steps, backup=config.backup,
            fan_out_auto=config.fan_out_auto, steps_auto=config.steps_auto,
        )  # fmt: skip
        self.exchange = DraftExchange(
            config, self.client, self.tuner, self.stats, self._context_len
        )
        hooks.set_worker(self)
        if config.trace_file is not None and self.client is not None:
            self.record(True)

    def record(self, on: bool) -> None:
        """Begin or end to write a timeline. Raises `OSError` when its file cannot be written."""
        if on and self.client is not None and self.trace_state == "off":
            self.recording = Recording(self.trace_file, self.stats, self.client)
        elif not on and self.recording is not None:
            self.recording.stop()

    @property
    def trace_state(self) -> str:
        """on, closing, or off."""
        return self.recording.state if self.recording is not None else "off"

    @property
    def trace_file(self) -> str:
        """Where the current timeline is, or the next one will be; every replica writes its own."""
        path = os.path.abspath(self.config.trace_file or TRACE_FILE)
        if not self.ps.dp_rank:
            return path
        root, kind = os.path.splitext(path)
        return f"{root}.{self.ps.dp_rank}{kind}"

    def tick(self) -> None:
        """Look after the draft servers; called in every loop of the scheduler."""
        if self.client is not None:
            self.client.tick()
        if self.recording is not None:
            self.recording.tick()

    def _connect(self) -> DraftFleet:
        model = self._runner.model_config
        vocabulary = read_vocabulary(
            self.server_args.tokenizer_path or self.server_args.model_path,
            self.server_args.trust_remote_code,
        )
        hello = make_hello(
            num_steps=self.num_steps,
            context_len=model.context_len,
            vocab_size=min(vocabulary.size, model.vocab_size),
            vocab_hash=vocabulary.fingerprint,
            max_running_requests=self.server_args.max_running_requests or 0,
        )
        client = DraftFleet(
            self.config, hello, self.stats,
            replica=self.ps.dp_rank or 0, replicas=self.ps.dp_size or 1,
        )  # fmt: skip
        client.tick()
        return client

    # -- what SGLang expects of a speculative worker -------------------------------------------

    @property
    def draft_worker(self) -> None:
        return None

    def alloc_memory_pool(
        self,
        memory_pool_config: Any = None,
        req_to_token_pool: Any = None,
        token_to_kv_pool_allocator: Any = None,
    ) -> None:
        super().alloc_memory_pool(memory_pool_config, req_to_token_pool, token_to_kv_pool_allocator)
        self.sampler = TargetSampler(
            req_to_token_pool.req_to_token.shape[0],
            self._runner.model_config.vocab_size,
            self.device,
        )

    def init_cuda_graphs(self) -> None:
        self._target.capture()
        if self._runner.decode_cuda_graph_runner is not None:
            self.tuner.width = self.speculative_num_draft_tokens
        assert self.sampler is not None
        self.sampler.warm_up()
        self._wait_for_draft_server()

    def _wait_for_draft_server(self) -> None:
        """Begin to serve with drafts, or say clearly that there are none."""
        client, limit = self.client, self.config.draft_start_timeout_s
        # The launcher waits for all that are its own; of others one is enough to begin with.
        ours = private_folder(self.config.endpoints[0]) is not None
        if client is None or not self.exchange.drafting or client.wait_until_up(limit, every=ours):
            return
        text = f"no draft server on {', '.join(self.config.endpoints)} within {limit:.0f} s"
        if self.config.draft_keys is not None:
            text += f", or it does not accept the keys in {self.config.draft_keys}"
        if self.config.draft_required:
            raise DraftUnavailableError(f"{text} (--ssd-draft-required)")
        logger.warning("%s; serving without drafts until it comes up", text)

    def clear_cache_pool(self) -> None:
        """SGLang has flushed its cache; the draft server forgets its own."""
        self.exchange.flush()

    def on_release(self, req: Any) -> None:
        """A request's KV is released: it finished, was aborted, or is retracted."""
        self.exchange.close_session(req.rid)

    def update_weights_from_disk(self, recv_req: Any) -> tuple[bool, str]:
        """The target's weights change elsewhere; the draft stays as it is."""
        return True, "Succeeded to update model weights."

    def update_weights_from_ipc(self, recv_req: Any) -> tuple[bool, str]:
        return True, "Succeeded to update model weights."

    def update_weights_from_tensor(self, recv_req: Any) -> tuple[bool, str]:
        return self.target_worker.update_weights_from_tensor(recv_req)

    def forward_batch_generation(
        self,
        batch: Any,
        on_publish: Callable[[torch.Tensor], None] | None = None,
        grammar_barrier: Callable[[], None] | None = None,
    ) -> GenerationBatchResult:
        """Run one batch: a prefill (with its first token) or a verify."""
        if batch.forward_mode.is_extend() or batch.forward_mode.is_idle():
            return self._prefill(batch, on_publish)
        return self._verify(batch, on_publish, grammar_barrier)

    # -- prefill -------------------------------------------------------------------------------

    def _prefill(self, batch: Any, on_publish: Any) -> GenerationBatchResult:
        assert self.sampler is not None
        started, self.exchange.outcome_at = self._begin_forward(), 0.0
        self.tuner.interrupted()
        sessions = self.exchange.open_sessions(batch)
        self.sampler.begin(batch.reqs)
        result = self.target_worker.forward_batch_generation(batch, is_verify=True)
        # The outcome of the forward before is news now, not after this prefill.
        self.exchange.send_news(wait=True)
        logits_output = result.logits_output
        seq_lens = batch.seq_lens
        if batch.is_prefill_only:
            tokens = torch.zeros(len(batch.reqs), dtype=torch.int64, device=self.device)
            if batch.return_logprob and logits_output.next_token_logits is not None:
                self.sampler.prefill_logprobs(batch, logits_output, tokens)
        else:
            tokens = self._draw_first(batch, logits_output, seq_lens)
        if on_publish is not None:
            on_publish(seq_lens)
        ones = torch.ones(len(batch.reqs), dtype=torch.int32, device=self.device)
        self.exchange.add(self._copy_outcome(sessions, None, ones, tokens[:, None], started))
        self.sampler.accept(batch.reqs, tokens[:, None], ones)
        result.next_token_ids = tokens
        result.next_draft_input = DraftInput(bonus_tokens=tokens, new_seq_lens=seq_lens)
        result.new_seq_lens = seq_lens
        result.accept_lens = ones
        result.speculative_num_draft_tokens = 1
        self.exchange.send_news(wait=False)
        self._returned_at = time.perf_counter()
        return result

    def _draw_first(self, batch: Any, logits_output: Any, seq_lens: torch.Tensor) -> torch.Tensor:
        """The first token of each row: int64 [bs]. `seq_lens` tokens came before it."""
        assert self.sampler is not None
        sampling_info = batch.sampling_info
        grammar_mask = None
        if batch.has_grammar:
            sampling_info.grammars = [req.grammar for req in batch.reqs]
            sampling_info.update_regex_vocab_mask()
            grammar_mask = sampling_info.grammar_mask
            sampling_info.grammar_mask = None
        chain = torch.zeros((len(batch.reqs), 1), dtype=torch.int64, device=self.device)
        tokens = self.sampler.sample(
            logits_output.next_token_logits,
            batch.reqs,
            sampling_info,
            chain,
            seq_lens.to(torch.int64),
            grammar_mask,
        )
        tokens = self._same_on_all_ranks(tokens).squeeze(1)
        if batch.return_logprob:
            self.sampler.prefill_logprobs(batch, logits_output, tokens)
        return tokens

    # -- verify --------------------------------------------------------------------------------

    def _verify(self, batch: Any, on_publish: Any, barrier: Any) -> GenerationBatchResult:
        assert self.sampler is not None
        reqs, bs = batch.reqs, len(batch.reqs)
        self._begin_forward()
        bonus = batch.spec_info.bonus_tokens
        prepared = self._target.prepare(batch)
        sessions, drafts = self.exchange.fetch(batch, barrier)
        if self.ps.tp_size > 1:
            drafts.broadcast(self._runner.tp_group)
        lens = drafts.lens
        started = time.perf_counter()
        if started - self.exchange.outcome_at < PAUSE_S:
            self.stats.idle.add(started - self.exchange.outcome_at)
        self.exchange.outcome_at = 0.0
        width = self._width(lens)
        seq_lens = batch.seq_lens
        chain, logits_output, graph = self._target(
            batch, bonus, torch.from_numpy(drafts.first(width - 1)), prepared
        )
        draft_lens = self._to_device(torch.from_numpy(lens))
        mask = None
        if batch.has_grammar:
            if barrier is not None:
                barrier()
            mask = build_grammar_vocab_mask(
                reqs=[GrammarRow(req) for req in reqs],
                tree=GrammarTree.from_linear_chain(chain),
                sampling_info=batch.sampling_info,
                device=self.device,
                barrier=None,
            )
        logits, first_index = logits_output.next_token_logits, seq_lens.to(torch.int64) + 1
        tokens = self.sampler.sample(logits, reqs, batch.sampling_info, chain, first_index, mask)
        proposals = drafts.proposals(width, self._to_device)
        if proposals is None:
            tokens = self._same_on_all_ranks(tokens)
            accept_lens = count_accepted(tokens, chain, draft_lens)
        else:
            tokens, accept_lens = self.sampler.reject(
                logits, reqs, chain, first_index, draft_lens, tokens, proposals
            )
            tokens = self._same_on_all_ranks(tokens)
            accept_lens = self._same_on_all_ranks(accept_lens)
        new_seq_lens = seq_lens + accept_lens
        if on_publish is not None:
            on_publish(new_seq_lens)
        self.exchange.add(self._copy_outcome(sessions, lens.tolist(), accept_lens, tokens, started))
        self.sampler.accept(reqs, tokens, accept_lens)
        bonus = tokens.gather(1, (accept_lens - 1).long()[:, None]).squeeze(1)
        if batch.return_logprob:
            self.sampler.verify_logprobs(batch, logits_output, tokens)
        self.stats.verifies += 1
        self.stats.verifies_without_drafts += int(width == 1)
        launched = time.perf_counter()
        self.stats.launch.add(launched - started)
        if self.stats.recorder is not None:
            self.stats.recorder.add(SpanKind.LAUNCH, started, launched, count=bs)
        self._returned_at = launched
        self.exchange.send_news(wait=False)
        self.tuner.verified(bs, width, self.exchange.drafting)
        return GenerationBatchResult(
            logits_output=logits_output,
            next_token_ids=tokens.flatten(),
            can_run_cuda_graph=graph,
            accept_lens=accept_lens,
            new_seq_lens=new_seq_lens,
            next_draft_input=DraftInput(bonus_tokens=bonus, new_seq_lens=new_seq_lens),
            speculative_num_draft_tokens=width,
        )

    def _begin_forward(self) -> float:
        """What lay between the last forward and this one was SGLang's; now, in seconds."""
        now = time.perf_counter()
        if self.stats.recorder is not None and now - self._returned_at < PAUSE_S:
            self.stats.recorder.add(SpanKind.HOST, self._returned_at, now)
        return now

    def _width(self, lens: np.ndarray) -> int:
        """Tokens a row: 1 without any drafts; where graphs are captured, K+1 otherwise."""
        if not lens.any():
            return 1
        if self._runner.decode_cuda_graph_runner is not None:
            return self.speculative_num_draft_tokens
        return int(lens.max()) + 1

    def _to_device(self, host: torch.Tensor) -> torch.Tensor:
        if str(self.device).startswith("cpu"):
            return host
        return host.pin_memory().to(self.device, non_blocking=True)

    # -- tensor parallelism ------------------------------------------------------------------------

    def _same_on_all_ranks(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rank 0's tokens: a near tie may fall differently on each rank, and they must not part."""
        if self.ps.tp_size > 1:
            group = self._runner.tp_group
            dist.broadcast(tokens, src=group.ranks[0], group=group.device_group)
        return tokens


def _refuse_expert_adapters(runner: Any) -> None:
    """SGLang counts the tokens of such layers by prompt lengths, which a verify does not have."""
    if runner.server_args.enable_lora and runner.lora_manager.lora_backend.is_moe_lora:
        raise ConfigError(
            "LoRA adapters on the experts of a mixture of experts: SSD does not support them; "
            "leave gate_up_proj and down_proj out of --lora-target-modules"
        )
