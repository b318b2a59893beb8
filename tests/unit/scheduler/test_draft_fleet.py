"""Several draft servers of one verifier, in fake time: placement, moving, waiting."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from random import Random
from typing import Any

import numpy as np
import pytest

from channels import FakeClock, MemoryServer, wait_for_any
from model_server import HASH, NO_STOP, SAMPLING, VOCAB, K, ModelServer, drafts_after
from sgl_ssd import protocol
from sgl_ssd.config import VerifierConfig
from sgl_ssd.scheduler.draft_client import (
    BREAKER_TIMEOUTS,
    MAX_OPENS_PER_ROUND,
    UNHEARD_S,
    DraftClient,
    make_hello,
)
from sgl_ssd.scheduler.draft_fleet import DraftFleet
from sgl_ssd.scheduler.draft_link import FIRST_PINGS, SILENCE_S
from sgl_ssd.scheduler.sessions import Session
from sgl_ssd.scheduler.stats import SSDStats


class Rig:
    """A fleet and its servers."""

    def __init__(
        self, servers: int = 2, *, timeout_ms: float | None = None, replica: int = 0,
        replicas: int = 1, scheme: str = "ipc:///unused/",
    ) -> None:  # fmt: skip
        self.clock = FakeClock()
        self.wires = [MemoryServer(self.clock) for _ in range(servers)]
        self.servers = [ModelServer(wire) for wire in self.wires]
        for i, server in enumerate(self.servers):
            server.name = 100 * i
        self.channels = [wire.connect(b"me") for wire in self.wires]
        config = VerifierConfig(
            endpoints=[f"{scheme}{7000 + i}" for i in range(servers)], num_steps=K,
            draft_timeout_ms=timeout_ms,
        )  # fmt: skip
        self.stats = SSDStats(K)
        self.fleet = DraftFleet(
            config, make_hello(K, 1 << 20, VOCAB, HASH, 8), self.stats, self.channels, self.clock,
            replica=replica, replicas=replicas, wait=wait_for_any,
        )  # fmt: skip

    def connect(self) -> Rig:
        for _ in range(3):
            self.fleet.tick()
        assert all(client.up for client in self.fleet.clients)
        for server in self.servers:
            server.messages.clear()
        return self

    def open(self, rid: str, tokens: Iterable[int] = (1, 2, 3)) -> Session:
        return self.fleet.open_session(rid, list(tokens), SAMPLING, NO_STOP)

    def opened(self, count: int) -> list[Session]:
        return [self.open(str(i), [i, 1]) for i in range(count)]

    def round(self, *sessions: Session) -> bool:
        self.fleet.ask(sessions)
        return self.fleet.collect(sessions)

    def ticks(self, seconds: float, step: float = 0.25) -> None:
        until = self.clock.now + seconds
        while self.clock.now < until:
            self.clock.sleep(step)
            self.fleet.tick()

    def loads(self) -> list[int]:
        return [len(client.sessions) for client in self.fleet.clients]


EVENTS = ["round"] * 6 + ["open", "close", "freeze", "thaw", "restart", "wait"]


def has_drafts(session: Session) -> bool:
    drafts = session.speculation()
    assert drafts in ([], drafts_after(session.tokens))
    return bool(drafts)


@pytest.fixture
def rig() -> Rig:
    return Rig().connect()


# -- placement -----------------------------------------------------------------------------------


def test_sessions_go_where_the_fewest_are(rig: Rig) -> None:
    sessions = rig.opened(4)
    assert [s.server for s in sessions] == [0, 1, 0, 1]
    rig.fleet.close_session("1")
    rig.fleet.close_session("3")
    assert rig.loads() == [2, 0]
    assert [rig.open(f"n{i}", [i]).server for i in range(3)] == [1, 1, 0]
    assert len(rig.fleet.sessions) == 5


def test_one_question_for_each_server_concerned(rig: Rig) -> None:
    sessions = rig.opened(5)
    assert rig.round(*sessions) and all(map(has_drafts, sessions))
    asked = [server.received(protocol.Speculate) for server in rig.servers]
    assert [[q.num_rows for q in questions] for questions in asked] == [[3], [2]]
    ids = [q.round_id for questions in asked for q in questions]
    assert len(set(ids)) == 2, "a timeline tells them apart by it"
    sessions[1].commit([4])
    assert rig.round(sessions[1]) and has_drafts(sessions[1])
    assert [len(server.received(protocol.Speculate)) for server in rig.servers] == [0, 1]
    assert rig.stats.timeouts == 0 and rig.stats.period.count == 1


def test_the_next_turn_of_a_conversation_goes_to_the_same_server(rig: Rig) -> None:
    rig.opened(1)
    turn = rig.open("turn", range(100, 300))
    assert turn.server == 1
    turn.commit(list(range(300, 400)))
    rig.fleet.close_session("turn")
    rig.fleet.close_session("0")
    assert rig.loads() == [0, 0]
    assert rig.open("next", [*turn.tokens, 5, 6, 7]).server == 1
    assert rig.open("another", range(500, 800)).server == 0


def test_settings_flush_and_close_reach_every_server(rig: Rig) -> None:
    sessions = rig.opened(3)
    rig.fleet.push = False
    rig.fleet.configure(2, [3, 2, 1], "fast")
    for wire in rig.wires:
        wire.take_turn()
    for server in rig.servers:
        (message,) = server.received(protocol.Configure)
        assert (message.num_steps, message.fan_out, message.backup) == (2, [3, 2, 1], "fast")
        assert not message.push
    rig.fleet.flush()
    assert all(s.closed for s in sessions) and rig.loads() == [0, 0]
    rig.fleet.ask(sessions)
    assert rig.loads() == [0, 0], "what is closed is not placed again"
    rig.ticks(0.5)
    assert all(not server.sessions for server in rig.servers)
    assert all(len(server.received(protocol.Flush)) == 1 for server in rig.servers)
    rig.opened(2)
    rig.fleet.close()
    for wire in rig.wires:
        wire.take_turn()
    assert all(not server.sessions for server in rig.servers)
    assert [channel.closings for channel in rig.channels] == [1, 1]


# -- a server is lost ----------------------------------------------------------------------------


def test_its_sessions_move_with_their_next_question(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    sessions = rig.opened(4)
    assert rig.round(*sessions)
    first, epochs = rig.servers[0], [s.wire_epoch for s in sessions]
    first.frozen = True
    rig.ticks(SILENCE_S + 3)
    assert [client.up for client in rig.fleet.clients] == [False, True] and rig.fleet.up
    (line,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert line.startswith("draft server 0 down") and "others" in line
    for s in sessions:
        s.commit([7])
    rig.servers[1].messages.clear()
    assert rig.round(*sessions) and all(map(has_drafts, sessions))
    assert rig.loads() == [0, 4]
    opens = rig.servers[1].received(protocol.Open)
    assert [o.sid for o in opens] == [sessions[0].sid, sessions[2].sid]
    for i in (0, 2):
        assert sessions[i].wire_epoch > epochs[i]
    assert [o.prompt.tolist() for o in opens] == [[0, 1, 7], [2, 1, 7]]
    # The lost one may have kept them: once it is back it hears that they are over.
    first.frozen = False
    rig.wires[0].inbox.clear()
    rig.ticks(2.0)
    assert rig.fleet.clients[0].up and not first.sessions
    for s in sessions:
        s.commit([8])
    assert rig.round(*sessions) and rig.loads() == [0, 4], "nobody moves back"
    assert rig.open("new").server == 0, "but new ones go there"


def test_a_closed_session_does_not_move(rig: Rig) -> None:
    gone, stays = rig.opened(2)
    rig.round(gone, stays)
    rig.fleet.close_session("0")
    rig.fleet.clients[0]._down("a test says so")
    rig.fleet.ask([gone, stays])
    assert rig.loads() == [0, 1]


def test_many_move_over_several_rounds(rig: Rig) -> None:
    count = 2 * MAX_OPENS_PER_ROUND + 4
    sessions = rig.opened(2 * count)
    rig.round(*sessions)
    rig.round(*sessions)
    rig.fleet.clients[0]._down("a test says so")
    rig.servers[0].frozen = True
    moved = []
    for _ in range(4):
        for s in sessions:
            s.commit([5])
        assert rig.round(*sessions)
        moved.append(sum(map(has_drafts, sessions)) - count)
    assert moved == [MAX_OPENS_PER_ROUND, 2 * MAX_OPENS_PER_ROUND, count, count]


def test_a_server_that_restarts_at_once_loses_them_to_another(rig: Rig) -> None:
    sessions = rig.opened(2)
    rig.round(*sessions)
    rig.servers[0].restart()
    for s in sessions:
        s.commit([3])
    rig.round(*sessions)
    assert not rig.fleet.clients[0].up and rig.stats.timeouts == 0
    assert has_drafts(sessions[1]), "the other answers as ever"
    for s in sessions:
        s.commit([4])
    assert rig.round(*sessions) and all(map(has_drafts, sessions)) and rig.loads() == [0, 2]
    rig.ticks(2.0)
    assert rig.fleet.clients[0].up and rig.fleet.clients[0].restarts == rig.stats.restarts == 1


def test_answers_of_the_server_it_has_left_are_stale(rig: Rig) -> None:
    session = rig.open("r")
    rig.fleet.ask([session])
    question = [m for m in map(protocol.decode, [f for _, f in rig.wires[0].inbox])][-1]
    rig.fleet.clients[0].server = None
    session.commit([9])
    assert rig.round(session) and session.server == 1 and has_drafts(session)
    drafts = list(session.drafts)
    rows = np.array([[session.sid, session.wire_epoch, session.committed, 0, 1]], np.int64)
    rig.wires[0].send(b"me", protocol.encode(protocol.Speculations(
        round_id=question.round_id, num_rows=1, num_steps=K, rows=rows,
        tokens=np.array([[5, 0, 0, 0]], np.int32),
    )))  # fmt: skip
    rig.wires[0].serve = None
    rig.fleet.tick()
    assert session.drafts == drafts and rig.stats.stale_answers == 1


def test_without_any_server_everything_waits_for_the_first_that_comes() -> None:
    rig = Rig(3)
    sessions = rig.opened(3)
    assert not rig.round(*sessions) or not any(map(has_drafts, sessions))
    assert rig.loads() == [0, 0, 0] and not rig.fleet.up and rig.fleet.server is None
    for server in rig.servers[1:]:
        server.frozen = True
    rig.ticks(2.5)
    assert rig.round(*sessions) and all(map(has_drafts, sessions)) and rig.loads() == [3, 0, 0]


@pytest.mark.parametrize("seed", range(8))
def test_whatever_dies_drafts_are_right_and_nothing_stays_open(seed: int) -> None:
    random = Random(seed)
    rig = Rig(3, timeout_ms=20, replica=seed % 2, replicas=1 + seed % 2).connect()
    sessions: dict[str, Session] = {}
    for step in range(300):
        event = random.choice(
            ["round"] * 6 + ["open", "close", "freeze", "thaw", "restart", "wait"]
        )
        server = random.choice(rig.servers)
        if event == "open":
            rid = str(random.randrange(12))
            sessions[rid] = rig.open(rid, [step, 1])
        elif event == "close":
            rid = str(random.randrange(12))
            rig.fleet.close_session(rid)
            sessions.pop(rid, None)
        elif event in ("freeze", "thaw"):
            server.frozen = event == "freeze"
        elif event == "restart":
            server.restart()
        elif event == "wait":
            rig.ticks(random.choice([0.2, SILENCE_S + 3]))
        else:
            for s in sessions.values():
                s.commit([step % VOCAB])
            rig.round(*sessions.values())
        for s in sessions.values():
            has_drafts(s)
    for server in rig.servers:
        server.frozen = False
    rig.ticks(10.0)
    for _ in range(3):
        for s in sessions.values():
            s.commit([7])
        rig.round(*sessions.values())
    assert sessions and all(map(has_drafts, sessions.values()))
    rig.ticks(1.5)
    open_there = [sorted(server.sessions) for server in rig.servers]
    placed = [sorted(client.sessions) for client in rig.fleet.clients]
    assert open_there == placed
    assert sorted(sid for sids in placed for sid in sids) == sorted(
        s.sid for s in sessions.values()
    )


# -- waiting -------------------------------------------------------------------------------------


def test_a_silent_server_costs_only_its_own_rows() -> None:
    rig = Rig(timeout_ms=50).connect()
    a, b = rig.opened(2)
    rig.round(a, b)
    rig.servers[0].frozen = True
    rig.wires[1].latency_s = 0.02
    for s in (a, b):
        s.commit([3])
    begun = rig.clock.now
    assert not rig.round(a, b)
    assert rig.clock.now - begun == pytest.approx(0.05, abs=2e-3)
    assert not has_drafts(a) and has_drafts(b)
    assert [c.timeouts for c in rig.fleet.clients] == [1, 0] and rig.stats.timeouts == 1


@pytest.mark.parametrize(("servers", "moves"), [(1, False), (2, True)])
def test_a_server_that_says_nothing_is_given_up_where_there_are_others(
    servers: int, moves: bool
) -> None:
    rig = Rig(servers).connect()
    session = rig.open("r")
    for _ in range(30):
        session.commit([3])
        rig.clock.sleep(0.01)
        assert rig.round(session)
    rig.clock.sleep(3.0)  # nothing was asked: nothing had to be said
    rig.servers[0].frozen = True
    begun = rig.clock.now
    while rig.clock.now < begun + 4.0:
        session.commit([3])
        rig.clock.sleep(0.01)
        rig.fleet.tick()
        rig.round(session)
        if has_drafts(session):
            break
    assert has_drafts(session) is moves is (not rig.fleet.clients[0].up)
    if moves:
        assert UNHEARD_S <= rig.clock.now - begun < UNHEARD_S + 0.1 and session.server == 1


def test_a_server_that_is_late_but_alive_keeps_its_sessions(rig: Rig) -> None:
    session = rig.open("r")
    rig.wires[0].latency_s = 0.7  # beyond any deadline
    for _ in range(300):
        session.commit([3])
        rig.clock.sleep(0.01)
        rig.fleet.tick()
        rig.round(session)
    assert session.server == 0 and rig.fleet.clients[0].up and rig.stats.timeouts > 5


def test_two_silent_servers_are_waited_for_once() -> None:
    rig = Rig(3, timeout_ms=50).connect()
    sessions = rig.opened(3)
    for server in rig.servers[1:]:
        server.frozen = True
    looks: list[float] = []

    def wait(channels: Any, left_s: float) -> None:
        looks.append(left_s)
        wait_for_any(channels, left_s)

    rig.fleet._wait_for_any = wait
    assert not rig.round(*sessions) and list(map(has_drafts, sessions)) == [True, False, False]
    assert looks == [pytest.approx(0.05)] and rig.stats.timeouts == 1, "no busy loop"


def test_all_are_waited_for_at_the_same_time() -> None:
    rig = Rig(3, timeout_ms=100).connect()
    sessions = rig.opened(3)
    for wire, latency_s in zip(rig.wires, (0.03, 0.05, 0.01), strict=True):
        wire.latency_s = latency_s
    begun = rig.clock.now
    assert rig.round(*sessions) and all(map(has_drafts, sessions))
    assert rig.clock.now - begun == pytest.approx(0.05, abs=1e-3)
    trips = [client.round_trip.mean for client in rig.fleet.clients]
    assert trips == pytest.approx([0.03, 0.05, 0.01], abs=1e-3)
    assert rig.stats.round_trip.count == 3 and rig.stats.wait.count == 1


def test_the_breaker_is_the_servers_own(rig: Rig) -> None:
    a, b = rig.opened(2)
    for _ in range(30):
        a.commit([3])
        b.commit([3])
        rig.round(a, b)
    rig.servers[0].frozen = True
    for _ in range(BREAKER_TIMEOUTS):
        a.commit([3])
        b.commit([3])
        rig.round(a, b)
    assert rig.fleet.resting(a) and not rig.fleet.resting(b)
    for latency_s in (0.0, 0.005, 0.005):
        rig.wires[1].latency_s = latency_s
        begun = rig.clock.now
        a.commit([3])
        b.commit([3])
        rig.round(a, b)
        assert not has_drafts(a) and has_drafts(b), "the other one is waited for"
        assert rig.clock.now == pytest.approx(begun + latency_s), "and nobody else"


def test_a_flood_from_one_server_does_not_hold_the_scheduler() -> None:
    rig = Rig(timeout_ms=50).connect()
    a, b = rig.opened(2)
    rig.fleet.ask([a, b])
    for _ in range(1000):
        rig.wires[0].send(b"me", protocol.encode(protocol.Pong(nonce=0, stats={})))
    rig.wires[0].serve = None
    begun = rig.clock.now
    assert not rig.fleet.collect([a, b])
    assert rig.clock.now - begun <= 0.05 + 1e-3 and has_drafts(b)


@pytest.mark.parametrize("every", [False, True])
def test_a_start_waits_for_one_or_for_all(every: bool) -> None:
    rig = Rig()
    rig.servers[1].frozen = True
    begun = rig.clock.now
    assert rig.fleet.wait_until_up(3.0, every) is not every
    assert (rig.clock.now - begun >= 3.0) is every
    rig.servers[1].frozen = False
    assert rig.fleet.wait_until_up(3.0, True)


def test_a_replica_begins_with_the_servers_of_others_if_its_own_are_away() -> None:
    rig = Rig(replica=1, replicas=2)
    rig.servers[1].frozen = True
    begun = rig.clock.now
    assert rig.fleet.wait_until_up(600.0) and rig.clock.now - begun < 1.0
    assert not rig.fleet.wait_until_up(2.0, every=True)


# -- replicas of the target ----------------------------------------------------------------------


def test_a_replica_keeps_to_its_home_servers() -> None:
    rig = Rig(4, replica=1, replicas=2).connect()
    assert [s.server for s in rig.opened(4)] == [1, 3, 1, 3]
    assert rig.fleet.servers_up == 2
    assert [state["home"] for state in rig.fleet.states()] == [False, True, False, True]


def test_it_uses_others_while_none_of_its_own_is_up() -> None:
    rig = Rig(3, replica=1, replicas=3).connect()
    session = rig.open("r")
    assert rig.round(session) and session.server == 1
    rig.fleet.clients[1]._down("a test says so")
    rig.servers[1].frozen = True
    session.commit([4])
    assert rig.round(session) and has_drafts(session) and session.server == 0
    rig.servers[1].frozen = False
    rig.ticks(2.0)
    session.commit([5])
    assert rig.round(session) and has_drafts(session) and session.server == 1, "it returns"
    rig.ticks(0.5)
    assert not rig.servers[0].sessions


# -- what is told of them ------------------------------------------------------------------------


def test_states_tell_of_each_server(rig: Rig) -> None:
    rig.opened(3)
    rig.fleet.clients[1]._down("a test says so")
    one, two = rig.fleet.states()
    assert (one["draft"], two["draft"]) == ("up", "down")
    assert (one["open_sessions"], two["open_sessions"]) == (2, 1)
    assert (one["endpoint"], two["endpoint"]) == ("ipc:///unused/7000", "ipc:///unused/7001")
    assert one["draft_model"] == "draft-model" and two["draft_model"] == ""
    assert one["draft_stats"] == {"peers": 1.0} == rig.fleet.server_stats


def pings(rig: Rig, index: int) -> list[float]:
    return list(rig.fleet.clients[index].pings_s)


def test_the_way_to_a_server_is_measured_when_it_comes_up(caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    rig = Rig(scheme="tcp://127.0.0.1:")
    rig.wires[1].latency_s = 0.02
    rig.ticks(1.0, step=1e-4)
    near, far = (client.ping_ms for client in rig.fleet.clients)
    assert near == (0.0, 0.0) and far[0] == pytest.approx(20, abs=0.2)
    assert len(pings(rig, 1)) >= FIRST_PINGS
    (line,) = [m for m in caplog.messages if "round trip of a ping 20." in m]
    assert line.startswith("draft server 1 at tcp://127.0.0.1:7001")
    assert rig.fleet.states()[1]["ping_ms"] == far[0]
    assert rig.fleet.pings_ms() == [near[0], far[0]] and Rig().connect().fleet.pings_ms() == []
    rig.wires[1].latency_s = 0.03
    rig.ticks(40.0, step=4e-4)
    assert rig.fleet.clients[1].ping_ms[0] == pytest.approx(30, abs=0.5), "of the last pings"


def test_it_is_measured_before_the_first_request() -> None:
    rig = Rig()
    for wire, latency_s in zip(rig.wires, (0.001, 0.02), strict=True):
        wire.latency_s = latency_s
    assert rig.fleet.wait_until_up(5.0, every=True)
    assert [c.ping_ms[0] for c in rig.fleet.clients] == pytest.approx([1, 20])
    assert min(len(pings(rig, i)) for i in (0, 1)) >= FIRST_PINGS - 1
    rig.servers[0].restart()
    rig.servers[0].frozen = True
    begun = rig.clock.now
    rig.fleet.clients[0]._down("a test says so")
    assert not rig.fleet.wait_until_up(0.5, every=True) and rig.clock.now - begun < 1.0


def test_under_load_it_is_measured_while_an_answer_is_waited_for(rig: Rig) -> None:
    session = rig.open("r")
    rig.wires[0].latency_s = 0.004
    for _ in range(100):
        session.commit([3])
        rig.clock.sleep(0.05)
        rig.fleet.tick()
        assert rig.round(session)
    assert len(pings(rig, 0)) >= 4 and pings(rig, 0)[-4:] == pytest.approx([0.004] * 4)


def test_an_answer_that_has_lain_there_measures_nothing(rig: Rig) -> None:
    before = pings(rig, 0)
    rig.ticks(5.0, step=0.25)
    assert pings(rig, 0) == before, "up to 250 ms of it were ours"
    rig.ticks(0.999, step=0.999)
    client: DraftClient = rig.fleet.clients[0]
    rig.wires[0].latency_s = 0.01
    rig.clock.sleep(0.2)
    client.tick()
    message = client.receive(0.5)  # as a round does while it waits
    assert isinstance(message, protocol.Pong)
    client.handle(message)
    assert pings(rig, 0)[len(before) :] == pytest.approx([0.01])
