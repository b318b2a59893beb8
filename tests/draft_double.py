"""A draft server without a model, for tests: it drafts from a script, well or badly.

Speaks the real protocol over the real socket, so that the verifier's whole path is exercised. The
variants are those of the reliability tests: right, half right, wrong, slow, or lying.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from sgl_ssd import protocol
from sgl_ssd.errors import ProtocolError
from sgl_ssd.protocol import Status
from sgl_ssd.transport import ZmqServer

Drafter = Callable[[list[int], int], list[int]]


@dataclass
class Script:
    """Continuations that are known beforehand: sequences of token ids, prompt included."""

    sequences: list[list[int]] = field(default_factory=list)

    def draft(self, tokens: list[int], count: int) -> list[int]:
        """The next `count` tokens after `tokens`, as far as some sequence knows them."""
        for sequence in self.sequences:
            if sequence[: len(tokens)] == tokens:
                return sequence[len(tokens) : len(tokens) + count]
        return []


class DraftDouble(threading.Thread):
    """Answers on `endpoint` with what `drafter(tokens, count)` returns.

    `wrong`: share of drafted tokens that are replaced by others; `delay_s`: upper bound of a random
    pause before each answer; `tamper` may change an answer before it is encoded, or its frames.
    """

    def __init__(
        self,
        endpoint: str,
        drafter: Drafter,
        *,
        vocab_size: int,
        vocab_hash: str = "",
        num_steps: int = 16,
        wrong: float = 0.0,
        delay_s: float = 0.0,
        tamper: Callable[[protocol.Speculations], object] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(daemon=True)
        self.endpoint, self.drafter = endpoint, drafter
        self.vocab_size, self.vocab_hash, self.num_steps = vocab_size, vocab_hash, num_steps
        self.wrong, self.delay_s, self.tamper = wrong, delay_s, tamper
        self.steps = num_steps
        self.opened: dict[tuple[bytes, int], tuple[int, list[int]]] = {}
        self.counts: dict[str, int] = {}
        self._random = random.Random(seed)
        self._known: set[bytes] = set()
        self._stop_event = threading.Event()
        self._ready = threading.Event()
        self.start()
        self._ready.wait(10)

    def run(self) -> None:
        server = ZmqServer(self.endpoint)
        self._ready.set()
        try:
            while not self._stop_event.is_set():
                received = server.recv(0.05)
                if received is None:
                    continue
                peer, frames = received
                try:
                    answer = self._answer(peer, protocol.decode(frames))
                except ProtocolError as e:
                    answer = protocol.Error(code="malformed", text=str(e))
                if answer is None:
                    continue
                if isinstance(answer, protocol.Speculations):
                    if self.delay_s:
                        time.sleep(self._random.random() * self.delay_s)
                    if self.tamper is not None:
                        changed = self.tamper(answer)
                        if isinstance(changed, list):
                            server.send(peer, changed)
                            continue
                        if changed is None:
                            continue
                server.send(peer, protocol.encode(answer))
        finally:
            server.close()

    def stop(self) -> None:
        """End the thread and close the socket."""
        self._stop_event.set()
        self.join(10)

    def _answer(self, peer: bytes, message: protocol.Message) -> protocol.Message | None:
        name = type(message).__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        if isinstance(message, protocol.Hello):
            self._known.add(peer)
            return protocol.Ready(
                server="double", model_path="double", num_steps=self.num_steps,
                context_len=1 << 20, vocab_size=self.vocab_size, vocab_hash=self.vocab_hash,
                fan_out=[1] * (self.num_steps + 1), backup="none", max_branch_rows=1, device="cpu",
            )  # fmt: skip
        if peer not in self._known:
            return protocol.Error(code="hello_first", text="say Hello first")
        if isinstance(message, protocol.Ping):
            return protocol.Pong(nonce=message.nonce, stats={})
        if isinstance(message, protocol.Configure):
            self.steps = message.num_steps
        elif isinstance(message, protocol.Open):
            self.opened[peer, message.sid] = (message.epoch, message.prompt.tolist())
        elif isinstance(message, protocol.Close):
            self.opened.pop((peer, message.sid), None)
        elif isinstance(message, protocol.Flush):
            self.opened.clear()
        elif isinstance(message, protocol.Speculate):
            return self._speculate(peer, message)
        return None

    def _speculate(self, peer: bytes, message: protocol.Speculate) -> protocol.Speculations:
        rows = np.zeros((message.num_rows, 5), dtype=np.int64)
        tokens = np.zeros((message.num_rows, self.steps), dtype=np.int32)
        at = 0
        for i, (sid, epoch, base, count) in enumerate(message.rows.tolist()):
            news = message.tokens[at : at + count].tolist()
            at += count
            session = self.opened.get((peer, sid))
            if session is None or session[0] != epoch:
                rows[i] = (sid, epoch, 0, Status.UNKNOWN, 0)
                continue
            known = session[1]
            if base > len(known):
                rows[i] = (sid, epoch, len(known), Status.NEED, 0)
                continue
            known.extend(news[len(known) - base :])
            drafts = self.drafter(known, self.steps)[: self.steps]
            drafts = [self._random_token(t) if self._flip() else t for t in drafts]
            rows[i] = (sid, epoch, len(known), Status.HIT if drafts else Status.EMPTY, len(drafts))
            tokens[i, : len(drafts)] = drafts
        return protocol.Speculations(
            round_id=message.round_id, num_rows=len(rows), num_steps=self.steps,
            rows=rows, tokens=tokens,
        )  # fmt: skip

    def _flip(self) -> bool:
        return self._random.random() < self.wrong

    def _random_token(self, other_than: int) -> int:
        return (other_than + 1 + self._random.randrange(self.vocab_size - 1)) % self.vocab_size
