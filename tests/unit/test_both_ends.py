"""Both ends of the wire together: the real client and the real server loop, with faults between.

Only the models are pretended: drafts are a function of the tokens, so each one can be checked.
"""

from __future__ import annotations

import random
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from channels import (
    FAULTS,
    FakeClock,
    Fault,
    FaultyChannel,
    MemoryServer,
    random_schedule,
)
from sgl_ssd import protocol
from sgl_ssd.config import VerifierConfig
from sgl_ssd.draft_server.server import DraftServer
from sgl_ssd.protocol import Status
from sgl_ssd.scheduler.draft_client import make_hello
from sgl_ssd.scheduler.draft_fleet import DraftFleet
from sgl_ssd.scheduler.sessions import Session, SessionSampling, StopRule
from sgl_ssd.scheduler.stats import SSDStats

K, VOCAB, LEASE_S = 4, 1000, 60.0
SAMPLING = SessionSampling(seed=1, temperature=1.0, top_k=50, top_p=0.9, min_p=0.1)
NO_STOP = StopRule(frozenset(), 1 << 20)


def drafts_after(tokens: Sequence[int]) -> list[int]:
    start = zlib.crc32(np.array(tokens, dtype=np.int32).tobytes())
    return [(start + 7919 * j) % VOCAB for j in range(K)]


@dataclass(eq=False)
class PretendedDraft:
    tokens: array
    num_steps: int
    fan_out: list[int]
    chain: list[int] = field(default_factory=list)
    ahead_s: float = 0.0

    @property
    def answered(self) -> int:
        return len(self.chain)

    def entries(self, num_steps: int) -> tuple[np.ndarray, np.ndarray]:
        """For every accepted length the outcome that `BothEnds.round` makes of it."""
        text, length = list(self.tokens), len(self.tokens)
        keys, drafts = [], []
        for depth in range(len(self.chain) + 1):
            root = length % VOCAB
            after = drafts_after([*text, *self.chain[:depth], root])[:num_steps]
            keys.append((depth, root, len(after)))
            drafts.append(after)
        return np.array(keys, np.int32), np.array(drafts, np.int32)


@dataclass
class PretendedEngine:
    """Hits, misses and prompts that are not in yet, by the number of tokens."""

    context_len: int = 1 << 20
    busy: bool = False
    starved: bool = False
    open_drafts: set[PretendedDraft] = field(default_factory=set)
    planned: list[PretendedDraft] = field(default_factory=list)

    def open(
        self, tokens: Sequence[int], params: Any, extra_key: str, num_steps: int,
        fan_out: Sequence[int],
    ) -> PretendedDraft:  # fmt: skip
        draft = PretendedDraft(array("q", tokens), num_steps, list(fan_out))
        self.open_drafts.add(draft)
        return draft

    def close(self, draft: PretendedDraft, keep: bool = True) -> None:
        self.open_drafts.remove(draft)

    def advance(
        self, draft: PretendedDraft, new: Sequence[int], patient: bool = True
    ) -> Status | None:
        assert draft in self.open_drafts
        draft.tokens.extend(new)
        draft.chain = []
        if len(draft.tokens) % 7 == 3:
            return Status.PREFILLING
        if len(draft.tokens) % 3 == 1:
            return None
        draft.chain = drafts_after(draft.tokens)
        return Status.HIT

    def backup(self, drafts: Sequence[PretendedDraft], kind: str) -> list[Status]:
        for draft in drafts:
            draft.chain = drafts_after(draft.tokens)[:1]
        return [Status.BACKUP] * len(drafts)

    def plan(self, *drafts: PretendedDraft) -> None:
        assert all(draft in self.open_drafts for draft in drafts)
        self.planned += drafts

    def work(self) -> None:
        pass

    def take_built(self) -> list[PretendedDraft]:
        """Most caches are complete at once."""
        built, self.planned = self.planned, []
        return [d for d in built if d in self.open_drafts and d.chain and len(d.tokens) % 5]

    def summary(self) -> dict[str, float]:
        return {}


class BothEnds:
    """One verifier and one draft server, which may die and come back."""

    def __init__(self, seed: int, faults: Sequence[Fault]) -> None:
        self.clock = FakeClock()
        self.wire = MemoryServer(self.clock)
        self.name = 0
        self.restart()
        schedule = random_schedule(seed, 0.15, faults)
        self.channel = FaultyChannel(self.wire.connect(b"me"), schedule, self.clock, seed=seed)
        self.stats = SSDStats(K)
        config = VerifierConfig(endpoints=["ipc:///tmp/unused/draft"], num_steps=K)
        hello = make_hello(K, 1 << 20, VOCAB, "h", 8)
        self.client = DraftFleet(config, hello, self.stats, [self.channel], self.clock)

    def restart(self) -> None:
        self.name += 1
        self.wire.inbox.clear()
        self.engine = PretendedEngine()
        ready = protocol.Ready(
            server=f"server {self.name}", model_path="m", num_steps=K, context_len=1 << 20,
            vocab_size=VOCAB, vocab_hash="h", fan_out=[2] * (K + 1), backup="jit",
            max_branch_rows=16, device="cpu",
        )  # fmt: skip
        self.server = DraftServer(
            self.wire, self.engine, ready, max_sessions=64, lease_s=LEASE_S, clock=self.clock
        )
        self.wire.serve = self.server.turn

    def ticks(self, seconds: float) -> None:
        until = self.clock.now + seconds
        while self.clock.now < until:
            self.clock.sleep(0.25)
            self.client.tick()

    def round(self, sessions: list[Session]) -> int:
        """One round of all sessions; the number of those that got drafts."""
        self.client.ask(sessions)
        self.client.collect(sessions)
        served = 0
        for s in sessions:
            drafts = s.speculation()
            assert drafts == drafts_after(s.tokens)[: len(drafts)]
            served += bool(drafts)
            s.commit([*drafts[: s.committed % (K + 1)], s.committed % VOCAB])
        return served


EXACT = [f for f in FAULTS if f is not Fault.CORRUPT]


@pytest.mark.parametrize("seed", range(15))
def test_drafts_are_right_or_absent_and_come_back(seed: int) -> None:
    ends, rng = BothEnds(seed, EXACT), random.Random(seed)
    sessions: list[Session] = []
    for step in range(120):
        if len(sessions) < 5:
            tokens = [rng.randrange(VOCAB) for _ in range(rng.randint(2, 9))]
            sessions.append(ends.client.open_session(f"r{step}", tokens, SAMPLING, NO_STOP))
        ends.round([s for s in sessions if rng.random() < 0.8])
        ends.ticks(rng.choice([0.0, 0.25, 1.0]))
        if rng.random() < 0.05:
            ends.client.close_session(sessions.pop(rng.randrange(len(sessions))).rid)
        if step % 40 == 30:
            ends.restart()
    assert ends.stats.outcomes[Status.HIT] > 20, "some rounds went well all the same"
    assert ends.stats.outcomes[Status.HIT] > ends.stats.pushed_hits > 5
    ends.channel.heal()
    ends.ticks(10.0)
    served = [ends.round(sessions) for _ in range(30)]
    assert sum(served[5:]) > 25 * len(sessions) / 2, "about every seventh is being prefilled"
    assert ends.stats.outcomes[Status.BACKUP] and ends.stats.outcomes[Status.PREFILLING]


def test_nothing_is_left_open_without_faults() -> None:
    ends, rng = BothEnds(0, EXACT), random.Random(0)
    ends.channel.heal()
    ends.ticks(1.0)
    for step in range(50):
        s = ends.client.open_session(f"r{step % 7}", [1, 2, step], SAMPLING, NO_STOP)
        assert ends.client.up
        for _ in range(rng.randint(0, 5)):
            ends.round([s])
        if rng.random() < 0.5:
            ends.client.close_session(s.rid)
    assert len(ends.engine.open_drafts) <= 8
    ends.client.close()
    ends.server.turn()
    assert not ends.engine.open_drafts and ends.stats.timeouts == 0


def test_a_silent_verifiers_sessions_are_closed_and_come_back() -> None:
    ends = BothEnds(0, EXACT)
    ends.channel.heal()
    ends.ticks(1.0)
    s = ends.client.open_session("r", [1, 2], SAMPLING, NO_STOP)
    ends.round([s])
    ends.clock.sleep(LEASE_S + 2.0)
    ends.server.turn()
    assert not ends.engine.open_drafts
    ends.ticks(3.0)
    assert ends.client.up
    assert sum(ends.round([s]) for _ in range(10)) > 4
    assert len(ends.engine.open_drafts) == 1
