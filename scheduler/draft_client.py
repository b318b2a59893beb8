"""Rounds with one draft server: what is asked, what comes back, and how long that is waited for.

Whatever goes wrong costs drafts only: a message that cannot be sent, an answer that is late, stale
or malformed, a server that dies or restarts. Everything that arrives is checked here before it can
reach a tensor.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from sgl_ssd import protocol
from sgl_ssd.errors import ProtocolError
from sgl_ssd.fan_out import MAX_FAN_OUT
from sgl_ssd.protocol import SpanKind, Status
from sgl_ssd.scheduler.draft_link import DraftLink
from sgl_ssd.scheduler.entries import Entries
from sgl_ssd.scheduler.proposals import valid_proposals
from sgl_ssd.scheduler.sessions import Session
from sgl_ssd.scheduler.stats import MeanTime, SSDStats
from sgl_ssd.transport import ClientChannel

logger = logging.getLogger(__name__)

# A deadline from measured times: mean + 6 mean deviations of a round trip, at least two rounds
# (going on without drafts costs about a round), between these bounds.
DEADLINE_FLOOR_S = 0.010
DEADLINE_CAP_S = 0.500
# After this many rounds in a row without any answer in time, drafting rests for a while.
BREAKER_TIMEOUTS = 5
BREAKER_REST_S = 1.0
MAX_OPENS_PER_ROUND = 16
# Where others could take over: a server that says nothing at all for so long after a question.
UNHEARD_S = 1.0


class DraftClient(DraftLink):
    """Asks one draft server for speculations and keeps it informed of what is committed.

    Attributes:
        sessions: those that are placed at this server, by wire id.
        round_trip: of its answers that were waited for.
        timeouts: rounds that went on without an answer of it.
    """

    def __init__(
        self,
        endpoint: str,
        hello: protocol.Hello,
        settings: protocol.Configure,
        stats: SSDStats,
        channel: ClientChannel,
        round_ids: Iterator[int],
        *,
        top_m: int,
        deadline_s: float | None = None,
        index: int = 0,
        alone: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`round_ids` rise and are unique in this process; `top_m`: most entries of a proposal;
        `deadline_s`: how long an answer is waited for, None: from measured times."""
        super().__init__(
            endpoint, hello, settings, stats, channel, index=index, alone=alone, clock=clock
        )
        self.sessions: dict[int, Session] = {}
        self.round_trip = MeanTime()
        self.timeouts = 0
        self._round_ids = round_ids
        self._top_m = top_m
        self._fixed_deadline_s = deadline_s
        self._round_id = 0
        self._asked_at = 0.0
        self._unheard_from = 0.0  # the first question since which nothing was heard
        self._awaited = -1  # the round whose answer somebody waits for
        self._given_up = -1  # the last one that was waited for in vain
        self._timeouts_in_a_row = 0
        self._rest_until = -1e9

    @property
    def resting(self) -> bool:
        """Whether the circuit breaker keeps drafting off for a moment."""
        return self._clock() < self._rest_until

    def _connection_changed(self) -> None:
        self._timeouts_in_a_row = 0
        self._rest_until = -1e9
        for session in self.sessions.values():
            session.wire_epoch = session.asked = -1
            session.refused = False

    # -- sessions ----------------------------------------------------------------------------

    def take_over(self, session: Session) -> None:
        """Draft for a session from now on."""
        self.sessions[session.sid] = session
        session.server = self.index
        session.wire_epoch = session.asked = -1
        session.refused = False

    def release(self, session: Session) -> None:
        """Draft for a session no more; does nothing if it is not at this server."""
        if self.sessions.pop(session.sid, None) is not None and session.next_epoch > 0:
            self._owe_close(session.sid, session.next_epoch - 1)

    def flush(self) -> None:
        """Forget everything on the draft server, and all sessions."""
        self.sessions.clear()
        super().flush()

    def open_on_wire(self, session: Session) -> bool:
        """Open a session with all that is committed, under a new epoch; whether that was sent."""
        sampling = session.sampling
        bias_ids = sampling.bias_ids if sampling.bias_ids is not None else np.empty(0, np.int32)
        bias = sampling.bias_values if sampling.bias_values is not None else np.empty(0, np.float32)
        try:
            sent = self.send(
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

    def ask(self, sessions: Iterable[Session]) -> bool:
        """Tell the draft server what is committed in `sessions`, which are placed here, and ask
        for speculations; whether there was anything to ask.

        One message for all; returns at once. Sessions whose question is still unanswered are
        asked again, since the server answers the newest message only.
        """
        unanswered = [s for s in self.sessions.values() if self.due(s)]
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
                if not self.open_on_wire(session):
                    continue
            wanted.append(session)
        if not wanted:
            return False
        for session in wanted:
            self._take_entry(session)
        rows = np.array(
            [(s.sid, s.wire_epoch, s.acked, s.committed - s.acked) for s in wanted], dtype=np.int64
        )
        news = [t for s in wanted for t in s.tokens[s.acked :]]
        self._round_id = next(self._round_ids)
        self._asked_at = self._clock()
        if self._heard_at >= self._unheard_from:
            self._unheard_from = self._asked_at
        sent = self.send(
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
        self.ping_with_question(self._asked_at)
        return True

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

    def due(self, session: Session) -> bool:
        """Whether an answer to what was asked of a session, which is placed here, is still out."""
        return (
            self.server is not None
            and not session.closed
            and session.asked == session.committed
            and session.answered != session.committed
        )

    @property
    def deadline(self) -> float:
        """Until when the answer to the last question is waited for; long past while it rests."""
        return -1e9 if self.resting else self._asked_at + self._deadline_s()

    def _deadline_s(self) -> float:
        if self._fixed_deadline_s is not None:
            return self._fixed_deadline_s
        trip = self.round_trip
        if trip.count < 20:
            return DEADLINE_CAP_S
        wanted = max(trip.recent + 6 * trip.deviation, 2 * self._stats.period.recent)
        return min(DEADLINE_CAP_S, max(DEADLINE_FLOOR_S, wanted))

    def give_up(self) -> None:
        """Count it as down if it has been silent for `UNHEARD_S`; there are others."""
        unheard_s = self._clock() - self._unheard_from
        if self._heard_at < self._unheard_from and unheard_s >= UNHEARD_S:
            self._down(f"no answer for {unheard_s:.0f} s")

    def timed_out(self) -> None:
        """The round went on without the answer."""
        self._given_up = self._round_id
        self.timeouts += 1
        self._timeouts_in_a_row += 1
        # A deadline that cuts off what it measures would never grow again.
        self._observe_trip(self._clock() - self._asked_at)
        if self._timeouts_in_a_row >= BREAKER_TIMEOUTS:
            self._timeouts_in_a_row = 0
            self._rest_until = self._clock() + BREAKER_REST_S
            logger.debug("answers of %s are late; it rests for %.0f s", self.name, BREAKER_REST_S)

    def _observe_trip(self, seconds: float) -> None:
        self.round_trip.add(seconds)
        self._stats.round_trip.add(seconds)

    # -- messages in -------------------------------------------------------------------------

    def handle(self, message: protocol.Message) -> None:
        """Take in one message of the draft server."""
        if isinstance(message, protocol.Speculations):
            self._on_speculations(message)
        elif isinstance(message, protocol.Entries):
            self._on_entries(message)
        else:
            super().handle(message)

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
                self._observe_trip(trip_s)
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
            session = self.sessions.get(sid)
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
            session = self.sessions.get(sid)
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
