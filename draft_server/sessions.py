"""Who is connected, and which requests of theirs are open.

A *peer* is one verifier (one ZeroMQ identity), known from its `Hello` on and forgotten when it has
been silent for the lease. A *session* is one request: (peer, sid), with an epoch that rises when
the verifier opens it anew. Pure bookkeeping: drafts are opened and closed by the server.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from sgl_ssd.protocol import Hello


@dataclass
class Session:
    """One open request. `draft` is the engine's side of it.

    `top_m`: size of the proposals that travel with its drafts; 0: none do.
    """

    sid: int
    epoch: int
    draft: Any
    last_seen: float = 0.0
    top_m: int = 0


@dataclass
class Peer:
    """One verifier and its settings."""

    identity: bytes
    hello: Hello
    num_steps: int
    fan_out: list[int]
    backup: str
    last_seen: float
    generation: int = 0
    sessions: dict[int, Session] = field(default_factory=dict)
    push: bool = False  # complete caches are sent ahead
    asked_at: float = 0.0  # when its newest question came

    def namespace(self, extra_key: str) -> str:
        """The radix tree's namespace: prefixes are shared within one verifier only.

        A flush makes a new one, so that what is cached can't be found any more.
        """
        return f"{self.identity.hex()}/{self.generation}/{extra_key}"


class Peers:
    """All verifiers that have said Hello."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._peers: dict[bytes, Peer] = {}
        self._generation = 0

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._peers.values()))

    def __len__(self) -> int:
        return len(self._peers)

    def get(self, identity: bytes, now: float) -> Peer | None:
        """The peer, whose lease begins anew; None if it has not said Hello."""
        peer = self._peers.get(identity)
        if peer is not None:
            peer.last_seen = now
        return peer

    def find(self, identity: bytes) -> Peer | None:
        """The peer; its lease goes on as it was."""
        return self._peers.get(identity)

    def join(
        self, identity: bytes, hello: Hello, fan_out: list[int], backup: str, now: float
    ) -> list[Session]:
        """A Hello that fits. Returns sessions to close: those of an earlier process.

        The same verifier saying Hello again (it may have missed `Ready`) keeps its sessions.
        """
        old = self._peers.get(identity)
        if old is not None and old.hello == hello:
            old.last_seen = now
            return []
        self._generation += 1
        self._peers[identity] = Peer(
            identity, hello, hello.num_steps, fan_out, backup, now, self._generation
        )
        return list(old.sessions.values()) if old is not None else []

    def flush(self, peer: Peer) -> list[Session]:
        """Forget the peer's sessions and prefixes; returns the sessions to close."""
        self._generation += 1
        peer.generation = self._generation
        sessions = list(peer.sessions.values())
        peer.sessions.clear()
        return sessions

    def expire(self, now: float) -> list[Peer]:
        """Forget the peers that were silent for the lease; returns them."""
        gone = [p for p in self._peers.values() if now - p.last_seen > self._lease_s]
        for peer in gone:
            del self._peers[peer.identity]
        return gone

    def expire_sessions(self, now: float) -> list[Session]:
        """Take out the sessions nobody asked about for the lease: their Close must have got lost.

        A verifier that still wants one hears UNKNOWN and opens it again.
        """
        gone = []
        for peer in self._peers.values():
            old = [s for s in peer.sessions.values() if now - s.last_seen > self._lease_s]
            for session in old:
                del peer.sessions[session.sid]
            gone += old
        return gone

    @property
    def num_sessions(self) -> int:
        return sum(len(p.sessions) for p in self._peers.values())
