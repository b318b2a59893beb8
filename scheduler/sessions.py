"""Requests as the draft server knows them, seen from the verifier. Pure Python."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from sgl_ssd.scheduler.entries import Entries
from sgl_ssd.scheduler.request_trace import RequestTrace


@dataclass(frozen=True)
class SessionSampling:
    """What drafting needs to know of a request's sampling parameters.

    `top_m` > 0: it is verified by rejection, with proposals of at most `top_m` tokens.
    """

    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    bias_ids: np.ndarray | None = None  # int32 [n]
    bias_values: np.ndarray | None = None  # float32 [n]
    top_m: int = 0
    saguaro_c: float = 1.0


@dataclass(frozen=True)
class StopRule:
    """The ends of a request that can be told from token ids alone (absolute lengths)."""

    token_ids: frozenset[int]
    max_length: int


@dataclass(eq=False)
class Session:
    """One open request.

    Attributes:
        tokens: every committed token, prompt included, the bonus token last.
        acked: how many of them the draft server is known to have.
        wire_epoch: epoch under which the session is open on the wire; -1 when it is not.
        server: index of the draft server that it is placed at; -1: none.
        link: which connection it was opened on (a restarted server knows no sessions).
        proposals: what `drafts` were drawn from, ids int32 and probabilities float32 [K, M]; None
            if they were drawn coupled.
        entries: what the draft server has sent ahead of the question; None: nothing, or used up.
        answered: number of committed tokens that `drafts` continues; -1: no answer yet.
        accepted: drafts accepted in the last round; 0 before the first.
        trace: what its client is told about its rounds, if it has asked.
        done: ended as far as token ids can tell; no more drafts are wanted.
        refused: the draft server can draft no further (its context is full).
    """

    sid: int
    rid: str
    tokens: array
    sampling: SessionSampling
    stop: StopRule
    extra_key: str = ""
    acked: int = 0
    wire_epoch: int = -1
    next_epoch: int = 0
    server: int = -1
    link: int = -1
    asked: int = -1
    answered: int = -1
    status: int = -1
    drafts: list[int] = field(default_factory=list)
    proposals: tuple[np.ndarray, np.ndarray] | None = None
    entries: Entries | None = None
    accepted: int = 0
    trace: RequestTrace | None = None
    done: bool = False
    refused: bool = False
    closed: bool = False

    @property
    def committed(self) -> int:
        """Number of committed tokens."""
        return len(self.tokens)

    def commit(self, tokens: list[int]) -> None:
        """Append what the target has produced; marks the session done at a token-level stop."""
        for token in tokens:
            self.tokens.append(token)
            if token in self.stop.token_ids or len(self.tokens) >= self.stop.max_length:
                self.done = True
                return

    def speculation(self) -> list[int]:
        """Drafts for the positions after the last committed token; empty when there are none."""
        return self.drafts if self.answered == self.committed else []


class SessionTable:
    """All open sessions, by request id and by wire id. Wire ids are never used twice."""

    def __init__(self) -> None:
        self._by_rid: dict[str, Session] = {}
        self._by_sid: dict[int, Session] = {}
        self._next_sid = 0

    def __len__(self) -> int:
        return len(self._by_sid)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_sid.values()))

    def add(
        self,
        rid: str,
        tokens: list[int],
        sampling: SessionSampling,
        stop: StopRule,
        extra_key: str = "",
    ) -> Session:
        """A new session for `rid`, which must not have one."""
        session = Session(
            self._next_sid, rid, array("i", tokens), sampling, stop, extra_key=extra_key
        )
        self._next_sid += 1
        self._by_rid[rid] = session
        self._by_sid[session.sid] = session
        return session

    def get(self, rid: str) -> Session | None:
        """The open session of a request, or None."""
        return self._by_rid.get(rid)

    def by_sid(self, sid: int) -> Session | None:
        """The open session with a wire id, or None."""
        return self._by_sid.get(sid)

    def remove(self, rid: str) -> Session | None:
        """Take out the session of `rid` and mark it closed; None if there is none."""
        session = self._by_rid.pop(rid, None)
        if session is not None:
            del self._by_sid[session.sid]
            session.closed = True
        return session
