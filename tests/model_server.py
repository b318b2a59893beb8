"""A draft server without a draft model, for tests of the verifier's end of the wire."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from channels import MemoryServer
from sgl_ssd import protocol
from sgl_ssd.errors import ProtocolError
from sgl_ssd.protocol import Status
from sgl_ssd.scheduler.sessions import SessionSampling, StopRule

K, VOCAB, HASH = 4, 1000, "same"
SAMPLING = SessionSampling(seed=1, temperature=1.0, top_k=50, top_p=0.9, min_p=0.1)
NO_STOP = StopRule(frozenset(), 1 << 20)


def drafts_after(tokens: Sequence[int], count: int = K) -> list[int]:
    """The model server's drafts: another list for every other sequence."""
    start = zlib.crc32(np.array(tokens, dtype=np.int32).tobytes())
    return [(start + 7919 * j) % VOCAB for j in range(count)]


class ModelServer:
    """What a draft server does with each message, without a draft model."""

    def __init__(self, channel: MemoryServer) -> None:
        self.channel = channel
        channel.serve = self.turn
        self.frozen = False
        self.vocab_hash = HASH
        self.num_steps = K
        self.name = 0
        self.peers: set[bytes] = set()
        self.sessions: dict[int, tuple[int, list[int]]] = {}
        self.messages: list[protocol.Message] = []
        self.malformed = 0

    def restart(self) -> None:
        """All state and all that is on its way is lost."""
        self.name += 1
        self.peers.clear()
        self.sessions.clear()
        self.channel.inbox.clear()

    def turn(self) -> None:
        if self.frozen:
            return
        question = None
        while (received := self.channel.recv(0.0)) is not None:
            peer, frames = received
            try:
                message = protocol.decode(frames)
            except ProtocolError:
                self.malformed += 1
                continue
            self.messages.append(message)
            if isinstance(message, protocol.Speculate) and peer in self.peers:
                self.take_in(message)
                if question is None or message.round_id > question[1].round_id:
                    question = peer, message
            else:
                self.handle(peer, message)
        if question is not None:  # only the newest is answered
            self.send(question[0], self.take_in(question[1]))

    def send(self, peer: bytes, message: protocol.Message) -> None:
        self.channel.send(peer, protocol.encode(message))

    def handle(self, peer: bytes, message: protocol.Message) -> None:
        if isinstance(message, protocol.Hello):
            self.peers.add(peer)
            self.send(peer, ready(self.vocab_hash, self.num_steps, f"server {self.name}"))
        elif peer not in self.peers:
            self.send(peer, protocol.Error(code="hello_first", text="say Hello first"))
        elif isinstance(message, protocol.Ping):
            self.send(peer, protocol.Pong(nonce=message.nonce, stats={"peers": 1.0}))
        elif isinstance(message, protocol.Open):
            if message.epoch > self.sessions.get(message.sid, (-1, []))[0]:
                self.sessions[message.sid] = message.epoch, message.prompt.tolist()
        elif isinstance(message, protocol.Close):
            if self.sessions.get(message.sid, (1 << 62, []))[0] <= message.epoch:
                del self.sessions[message.sid]
        elif isinstance(message, protocol.Flush):
            self.sessions.clear()

    def take_in(self, message: protocol.Speculate) -> protocol.Speculations:
        rows, drafts, at = [], [], 0
        for sid, epoch, base, count in message.rows.tolist():
            news = message.tokens[at : at + count].tolist()
            at += count
            status, have, chain = self.news(sid, epoch, base, news)
            rows.append((sid, epoch, have, status, len(chain)))
            drafts.append(chain + [0] * (K - len(chain)))
        return answer(message.round_id, rows, drafts)

    def news(
        self, sid: int, epoch: int, base: int, news: list[int]
    ) -> tuple[Status, int, list[int]]:
        current, known = self.sessions.get(sid, (-1, []))
        if current != epoch:
            return Status.UNKNOWN, 0, []
        if base > len(known):
            return Status.NEED, len(known), []
        overlap = len(known) - base
        if news[:overlap] != known[base : base + len(news)]:
            return Status.UNKNOWN, 0, []
        known.extend(news[overlap:])
        return Status.HIT, len(known), drafts_after(known)

    def received(self, kind: type) -> list[Any]:
        """All messages of a type so far, and forget them all."""
        found = [m for m in self.messages if isinstance(m, kind)]
        self.messages.clear()
        return found


def ready(vocab_hash: str = HASH, num_steps: int = K, server: str = "server") -> protocol.Ready:
    return protocol.Ready(
        server=server, model_path="draft-model", num_steps=num_steps, context_len=1 << 20,
        vocab_size=VOCAB, vocab_hash=vocab_hash, fan_out=[1] * (num_steps + 1), backup="jit",
        max_branch_rows=16, device="cpu",
    )  # fmt: skip


def answer(
    round_id: int, rows: list[tuple], tokens: list[list[int]], steps: int = K
) -> protocol.Speculations:
    """`rows` are (sid, epoch, have, status, num)."""
    return protocol.Speculations(
        round_id=round_id, num_rows=len(rows), num_steps=steps,
        rows=np.array(rows, dtype=np.int64).reshape(-1, 5),
        tokens=np.array(tokens, dtype=np.int32).reshape(-1, steps),
    )  # fmt: skip
