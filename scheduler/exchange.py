"""What goes between the verifier and its draft server: outcomes out as news, drafts in."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from sgl_ssd import explain
from sgl_ssd.config import VerifierConfig
from sgl_ssd.protocol import SpanKind, Status
from sgl_ssd.sampling import TOP_K_ALL
from sgl_ssd.scheduler.draft_fleet import DraftFleet
from sgl_ssd.scheduler.grammar import GrammarRow, fit_drafts
from sgl_ssd.scheduler.outcomes import PendingOutcome
from sgl_ssd.scheduler.proposals import Drafts
from sgl_ssd.scheduler.request_trace import RequestTrace
from sgl_ssd.scheduler.sessions import Session, SessionSampling, StopRule
from sgl_ssd.scheduler.stats import SSDStats
from sgl_ssd.scheduler.tuner import Tuner

_SOURCES = {int(Status.HIT): "hit", int(Status.PARTIAL): "partial"}


class DraftExchange:
    """Opens a session for each request, reports what is committed, fetches drafts.

    Only rank 0 has a `client`; on others nothing is open and nothing comes.

    Attributes:
        drafting: whether drafts are wanted at all; may change at any time.
        verification, saguaro_c, proposal_top_m: for sessions that are opened from now on.
        outcome_at: when the host saw the outcome of the last verify (`time.perf_counter`).
    """

    def __init__(
        self,
        config: VerifierConfig,
        client: DraftFleet | None,
        tuner: Tuner,
        stats: SSDStats,
        context_len: int,
    ) -> None:
        self.drafting = config.drafting
        self.verification = config.verification
        self.saguaro_c, self.proposal_top_m = config.saguaro_c, config.proposal_top_m
        self.outcome_at = 0.0
        self._client = client
        self._tuner = tuner
        self._stats = stats
        self._context_len = context_len
        self._max_top_m = config.proposal_top_m
        self._num_steps = config.num_steps
        self._pending: list[PendingOutcome] = []
        self._asking: dict[int, Session] = {}

    @property
    def asks(self) -> bool:
        """Whether drafts are wanted now."""
        return self.drafting and not self._tuner.paused

    # -- sessions --------------------------------------------------------------------------------

    def open_sessions(self, batch: Any) -> list[Session | None]:
        """Open a session for each request at its first chunk; returns the sessions of rows whose
        prefill ends with this forward (None: more chunks follow, or nobody drafts for it)."""
        sessions: list[Session | None] = []
        for i, req in enumerate(batch.reqs):
            if self._client is None:
                sessions.append(None)
                continue
            session = self._client.sessions.get(req.rid)
            total = len(req.origin_input_ids) + len(req.output_ids)
            if session is None and self.drafting and _wants_drafts(req):
                session = self._client.open_session(
                    req.rid,
                    [*req.origin_input_ids, *req.output_ids],
                    self._sampling(req),
                    _stop_rule(req, self._context_len),
                    _draft_key(req),
                )
                session.trace = self._request_trace(req)
            last_chunk = batch.prefix_lens[i] + batch.extend_lens[i] >= total
            sessions.append(session if last_chunk else None)
        return sessions

    def close_session(self, rid: str) -> None:
        """A request is over, or its KV is given up; does nothing if nobody drafts for it."""
        if self._client is not None:
            self._client.close_session(rid)

    def flush(self) -> None:
        """Both caches are to be empty; whatever is on its way is forgotten."""
        self._pending.clear()
        self._asking.clear()
        if self._client is not None:
            self._client.flush()

    def _sampling(self, req: Any) -> SessionSampling:
        sampling = _session_sampling(req)
        if self.verification == "coupled" or sampling.temperature <= 0:
            return sampling
        return replace(sampling, top_m=self.proposal_top_m, saguaro_c=self.saguaro_c)

    def _request_trace(self, req: Any) -> RequestTrace | None:
        """Of a request whose client asked for it; SGLang sends it along with the output."""
        if not explain.wanted(req.sampling_params.custom_params):
            return None
        if req.customized_info is None:
            prompt = len(req.origin_input_ids)
            trace = RequestTrace(prompt, lambda: self.send_news(wait=False))
            req.customized_info = {explain.KEY: trace}
        trace = req.customized_info.get(explain.KEY)
        return trace if isinstance(trace, RequestTrace) else None

    # -- outcomes out ----------------------------------------------------------------------------

    def add(self, outcome: PendingOutcome) -> None:
        """The outcome of a forward that was just launched."""
        self._pending.append(outcome)

    def send_news(self, wait: bool) -> None:
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
            self._stats.outcome_wait.add(now - started)
            if self._stats.recorder is not None:
                self._stats.recorder.add(SpanKind.OUTCOME_WAIT, started, now)
        if self._client is not None and self._asking and self.asks:
            self._client.ask(self._asking.values())
        self._asking.clear()

    def _commit(self, outcome: PendingOutcome) -> None:
        rows = outcome.rows()
        self._observe_forward(outcome, rows)
        for i, (session, tokens) in enumerate(zip(outcome.sessions, rows, strict=True)):
            if outcome.drafted is not None and (session is None or not session.done):
                self._stats.observe_round(outcome.drafted[i], len(tokens) - 1)
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
            self.outcome_at = outcome.done
            self._stats.verify.add(outcome.done - outcome.begun)
        if self._stats.recorder is not None:
            kind = SpanKind.VERIFY if is_verify else SpanKind.PREFILL
            self._stats.recorder.add(kind, outcome.begun, outcome.done, count=sum(map(len, rows)))

    # -- drafts in -------------------------------------------------------------------------------

    def fetch(
        self, batch: Any, grammar_barrier: Callable[[], None] | None
    ) -> tuple[list[Session | None], Drafts]:
        """The sessions of a batch that is to be verified, and its drafts; waits for them at most
        until the deadline.

        `grammar_barrier` returns once the grammars of the requests have taken in all outcomes.
        """
        reqs, client = batch.reqs, self._client
        sessions: list[Session | None] = [None] * len(reqs)
        drafts = Drafts.none(len(reqs), self._num_steps, self._max_top_m)
        # Who asks for drafts must know the outcome of the forward before; others need not wait.
        self.send_news(wait=self.asks and client is not None and client.up)
        if client is not None:
            sessions = [client.sessions.get(req.rid) for req in reqs]
            self._take_drafts(client, reqs, sessions, drafts)
            if batch.has_grammar and self.asks and not self._pending:
                if grammar_barrier is not None:
                    grammar_barrier()
                self._fit_drafts(client, reqs, sessions, drafts)
        return sessions, drafts

    def _take_drafts(
        self,
        client: DraftFleet,
        reqs: Sequence[Any],
        sessions: Sequence[Session | None],
        drafts: Drafts,
    ) -> None:
        """Fill `drafts` with what has come for the batch by now."""
        if not self.drafting:
            return
        if self._tuner.paused:
            for _ in reqs:
                self._stats.observe_no_drafts("does_not_pay")
            return
        present = [s for s in sessions if s is not None]
        if client.up:
            # Rows that have never been asked for (opened while the server was away, or skipped
            # since) are asked now, together with the unanswered ones.
            if any(s.asked != s.committed and not s.done and not s.refused for s in present):
                client.ask(present)
            client.collect(present)
        limit = min(client.num_steps, self._num_steps)
        # With an outcome still to be committed, a session's drafts are those it was verified with
        # last: drafted for earlier positions, and no fresh samples of their proposals any more.
        known = not self._pending
        for i, (req, session) in enumerate(zip(reqs, sessions, strict=True)):
            if session is None:
                self._stats.observe_no_drafts("not_opened")
                continue
            speculation = session.speculation()[: min(limit, _room(session))] if known else []
            if req.custom_logit_processor is not None:
                speculation = []
            drafts.put(i, speculation, session.proposals)
            source = _SOURCES.get(session.status, "backup")
            if not speculation:
                processor = req.custom_logit_processor is not None
                source = "processor" if processor else _reason(client, session)
                self._stats.observe_no_drafts(source)
            if session.trace is not None and not session.done:
                waited_s = client.waited_s if client.up else 0.0
                session.trace.verified(len(speculation), source, waited_s)

    def _fit_drafts(
        self,
        client: DraftFleet,
        reqs: Sequence[Any],
        sessions: Sequence[Session | None],
        drafts: Drafts,
    ) -> None:
        """Let drafts keep to their request's grammar; all outcomes are committed to `sessions`."""
        limit = min(client.num_steps, self._num_steps)
        for i, (req, session) in enumerate(zip(reqs, sessions, strict=True)):
            grammar = GrammarRow(req).grammar
            if grammar is None or session is None or session.done or session.sampling.top_m > 0:
                continue
            if req.custom_logit_processor is not None:
                continue
            given = drafts.tokens[i, : drafts.lens[i]].tolist()
            room = min(limit, _room(session))
            drafts.put(i, fit_drafts(grammar, req.tokenizer, given, session.tokens, room), None)


def _reason(client: DraftFleet, session: Session) -> str:
    """Why a session has no drafts."""
    if not client.up:
        return "down"
    if session.done:
        return "finished"
    if session.refused:
        return "context"
    if session.answered != session.committed:
        return "resting" if client.resting(session) else "late"
    return {3: "miss", 4: "prefilling", 8: "no_memory"}.get(session.status, "empty")


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
