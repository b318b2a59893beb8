"""When the worker looks at what the target has computed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sgl_ssd.scheduler.proposals import Drafts
from sgl_ssd.scheduler.stats import SSDStats
from sgl_ssd.scheduler.worker import SSDWorker


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


@pytest.fixture
def worker() -> Any:
    worker = object.__new__(SSDWorker)
    worker.stats = SSDStats(4)
    worker.drafting = True
    worker.tuner = SimpleNamespace(paused=False)
    worker.asked = []
    worker.client = SimpleNamespace(ask=lambda sessions: worker.asked.append(list(sessions)))
    worker._pending, worker._asking = [], {}
    return worker


def test_without_waiting_only_what_is_there_is_committed_in_order(worker: Any, session: Any):
    worker._pending = [
        Outcome(session, t, ready) for t, ready in ((5, True), (6, False), (7, True))
    ]
    worker._send_news(wait=False)
    assert session.tokens == [5] and len(worker._pending) == 2
    assert worker.asked == [[session]]
    worker._send_news(wait=False)
    assert session.tokens == [5] and len(worker.asked) == 1
    assert worker.stats.outcome_wait.count == 0


def test_waiting_commits_all_and_asks_once(worker: Any, session: Any):
    worker._pending = [Outcome(session, 5, False), Outcome(session, 6, False)]
    worker._send_news()
    assert session.tokens == [5, 6] and not worker._pending
    assert worker.asked == [[session]] and worker.stats.outcome_wait.count == 1


def test_nobody_is_asked_while_drafting_is_off(worker: Any, session: Any):
    worker.drafting = False
    worker._pending = [Outcome(session, 5, True)]
    worker._send_news(wait=False)
    assert session.tokens == [5] and worker.asked == [] and not worker._asking


@pytest.mark.parametrize("pending", [False, True])
def test_drafts_are_never_verified_twice(worker: Any, pending: bool):
    """While an outcome is on its way, a session's drafts are those of the forward before.

    In rejection they would pass for fresh samples of their proposals, and bias the text.
    """
    session = SimpleNamespace(
        asked=2, committed=2, answered=2, done=False, refused=False, status=0, proposals=None,
        trace=None,
        speculation=lambda: [7, 8], stop=SimpleNamespace(max_length=100),
    )  # fmt: skip
    worker.client = SimpleNamespace(up=False, num_steps=4)
    worker.num_steps = 4
    worker._pending = [object()] if pending else []
    drafts = Drafts.none(1, 4, 2)
    worker._take_drafts([SimpleNamespace(custom_logit_processor=None)], [session], drafts)
    assert drafts.lens.tolist() == ([0] if pending else [2])
    assert worker.stats.reasons["down"] == int(pending)
