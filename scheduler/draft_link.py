"""The connection to one draft server: whether it is up, how far away it is, what it is still owed.

Runs on the scheduler's own thread and never blocks except in `receive`, which has a timeout.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable

from sgl_ssd import protocol
from sgl_ssd.errors import ProtocolError
from sgl_ssd.scheduler.stats import SSDStats
from sgl_ssd.transport import ClientChannel

logger = logging.getLogger(__name__)

PING_S = 1.0
SILENCE_S = 5.0
HELLO_S = 1.0
# Rather with a question, whose answer somebody may wait for: then the Pong is read when it comes.
PING_WITH_QUESTION_S = 0.8
FIRST_PINGS = 5  # one after the other when a server comes up, to see how far away it is
MEASURING_S = 0.5
MEASURED_PINGS = 32
# A Pong may have lain in the socket since we last looked: that long, or it measures nothing.
PROMPT_S = 0.0005
# A peer that sends without end must not keep the scheduler from its work.
MAX_MESSAGES_AT_ONCE = 256

_links = itertools.count()


class DraftLink:
    """Says Hello until there is a Ready, then pings; sends what is owed once it can be sent.

    Attributes:
        name: what logs call this draft server.
        endpoint: where it listens.
        server: its Ready; None while it is down.
        server_stats: its own numbers, of the last Pong.
        restarts: how often another draft server came up in place of one that was known.
        pings_s: measured round trips of the last pings, without work on either side.
    """

    def __init__(
        self,
        endpoint: str,
        hello: protocol.Hello,
        settings: protocol.Configure,
        stats: SSDStats,
        channel: ClientChannel,
        *,
        index: int = 0,
        alone: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`index` tells the servers of one verifier apart; `alone`: there is no other."""
        self.endpoint, self.index = endpoint, index
        self.name = "draft server" if alone else f"draft server {index}"
        self.channel = channel
        self.server: protocol.Ready | None = None
        self.server_stats: dict[str, float] = {}
        self.restarts = 0
        self.pings_s: deque[float] = deque(maxlen=MEASURED_PINGS)
        self._hello = hello
        self._settings = settings
        self._stats = stats
        self._clock = clock
        self._consequence = (
            "serving goes on without drafts" if alone else "its requests go to the others"
        )
        self._last_server = ""
        self._on_spans: Callable[[protocol.Spans, int], None] | None = None
        self._link = next(_links)  # unique: a session is open on the wire under one of them
        self._last_ping = 0.0
        self._last_hello = -1e9
        self._nonce = 0
        self._unanswered_ping_at: float | None = None
        self._first_pings = 0
        self._looked_at = -1e9  # when the socket was empty last
        self._heard_at = -1e9
        self._refused_text = ""
        # What the server has yet to hear: a flush, and the last epoch of closed sessions.
        self._flush_owed = False
        self._closes_owed: dict[int, int] = {}

    @property
    def up(self) -> bool:
        """Whether the draft server has said Ready and is not silent since."""
        return self.server is not None

    def tick(self) -> None:
        """Keep the connection alive; call it often (every loop of the scheduler)."""
        now = self._clock()
        self.drain()
        if self.server is None:
            if now - self._last_hello >= HELLO_S:
                self._last_hello = now
                self.send(self._hello)
            return
        self._send_owed()
        # Also where questions keep on sending pings, so that none is ever due here.
        waited = now - (self._unanswered_ping_at or now)
        if waited > SILENCE_S:
            self._down(f"no sign of life for {waited:.0f} s")
        elif now - self._last_ping >= PING_S:
            self._ping(now)

    def measure(self) -> None:
        """Wait for the answers to the first pings, at most `MEASURING_S`."""
        until = self._clock() + MEASURING_S
        while self.up and self._first_pings:
            message = self.receive(max(0.0, until - self._clock()))
            if message is None:
                return
            self.handle(message)

    def configure(self, settings: protocol.Configure) -> None:
        """Change K (at most the start's), fan-out, backup and push at run time."""
        self._settings = settings
        if self.up:
            self.send(settings)

    def record(self, on_spans: Callable[[protocol.Spans, int], None] | None) -> None:
        """Let the draft server record spans for a timeline; `on_spans` gets them and our index,
        about once a second. None: those that still come are dropped."""
        self._on_spans = on_spans
        if on_spans is not None and self.up:
            self.send(protocol.Record(on=True))

    def stop_recording(self) -> bool:
        """Ask for the last spans; whether they can be expected."""
        return self.up and self.send(protocol.Record(on=False))

    def flush(self) -> None:
        """Forget everything on the draft server."""
        self._flush_owed = True
        self._closes_owed.clear()
        self._send_owed()

    def close(self) -> None:
        """Drop the connection."""
        self.channel.close()

    # -- up and down -------------------------------------------------------------------------

    def ping_with_question(self, now: float) -> None:
        """A question was sent: a ping along with it, if one is due soon."""
        if now - self._last_ping >= PING_WITH_QUESTION_S:
            self._ping(now)

    def _ping(self, now: float) -> None:
        self._nonce += 1
        self._last_ping = now
        if self._unanswered_ping_at is None:
            self._unanswered_ping_at = now
        self.send(protocol.Ping(nonce=self._nonce))

    def _on_pong(self, pong: protocol.Pong) -> None:
        now = self._clock()
        if pong.nonce == self._nonce and now - self._looked_at <= PROMPT_S:
            self.pings_s.append(now - self._last_ping)
        self._unanswered_ping_at = None
        self.server_stats = pong.stats
        if self._first_pings > 0:
            self._first_pings -= 1
            if self._first_pings:
                self._ping(now)
            elif self.pings_s and self.remote:
                logger.info(
                    "%s at %s: round trip of a ping %.2f ms, mean %.2f ms",
                    self.name, self.endpoint, *self.ping_ms,
                )  # fmt: skip

    @property
    def remote(self) -> bool:
        """Whether it is reached over a network, or could be."""
        return self.endpoint.startswith("tcp:")

    @property
    def ping_ms(self) -> tuple[float, float]:
        """Shortest and mean round trip of the last pings, in milliseconds; 0: not measured."""
        if not self.pings_s:
            return 0.0, 0.0
        return 1e3 * min(self.pings_s), 1e3 * sum(self.pings_s) / len(self.pings_s)

    def _down(self, why: str) -> None:
        if self.server is not None:
            logger.warning("%s down: %s; %s", self.name, why, self._consequence)
        self.server = None
        self._unanswered_ping_at = None
        self._connection_changed()

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
            self._refuse(f"{self.name} {ready.model_path!r} does not fit: {problem}")
            return
        self.server = ready
        restarted = self._last_server not in ("", ready.server)
        self.restarts += restarted
        self._stats.restarts += restarted
        self._last_server = ready.server
        self._link = next(_links)
        self._connection_changed()
        self._send_owed()
        self.send(self._settings)
        if self._on_spans is not None:
            self.send(protocol.Record(on=True))
        self.pings_s.clear()
        self._unanswered_ping_at = None
        self._first_pings = FIRST_PINGS
        self._ping(self._clock())
        logger.info(
            "%s up: %s on %s, K=%d, context %d",
            self.name, ready.model_path, ready.device, ready.num_steps, ready.context_len,
        )  # fmt: skip
        if ready.context_len < hello.context_len:
            logger.warning(
                "context of the draft %d tokens, of the target %d: no drafts for a request beyond "
                "%d tokens", ready.context_len, hello.context_len, ready.context_len,
            )  # fmt: skip

    def _refuse(self, text: str) -> None:
        if text != self._refused_text:
            logger.error("%s; %s", text, self._consequence)
            self._refused_text = text

    def _connection_changed(self) -> None:
        """The server is lost, or a new one there: nothing is open on the wire any more."""

    # -- messages ----------------------------------------------------------------------------

    def _owe_close(self, sid: int, epoch: int) -> None:
        """Close a session up to `epoch`, now or as soon as that can be sent."""
        self._closes_owed[sid] = epoch
        self._send_owed()

    def _send_owed(self) -> None:
        """Send the flush and the closes that are due, as far as the server can be reached."""
        if self.up and self._flush_owed:
            self._flush_owed = not self.send(protocol.Flush())
        while self.up and not self._flush_owed and self._closes_owed:
            sid, epoch = next(iter(self._closes_owed.items()))
            if not self.send(protocol.Close(sid=sid, epoch=epoch)):
                return
            del self._closes_owed[sid]

    def send(self, message: protocol.Message) -> bool:
        """Queue a message; False when there is no room."""
        return self.channel.send(protocol.encode(message))

    def receive(self, timeout_s: float) -> protocol.Message | None:
        """The next well-formed message, or None when `timeout_s` is over."""
        begun = self._clock()
        deadline = begun + timeout_s
        for _ in range(MAX_MESSAGES_AT_ONCE):
            frames = self.channel.recv(max(0.0, deadline - begun))
            now = self._clock()
            if frames is None or now - begun > PROMPT_S:  # none was there, or it was waited for
                self._looked_at = now
            if frames is None:
                return None
            begun = self._heard_at = now
            try:
                return protocol.decode(frames)
            except ProtocolError as e:
                self._stats.invalid_messages += 1
                logger.debug("dropped a message from %s: %s", self.name, e)
        return None

    def drain(self) -> None:
        """Take in what has come."""
        for _ in range(MAX_MESSAGES_AT_ONCE):
            message = self.receive(0.0)
            if message is None:
                return
            self.handle(message)

    def handle(self, message: protocol.Message) -> None:
        """Take in one message of the draft server."""
        if isinstance(message, protocol.Ready):
            self._on_ready(message)
        elif isinstance(message, protocol.Pong):
            self._on_pong(message)
        elif isinstance(message, protocol.Spans):
            if self._on_spans is not None:
                self._on_spans(message, self.index)
        elif isinstance(message, protocol.Error):
            if message.code == "hello_first":
                self._down("it has restarted")
                self._last_hello = -1e9
            else:
                self._refuse(f"{self.name}: {message.text}")
        else:
            self._stats.invalid_messages += 1
