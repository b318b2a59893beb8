"""The verifier's worker: one forward of the target, with drafts from another process.

One decode of a batch, in time:
  1. the outcome of the forward before reaches the host, goes to the draft server as news;
  2. the server's speculations come back (or the deadline passes);
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
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask

from sgl_ssd import explain
from sgl_ssd.config import VerifierConfig
from sgl_ssd.errors import ConfigError, DraftUnavailableError
from sgl_ssd.protocol import SpanKind, Status
from sgl_ssd.sampling import TOP_K_ALL
from sgl_ssd.scheduler import hooks
from sgl_ssd.scheduler.draft_client import DraftClient, make_hello
from sgl_ssd.scheduler.grammar import fit_drafts
from sgl_ssd.scheduler.graphs import PlainDecodeGraphs
from sgl_ssd.scheduler.inputs import DraftInput, VerifyInput
from sgl_ssd.scheduler.logits import TargetSampler, count_accepted
from sgl_ssd.scheduler.outcomes import OutcomeCopier, PendingOutcome
from sgl_ssd.scheduler.proposals import Drafts
from sgl_ssd.scheduler.recording import Recording
from sgl_ssd.scheduler.request_trace import RequestTrace
from sgl_ssd.scheduler.sessions import Session, SessionSampling, StopRule
from sgl_ssd.scheduler.stats import SSDStats
from sgl_ssd.scheduler.tuner import Tuner
from sgl_ssd.vocabulary import read_vocabulary

logger = logging.getLogger(__name__)

TRACE_FILE = "ssd_trace.json"
PAUSE_S = 0.5  # a longer time between two forwards is no part of a round
_SOURCES = {int(Status.HIT): "hit", int(Status.PARTIAL): "partial"}


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
        self.drafting = config.drafting
        self.verification = config.verification
        self.saguaro_c, self.proposal_top_m = config.saguaro_c, config.proposal_top_m
        self._target_worker = target_worker
        self._runner = target_worker.model_runner
        _refuse_expert_adapters(self._runner)
        self.device = server_args.device
        self.num_steps = server_args.speculative_num_steps
        self.speculative_num_draft_tokens = self.num_steps + 1
        self.stats = SSDStats(self.num_steps)
        self.sampler: TargetSampler | None = None
        self._plain = PlainDecodeGraphs(self._runner)
        self._copy_outcome = OutcomeCopier(self.device)
        self._pending: list[PendingOutcome] = []
        self._asking: dict[int, Session] = {}
        self._context_len = self._runner.model_config.context_len
        # For the times between two forwards: when the last one was launched, and was done.
        self._returned_at = self._done_at = 0.0
        self.recording: Recording | None = None
        self.client = self._connect() if ps.tp_rank == 0 else None
        self.tuner = Tuner(
            self.stats, self.client, self.num_steps, backup=config.backup,
            fan_out_auto=config.fan_out_auto, steps_auto=config.steps_auto,
        )  # fmt: skip
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
        """Where the current timeline is, or the next one will be."""
        return os.path.abspath(self.config.trace_file or TRACE_FILE)

    def tick(self) -> None:
        """Look after the draft server; called in every loop of the scheduler."""
        if self.client is not None:
            self.client.tick()
        if self.recording is not None:
            self.recording.tick()

    def _connect(self) -> DraftClient:
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
        client = DraftClient(self.config, hello, self.stats)
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
        self._plain.capture()
        if self._runner.decode_cuda_graph_runner is not None:
            self.tuner.width = self.speculative_num_draft_tokens
        assert self.sampler is not None
        self.sampler.warm_up()
        self._wait_for_draft_server()

    def _wait_for_draft_server(self) -> None:
        """Begin to serve with drafts, or say clearly that there are none."""
        client, limit = self.client, self.config.draft_start_timeout_s
        if client is None or not self.drafting or client.wait_until_up(limit):
            return
        text = f"no draft server on {self.config.endpoint} within {limit:.0f} s"
        if self.config.draft_keys is not None:
            text += f", or it does not accept the keys in {self.config.draft_keys}"
        if self.config.draft_required:
            raise DraftUnavailableError(f"{text} (--ssd-draft-required)")
        logger.warning("%s; serving without drafts until it comes up", text)

    def clear_cache_pool(self) -> None:
        """SGLang has flushed its cache; the draft server forgets its own."""
        self._pending.clear()
        self._asking.clear()
        if self.client is not None:
            self.client.flush()

    def on_release(self, req: Any) -> None:
        """A request's KV is released: it finished, was aborted, or is retracted."""
        if self.client is not None:
            self.client.close_session(req.rid)

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
        started, self._done_at = self._begin_forward(), 0.0
        self.tuner.interrupted()
        sessions = self._open_sessions(batch)
        self.sampler.begin(batch.reqs)
        result = self.target_worker.forward_batch_generation(batch, is_verify=True)
        # The outcome of the forward before is news now, not after this prefill.
        self._send_news()
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
        self._pending.append(self._copy_outcome(sessions, None, ones, tokens[:, None], started))
        self.sampler.accept(batch.reqs, tokens[:, None], ones)
        result.next_token_ids = tokens
        result.next_draft_input = DraftInput(bonus_tokens=tokens, new_seq_lens=seq_lens)
        result.new_seq_lens = seq_lens
        result.accept_lens = ones
        result.speculative_num_draft_tokens = 1
        self._send_news(wait=False)
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

    def _open_sessions(self, batch: Any) -> list[Session | None]:
        """Open a session for each request at its first chunk; returns the sessions of rows whose
        prefill ends with this forward (None: more chunks follow, or nobody drafts for it)."""
        sessions: list[Session | None] = []
        for i, req in enumerate(batch.reqs):
            if self.client is None:
                sessions.append(None)
                continue
            session = self.client.sessions.get(req.rid)
            total = len(req.origin_input_ids) + len(req.output_ids)
            if session is None and self.drafting and _wants_drafts(req):
                session = self.client.open_session(
                    req.rid,
                    [*req.origin_input_ids, *req.output_ids],
                    self._session_sampling(req),
                    _stop_rule(req, self._context_len),
                    _draft_key(req),
                )
                session.trace = self._request_trace(req)
            last_chunk = batch.prefix_lens[i] + batch.extend_lens[i] >= total
            sessions.append(session if last_chunk else None)
        return sessions

    def _request_trace(self, req: Any) -> RequestTrace | None:
        """Of a request whose client asked for it; SGLang sends it along with the output."""
        if not explain.wanted(req.sampling_params.custom_params):
            return None
        if req.customized_info is None:
            prompt = len(req.origin_input_ids)
            trace = RequestTrace(prompt, lambda: self._send_news(wait=False))
            req.customized_info = {explain.KEY: trace}
        trace = req.customized_info.get(explain.KEY)
        return trace if isinstance(trace, RequestTrace) else None

    # -- verify --------------------------------------------------------------------------------

    def _verify(self, batch: Any, on_publish: Any, barrier: Any) -> GenerationBatchResult:
        assert self.sampler is not None
        reqs, bs = batch.reqs, len(batch.reqs)
        self._begin_forward()
        sessions: list[Session | None] = [None] * bs
        drafts = Drafts.none(bs, self.num_steps, self.config.proposal_top_m)
        # Who asks for drafts must know the outcome of the forward before; others need not wait.
        client = self.client
        self._send_news(wait=self._asks and client is not None and client.up)
        if client is not None:
            sessions = [client.sessions.get(req.rid) for req in reqs]
            self._take_drafts(reqs, sessions, drafts)
            if batch.has_grammar and self._asks and not self._pending:
                if barrier is not None:
                    barrier()
                self._fit_drafts(reqs, sessions, drafts)
        if self.ps.tp_size > 1:
            drafts.broadcast(self._runner.tp_group)
        lens = drafts.lens
        started = time.perf_counter()
        if started - self._done_at < PAUSE_S:
            self.stats.idle.add(started - self._done_at)
        self._done_at = 0.0
        width = self._width(lens)
        seq_lens = batch.seq_lens
        chain = torch.empty((bs, width), dtype=torch.int64, device=self.device)
        chain[:, 0] = batch.spec_info.bonus_tokens
        draft_lens = self._to_device(torch.from_numpy(lens))
        if width > 1:
            chain[:, 1:] = self._to_device(torch.from_numpy(drafts.tokens[:, : width - 1].copy()))

        logits_output, graph = self._forward(batch, chain, seq_lens)
        mask = None
        if batch.has_grammar:
            if barrier is not None:
                barrier()
            mask = build_grammar_vocab_mask(
                reqs=[_GrammarRow(req) for req in reqs],
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
        self._pending.append(
            self._copy_outcome(sessions, lens.tolist(), accept_lens, tokens, started)
        )
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
        self._send_news(wait=False)
        self.tuner.verified(bs, width, self.drafting)
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

    def _forward(self, batch: Any, chain: torch.Tensor, seq_lens: torch.Tensor) -> tuple[Any, bool]:
        """The target over `chain` int64 [bs, width], whose KV goes behind `seq_lens` tokens."""
        width = chain.shape[1]
        columns = seq_lens[:, None] + torch.arange(width, device=self.device)
        slots = batch.req_to_token_pool.req_to_token[batch.req_pool_indices[:, None], columns]
        batch.out_cache_loc = slots.reshape(-1).to(torch.int64)
        batch.input_ids = chain.flatten()
        if width == 1:
            batch.forward_mode = ForwardMode.DECODE
            batch.spec_info = None
            batch.seq_lens = seq_lens + 1
            if batch.seq_lens_cpu is not None:
                batch.seq_lens_cpu = batch.seq_lens_cpu + 1
                batch.seq_lens_sum = None
            with self._plain.active():
                result = self.target_worker.forward_batch_generation(batch, is_verify=True)
            batch.seq_lens = seq_lens
        else:
            # Columns without a real draft may lie beyond the context; their result is not used.
            positions = columns.clamp(max=self._context_len - 1).flatten()
            batch.forward_mode = ForwardMode.TARGET_VERIFY
            batch.spec_info = VerifyInput(
                draft_token=batch.input_ids, positions=positions, draft_token_num=width
            )
            result = self.target_worker.forward_batch_generation(batch, is_verify=True)
        return result.logits_output, result.can_run_cuda_graph

    # -- talking to the draft server -------------------------------------------------------------

    def _take_drafts(
        self,
        reqs: list[Any],
        sessions: list[Session | None],
        drafts: Drafts,
    ) -> None:
        """Fill `drafts` with what has come for the batch by now."""
        assert self.client is not None
        if not self.drafting:
            return
        if self.tuner.paused:
            for _ in reqs:
                self.stats.observe_no_drafts("does_not_pay")
            return
        present = [s for s in sessions if s is not None]
        if self.client.up:
            # Rows that have never been asked for (opened while the server was away, or skipped
            # since) are asked now, together with the unanswered ones.
            if any(s.asked != s.committed and not s.done and not s.refused for s in present):
                self.client.ask(present)
            self.client.collect(present)
        limit = min(self.client.num_steps, self.num_steps)
        # With an outcome still to be committed, a session's drafts are those it was verified with
        # last: drafted for earlier positions, and no fresh samples of their proposals any more.
        known = not self._pending
        for i, (req, session) in enumerate(zip(reqs, sessions, strict=True)):
            if session is None:
                self.stats.observe_no_drafts("not_opened")
                continue
            speculation = session.speculation()[: min(limit, _room(session))] if known else []
            if req.custom_logit_processor is not None:
                speculation = []
            drafts.put(i, speculation, session.proposals)
            source = _SOURCES.get(session.status, "backup")
            if not speculation:
                processor = req.custom_logit_processor is not None
                source = "processor" if processor else self._reason(session)
                self.stats.observe_no_drafts(source)
            if session.trace is not None and not session.done:
                waited_s = self.client.waited_s if self.client.up else 0.0
                session.trace.verified(len(speculation), source, waited_s)

    def _fit_drafts(self, reqs: list[Any], sessions: list[Session | None], drafts: Drafts) -> None:
        """Let drafts keep to their request's grammar; all outcomes are committed to `sessions`."""
        assert self.client is not None
        limit = min(self.client.num_steps, self.num_steps)
        for i, (req, session) in enumerate(zip(reqs, sessions, strict=True)):
            grammar = _GrammarRow(req).grammar
            if grammar is None or session is None or session.done or session.sampling.top_m > 0:
                continue
            if req.custom_logit_processor is not None:
                continue
            given = drafts.tokens[i, : drafts.lens[i]].tolist()
            room = min(limit, _room(session))
            drafts.put(i, fit_drafts(grammar, req.tokenizer, given, session.tokens, room), None)

    def _reason(self, session: Session) -> str:
        assert self.client is not None
        if not self.client.up:
            return "down"
        if session.done:
            return "finished"
        if session.refused:
            return "context"
        if session.answered != session.committed:
            return "resting" if self.client.resting else "late"
        return {3: "miss", 4: "prefilling", 8: "no_memory"}.get(session.status, "empty")

    def _send_news(self, wait: bool = True) -> None:
        """Commit pending outcomes to their sessions and ask for their next speculations.

        With `wait`, all of them; otherwise those that the device has computed by now.
        """
        started, pending = time.perf_counter(), len(self._pending)
        while self._pending and (wait or self._pending[0].is_ready()):
            self._commit(self._pending.pop(0))
        if len(self._pending) == pending:
            return
        if wait:
            now = time.perf_counter()
            self.stats.outcome_wait.add(now - started)
            if self.stats.recorder is not None:
                self.stats.recorder.add(SpanKind.OUTCOME_WAIT, started, now)
        if self.client is not None and self._asking and self._asks:
            self.client.ask(self._asking.values())
        self._asking.clear()

    @property
    def _asks(self) -> bool:
        """Whether drafts are wanted now."""
        return self.drafting and not self.tuner.paused

    def _commit(self, outcome: PendingOutcome) -> None:
        rows = outcome.rows()
        self._observe_forward(outcome, rows)
        for i, (session, tokens) in enumerate(zip(outcome.sessions, rows, strict=True)):
            if outcome.drafted is not None and (session is None or not session.done):
                self.stats.observe_round(outcome.drafted[i], len(tokens) - 1)
            if session is None or session.closed or session.done:
                continue
            accepted = len(tokens) - 1
            if session.trace is not None and outcome.drafted is not None:
                session.trace.committed(
                    session.committed, accepted, tokens[-1], outcome.done - outcome.begun
                )
            session.commit(tokens)
            session.accepted = accepted
            self._asking[session.sid] = session

    def _observe_forward(self, outcome: PendingOutcome, rows: list[list[int]]) -> None:
        """Its times; `rows` are the tokens that it has committed."""
        is_verify = outcome.drafted is not None
        if is_verify:
            self._done_at = outcome.done
            self.stats.verify.add(outcome.done - outcome.begun)
        if self.stats.recorder is not None:
            kind = SpanKind.VERIFY if is_verify else SpanKind.PREFILL
            self.stats.recorder.add(kind, outcome.begun, outcome.done, count=sum(map(len, rows)))

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

    def _session_sampling(self, req: Any) -> SessionSampling:
        sampling = _session_sampling(req)
        if self.verification == "coupled" or sampling.temperature <= 0:
            return sampling
        return replace(sampling, top_m=self.proposal_top_m, saguaro_c=self.saguaro_c)


def _refuse_expert_adapters(runner: Any) -> None:
    """SGLang counts the tokens of such layers by prompt lengths, which a verify does not have."""
    if runner.server_args.enable_lora and runner.lora_manager.lora_backend.is_moe_lora:
        raise ConfigError(
            "LoRA adapters on the experts of a mixture of experts: SSD does not support them; "
            "leave gate_up_proj and down_proj out of --lora-target-modules"
        )


class _GrammarRow:
    """A request as the mask builder sees it: without its grammar once that has failed.

    A grammar that refuses a token it has allowed ends its request (`to_finish`). Under the overlap
    loop the request has one more row by then, for which a mask could only raise an error.
    """

    def __init__(self, req: Any) -> None:
        self.grammar = None if req.to_finish is not None else req.grammar


def _wants_drafts(req: Any) -> bool:
    """Whether a request will decode, and from tokens that a draft server can see."""
    return (
        req.sampling_params.max_new_tokens > 1
        and req.multimodal_inputs is None
        and req.input_embeds is None
    )


def _draft_key(req: Any) -> str:
    """Namespace of a request's prefixes in the draft's cache: its own, whatever its adapter is.

    SGLang appends the adapter's id, which changes the target's KV, but not the draft's.
    """
    return (req.extra_key or "").removesuffix(req.lora_id or "")


def _room(session: Session) -> int:
    """Drafts that can still be committed before the request's length limit."""
    return max(0, session.stop.max_length - session.committed - 1)


def _session_sampling(req: Any) -> SessionSampling:
    p = req.sampling_params
    bias = p.logit_bias or {}
    return SessionSampling(
        seed=req.ssd_seed,
        temperature=0.0 if p.top_k == 1 else float(p.temperature),
        top_k=p.top_k if p.top_k > 0 else TOP_K_ALL,
        top_p=float(p.top_p),
        min_p=float(p.min_p),
        bias_ids=np.array([int(t) for t in bias], dtype=np.int32) if bias else None,
        bias_values=np.array(list(bias.values()), dtype=np.float32) if bias else None,
    )


def _stop_rule(req: Any, context_len: int) -> StopRule:
    p = req.sampling_params
    ids: set[int] = set()
    if not p.ignore_eos:
        ids |= set(p.stop_token_ids or ()) | set(req.eos_token_ids or ())
        if req.tokenizer is not None:
            ids |= {req.tokenizer.eos_token_id} - {None}
            ids |= set(getattr(req.tokenizer, "additional_stop_token_ids", None) or ())
    length = len(req.origin_input_ids) + p.max_new_tokens
    return StopRule(frozenset(ids), min(length, context_len))
