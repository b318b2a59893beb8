"""The draft server's loop: receive, answer, build. Speaks `protocol` over any `ServerChannel`."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np

from sgl_ssd.draft_server.proposals import SamplingParams
from sgl_ssd.draft_server.sessions import Peer, Peers, Session
from sgl_ssd.draft_server.stats import ServerStats
from sgl_ssd.errors import ProtocolError
from sgl_ssd.fan_out import MAX_FAN_OUT
from sgl_ssd.protocol import (
    Close,
    Configure,
    Entries,
    Error,
    Flush,
    Hello,
    Message,
    Open,
    Ping,
    Pong,
    Ready,
    Record,
    SpanKind,
    Spans,
    Speculate,
    Speculations,
    Status,
    decode,
    encode,
)
from sgl_ssd.recorder import Recorder
from sgl_ssd.transport import ServerChannel

logger = logging.getLogger(__name__)

IDLE_POLL_S = 0.5
STARVED_POLL_S = 0.02
HOUSEKEEPING_S = 1.0
ERRORS_PER_S = 10
MESSAGES_PER_TURN = 1024
RECEIVE_S = 0.002
SESSIONS_PER_SLOT = 16
PUSHED_AT_ONCE = 32  # sessions in one message
STUCK_S = 10.0
PATIENT_ROWS = 2
"""A question about more does not wait for the first draft of one: all the others would."""


class Engine(Protocol):
    """What the loop needs of a draft engine; see `engine.DraftEngine`."""

    context_len: int

    @property
    def busy(self) -> bool: ...

    @property
    def starved(self) -> bool: ...

    def open(
        self, tokens: Sequence[int], params: SamplingParams, extra_key: str, num_steps: int,
        fan_out: Sequence[int],
    ) -> Any: ...  # fmt: skip

    def close(self, draft: Any, keep: bool = True) -> None: ...

    def advance(self, draft: Any, new: Sequence[int], patient: bool) -> Status | None: ...

    def backup(self, drafts: Sequence[Any], kind: str) -> list[Status]: ...

    def plan(self, *drafts: Any) -> None: ...

    def work(self) -> None: ...

    def take_built(self) -> list[Any]: ...

    def summary(self) -> dict[str, float]: ...

    @property
    def recorders(self) -> list[Recorder]: ...


class DraftServer:
    """One loop, one thread, one engine, many verifiers.

    `ready` is the template of the answer to a `Hello` that fits.
    """

    def __init__(
        self,
        channel: ServerChannel,
        engine: Engine,
        ready: Ready,
        *,
        max_sessions: int,
        lease_s: float,
        clock: Any = time.monotonic,
    ) -> None:
        self._channel = channel
        self._engine = engine
        self._ready = ready
        self._max_open = max_sessions * SESSIONS_PER_SLOT
        self._clock = clock
        self.peers = Peers(lease_s)
        self.stats = ServerStats()
        self._asked: dict[bytes, Speculate] = {}
        self._housekeeping_at = 0.0
        self._errors_left = ERRORS_PER_S
        self._recorders: dict[bytes, Recorder] = {}  # of verifiers that write a timeline
        self.snapshot: dict[str, float] = {}  # for other threads; a second old at most when busy
        self._turned_at = clock()
        self._stop = False
        self._handlers: dict[type[Message], Any] = {
            Open: self._open,
            Close: self._close,
            Speculate: self._speculate,
            Configure: self._configure,
            Flush: self._flush,
            Ping: self._ping,
            Record: self._record,
        }

    def stop(self) -> None:
        """Leave `run` at the end of the current turn. Safe in a signal handler."""
        self._stop = True

    @property
    def alive(self) -> bool:
        """Whether the loop has turned lately, be it idly. For other threads."""
        return bool(self._clock() - self._turned_at < STUCK_S)

    def run(self) -> None:
        """Serve until `stop`."""
        while not self._stop:
            self.turn()

    def turn(self) -> None:
        """Take the news, answer, build for a step, and send what is complete."""
        self._turned_at = self._clock()
        self._receive()
        self._answer()
        self._engine.work()
        self._push()
        self._keep_house()

    # -- receiving -----------------------------------------------------------------------------

    def _receive(self) -> None:
        if self._engine.busy:
            timeout = 0.0
        else:
            timeout = STARVED_POLL_S if self._engine.starved else IDLE_POLL_S
        begin = self._clock()
        for _ in range(MESSAGES_PER_TURN):
            if self._asked and self._clock() - begin > RECEIVE_S:
                return  # one verifier's flood does not keep another's question waiting
            received = self._channel.recv(timeout)
            if timeout:
                self.stats.idle_seconds += self._clock() - begin
            if received is None:
                return
            timeout = 0.0
            self._handle(*received)

    def _handle(self, identity: bytes, frames: list[bytes]) -> None:
        now = self._clock()
        try:
            message = decode(frames)
        except ProtocolError as e:
            self.stats.malformed += 1
            logger.debug("malformed message dropped: %s", e)
            return
        if isinstance(message, Hello):
            self._hello(identity, message, now)
            return
        peer = self.peers.get(identity, now)
        handler = self._handlers.get(type(message))
        if handler is None:  # a message that only a draft server sends
            self.stats.malformed += 1
        elif peer is None:
            self._refuse(identity, "hello_first", "say Hello before anything else")
        else:
            handler(peer, message)

    def _refuse(self, identity: bytes, code: str, text: str) -> None:
        self.stats.refused += 1
        if self._errors_left > 0:
            self._errors_left -= 1
            self._send(identity, Error(code=code, text=text))

    def _send(self, identity: bytes, message: Message) -> bool:
        sent = self._channel.send(identity, encode(message))
        self.stats.unsent += not sent
        return sent

    def _hello(self, identity: bytes, hello: Hello, now: float) -> None:
        problem = self._mismatch(hello)
        if problem:
            logger.warning("verifier %s refused: %s", hello.verifier, problem)
            self._refuse(identity, "pair_mismatch", problem)
            return
        fan_out = self._ready.fan_out[: hello.num_steps] + self._ready.fan_out[-1:]
        known = len(self.peers)
        for session in self.peers.join(identity, hello, fan_out, self._ready.backup, now):
            self._engine.close(session.draft)
        if len(self.peers) > known:
            logger.info("verifier %s connected (%d in all)", hello.verifier, len(self.peers))
        self._send(identity, self._ready)

    def _mismatch(self, hello: Hello) -> str | None:
        mine = self._ready
        if hello.num_steps > mine.num_steps:
            return (
                f"the verifier wants {hello.num_steps} drafts a round, this server was started "
                f"with --num-steps {mine.num_steps}"
            )
        if hello.vocab_hash and mine.vocab_hash and hello.vocab_hash != mine.vocab_hash:
            return (
                f"target ({hello.vocab_size} tokens) and draft {mine.model_path} "
                f"({mine.vocab_size} tokens) have different vocabularies: the same id means "
                "another token. Choose a draft of the same model family"
            )
        return None

    def _open(self, peer: Peer, message: Open) -> None:
        old = peer.sessions.get(message.sid)
        if old is not None:
            if message.epoch <= old.epoch:
                return
            self._engine.close(old.draft)
            del peer.sessions[message.sid]
        prompt = message.prompt
        if int(prompt.min()) < 0 or int(prompt.max()) >= peer.hello.vocab_size:
            self.stats.malformed += 1
            return
        quota = max(1, self._max_open // len(self.peers))
        if len(peer.sessions) >= quota:
            self._refuse(peer.identity, "too_many_sessions", f"more than {quota} open")
            return
        params = SamplingParams(
            temperature=message.temperature,
            top_k=message.top_k,
            top_p=message.top_p,
            min_p=message.min_p,
            seed=message.seed,
            bias_ids=message.bias_ids if message.num_bias else None,
            bias_values=np.nan_to_num(message.bias_values) if message.num_bias else None,
            vocab_limit=min(peer.hello.vocab_size, self._ready.vocab_size),
            top_m=message.top_m,
            saguaro_c=message.saguaro_c,
            fan_out=tuple(peer.fan_out),
        )
        draft = self._engine.open(
            prompt, params, peer.namespace(message.extra_key), peer.num_steps,
            peer.fan_out,
        )  # fmt: skip
        draft.name = peer.identity, message.sid
        top_m = params.top_m if params.sampled else 0
        peer.sessions[message.sid] = Session(
            message.sid, message.epoch, draft, self._clock(), top_m
        )

    def _close(self, peer: Peer, message: Close) -> None:
        session = peer.sessions.get(message.sid)
        if session is not None and session.epoch <= message.epoch:
            del peer.sessions[message.sid]
            self._engine.close(session.draft)

    def _configure(self, peer: Peer, message: Configure) -> None:
        if message.num_steps > self._ready.num_steps:
            self._refuse(
                peer.identity, "configure",
                f"num_steps {message.num_steps}: at most {self._ready.num_steps} at run time",
            )  # fmt: skip
            return
        peer.num_steps = message.num_steps
        peer.fan_out = [min(f, MAX_FAN_OUT) for f in message.fan_out]
        peer.backup = message.backup
        peer.push = message.push
        for session in peer.sessions.values():
            session.draft.num_steps = peer.num_steps
            session.draft.fan_out = list(peer.fan_out)

    def _flush(self, peer: Peer, message: Flush) -> None:
        for session in self.peers.flush(peer):
            self._engine.close(session.draft, keep=False)

    def _ping(self, peer: Peer, message: Ping) -> None:
        self._send(peer.identity, Pong(nonce=message.nonce, stats=self.summary()))
        if peer.identity in self._recorders:
            self._send_spans(peer.identity)

    def _record(self, peer: Peer, message: Record) -> None:
        if message.on:
            self._recorders[peer.identity] = Recorder()
            self._engine.recorders[:] = self._recorders.values()
        elif peer.identity in self._recorders:
            self._send_spans(peer.identity, last=True)
            self._forget_recorder(peer.identity)

    def _send_spans(self, identity: bytes, last: bool = False) -> None:
        spans = self._recorders[identity].drain()
        marks = np.array([(kind, id_, count) for kind, _, _, id_, count in spans], np.int64)
        times = np.array([(begin, end) for _, begin, end, _, _ in spans], np.float64)
        shaped = {"marks": marks.reshape(-1, 3), "times": times.reshape(-1, 2)}
        self._send(identity, Spans(num=len(spans), last=last, **shaped))

    def _forget_recorder(self, identity: bytes) -> None:
        if self._recorders.pop(identity, None) is not None:
            self._engine.recorders[:] = self._recorders.values()

    def _speculate(self, peer: Peer, message: Speculate) -> None:
        earlier = self._asked.get(peer.identity)
        if earlier is not None:
            self.stats.unanswered += 1
            if message.round_id < earlier.round_id:
                return
            self._take_in(peer, earlier)
        self._asked[peer.identity] = message
        peer.asked_at = self._clock()

    # -- answering -----------------------------------------------------------------------------

    def _answer(self) -> None:
        """Answer the newest question of each peer."""
        while self._asked:
            identity, message = self._asked.popitem()
            peer = self.peers.get(identity, self._clock())
            if peer is not None:
                self._answer_one(peer, message)

    def _take_in(self, peer: Peer, message: Speculate) -> list[tuple[Session | None, Any, int]]:
        """Apply the news of each row: (session, status or None for a miss, have_len)."""
        rows: list[tuple[Session | None, Any, int]] = []
        patient = len(message.rows) <= PATIENT_ROWS
        at, now = 0, self._clock()
        seen: set[int] = set()  # a session asked for twice in one message is refused
        for sid, epoch, base, num in message.rows.tolist():
            tokens = message.tokens[at : at + num]
            at += num
            session = peer.sessions.get(sid)
            if session is None or session.epoch != epoch or sid in seen:
                rows.append((None, Status.UNKNOWN, 0))
                continue
            seen.add(sid)
            session.last_seen = now
            status = self._news(peer, session, base, tokens, patient)
            have = 0 if status is Status.UNKNOWN else len(session.draft.tokens)
            rows.append((session if status is not Status.UNKNOWN else None, status, have))
        return rows

    def _news(
        self, peer: Peer, session: Session, base: int, tokens: np.ndarray, patient: bool
    ) -> Any:
        known = session.draft.tokens
        have = len(known)
        if base > have:
            return Status.NEED
        values = tokens.tolist()
        overlap = min(have - base, len(values))
        if values[:overlap] != known[base : base + overlap].tolist():
            return Status.UNKNOWN
        new = values[overlap:]
        if new and (min(new) < 0 or max(new) >= peer.hello.vocab_size):
            return Status.UNKNOWN
        return self._engine.advance(session.draft, new, patient)

    def _answer_one(self, peer: Peer, message: Speculate) -> None:
        begin = self._clock()
        rows = self._take_in(peer, message)
        taken_in = self._clock()
        missed = [i for i, (session, status, _) in enumerate(rows) if session and status is None]
        if missed:
            kind = peer.backup
            if kind == "auto":  # a just-in-time draft for some makes the others wait
                kind = "jit" if len(rows) == 1 else "fast"
            drafts = [rows[i][0].draft for i in missed]  # type: ignore[union-attr]
            for i, status in zip(missed, self._engine.backup(drafts, kind), strict=True):
                session, _, have = rows[i]
                rows[i] = (session, status, have)
            self.stats.misses += len(missed)
        recorder = self._recorders.get(peer.identity)
        if recorder is not None:
            now, id_ = self._clock(), message.round_id
            recorder.add(SpanKind.ADOPT, begin, taken_in, count=len(rows))
            if missed:
                recorder.add(SpanKind.BACKUP, taken_in, now, count=len(missed))
            recorder.add(SpanKind.ANSWER, peer.asked_at, now, id_, len(rows))
        self._send(peer.identity, self._speculations(peer, message, rows))
        self.stats.rounds += 1
        self.stats.rows += len(rows)
        for _, status, _ in rows:
            self.stats.count(status)
        self._engine.plan(*(s.draft for s, status, _ in rows if s and status in _BUILDABLE))

    def _speculations(
        self,
        peer: Peer,
        message: Speculate,
        rows: list[tuple[Session | None, Any, int]],
    ) -> Speculations:
        steps = peer.num_steps
        head = np.empty((len(rows), 5), np.int64)
        head[:, :2] = message.rows[:, :2]
        tokens = np.zeros((len(rows), steps), np.int32)
        served = [s for s, status, _ in rows if s is not None and status in _SERVED]
        top_m = max((s.top_m for s in served), default=0)
        ids = np.zeros((len(rows), steps, top_m), np.int32)
        probs = np.zeros((len(rows), steps, top_m), np.float32)
        aheads: list[float] = []
        for i, (session, status, have) in enumerate(rows):
            num = 0
            if session is not None and status in _SERVED:
                chain = session.draft.chain[:steps]
                num = len(chain)
                tokens[i, :num] = chain
                m = session.top_m
                if m:
                    ids[i, :num, :m], probs[i, :num, :m] = session.draft.proposals(num)
                aheads.append(session.draft.ahead_s)
            head[i, 2:] = have, int(status), num
        return Speculations(
            round_id=message.round_id,
            num_rows=len(rows),
            num_steps=steps,
            ahead_us=int(1e6 * min(aheads, default=0.0)),
            top_m=top_m,
            rows=head,
            tokens=tokens,
            proposal_ids=ids,
            proposal_probs=probs,
        )

    # -- ahead of the question -----------------------------------------------------------------

    def _push(self) -> None:
        """Send the caches that have become complete to the verifiers that want them ahead.

        Where a request is verified by rejection its proposals would have to come along, for every
        entry: it has to ask.
        """
        built: dict[bytes, list[Session]] = {}
        for draft in self._engine.take_built():
            identity, sid = draft.name
            peer = self.peers.find(identity)
            session = peer.sessions.get(sid) if peer is not None and peer.push else None
            if session is not None and session.draft is draft and not session.top_m:
                built.setdefault(identity, []).append(session)
        for identity, sessions in built.items():
            peer = self.peers.find(identity)
            assert peer is not None
            for at in range(0, len(sessions), PUSHED_AT_ONCE):
                self._send_entries(peer, sessions[at : at + PUSHED_AT_ONCE])

    def _send_entries(self, peer: Peer, sessions: list[Session]) -> None:
        begin, steps = self._clock(), peer.num_steps
        rows = np.zeros((len(sessions), 5), np.int64)
        chains = np.zeros((len(sessions), steps), np.int32)
        keys, tokens = [], []
        for i, session in enumerate(sessions):
            draft = session.draft
            chain = draft.chain[: min(steps, draft.answered)]
            chains[i, : len(chain)] = chain
            entries, drafts = draft.entries(steps)
            usable = entries[:, 0] <= len(chain)
            keys.append(entries[usable])
            tokens.append(drafts[usable])
            rows[i] = session.sid, session.epoch, len(draft.tokens), len(chain), len(keys[-1])
        count = int(rows[:, 4].sum())
        if not count:
            return
        message = Entries(
            num_rows=len(sessions),
            num_entries=count,
            num_steps=steps,
            rows=rows,
            chains=chains,
            keys=np.concatenate(keys),
            tokens=np.concatenate(tokens),
        )
        if not self._send(peer.identity, message):
            return
        self.stats.pushes += 1
        self.stats.pushed_entries += count
        recorder = self._recorders.get(peer.identity)
        if recorder is not None:
            recorder.add(SpanKind.PUSH, begin, self._clock(), count=count)

    # -- housekeeping --------------------------------------------------------------------------

    def _keep_house(self) -> None:
        now = self._clock()
        if now < self._housekeeping_at:
            return
        self._housekeeping_at = now + HOUSEKEEPING_S
        self.snapshot = self.summary()
        self._errors_left = ERRORS_PER_S
        for peer in self.peers.expire(now):
            logger.warning("verifier %s is silent: its sessions are closed", peer.hello.verifier)
            self._forget_recorder(peer.identity)
            self.stats.expired_peers += 1
            for session in peer.sessions.values():
                self._engine.close(session.draft)
        for session in self.peers.expire_sessions(now):
            self.stats.expired_sessions += 1
            self._engine.close(session.draft)

    def summary(self) -> dict[str, float]:
        """All numbers, flat."""
        return {
            "peers": len(self.peers),
            "sessions": self.peers.num_sessions,
            **{k: float(v) for k, v in asdict(self.stats).items()},
            **self._engine.summary(),
        }


_SERVED = frozenset((Status.HIT, Status.PARTIAL, Status.BACKUP))
_BUILDABLE = _SERVED | {Status.EMPTY, Status.NO_MEMORY}
