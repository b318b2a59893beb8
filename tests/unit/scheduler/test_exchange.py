"""When outcomes are committed, who is asked, and which drafts are verified."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sgl_ssd.config import VerifierConfig
from sgl_ssd.scheduler.exchange import DraftExchange
from sgl_ssd.scheduler.proposals import Drafts
from sgl_ssd.scheduler.stats import SSDStats


class Outcome:
    """One row of a verify; not on the host until it is `ready`, or somebody waits for it."""

    def __init__(self, session: Any, token: int, ready: bool) -> None:
        self.sessions, self.drafted = [session], [0]
        self.begun = self.done = 0.0
        self._token, self._ready = token, ready

    def is_ready(self) -> bool:
        return self._ready

    def rows(self) -> list[list[int]]:
        self._ready = True
        return [[self._token]]


@pytest.fixture
def session() -> Any:
    tokens: list[int] = []
    return SimpleNamespace(
        sid=1, closed=False, done=False, trace=None, tokens=tokens, commit=tokens.extend
    )


class Bench:
    """An exchange, and what its client was asked."""

    def __init__(self) -> None:
        self.stats, self.asked = SSDStats(4), []
        client: Any = SimpleNamespace(ask=lambda sessions: self.asked.append(list(sessions)))
        tuner: Any = SimpleNamespace(paused=False)
        config = VerifierConfig(["ipc:///tmp/unused/draft"], num_steps=4, proposal_top_m=2)
        self.exchange = DraftExchange(config, client, tuner, self.stats, 100)

    def add(self, *outcomes: Any) -> None:
        for outcome in outcomes:
            self.exchange.add(outcome)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_without_waiting_only_what_is_there_is_committed_in_order(bench: Bench, session: Any):
    bench.add(*(Outcome(session, t, ready) for t, ready in ((5, True), (6, False), (7, True))))
    bench.exchange.send_news(wait=False)
    assert session.tokens == [5] and bench.asked == [[session]]
    bench.exchange.send_news(wait=False)
    assert session.tokens == [5] and len(bench.asked) == 1
    assert bench.stats.outcome_wait.count == 0
    bench.exchange.send_news(wait=True)
    assert session.tokens == [5, 6, 7]


def test_waiting_commits_all_and_asks_once(bench: Bench, session: Any):
    bench.add(Outcome(session, 5, False), Outcome(session, 6, False))
    bench.exchange.send_news(wait=True)
    assert session.tokens == [5, 6]
    assert bench.asked == [[session]] and bench.stats.outcome_wait.count == 1
    bench.exchange.send_news(wait=True)
    assert bench.stats.outcome_wait.count == 1, "nothing is left"


def test_nobody_is_asked_while_drafting_is_off(bench: Bench, session: Any):
    bench.exchange.drafting = False
    bench.add(Outcome(session, 5, True))
    bench.exchange.send_news(wait=False)
    assert session.tokens == [5] and bench.asked == []
    bench.exchange.drafting = True
    bench.add(Outcome(session, 6, True))
    session.closed = True
    bench.exchange.send_news(wait=False)
    assert bench.asked == [], "what was news while drafting was off is asked with the next verify"


@pytest.mark.parametrize("pending", [False, True])
def test_drafts_are_never_verified_twice(bench: Bench, pending: bool):
    """While an outcome is on its way, a session's drafts are those of the forward before.

    In rejection they would pass for fresh samples of their proposals, and bias the text.
    """
    session: Any = SimpleNamespace(
        asked=2, committed=2, answered=2, done=False, refused=False, status=0, proposals=None,
        trace=None, speculation=lambda: [7, 8], stop=SimpleNamespace(max_length=100),
    )  # fmt: skip
    bench.exchange._client = SimpleNamespace(  # type: ignore[assignment]
        up=False, num_steps=4, sessions={"r": session}
    )
    if pending:
        bench.add(Outcome(None, 1, ready=False))
    req = SimpleNamespace(rid="r", custom_logit_processor=None)
    batch = SimpleNamespace(reqs=[req], has_grammar=False)
    sessions, drafts = bench.exchange.fetch(batch, None)
    assert sessions == [session] and isinstance(drafts, Drafts)
    assert drafts.lens.tolist() == ([0] if pending else [2])
    assert bench.stats.reasons["down"] == int(pending)
