"""The verifier's end of the wire, against a model of the draft server, in fake time."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from channels import (
    FAULTS,
    FakeClock,
    Fault,
    FaultyChannel,
    MemoryServer,
    Schedule,
    listed_schedule,
    random_schedule,
)
from model_server import HASH, NO_STOP, SAMPLING, VOCAB, K, ModelServer, answer, drafts_after, ready
from sgl_ssd import protocol
from sgl_ssd.config import VerifierConfig
from sgl_ssd.fan_out import MAX_FAN_OUT
from sgl_ssd.protocol import Status
from sgl_ssd.recorder import Recorder
from sgl_ssd.scheduler.draft_client import (
    BREAKER_REST_S,
    BREAKER_TIMEOUTS,
    DEADLINE_CAP_S,
    DEADLINE_FLOOR_S,
    MAX_OPENS_PER_ROUND,
    make_hello,
)
from sgl_ssd.scheduler.draft_fleet import DraftFleet
from sgl_ssd.scheduler.draft_link import HELLO_S, PING_S, SILENCE_S
from sgl_ssd.scheduler.sessions import Session, SessionSampling
from sgl_ssd.scheduler.stats import SSDStats


class Rig:
    """A client and its server. `serve` False: the test itself plays the server."""

    def __init__(
        self,
        *,
        serve: bool = True,
        schedule: Schedule | None = None,
        timeout_ms: float | None = None,
        backup: str = "auto",
        capacity: int = 1024,
    ) -> None:
        self.clock = FakeClock()
        self.wire = MemoryServer(self.clock)
        self.server = ModelServer(self.wire)
        if not serve:
            self.wire.serve = None
        self.inner = self.wire.connect(b"me", capacity)
        self.faulty = None
        channel: Any = self.inner
        if schedule is not None:
            channel = self.faulty = FaultyChannel(self.inner, schedule, self.clock)
        config = VerifierConfig(
            endpoints=["ipc:///tmp/unused/draft"], num_steps=K, fan_out=[4] * (K + 1),
            backup=backup, draft_timeout_ms=timeout_ms,
        )  # fmt: skip
        self.stats = SSDStats(K)
        hello = make_hello(K, 1 << 20, VOCAB, HASH, 8)
        self.client = DraftFleet(config, hello, self.stats, [channel], self.clock)
        (self.link,) = self.client.clients

    def connect(self) -> Rig:
        self.client.tick()
        self.client.tick()
        assert self.client.up
        self.server.messages.clear()
        return self

    def ticks(self, seconds: float, step: float = 0.25) -> None:
        """Let time pass, with a tick now and then."""
        until = self.clock.now + seconds
        while self.clock.now < until:
            self.clock.sleep(step)
            self.client.tick()

    def open(self, rid: str = "r", tokens: Iterable[int] = (1, 2, 3), **kwargs: Any) -> Session:
        stop = kwargs.pop("stop", NO_STOP)
        return self.client.open_session(rid, list(tokens), SAMPLING, stop, **kwargs)

    def round(self, *sessions: Session) -> bool:
        self.client.ask(sessions)
        return self.client.collect(sessions)

    def say(self, message: protocol.Message) -> None:
        """As the server, to the client."""
        assert self.wire.send(b"me", protocol.encode(message))

    def heard(self) -> list[protocol.Message]:
        """What the client has sent since, when the test plays the server."""
        messages = [protocol.decode(frames) for _, frames in self.wire.inbox]
        self.wire.inbox.clear()
        return messages

    def asked(self) -> protocol.Speculate:
        """The one question that the client has sent since."""
        (question,) = [m for m in self.heard() if isinstance(m, protocol.Speculate)]
        return question


@pytest.fixture
def rig() -> Rig:
    return Rig().connect()


@pytest.fixture
def played() -> Rig:
    """The test plays the server, and the client is up; answers are due within 50 ms."""
    one = Rig(serve=False, timeout_ms=50.0)
    one.client.tick()
    one.say(ready())
    one.client.tick()
    assert one.client.up
    one.heard()
    return one


def lines(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= level]


# -- Hello and Ready -----------------------------------------------------------------------------


def test_hello_is_answered_and_followed_by_the_settings() -> None:
    one = Rig(backup="auto")
    one.client.tick()
    assert not one.client.up
    one.client.tick()
    assert one.client.up and one.client.server is not None
    assert one.client.server.model_path == "draft-model"
    one.client.tick()
    one.inner.recv(0)
    (configure,) = [m for m in one.server.messages if isinstance(m, protocol.Configure)]
    assert (configure.num_steps, configure.fan_out) == (K, [4] * (K + 1))
    assert configure.backup == "auto"


def test_hello_is_repeated_while_nobody_answers() -> None:
    one = Rig(serve=False)
    one.ticks(10.0)
    hellos = one.heard()
    assert all(isinstance(m, protocol.Hello) for m in hellos)
    assert 8 <= len(hellos) <= 11, "about one a second"
    assert len({m.verifier for m in hellos}) == 1


def test_two_clients_have_two_names() -> None:
    names = {make_hello(K, 1, 1, "", 1).verifier for _ in range(100)}
    assert len(names) == 100 and all(len(n) <= 128 for n in names)


def test_wait_until_up_is_bounded() -> None:
    one = Rig(serve=False)
    begun = one.clock.now
    assert not one.client.wait_until_up(3.0)
    assert 3.0 <= one.clock.now - begun < 3.3


def test_wait_until_up_returns_as_soon_as_it_is() -> None:
    one = Rig()
    one.wire.latency_s = 0.2
    begun = one.clock.now
    assert one.client.wait_until_up(60.0)
    assert one.clock.now - begun < 1.0


@pytest.mark.parametrize(
    ("vocab_hash", "num_steps", "why"), [("other", K, "vocabulary"), (HASH, K - 1, "drafts 3")]
)
def test_a_server_that_does_not_fit_is_refused_with_one_line(
    caplog: pytest.LogCaptureFixture, vocab_hash: str, num_steps: int, why: str
) -> None:
    one = Rig()
    one.server.vocab_hash, one.server.num_steps = vocab_hash, num_steps
    one.ticks(20.0)
    assert not one.client.up
    (line,) = lines(caplog)
    assert "draft-model" in line and why in line
    one.open()
    assert not one.server.received(protocol.Open)


def test_a_server_that_refuses_us_is_reported_with_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = Rig(serve=False)
    for _ in range(20):
        one.ticks(HELLO_S)
        one.say(protocol.Error(code="pair_mismatch", text="another vocabulary"))
    assert not one.client.up
    (line,) = lines(caplog)
    assert "another vocabulary" in line


@pytest.mark.parametrize(("vocab_hash", "num_steps"), [("", K), (HASH, 16)])
def test_an_unknown_vocabulary_or_a_larger_k_fits(vocab_hash: str, num_steps: int) -> None:
    one = Rig()
    one.server.vocab_hash, one.server.num_steps = vocab_hash, num_steps
    one.connect()


def test_a_second_answer_to_hello_changes_nothing(rig: Rig) -> None:
    """Hellos that queued up while the server was away are all answered when it comes."""
    s = rig.open()
    assert rig.round(s)
    rig.server.messages.clear()
    for _ in range(10):
        rig.say(ready(server="server 0"))
    rig.ticks(0.5)
    s.commit([4])
    assert rig.round(s) and s.speculation()
    assert not rig.server.received(protocol.Open)


# -- signs of life -------------------------------------------------------------------------------


def test_pings_keep_the_connection(rig: Rig) -> None:
    rig.ticks(30.0)
    assert rig.client.up and rig.client.server_stats == {"peers": 1.0}
    pings = rig.server.received(protocol.Ping)
    assert 30 / PING_S * 0.8 <= len(pings) <= 30 / PING_S + 1


def test_a_server_that_answers_questions_only_late_stays_up(rig: Rig) -> None:
    rig.wire.latency_s = SILENCE_S * 0.6
    rig.ticks(60.0)
    assert rig.client.up


def test_silence_is_noticed_and_healed(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    s = rig.open(tokens=[1, 2, 3])
    assert rig.round(s)
    first_epoch = s.wire_epoch
    rig.server.frozen = True
    rig.ticks(SILENCE_S)
    assert rig.client.up, "not too soon"
    rig.ticks(3.0)
    assert not rig.client.up
    rig.ticks(20.0)
    assert len(lines(caplog)) == 1 and "down" in lines(caplog)[0]

    s.commit([4, 5])
    begun = rig.clock.now
    assert rig.round(s) and rig.clock.now == begun, "nothing to wait for"
    assert not s.speculation()

    rig.server.frozen = False
    rig.server.restart()
    rig.ticks(2.0)
    assert rig.client.up
    rig.server.messages.clear()
    assert rig.round(s) and s.speculation() == drafts_after([1, 2, 3, 4, 5])
    (opened,) = rig.server.received(protocol.Open)
    assert opened.prompt.tolist() == [1, 2, 3, 4, 5] and opened.epoch > first_epoch


@pytest.mark.parametrize("timeout_ms", [None, 20, 50])
@pytest.mark.parametrize("round_s", [0.01, 0.05])
def test_silence_is_noticed_while_questions_go_on(timeout_ms: float | None, round_s: float) -> None:
    """Questions bring pings along: it must not take a pause between them to see the silence."""
    rig = Rig(timeout_ms=timeout_ms).connect()
    session = rig.open("r")

    def rounds(seconds: float) -> None:
        end = rig.clock.now + seconds
        while rig.clock.now < end and rig.client.up:
            session.commit([3])
            rig.clock.sleep(round_s)
            rig.client.tick()
            rig.round(session)

    rounds(3.0)
    assert rig.client.up
    rig.server.frozen = True
    began = rig.clock.now
    rounds(20.0)
    assert not rig.client.up and rig.clock.now - began < 7.5


def test_a_restarted_server_is_noticed_at_once(rig: Rig) -> None:
    sessions = [rig.open(str(i), [i, 1]) for i in range(3)]
    assert rig.round(*sessions)
    rig.server.restart()
    begun = rig.clock.now
    for s in sessions:
        s.commit([9])
    rig.round(*sessions)
    assert not rig.client.up, "it said: Hello first"
    rig.client.tick()
    rig.client.tick()
    assert rig.client.up and rig.clock.now == begun
    assert rig.round(*sessions)
    for i, s in enumerate(sessions):
        assert s.speculation() == drafts_after([i, 1, 9]) and s.wire_epoch == 1


def test_a_question_that_died_with_the_server_is_not_waited_for(rig: Rig) -> None:
    s = rig.open()
    rig.round(s)
    s.commit([4])
    rig.client.ask([s])
    rig.server.restart()
    rig.client.tick()
    rig.clock.sleep(PING_S)
    for _ in range(4):
        rig.client.tick()
    assert rig.client.up
    begun = rig.clock.now
    rig.client.collect([s])
    assert rig.clock.now == begun
    assert s.asked != s.committed, "the worker asks again"
    assert rig.round(s) and s.speculation() == drafts_after([1, 2, 3, 4])


# -- sessions on the wire --------------------------------------------------------------------------


def test_open_carries_what_coupled_drafting_needs(rig: Rig) -> None:
    bias = np.array([5], np.int32), np.array([-2.0], np.float32)
    sampling = SessionSampling(-7, 0.5, 40, 0.8, 0.05, *bias)
    rig.client.open_session("r", [1, 2], sampling, NO_STOP, "key")
    rig.inner.recv(0)
    (opened,) = rig.server.received(protocol.Open)
    assert (opened.seed, opened.temperature, opened.top_k) == (-7, 0.5, 40)
    assert (opened.top_p, opened.min_p, opened.extra_key) == (0.8, 0.05, "key")
    assert opened.prompt.tolist() == [1, 2] and opened.bias_ids.tolist() == [5]
    assert opened.bias_values.tolist() == [-2.0]


def test_a_request_that_cannot_be_said_gets_no_drafts_and_harms_nobody(rig: Rig) -> None:
    """A lone surrogate is legal in a client's JSON, and not on the wire."""
    bad, good = rig.open("bad", extra_key="\ud800"), rig.open("good")
    assert bad.refused
    assert rig.round(bad, good) and good.speculation() and not bad.speculation()


def test_a_session_opened_while_down_is_opened_later() -> None:
    one = Rig()
    s = one.open(tokens=[1])
    s.commit([2])
    one.connect()
    assert one.round(s) and s.speculation() == drafts_after([1, 2])


def test_each_close_is_sent_exactly_once(rig: Rig) -> None:
    s = rig.open("a")
    rig.open("b")
    rig.client.close_session("a")
    rig.client.close_session("a")
    rig.client.close_session("never opened")
    rig.client.close()
    rig.wire.serve()
    closes = rig.server.received(protocol.Close)
    assert [(c.sid, c.epoch) for c in closes] == [(s.sid, 0), (s.sid + 1, 0)]
    assert not rig.server.sessions and rig.inner.closings == 1


def test_reopening_a_request_closes_the_old_session(rig: Rig) -> None:
    old = rig.open("same", [1])
    new = rig.open("same", [1, 2])
    assert old.closed and old.sid != new.sid
    assert rig.round(old, new) and new.speculation() == drafts_after([1, 2])
    assert set(rig.server.sessions) == {new.sid}


def test_a_session_closed_while_the_server_is_silent_is_closed_later(rig: Rig) -> None:
    """The server may be the same one, with the session and its KV still there."""
    s, other = rig.open("a"), rig.open("b")
    rig.round(s, other)
    rig.server.frozen = True
    rig.ticks(SILENCE_S + 3.0)
    assert not rig.client.up
    rig.client.close_session("a")
    rig.wire.inbox.clear()
    rig.server.frozen = False
    rig.ticks(2.0)
    assert rig.client.up and set(rig.server.sessions) == {other.sid}
    assert len([m for m in rig.server.messages if isinstance(m, protocol.Close)]) == 1


def test_a_close_that_cannot_be_sent_is_sent_later() -> None:
    one = Rig(capacity=4).connect()
    s = one.open()
    assert one.round(s)
    one.server.frozen = True
    while one.link.send(protocol.Ping(nonce=0)):
        pass
    one.client.close_session("r")
    one.server.frozen = False
    one.ticks(2.0)
    assert not one.server.sessions
    assert len(one.server.received(protocol.Close)) == 1


def test_a_session_never_opened_on_the_wire_is_not_closed_there() -> None:
    one = Rig()
    one.open("a")
    one.client.close_session("a")
    one.connect()
    one.ticks(1.0)
    assert not one.server.received(protocol.Close)


def test_flush_forgets_everything(rig: Rig) -> None:
    sessions = [rig.open(str(i)) for i in range(3)]
    rig.client.flush()
    assert not len(rig.client.sessions) and all(s.closed for s in sessions)
    rig.client.tick()
    rig.wire.serve()
    assert not rig.server.sessions and len(rig.server.received(protocol.Flush)) == 1
    assert rig.round(*sessions) and not rig.server.received(protocol.Speculate)


def test_flush_while_down_happens_later(rig: Rig) -> None:
    rig.open("a")
    rig.server.frozen = True
    rig.ticks(SILENCE_S + 3.0)
    rig.client.flush()
    rig.wire.inbox.clear()
    rig.server.sessions[77] = 0, [1]
    rig.server.frozen = False
    s = rig.open("b")
    rig.ticks(2.0)
    assert 77 not in rig.server.sessions
    assert rig.round(s) and s.speculation()


# -- one round -------------------------------------------------------------------------------------


def test_a_round_brings_drafts_for_every_session(rig: Rig) -> None:
    sessions = [rig.open(str(i), [i, i + 1]) for i in range(10)]
    tokens = {s.sid: s.tokens.tolist() for s in sessions}
    for step in range(5):
        assert rig.round(*sessions)
        for s in sessions:
            assert s.speculation() == drafts_after(tokens[s.sid])
            news = [step, s.sid, 7][: 1 + step % 3]
            s.commit(news)
            tokens[s.sid] += news
            assert not s.speculation(), "they continue the tokens before"
    assert rig.stats.outcomes[Status.HIT] == 50 and rig.stats.timeouts == 0
    assert len(rig.server.received(protocol.Speculate)) == 5, "one message a round"


def test_only_news_is_sent(rig: Rig) -> None:
    s = rig.open(tokens=range(1, 100))
    rig.round(s)
    s.commit([5, 6])
    rig.round(s)
    s.commit([7])
    rig.round(s)
    questions = rig.server.received(protocol.Speculate)
    assert [(q.rows[0, 2], q.tokens.tolist()) for q in questions] == [
        (99, []), (99, [5, 6]), (101, [7]),
    ]  # fmt: skip


def test_sessions_that_want_nothing_are_left_out(rig: Rig) -> None:
    names = ("done", "closed", "refused", "wants")
    sessions = {name: rig.open(name, [1]) for name in names}
    rig.round(*sessions.values())
    rig.server.messages.clear()
    sessions["done"].done = True
    rig.client.close_session("closed")
    sessions["refused"].refused = True
    for s in sessions.values():
        s.commit([2])
    assert rig.round(*sessions.values())
    (question,) = rig.server.received(protocol.Speculate)
    assert question.rows[:, 0].tolist() == [sessions["wants"].sid]


@pytest.mark.parametrize("sessions", [0, 1])
def test_nothing_to_ask_sends_nothing(rig: Rig, sessions: int) -> None:
    asked = [rig.open() for _ in range(sessions)]
    for s in asked:
        s.done = True
    assert rig.round(*asked)
    assert not rig.server.received(protocol.Speculate)


def test_opens_after_a_reconnection_are_spread_over_rounds(rig: Rig) -> None:
    sessions = [rig.open(str(i), [i]) for i in range(2 * MAX_OPENS_PER_ROUND + 3)]
    rig.round(*sessions)
    rig.server.restart()
    rig.round(*sessions)
    rig.client.tick()
    rig.client.tick()
    rig.server.messages.clear()
    opened = 0
    for expected in (MAX_OPENS_PER_ROUND, MAX_OPENS_PER_ROUND, 3, 0):
        for s in sessions:
            s.commit([1])
        assert rig.round(*sessions)
        assert len(rig.server.received(protocol.Open)) == expected
        opened += expected
        assert sum(bool(s.speculation()) for s in sessions) == opened


def test_sessions_not_answered_yet_are_asked_again(played: Rig) -> None:
    """The server answers the newest question only: one about others must not bury this one."""
    a, b = played.open("a"), played.open("b", [4])
    played.client.ask([a])
    played.client.ask([b])
    question = [m for m in played.heard() if isinstance(m, protocol.Speculate)][-1]
    assert sorted(question.rows[:, 0].tolist()) == [a.sid, b.sid]


def test_an_answered_session_is_not_asked_for_again(rig: Rig) -> None:
    a, b = rig.open("a"), rig.open("b", [4])
    rig.round(a)
    rig.server.messages.clear()
    rig.round(b)
    (question,) = rig.server.received(protocol.Speculate)
    assert question.rows[:, 0].tolist() == [b.sid]


# -- statuses ----------------------------------------------------------------------------------


def test_unknown_opens_the_session_anew(rig: Rig) -> None:
    s = rig.open(tokens=[1, 2])
    rig.round(s)
    rig.server.sessions.clear()
    s.commit([3])
    begun = rig.clock.now
    assert rig.round(s) and rig.clock.now == begun, "an answer, if a useless one"
    assert not s.speculation()
    s.commit([4])
    rig.server.messages.clear()
    assert rig.round(s) and s.speculation() == drafts_after([1, 2, 3, 4])
    (opened,) = rig.server.received(protocol.Open)
    assert (opened.epoch, opened.prompt.tolist()) == (1, [1, 2, 3, 4])


def test_need_sends_again_from_where_the_server_is(rig: Rig) -> None:
    s = rig.open(tokens=[1, 2, 3, 4, 5, 6])
    rig.round(s)
    epoch, known = rig.server.sessions[s.sid]
    del known[2:]
    s.commit([7])
    begun = rig.clock.now
    assert rig.round(s) and rig.clock.now == begun and not s.speculation()
    s.commit([8])
    rig.server.messages.clear()
    assert rig.round(s) and s.speculation() == drafts_after([1, 2, 3, 4, 5, 6, 7, 8])
    (question,) = rig.server.received(protocol.Speculate)
    assert question.rows.tolist() == [[s.sid, epoch, 2, 6]]
    assert question.tokens.tolist() == [3, 4, 5, 6, 7, 8]


def test_a_long_gap_opens_the_session_anew(rig: Rig) -> None:
    s = rig.open(tokens=[1])
    rig.round(s)
    s.commit([2] * (protocol.MAX_ROW_TOKENS + 1))
    rig.server.messages.clear()
    assert rig.round(s) and s.speculation() == drafts_after(s.tokens)
    (opened,) = rig.server.received(protocol.Open)
    assert opened.epoch == 1 and opened.num_prompt == s.committed


def test_a_long_gap_while_nothing_can_be_sent_is_harmless() -> None:
    one = Rig(capacity=4, timeout_ms=10.0).connect()
    s = one.open(tokens=[1])
    one.round(s)
    one.server.frozen = True
    while one.link.send(protocol.Ping(nonce=0)):
        pass
    s.commit([2] * (protocol.MAX_ROW_TOKENS + 1))
    one.round(s)
    one.server.frozen = False
    one.ticks(1.0)
    assert one.round(s) and s.speculation() == drafts_after(s.tokens)


def test_a_batch_beyond_the_protocols_limit_is_harmless(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "MAX_ROWS", 3)
    sessions = [rig.open(str(i), [i]) for i in range(5)]
    rig.round(*sessions)
    assert sum(bool(s.speculation()) for s in sessions) == 3


@pytest.mark.parametrize("status", [Status.EMPTY, Status.PREFILLING, Status.NO_MEMORY])
def test_an_answer_without_drafts_is_an_answer(played: Rig, status: Status) -> None:
    s = played.open()
    played.client.ask([s])
    played.say(answer(played.asked().round_id, [(s.sid, 0, 3, status, 0)], [[0] * K]))
    begun = played.clock.now
    assert played.client.collect([s]) and played.clock.now == begun
    assert not s.speculation() and s.status == status and not s.refused
    assert played.stats.outcomes[status] == 1


def test_a_full_context_ends_drafting_for_the_session(played: Rig) -> None:
    s = played.open()
    played.client.ask([s])
    played.say(answer(played.asked().round_id, [(s.sid, 0, 3, Status.CONTEXT, 0)], [[0] * K]))
    assert played.client.collect([s]) and s.refused
    s.commit([4])
    played.client.ask([s])
    assert not played.heard()


# -- late, stale and lying answers -------------------------------------------------------------


def test_a_late_answer_serves_while_it_still_fits(played: Rig) -> None:
    s = played.open()
    played.client.ask([s])
    first = played.asked().round_id
    assert not played.client.collect([s])
    played.client.ask([s])
    played.say(answer(first, [(s.sid, 0, 3, Status.HIT, 2)], [[7, 8, 0, 0]]))
    assert played.client.collect([s]) and s.speculation() == [7, 8]
    assert played.stats.late_answers == 1


def test_a_late_answer_that_fits_no_more_only_acknowledges(played: Rig) -> None:
    s = played.open(tokens=[1, 2, 3])
    played.client.ask([s])
    played.asked()
    s.commit([4])
    played.client.ask([s])
    first = played.asked().round_id
    s.commit([5])
    played.client.ask([s])
    second = played.asked().round_id
    played.say(answer(first, [(s.sid, 0, 4, Status.HIT, 2)], [[7, 8, 0, 0]]))
    assert not played.client.collect([s]) and not s.speculation()
    assert s.acked == 4, "from there on is news"
    played.say(answer(second, [(s.sid, 0, 5, Status.HIT, 1)], [[9, 0, 0, 0]]))
    assert played.client.collect([s]) and s.speculation() == [9]


def test_an_acknowledgement_never_goes_back(played: Rig) -> None:
    s = played.open(tokens=[1, 2, 3])
    played.client.ask([s])
    round_id = played.asked().round_id
    played.say(answer(round_id, [(s.sid, 0, 1, Status.HIT, 1)], [[9, 0, 0, 0]]))
    played.client.collect([s])
    assert s.acked == 3 and not s.speculation(), "it continues one token, not three"


@pytest.mark.parametrize("sid_off", [0, 1, -1])
@pytest.mark.parametrize("epoch", [-1, 0, 1, 2])
def test_other_sessions_and_epochs_are_ignored(played: Rig, sid_off: int, epoch: int) -> None:
    played.open("first")
    s = played.open()
    played.link.open_on_wire(s)
    assert s.wire_epoch == 1
    played.client.ask([s])
    round_id = played.asked().round_id
    played.say(answer(round_id, [(s.sid + sid_off, epoch, 3, Status.HIT, 2)], [[7, 8, 0, 0]]))
    right = (sid_off, epoch) == (0, 1)
    assert played.client.collect([s]) is right
    assert bool(s.speculation()) is right
    known = right or (sid_off, epoch) == (-1, 0)  # the other session that is open
    assert played.stats.stale_answers == (not known)


@pytest.mark.parametrize("epoch", [-1, 0])
def test_a_session_that_is_not_open_gets_no_answers(played: Rig, epoch: int) -> None:
    s = played.open()
    played.client.ask([s])
    round_id = played.asked().round_id
    played.say(answer(round_id, [(s.sid, 0, 0, Status.UNKNOWN, 0)], [[0] * K]))
    played.client.collect([s])
    s.answered = -1
    played.say(answer(round_id, [(s.sid, epoch, 3, Status.HIT, 2)], [[7, 8, 0, 0]]))
    played.client.tick()
    played.clock.sleep(2.0)
    played.client.tick()
    assert not s.speculation() and played.stats.stale_answers == 1


@pytest.mark.parametrize("bad", [-1, VOCAB, VOCAB + 1, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("at", [0, 3])
def test_ids_out_of_range_are_never_returned(played: Rig, bad: int, at: int) -> None:
    evil, good = played.open("evil"), played.open("good")
    played.client.ask([evil, good])
    tokens = [1, 2, 3, 4]
    tokens[at] = bad
    rows = [(s.sid, 0, 3, Status.HIT, K) for s in (evil, good)]
    played.say(answer(played.asked().round_id, rows, [tokens, [5, 6, 7, 8]]))
    assert played.client.collect([evil, good])
    assert evil.speculation() == [] and good.speculation() == [5, 6, 7, 8]
    assert played.stats.invalid_messages == 1


def test_unused_entries_may_be_anything(played: Rig) -> None:
    s = played.open()
    played.client.ask([s])
    rows = [(s.sid, 0, 3, Status.HIT, 2)]
    played.say(answer(played.asked().round_id, rows, [[1, 2, -5, VOCAB]]))
    assert played.client.collect([s]) and s.speculation() == [1, 2]


def test_more_drafts_than_k_are_cut(played: Rig) -> None:
    s = played.open()
    played.client.ask([s])
    rows = [(s.sid, 0, 3, Status.HIT, 64)]
    played.say(answer(played.asked().round_id, rows, [list(range(64))], steps=64))
    played.client.collect([s])
    assert s.speculation() == list(range(K))


@pytest.mark.parametrize("have", [-1, 4, 2**62, -(2**62)])
@pytest.mark.parametrize("status", [Status.HIT, Status.NEED])
def test_impossible_lengths_are_dropped(played: Rig, have: int, status: Status) -> None:
    s = played.open(tokens=[1, 2, 3])
    played.client.ask([s])
    rows = [(s.sid, 0, have, status, 1)]
    played.say(answer(played.asked().round_id, rows, [[1, 0, 0, 0]]))
    assert not played.client.collect([s]) and not s.speculation()
    assert s.acked == 3 and played.stats.invalid_messages == 1


def test_an_answer_to_a_question_never_asked_is_dropped(played: Rig) -> None:
    s = played.open()
    played.client.ask([s])
    round_id = played.asked().round_id + 1
    played.say(answer(round_id, [(s.sid, 0, 3, Status.HIT, 1)], [[1, 0, 0, 0]]))
    assert not played.client.collect([s]) and not s.speculation()
    assert played.stats.invalid_messages == 1


@pytest.mark.parametrize(
    "message",
    [protocol.Ping(nonce=1), protocol.Flush(), protocol.Close(sid=0, epoch=0)],
    ids=lambda m: type(m).__name__,
)
def test_messages_of_a_verifier_are_dropped(played: Rig, message: protocol.Message) -> None:
    played.say(message)
    played.ticks(1.0)
    assert played.client.up and played.stats.invalid_messages == 1


def test_garbage_before_the_answer_is_skipped(played: Rig) -> None:
    s = played.open()
    played.client.ask([s])
    for garbage in ([b""], [b"\x80\x04N."], [b"{}", b""], [b'{"v":1,"type":"Pong"}'], []):
        played.wire.send(b"me", garbage)
    rows = [(s.sid, 0, 3, Status.HIT, 1)]
    played.say(answer(played.asked().round_id, rows, [[5, 0, 0, 0]]))
    assert played.client.collect([s]) and s.speculation() == [5]
    assert played.stats.invalid_messages == 5


# -- time ------------------------------------------------------------------------------------------


def test_a_fixed_deadline_is_kept(played: Rig) -> None:
    s = played.open()
    played.client.ask([s])
    played.clock.sleep(0.02)
    assert not played.client.collect([s])
    assert played.clock.now - 1000.0 == pytest.approx(0.05, abs=1e-3), "counted from the question"
    begun = played.clock.now
    assert not played.client.collect([s])
    assert played.clock.now == begun, "it is over"
    assert played.stats.timeouts == 2


def test_an_answer_within_the_deadline_is_waited_for() -> None:
    one = Rig(timeout_ms=50.0).connect()
    one.wire.latency_s = 0.04
    s = one.open()
    assert one.round(s) and s.speculation()
    one.wire.latency_s = 0.06
    s.commit([4])
    assert not one.round(s)
    one.clock.sleep(0.02)
    assert one.client.collect([s]), "it is there by now"


def rounds(one: Rig, s: Session, count: int, pause: float = 0.0) -> None:
    for _ in range(count):
        s.commit([5])
        one.clock.sleep(pause)
        one.round(s)


@pytest.mark.parametrize("trip", [0.0, 0.003, 0.05, 0.2])
def test_the_deadline_follows_measured_times(trip: float) -> None:
    one = Rig().connect()
    s = one.open()
    one.wire.latency_s = trip
    rounds(one, s, 100)
    one.server.frozen = True
    s.commit([5])
    begun = one.clock.now
    assert not one.round(s)
    waited = one.clock.now - begun
    assert waited >= max(DEADLINE_FLOOR_S, trip) - 1e-6
    assert waited <= min(DEADLINE_CAP_S, max(DEADLINE_FLOOR_S, 3 * trip)) + 1e-6


def test_the_deadline_grows_again_after_it_was_too_short() -> None:
    one = Rig().connect()
    s = one.open()
    one.wire.latency_s = 0.001
    rounds(one, s, 100)
    one.wire.latency_s = 0.1
    late = one.stats.timeouts
    rounds(one, s, 200, pause=0.05)
    rounds(one, s, 20)
    assert one.stats.timeouts > late
    before = one.stats.timeouts
    rounds(one, s, 20)
    assert one.stats.timeouts == before and s.speculation()


class Flood:
    """A channel that always has another message."""

    def __init__(self, clock: FakeClock, frames: list[bytes]) -> None:
        self.clock, self.frames, self.count = clock, frames, 0

    def send(self, frames: list[bytes]) -> bool:
        return True

    def recv(self, timeout_s: float) -> list[bytes]:
        self.clock.sleep(1e-5)
        self.count += 1
        assert self.count < 100_000, "never comes back"
        return self.frames

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    "frames",
    [[b"garbage"], protocol.encode(protocol.Pong(nonce=0, stats={}))],
    ids=["garbage", "valid"],
)
def test_a_flood_of_messages_does_not_hold_the_scheduler(frames: list[bytes]) -> None:
    one = Rig(serve=False, timeout_ms=50.0)
    one.client.tick()
    one.say(ready())
    one.client.tick()
    s = one.open()
    one.link.channel = Flood(one.clock, frames)
    one.client.ask([s])
    begun = one.clock.now
    assert not one.client.collect([s])
    assert one.clock.now - begun < 0.1
    begun = one.clock.now
    one.ticks(2.0)
    assert one.clock.now - begun < 3.0
    assert one.client.wait_until_up(1.0)


def test_the_breaker_rests_and_recovers(rig: Rig) -> None:
    s = rig.open()
    rounds(rig, s, 30)
    rig.server.frozen = True
    rounds(rig, s, BREAKER_TIMEOUTS)
    assert rig.link.resting and rig.stats.timeouts == BREAKER_TIMEOUTS
    begun = rig.clock.now
    rounds(rig, s, 5)
    assert rig.clock.now == begun, "nobody waits"
    assert rig.stats.timeouts == BREAKER_TIMEOUTS
    rig.server.frozen = False
    s.commit([6])
    rig.client.ask([s])
    rig.inner.recv(0) if not len(rig.inner.inbox) else None
    rig.clock.sleep(BREAKER_REST_S + 0.01)
    assert not rig.link.resting
    s.commit([7])
    assert rig.round(s) and s.speculation() == drafts_after(s.tokens)


def test_answers_that_are_there_are_taken_while_it_rests(rig: Rig) -> None:
    s = rig.open()
    rounds(rig, s, 30)
    rig.server.frozen = True
    rounds(rig, s, BREAKER_TIMEOUTS)
    assert rig.link.resting
    rig.server.frozen = False
    s.commit([6])
    assert rig.round(s) and s.speculation(), "the memory server answers at once"


def test_late_answers_do_not_trip_the_breaker_while_some_are_in_time(rig: Rig) -> None:
    s = rig.open()
    rounds(rig, s, 30)
    for _ in range(5):
        rig.server.frozen = True
        rounds(rig, s, BREAKER_TIMEOUTS - 1)
        rig.server.frozen = False
        rounds(rig, s, 1)
    assert not rig.link.resting and s.speculation()


def test_answers_that_are_always_late_trip_the_breaker(played: Rig) -> None:
    """They come while the target verifies without drafts, before the next question."""
    session = played.open()
    for token in range(BREAKER_TIMEOUTS):
        assert not played.link.resting
        session.commit([token])
        assert not played.round(session)
        row = (session.sid, 0, session.committed, Status.EMPTY, 0)
        played.say(answer(played.asked().round_id, [row], [[0] * K]))
        played.client.tick()
    assert played.link.resting and played.stats.late_answers == BREAKER_TIMEOUTS


def test_settings_change_at_run_time(rig: Rig) -> None:
    rig.client.configure(2, [3, 2, 1], "fast")
    rig.wire.serve()
    (configure,) = rig.server.received(protocol.Configure)
    assert (configure.num_steps, configure.fan_out, configure.backup) == (2, [3, 2, 1], "fast")
    rig.server.restart()
    rig.ticks(3.0)
    (again,) = rig.server.received(protocol.Configure)
    assert again == configure, "a new server is told too"


# -- anything may happen -----------------------------------------------------------------------

EXACT_FAULTS = [f for f in FAULTS if f is not Fault.CORRUPT]


class Chaos:
    """Drives a client through a script of events, and checks every speculation."""

    def __init__(self, schedule: Schedule, exact: bool) -> None:
        self.rig = Rig(schedule=schedule)
        self.exact = exact
        self.opened: list[Session] = []
        self.truth: dict[int, list[int]] = {}
        self.token = 0

    def open(self, which: int) -> None:
        tokens = [which, self.token % VOCAB]
        s = self.rig.open(f"r{which}", tokens)
        self.opened = [o for o in self.opened if not o.closed] + [s]
        self.truth[s.sid] = tokens

    def close(self, which: int) -> None:
        self.rig.client.close_session(f"r{which}")
        self.opened = [o for o in self.opened if not o.closed]

    def commit(self, which: int) -> None:
        for s in self.opened:
            if (s.sid + which) % 4 or which == 0:
                self.token += 1
                drafts = s.speculation()[: which + 1]
                news = [*drafts, self.token % VOCAB]
                s.commit(news)
                self.truth[s.sid] += news

    def round(self, which: int) -> None:
        chosen = self.opened[which % 2 :]
        self.rig.client.ask(chosen)
        begun = self.rig.clock.now
        self.rig.client.collect(chosen)
        assert self.rig.clock.now - begun <= DEADLINE_CAP_S + 1e-3
        self.commit(which)

    def ask(self, which: int) -> None:
        self.rig.client.ask(self.opened[which:])

    def pause(self, which: int) -> None:
        self.rig.ticks(0.3 * 4**which)

    def restart(self, which: int) -> None:
        self.rig.server.restart()

    def freeze(self, which: int) -> None:
        self.rig.server.frozen = which % 2 == 0

    def flush(self, which: int) -> None:
        self.rig.client.flush()
        self.opened.clear()

    def check(self) -> None:
        for s in self.opened:
            tokens, drafts = self.truth[s.sid], s.speculation()
            assert s.tokens.tolist() == tokens
            assert len(drafts) <= K and all(0 <= t < VOCAB for t in drafts)
            if self.exact:
                assert drafts in ([], drafts_after(tokens))

    def run(self, events: Iterable[tuple[str, int]]) -> None:
        for name, which in events:
            getattr(self, name)(which)
            self.check()

    def recovers(self) -> None:
        """Without further faults, every open session has drafts again, and stays so."""
        assert self.rig.faulty is not None
        self.rig.faulty.heal()
        self.rig.server.frozen = False
        for _ in range(60):
            self.rig.ticks(0.25)
            self.commit(0)
            self.rig.round(*self.opened)
            self.check()
        assert self.rig.client.up
        for s in self.opened:
            assert s.speculation(), "drafts have not come back"
        live = {s.sid for s in self.opened}
        self.rig.ticks(1.5)
        # ZeroMQ loses or repeats nothing while a connection lives, and state repairs the rest, but
        # an Open or Close that is tampered with cannot be seen from here.
        touched = {kind for kind, _ in self.rig.faulty.happened}
        if not touched & {"Open", "Close", "Flush"}:
            assert set(self.rig.server.sessions) == live, "sessions are left on the server"


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["round"] * 6 + ["open"] * 3 + ["close", "commit", "ask", "pause"] * 2
            + ["restart", "freeze", "flush"]
        ),
        st.integers(0, 3),
    ),
    min_size=3,
    max_size=40,
)  # fmt: skip


@settings(max_examples=150, deadline=None, database=None)
@given(events=EVENTS, faults=st.lists(st.sampled_from([Fault.NONE, *EXACT_FAULTS]), max_size=120))
def test_drafts_are_right_or_absent_under_any_faults(
    events: list[tuple[str, int]], faults: list[Fault]
) -> None:
    chaos = Chaos(listed_schedule(faults), exact=True)
    chaos.run(events)
    chaos.open(0)
    chaos.recovers()


@settings(max_examples=60, deadline=None, database=None)
@given(events=EVENTS, faults=st.lists(st.sampled_from([Fault.NONE, *FAULTS]), max_size=120))
def test_corrupted_messages_harm_nothing_but_speed(
    events: list[tuple[str, int]], faults: list[Fault]
) -> None:
    chaos = Chaos(listed_schedule(faults), exact=False)
    chaos.run(events)
    chaos.open(0)
    chaos.recovers()


@pytest.mark.parametrize("kind", sorted(protocol.MESSAGES))
@pytest.mark.parametrize("fault", EXACT_FAULTS, ids=lambda f: f.value)
def test_half_of_each_kind_of_message_may_be_lost_or_mangled(kind: str, fault: Fault) -> None:
    chaos = Chaos(random_schedule(1, 0.5, [fault], [kind]), exact=True)
    chaos.run([("open", 0), ("round", 0), ("open", 1)])
    for i in range(12):
        chaos.run([("round", i % 4), ("pause", 0), ("open", 1 + i % 3)])
        if i % 5 == 4:
            chaos.run([("restart", 0), ("close", 1)])
    chaos.recovers()


def test_the_chaos_really_happens() -> None:
    chaos = Chaos(random_schedule(3, 0.3), exact=False)
    chaos.open(0)
    for i in range(150):
        chaos.run([("round", i % 4), ("pause", 0), ("open", 1 + i % 3)])
        chaos.run([("restart", 0)] if i % 10 == 9 else [])
    assert chaos.rig.faulty is not None
    happened = {fault for _, fault in chaos.rig.faulty.happened}
    assert happened == set(FAULTS)
    assert {kind for kind, _ in chaos.rig.faulty.happened} >= {
        "Hello", "Ready", "Open", "Close", "Speculate", "Speculations", "Ping", "Pong",
    }  # fmt: skip
    assert chaos.rig.server.malformed and chaos.rig.stats.invalid_messages
    assert chaos.rig.stats.outcomes[Status.HIT] > 20


def test_constants_make_sense() -> None:
    assert PING_S < SILENCE_S and DEADLINE_FLOOR_S < DEADLINE_CAP_S < SILENCE_S


# -- metrics and timelines -----------------------------------------------------------------------


def test_only_another_server_counts_as_a_restart(rig: Rig) -> None:
    rig.link._down("a test says so")
    rig.ticks(2.0)
    assert rig.client.up and rig.stats.restarts == 0
    rig.server.restart()
    rig.ticks(2 * SILENCE_S)
    assert rig.client.up and rig.stats.restarts == 1


def test_predictions_are_counted_by_the_accepted_length_of_the_outcome(rig: Rig) -> None:
    s = rig.open()
    rig.round(s)
    s.commit([4, 5, 6])
    s.accepted = 2
    rig.round(s)
    assert rig.stats.predictions["hit"] == [1, 0, 1, 0, 0]
    assert sum(rig.stats.predictions["miss"]) == 0


def test_how_far_ahead_the_draft_was(played: Rig) -> None:
    s = played.open()
    for ahead_us in (2500, -1500, 0):
        s.commit([4])
        played.client.ask([s])
        question = played.asked()
        reply = answer(question.round_id, [(s.sid, s.wire_epoch, s.committed, 0, 1)], [[7] * K])
        reply.ahead_us = ahead_us
        played.say(reply)
        assert played.client.collect([s])
    assert (played.stats.ahead.count, played.stats.behind.count) == (1, 1)
    assert played.stats.ahead.total == pytest.approx(0.0025)
    assert played.stats.behind.total == pytest.approx(0.0015)


def test_a_recording_goes_on_with_a_server_that_came_up_later(rig: Rig) -> None:
    got: list[protocol.Spans] = []
    rig.client.record(lambda spans, server: got.append(spans))
    rig.client.tick()
    assert rig.server.received(protocol.Record) == [protocol.Record(on=True)]
    rig.server.restart()
    rig.ticks(2 * SILENCE_S)
    assert rig.server.received(protocol.Record) == [protocol.Record(on=True)]
    spans = protocol.Spans(num=0, marks=np.zeros((0, 3), np.int64), times=np.zeros((0, 2)))
    rig.say(spans)
    rig.client.tick()
    assert len(got) == 1
    assert rig.client.stop_recording()
    rig.client.record(None)
    rig.say(spans)
    rig.client.tick()
    assert len(got) == 1 and rig.server.received(protocol.Record) == [protocol.Record(on=False)]


def test_the_wire_is_recorded_while_somebody_records(rig: Rig) -> None:
    rig.stats.recorder = Recorder()
    s = rig.open()
    rig.round(s)
    spans = rig.stats.recorder.drain()
    assert [(kind, id_, count) for kind, _, _, id_, count in spans] == [
        (protocol.SpanKind.ROUND_TRIP, 1, 1),
        (protocol.SpanKind.DRAFT_WAIT, 0, 0),
    ]


# -- entries sent ahead --------------------------------------------------------------------------


def sent_ahead(
    session: Session, chain: list[int], found: dict[tuple[int, int], list[int]], **changes: int
) -> protocol.Entries:
    """What a draft server that has answered `chain` says of the outcomes `found`."""
    row = {"sid": session.sid, "epoch": session.wire_epoch, "have": session.committed} | changes
    keys = [(depth, root, len(drafts)) for (depth, root), drafts in found.items()]
    tokens = [drafts + [0] * (K - len(drafts)) for drafts in found.values()]
    rows = [(row["sid"], row["epoch"], row["have"], len(chain), len(found))]
    return protocol.Entries(
        num_rows=1, num_entries=len(found), num_steps=K, rows=np.array(rows, np.int64),
        chains=np.array([chain + [0] * (K - len(chain))], np.int32),
        keys=np.array(keys, np.int32).reshape(-1, 3),
        tokens=np.array(tokens, np.int32).reshape(-1, K),
    )  # fmt: skip


def opened(played: Rig) -> Session:
    """A session whose first question was answered with the drafts 5 and 6."""
    session = played.open()
    played.client.ask([session])
    question = played.asked()
    row = (session.sid, 0, 3, Status.BACKUP, 2)
    played.say(answer(question.round_id, [row], [[5, 6, 0, 0]]))
    assert played.client.collect([session]) and session.speculation() == [5, 6]
    return session


def test_a_hit_that_was_sent_ahead_waits_for_nothing(played: Rig) -> None:
    session = opened(played)
    played.say(sent_ahead(session, [5, 6], {(1, 9): [10, 11], (0, 7): [12]}))
    session.commit([5, 9])
    session.accepted = 1
    begun = played.clock.now
    played.client.ask([session])
    assert session.speculation() == [10, 11] and session.status == Status.HIT
    assert played.client.collect([session]) and played.clock.now == begun
    assert played.stats.pushed_hits == 1 and played.stats.timeouts == 0
    assert played.stats.predictions["hit"] == [0, 1, 0, 0, 0]
    question = played.asked()  # the draft server hears of the outcome all the same
    assert question.tokens.tolist() == [5, 9]
    # Its answer acknowledges, and counts for nothing else.
    trips = played.stats.round_trip.count
    played.clock.sleep(0.3)
    row = (session.sid, 0, 5, Status.HIT, 2)
    played.say(answer(question.round_id, [row], [[10, 11, 0, 0]]))
    played.client.tick()
    assert session.acked == 5 and session.speculation() == [10, 11]
    assert played.stats.outcomes[Status.HIT] == 1 and played.stats.round_trip.count == trips
    # And is not waited for the next time either.
    session.commit([10, 20])
    played.client.ask([session])
    assert session.speculation() == []
    assert played.asked().tokens.tolist() == [10, 20]


def test_an_outcome_that_was_not_sent_ahead_is_asked_for(played: Rig) -> None:
    session = opened(played)
    played.say(sent_ahead(session, [5, 6], {(0, 7): [12]}))
    session.commit([8])
    played.client.ask([session])
    assert session.speculation() == []
    row = (session.sid, 0, 4, Status.BACKUP, 1)
    played.say(answer(played.asked().round_id, [row], [[33, 0, 0, 0]]))
    assert played.client.collect([session]) and session.speculation() == [33]
    assert played.stats.pushed_hits == 0 and played.stats.predictions["miss"][0] == 2


def test_only_those_without_an_entry_are_waited_for(played: Rig) -> None:
    first, second = opened(played), played.open("other", [1, 2])
    played.client.ask([second])
    row = (second.sid, 0, 2, Status.EMPTY, 0)
    played.say(answer(played.asked().round_id, [row], [[0, 0, 0, 0]]))
    played.client.collect([second])
    played.say(sent_ahead(first, [5, 6], {(0, 7): [12]}))
    for session in (first, second):
        session.commit([7])
    played.client.ask([first, second])
    assert first.speculation() == [12] and second.speculation() == []
    begun = played.clock.now
    assert not played.client.collect([first, second])
    assert played.clock.now - begun == pytest.approx(0.05)
    assert first.speculation() == [12] and played.stats.timeouts == 1


@pytest.mark.parametrize(
    ("changes", "counter"),
    [
        ({"epoch": 1}, "stale_answers"), ({"sid": 99}, "stale_answers"),
        ({"have": 4}, "invalid_messages"),
    ],
)  # fmt: skip
def test_entries_of_something_else_are_dropped(played: Rig, changes: dict, counter: str) -> None:
    session = opened(played)
    played.say(sent_ahead(session, [5, 6], {(0, 7): [12]}, **changes))
    session.commit([7]) if "have" not in changes else None
    played.client.ask([session])
    assert getattr(played.stats, counter) == 1 and played.stats.pushed_hits == 0


@pytest.mark.parametrize("bad", [-1, VOCAB])
@pytest.mark.parametrize("where", ["chain", "root", "draft"])
def test_entries_with_ids_that_are_no_tokens_are_dropped(played: Rig, bad: int, where: str) -> None:
    session = opened(played)
    chain, root, draft = [5, 6], 7, 12
    if where == "chain":
        chain = [5, bad]
    elif where == "root":
        root = bad
    else:
        draft = bad
    played.say(sent_ahead(session, chain, {(0, 7): [12], (0, root): [draft]}))
    session.commit([7])
    played.client.ask([session])
    assert session.speculation() == [] and played.stats.invalid_messages == 1


def test_entries_for_a_text_that_went_on_otherwise_are_not_used(played: Rig) -> None:
    """The last answer was late: what was verified is not the chain that the entries are for."""
    session = opened(played)
    late = sent_ahead(session, [5, 6], {(1, 9): [10, 11]})
    session.commit([8])
    played.say(late)
    session.commit([9])
    played.client.ask([session])
    assert session.speculation() == [] and session.entries is None


def test_push_is_part_of_the_settings(played: Rig) -> None:
    played.client.push = False
    played.client.configure(2, [1, 1, 1], "jit")
    (message,) = played.heard()
    assert isinstance(message, protocol.Configure) and not message.push
    played.client.push = True
    played.client.configure(2, [1, 1, 1], "jit")
    (message,) = played.heard()
    assert isinstance(message, protocol.Configure) and message.push


def test_entries_for_a_request_that_is_verified_by_rejection_are_dropped(played: Rig) -> None:
    """They bring no proposals. A sound draft server never sends any."""
    sampling = replace(SAMPLING, top_m=8)
    session = played.client.open_session("r", [1, 2, 3], sampling, NO_STOP)
    played.client.ask([session])
    played.say(sent_ahead(session, [], {(0, 7): [12]}))
    session.commit([7])
    played.client.ask([session])
    assert session.speculation() == [] and session.answered != session.committed
    assert (played.stats.pushed_hits, played.stats.invalid_messages) == (0, 1)


def test_an_answer_nobody_waited_for_says_nothing_of_the_next_outcome(played: Rig) -> None:
    """The draft server lacked the first outcome; it is told again with the second."""
    session = opened(played)
    played.say(sent_ahead(session, [5, 6], {(1, 9): [10, 11]}))
    session.commit([5, 9])
    played.client.ask([session])
    assert session.speculation() == [10, 11]
    row = (session.sid, 0, 3, Status.NEED, 0)
    played.say(answer(played.asked().round_id, [row], [[0] * K]))
    session.commit([10, 20])
    played.client.ask([session])
    question = played.asked()
    assert question.rows[0, 2] == 3 and question.tokens.tolist() == [5, 9, 10, 20]
    row = (session.sid, 0, 7, Status.BACKUP, 1)
    played.say(answer(question.round_id, [row], [[33, 0, 0, 0]]))
    assert played.client.collect([session]) and session.speculation() == [33]


def test_to_ask_again_keeps_what_was_sent_ahead(played: Rig) -> None:
    session = opened(played)
    played.say(sent_ahead(session, [5, 6], {(0, 7): [12]}))
    played.client.ask([session, played.open("other")])
    assert session.speculation() == [5, 6]
    session.commit([7])
    played.client.ask([session])
    assert session.speculation() == [12]


def test_a_restarted_server_is_not_asked_before_it_says_ready(played: Rig) -> None:
    session = opened(played)
    played.say(protocol.Error(code="hello_first", text="say Hello first"))
    session.commit([7])
    played.client.ask([session])
    assert played.heard() == [] and not played.client.up


def test_an_answer_that_comes_twice_is_one_round_trip(played: Rig) -> None:
    session = played.open()
    played.client.ask([session])
    message = answer(played.asked().round_id, [(session.sid, 0, 3, Status.EMPTY, 0)], [[0] * K])
    played.say(message)
    assert played.client.collect([session])
    played.clock.sleep(0.4)
    played.say(message)
    played.client.tick()
    assert played.stats.round_trip.count == 1


def test_no_more_is_kept_of_entries_than_a_session_can_have(played: Rig) -> None:
    """A message may be large, and another one for each session: they are not kept whole."""
    session = opened(played)
    played.say(sent_ahead(session, [5, 6], {(0, 7): [12]}))
    played.client.tick()
    assert session.entries is not None
    assert session.entries.keys.flags.owndata and session.entries.tokens.flags.owndata
    session.entries = None
    most = (K + 1) * MAX_FAN_OUT
    for count in (most, most + 1):
        found = {(i % 2, i // 2): [12] for i in range(count)}
        played.say(sent_ahead(session, [5, 6], found))
        played.client.tick()
        assert (session.entries is None) == (count > most)
        session.entries = None
    longer = sent_ahead(session, [5, 6], {(0, 7): [12]})
    longer.num_steps = K + 1
    longer.chains = np.pad(longer.chains, ((0, 0), (0, 1)))
    longer.tokens = np.pad(longer.tokens, ((0, 0), (0, 1)))
    played.say(longer)
    played.client.tick()
    assert session.entries is None and played.stats.invalid_messages == 2
