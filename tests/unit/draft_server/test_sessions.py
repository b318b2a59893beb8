"""Peers, epochs' home, leases and namespaces."""

from __future__ import annotations

from sgl_ssd.draft_server.sessions import Peers, Session
from sgl_ssd.protocol import Hello


def hello(name: str = "v") -> Hello:
    return Hello(
        verifier=name, num_steps=2, context_len=100, vocab_size=50, vocab_hash="h",
        max_running_requests=4,
    )  # fmt: skip


def test_a_peer_is_known_from_its_hello_on() -> None:
    peers = Peers(lease_s=10)
    assert peers.get(b"a", 0.0) is None
    assert peers.join(b"a", hello(), [1, 1, 1], "jit", 0.0) == []
    assert peers.get(b"a", 1.0) is not None and len(peers) == 1


def test_silence_ends_the_lease_and_any_message_renews_it() -> None:
    peers = Peers(lease_s=10)
    peers.join(b"a", hello(), [1], "jit", 0.0)
    peers.join(b"b", hello("w"), [1], "jit", 0.0)
    peers.get(b"a", 9.0)
    assert [p.identity for p in peers.expire(11.0)] == [b"b"]
    assert peers.get(b"b", 11.0) is None
    assert peers.expire(19.0) == []
    assert len(peers.expire(19.1)) == 1


def test_the_same_verifier_keeps_its_sessions_another_one_does_not() -> None:
    peers = Peers(lease_s=10)
    peers.join(b"a", hello(), [1], "jit", 0.0)
    peer = peers.get(b"a", 0.0)
    peer.sessions[1] = session = Session(1, 0, None)
    assert peers.join(b"a", hello(), [1], "jit", 1.0) == []
    assert peers.get(b"a", 1.0) is peer and peers.num_sessions == 1
    assert peers.join(b"a", hello("restarted"), [1], "jit", 2.0) == [session]
    assert peers.num_sessions == 0


def test_namespaces_are_a_peers_own_and_a_flush_makes_a_new_one() -> None:
    peers = Peers(lease_s=10)
    for name in (b"a", b"b"):
        peers.join(name, hello(name.decode()), [1], "jit", 0.0)
    a, b = (peers.get(name, 0.0) for name in (b"a", b"b"))
    seen = {a.namespace(""), a.namespace("x"), b.namespace(""), b.namespace("x")}
    a.sessions[1] = Session(1, 0, "draft")
    assert [s.draft for s in peers.flush(a)] == ["draft"] and not a.sessions
    seen |= {a.namespace(""), a.namespace("x")}
    peers.join(b"a", hello("again"), [1], "jit", 0.0)
    seen.add(peers.get(b"a", 0.0).namespace(""))
    assert len(seen) == 7


def test_a_session_whose_close_got_lost_ends_with_the_lease() -> None:
    peers = Peers(lease_s=10)
    peers.join(b"a", hello(), [1], "jit", 0.0)
    peer = peers.get(b"a", 20.0)
    peer.sessions[1] = lost = Session(1, 0, None, last_seen=5.0)
    peer.sessions[2] = Session(2, 0, None, last_seen=15.0)
    assert peers.expire_sessions(14.0) == []
    assert peers.expire_sessions(20.0) == [lost]
    assert list(peer.sessions) == [2]
