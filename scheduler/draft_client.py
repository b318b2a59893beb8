"""The verifier's end of the wire: one draft server, its liveness, and every open session on it.

Runs on the scheduler's own thread and never blocks except in `collect`, which has a deadline.
Whatever goes wrong costs drafts only: a message that cannot be sent, an answer that is late, stale
or malformed, a server that dies or restarts. Everything that arrives is checked here before it can
reach a tensor.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable

import numpy as np

from sgl_ssd import protocol
from sgl_ssd.config import VerifierConfig
from sgl_ssd.errors import ProtocolError
from sgl_ssd.fan_out import MAX_FAN_OUT
from sgl_ssd.keys import load_client_keys
from sgl_ssd.protocol import SpanKind, Status
from sgl_ssd.scheduler.entries import Entries
from sgl_ssd.scheduler.proposals import valid_proposals
from sgl_ssd.scheduler.sessions import Session, SessionSampling, SessionTable, StopRule
from sgl_ssd.scheduler.stats import SSDStats
from sgl_ssd.transport import ClientChannel, ZmqClient

logger = logging.getLogger(__name__)

PING_S = 1.0
SILENCE_S = 5.0
HELLO_S = 1.0
# A deadline from measured times: mean + 6 mean deviations of a round trip, at least two rounds
# (going on without drafts costs about a round), between these bounds.
DEADLINE_FLOOR_S = 0.010
DEADLINE_CAP_S = 0.500
# After this many rounds in a row without any answer in time, drafting rests for a while.
BREAKER_TIMEOUTS = 5
BREAKER_REST_S = 1.0
MAX_OPENS_PER_ROUND = 16
# A peer that sends without end must not keep the scheduler from its work.
MAX_MESSAGES_AT_ONCE = 256


class DraftClient:
    """Asks a draft server for speculations and keeps it informed of what is committed."""

    def __init__(
        self,
        config: VerifierConfig,
        hello: protocol.Hello,
        stats: SSDStats,
        channel: ClientChannel | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`hello.verifier` must be unique; `channel` defaults to ZeroMQ on `config.endpoint`."""
        self._hello = hello
        self._stats = stats
        self._clock = clock
        keys = load_client_keys(config.draft_keys) if config.draft_keys is not None else None
        self._channel = channel or ZmqClient(config.endpoint, hello.verifier.encode(), keys)
        self._fixed_deadline_s = (
            config.draft_timeout_ms / 1e3 if config.draft_timeout_ms is not None else None
        )
        self.sessions = SessionTable()
        self._top_m = config.proposal_top_m
        self.num_steps = config.num_steps
        self.fan_out = list(config.fan_out)
        self.backup = config.backup
        self.push = config.push
        self.server: protocol.Ready | None = None
        self.server_stats: dict[str, float] = {}
        self.waited_s = 0.0  # in the last `collect`
        self._last_server = ""
        self._on_spans: Callable[[protocol.Spans], None] | None = None
        self._link = 0
        self._round_id = 0
        self._asked_at = 0.0
        self._awaited = -1  # the round whose answer somebody waits for
        self._given_up = -1  # the last one that was waited for in vain
        self._last_seen = 0.0
        self._last_ping = 0.0
        self._last_hello = -1e9
        self._unanswered_ping_at: float | None = None
        self._timeouts_in_a_row = 0
        self._rest_until = -1e9
        self._refused_text = ""
        # What the server has yet to hear: a flush, and the last epoch of closed sessions.
        self._flush_owed = False
        self._closes_owed: dict[int, int] = {}

    @property
    def up(self) -> bool:
        """Whether a draft server has said Ready and is not silent since."""
        return self.server is not None

    @property
    def resting(self) -> bool:
        """Whether the circuit breaker keeps drafting off for a moment."""
        return self._clock() < self._rest_until

    # -- life of the connection ------------------------------------------------------------

    def tick(self) -> None:
        """Keep the connection alive; call it often (every loop of the scheduler)."""
        now = self._clock()
        self._drain()
        if self.server is None:
            if now - self._last_hello >= HELLO_S:
                self._last_hello = now
                self._send(self._hello)
            return
        self._send_owed()
        if now - self._last_ping >= PING_S:
            waited = now - (self._unanswered_ping_at or now)
            if waited > SILENCE_S:
                self._down(f"no sign of life for {waited:.0f} s")
                return
            self._last_ping = now
            if self._unanswered_ping_at is None:
                self._unanswered_ping_at = now
            self._send(protocol.Ping(nonce=self._round_id))

    def wait_until_up(self, timeout_s: float) -> bool:
        """Wait for the draft server, at most `timeout_s` seconds; whether it is up."""
        deadline = self._clock() + timeout_s
        while not self.up and self._clock() < deadline:
            self.tick()
            message = self._receive(min(0.1, timeout_s))
            if message is not None:
                self._handle(message)
        return self.up

    def _down(self, why: str) -> None:
        if self.server is not None:
            logger.warning("draft server down: %s; serving goes on without drafts", why)
        self.server = None
        self._unanswered_ping_at = None
        for session in self.sessions:
            session.wire_epoch = session.asked = -1

    def _on_ready(self, ready: protocol.Ready) -> None:
        if ready == self.server:
            return  # answers a Hello that had to wait for the server to come up
        hello = self._hello
        problem = ""
        if ready.vocab_hash and hello.vocab_hash and ready.vocab_hash != hello.vocab_hash:
            problem = "its vocabulary is another one"
        elif ready.num_steps < hello.num_steps:
            problem = f"it drafts {ready.num_steps} tokens, K is {hello.num_steps}"
        if problem:
            self._refuse(f"draft server {ready.model_path!r} does not fit: {problem}")
            return
        self.server = ready
        self._stats.restarts += self._last_server not in ("", ready.server)
        self._last_server = ready.server
        self._link += 1
        self._last_seen = self._clock()
        self._unanswered_ping_at = None
        self._timeouts_in_a_row = 0
        self._rest_until = -1e9
        for session in self.sessions:
            session.wire_epoch = session.asked = -1
            session.refused = False
        self._send_owed()
        self.configure(self.num_steps, self.fan_out, self.backup)
        if self._on_spans is not None:
            self._send(protocol.Record(on=True))
        logger.info(
            "draft server up: %s on %s, K=%d, context %d",
            ready.model_path, ready.device, ready.num_steps, ready.context_len,
        )  # fmt: skip
        if ready.context_len < hello.context_len:
            logger.warning(
                "context of the draft %d tokens, of the target %d: no drafts for a request beyond "
                "%d tokens", ready.context_len, hello.context_len, ready.context_len,
            )  # fmt: skip

    def _refuse(self, text: str) -> None:
        if text != self._refused_text:
            logger.error("%s; serving goes on without drafts", text)
            self._refused_text = text

    def configure(self, num_steps: int, fan_out: list[int], backup: str) -> None:
        """Change K (at most the start's), fan-out and backup at run time."""
        self.num_steps, self.fan_out, self.backup = num_steps, list(fan_out), backup
        if self.server is not None:
            self._send(
                protocol.Configure(
                    num_steps=num_steps, fan_out=fan_out, backup=backup, push=self.push
                )
            )

    def record(self, on_spans: Callable[[protocol.Spans], None] | None) -> None:
        """Let the draft server record spans for a timeline; `on_spans` gets them, about once a
        second. None: those that still come are dropped."""
        self._on_spans = on_spans
        if on_spans is not None and self.up:
            self._send(protocol.Record(on=True))

    def stop_recording(self) -> bool:
        """Ask for the last spans; whether they can be expected."""
        return self.up and self._send(protocol.Record(on=False))

    def close(self) -> None:
        """Close all sessions and the connection."""
        for session in self.sessions:
            self.close_session(session.rid)
        self._channel.close()

    # -- sessions ----------------------------------------------------------------------------

    def open_session(
        self,
        rid: str,
        tokens: list[int],
        sampling: SessionSampling,
        stop: StopRule,
        extra_key: str = "",
    ) -> Session:
        """Begin drafting for a request; one that is open under this id ends first."""
        self.close_session(rid)
        session = self.sessions.add(rid, tokens, sampling, stop, extra_key)
        if self.up:
            self._open_on_wire(session)
        return session

    def close_session(self, rid: str) -> None:
        """End drafting for a request; does nothing if it is not open."""
        session = self.sessions.remove(rid)
        if session is not None:
            logger.debug("request %s: session %d ends", rid, session.sid)
        if session is not None and session.next_epoch > 0:
            self._closes_owed[session.sid] = session.next_epoch - 1
            self._send_owed()

    def flush(self) -> None:
        """Forget everything on the draft server."""
        for session in self.sessions:
            self.sessions.remove(session.rid)
        self._flush_owed = True
        self._closes_owed.clear()
        self._send_owed()

    def _send_owed(self) -> None:
        """Send the flush and the closes that are due, as far as the server can be reached."""
        if self.up and self._flush_owed:
            self._flush_owed = not self._send(protocol.Flush())
        while self.up and not self._flush_owed and self._closes_owed:
            sid, epoch = next(iter(self._closes_owed.items()))
            if not self._send(protocol.Close(sid=sid, epoch=epoch)):
                return
            del self._closes_owed[sid]

    def _open_on_wire(self, session: Session) -> bool:
        """Open a session with all that is committed, under a new epoch; whether that was sent."""
        sampling = session.sampling
        bias_ids = sampling.bias_ids if sampling.bias_ids is not None else np.empty(0, np.int32)
        bias = sampling.bias_values if sampling.bias_values is not None else np.empty(0, np.float32)
        try:
            sent = self._send(
                protocol.Open(
                    sid=session.sid,
                    epoch=session.next_epoch,
                    seed=sampling.seed,
                    temperature=sampling.temperature,
                    top_k=sampling.top_k,
                    top_p=sampling.top_p,
                    min_p=sampling.min_p,
                    top_m=sampling.top_m,
                    saguaro_c=sampling.saguaro_c,
                    extra_key=session.extra_key,
                    num_prompt=session.committed,
                    num_bias=len(bias_ids),
                    prompt=np.frombuffer(session.tokens, dtype=np.int32).copy(),
                    bias_ids=bias_ids,
                    bias_values=bias,
                )
            )
        except ProtocolError as e:
            logger.debug("request %s gets no drafts: %s", session.rid, e)
            session.refused = True
            return False
        if sent:
            logger.debug(
                "request %s: session %d begins with %d tokens, epoch %d",
                session.rid, session.sid, session.committed, session.next_epoch,
            )  # fmt: skip
            session.wire_epoch = session.next_epoch
            session.next_epoch += 1
            session.link = self._link
            session.acked = session.committed
            session.asked = session.answered = -1
            session.entries = None
        return sent

    # -- one round ---------------------------------------------------------------------------

    def ask(self, sessions: Iterable[Session]) -> None:
        """Tell the draft server what is committed in `sessions` and ask for speculations.

        One message for all; returns at once. Sessions whose question is still unanswered are
        asked again, since the server answers the newest message only.
        """
        self._drain()  # entries sent ahead, and answers that nobody waited for
        if not self.up:
            return
        unanswered = [s for s in self.sessions if self._due(s)]
        wanted: list[Session] = []
        opens = 0
        for session in dict.fromkeys((*sessions, *unanswered)):
            if session.closed or session.done or session.refused:
                continue
            if len(wanted) == protocol.MAX_ROWS:
                break
            gap = session.committed - session.acked
            if (
                session.wire_epoch < 0
                or session.link != self._link
                or gap > protocol.MAX_ROW_TOKENS
            ):
                if opens == MAX_OPENS_PER_ROUND:
                    continue
                opens += 1
                if not self._open_on_wire(session):
                    continue
            wanted.append(session)
        if not wanted:
            return
        for session in wanted:
            self._take_entry(session)
        rows = np.array(
            [(s.sid, s.wire_epoch, s.acked, s.committed - s.acked) for s in wanted], dtype=np.int64
        )
        news = [t for s in wanted for t in s.tokens[s.acked :]]
        self._round_id += 1
        now = self._clock()
        if now - self._asked_at < DEADLINE_CAP_S:
            self._stats.period.add(now - self._asked_at)
        self._asked_at = now
        sent = self._send(
            protocol.Speculate(
                round_id=self._round_id,
                num_rows=len(wanted),
                num_tokens=len(news),
                rows=rows,
                tokens=np.array(news, dtype=np.int32),
            )
        )
        if sent:
            self._awaited = self._round_id
            for session in wanted:
                session.asked = session.committed
            if all(s.answered == s.committed for s in wanted):
                self._awaited = -1

    def _take_entry(self, session: Session) -> None:
        """If the draft server has sent this outcome's speculation ahead, it is here already."""
        if session.entries is None or session.answered == session.committed:
            return
        entries, session.entries = session.entries, None
        drafts = entries.find(session.tokens[entries.base :])
        if not drafts:
            return
        session.answered = session.committed
        session.status = Status.HIT
        session.drafts, session.proposals = drafts, None
        self._stats.pushed_hits += 1
        self._stats.observe_answer(Status.HIT, session.accepted)
        if session.trace is not None:
            session.trace.answered(0.0)

    def collect(self, sessions: Iterable[Session]) -> bool:
        """Wait for the answers to what was asked of `sessions`, at most until the deadline.

        Returns whether all answers that were due are here. Use `Session.speculation` afterwards.
        """
        started = self._clock()
        due = [s for s in sessions if self._due(s)]
        deadline = self._asked_at + self._deadline_s()
        if self.resting:
            deadline = started
        for _ in range(MAX_MESSAGES_AT_ONCE):
            due = [s for s in due if self._due(s)]
            if not due:
                break
            message = self._receive(max(0.0, deadline - self._clock()))
            if message is None:
                break
            self._handle(message)
        now = self._clock()
        self.waited_s = now - started
        self._stats.wait.add(self.waited_s)
        if self._stats.recorder is not None:
            self._stats.recorder.add(SpanKind.DRAFT_WAIT, started, now, count=len(due))
        if due and not self.resting:
            self._on_timeout()
        return not due

    def _due(self, session: Session) -> bool:
        return (
            self.up
            and not session.closed
            and session.asked == session.committed
            and session.answered != session.committed
        )

    def _deadline_s(self) -> float:
        if self._fixed_deadline_s is not None:
            return self._fixed_deadline_s
        trip = self._stats.round_trip
        if trip.count < 20:
            return DEADLINE_CAP_S
        wanted = max(trip.recent + 6 * trip.deviation, 2 * self._stats.period.recent)
        return min(DEADLINE_CAP_S, max(DEADLINE_FLOOR_S, wanted))

    def _on_timeout(self) -> None:
        self._given_up = self._round_id
        self._stats.timeouts += 1
        self._timeouts_in_a_row += 1
        # A deadline that cuts off what it measures would never grow again.
        self._stats.round_trip.add(self._clock() - self._asked_at)
        if self._timeouts_in_a_row >= BREAKER_TIMEOUTS:
            self._timeouts_in_a_row = 0
            self._rest_until = self._clock() + BREAKER_REST_S
            logger.debug("draft answers are late; drafting rests for %.0f s", BREAKER_REST_S)

    # -- messages in -------------------------------------------------------------------------

    def _send(self, message: protocol.Message) -> bool:
        return self._channel.send(protocol.encode(message))

    def _receive(self, timeout_s: float) -> protocol.Message | None:
        """The next well-formed message, or None when `timeout_s` is over."""
        deadline = self._clock() + timeout_s
        for _ in range(MAX_MESSAGES_AT_ONCE):
            frames = self._channel.recv(max(0.0, deadline - self._clock()))
            if frames is None:
                return None
            try:
                return protocol.decode(frames)
            except ProtocolError as e:
                self._stats.invalid_messages += 1
                logger.debug("dropped a message from the draft server: %s", e)
        return None

    def _drain(self) -> None:
        for _ in range(MAX_MESSAGES_AT_ONCE):
            message = self._receive(0.0)
            if message is None:
                return
            self._handle(message)

    def _handle(self, message: protocol.Message) -> None:
        self._last_seen = self._clock()
        if isinstance(message, protocol.Speculations):
            self._on_speculations(message)
        elif isinstance(message, protocol.Entries):
            self._on_entries(message)
        elif isinstance(message, protocol.Ready):
            self._on_ready(message)
        elif isinstance(message, protocol.Pong):
            self._unanswered_ping_at = None
            self.server_stats = message.stats
        elif isinstance(message, protocol.Spans):
            if self._on_spans is not None:
                self._on_spans(message)
        elif isinstance(message, protocol.Error):
            if message.code == "hello_first":
                self._down("it has restarted")
                self._last_hello = -1e9
            else:
                self._refuse(f"draft server: {message.text}")
        else:
            self._stats.invalid_messages += 1

    def _on_speculations(self, answer: protocol.Speculations) -> None:
        if answer.round_id > self._round_id:
            self._stats.invalid_messages += 1
            return
        newest = answer.round_id == self._round_id
        if newest:
            if answer.round_id == self._given_up:
                self._stats.late_answers += 1
            else:
                self._timeouts_in_a_row = 0
            now = self._clock()
            trip_s = now - self._asked_at
            if self._awaited == answer.round_id:  # or it may have lain here for a while
                self._awaited = -1
                self._stats.round_trip.add(trip_s)
                if self._stats.recorder is not None:
                    self._stats.recorder.add(
                        SpanKind.ROUND_TRIP, self._asked_at, now, answer.round_id, answer.num_rows
                    )
            if answer.ahead_us:  # 0: nothing was served
                side = self._stats.ahead if answer.ahead_us > 0 else self._stats.behind
                side.add(abs(answer.ahead_us) / 1e6)
        else:
            trip_s = 0.0
            self._stats.late_answers += 1
        rows = answer.rows.tolist()
        tokens = answer.tokens.tolist()
        sound = self._sound_proposals(answer)
        for i, ((sid, epoch, have, status, count), drafts) in enumerate(
            zip(rows, tokens, strict=True)
        ):
            session = self.sessions.by_sid(sid)
            if (
                session is None
                or session.wire_epoch < 0
                or epoch != session.wire_epoch
                or session.link != self._link
            ):
                self._stats.stale_answers += 1
                continue
            if status == Status.UNKNOWN:
                session.wire_epoch = -1  # opened anew with the next question
                have = session.asked if newest else -1
                count = 0
            elif not 0 <= have <= session.committed:
                self._stats.invalid_messages += 1
                continue
            elif status == Status.NEED:
                session.acked = have
                have = session.asked if newest else -1
                count = 0
            else:
                session.acked = max(session.acked, have)
            if status == Status.CONTEXT and have == session.committed:
                session.refused = True
            if have != session.committed or session.answered == session.committed:
                continue
            drafts = drafts[: min(count, self._hello.num_steps)]
            sampled = session.sampling.top_m > 0
            if any(not 0 <= t < self._hello.vocab_size for t in drafts) or (
                drafts and sampled and not sound[i]
            ):
                self._stats.invalid_messages += 1
                drafts = []
            session.answered = session.committed
            session.status = status
            session.drafts = drafts
            session.proposals = (
                (answer.proposal_ids[i].copy(), answer.proposal_probs[i].copy())
                if drafts and sampled
                else None
            )
            self._stats.observe_answer(Status(status), session.accepted)
            if session.trace is not None:
                session.trace.answered(trip_s)

    def _on_entries(self, message: protocol.Entries) -> None:
        limit, steps = self._hello.vocab_size, self._hello.num_steps
        ids = (message.chains, message.keys[:, 1], message.tokens)
        if (
            message.num_steps > steps
            or (message.rows[:, 4] > (steps + 1) * MAX_FAN_OUT).any()
            or any(((part < 0) | (part >= limit)).any() for part in ids)
        ):
            self._stats.invalid_messages += 1
            return
        at = 0
        for (sid, epoch, base, chain_len, count), chain in zip(
            message.rows.tolist(), message.chains.tolist(), strict=True
        ):
            part = slice(at, at + count)
            at += count
            session = self.sessions.by_sid(sid)
            if session is None or epoch != session.wire_epoch or session.link != self._link:
                self._stats.stale_answers += 1
            elif base > session.committed or session.sampling.top_m > 0:  # has no proposals
                self._stats.invalid_messages += 1
            else:
                # Copies, lest a session keeps the message with what it says of others.
                session.entries = Entries(
                    base, chain[:chain_len], message.keys[part].copy(), message.tokens[part].copy()
                )

    def _sound_proposals(self, answer: protocol.Speculations) -> list[bool]:
        """Which rows of an answer bring proposals for all their drafts that can be relied on."""
        if not 0 < answer.top_m <= self._top_m:
            return [False] * answer.num_rows
        sound: list[bool] = valid_proposals(
            answer.tokens, answer.rows[:, 4], answer.proposal_ids, answer.proposal_probs,
            self._hello.vocab_size,
        ).tolist()  # fmt: skip
        return sound


def make_hello(
    num_steps: int, context_len: int, vocab_size: int, vocab_hash: str, max_running_requests: int
) -> protocol.Hello:
    """A `Hello` with a name that no other verifier has."""
    return protocol.Hello(
        verifier=f"{os.getpid()}-{uuid.uuid4().hex}",
        num_steps=num_steps,
        context_len=context_len,
        vocab_size=vocab_size,
        vocab_hash=vocab_hash,
        max_running_requests=max_running_requests,
    )
