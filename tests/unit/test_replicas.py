"""Several replicas as one server."""

from __future__ import annotations

from typing import Any

from live_looks import server_info
from sgl_ssd.live import Look, compare
from sgl_ssd.protocol import Status
from sgl_ssd.replicas import merged, merged_draft_stats
from sgl_ssd.scheduler.stats import SSDStats


def stats(rounds: int) -> dict[str, Any]:
    counted = SSDStats(4)
    for _ in range(rounds):
        counted.observe_round(4, 3)
        counted.observe_answer(Status.HIT, 3)
        counted.verify.add(0.01)
    counted.observe_no_drafts(f"reason {rounds}")
    return counted.as_dict() | {"draft": "up", "requests": [{"rid": rounds}]}


def test_counts_of_all_replicas_are_added_up() -> None:
    whole = merged([stats(3), stats(4)])
    together = stats(7)
    for name in ("rounds", "accepted", "hits", "accepted_per_position", "hits_per_length"):
        assert whole[name] == together[name], name
    assert whole["outcomes"]["hit"] == 7
    assert whole["without_drafts"] == {"reason 3": 1, "reason 4": 1}
    assert whole["times"]["verify"][0] == 7
    assert [r["rid"] for r in whole["requests"]] == [3, 4]


def test_one_replica_is_what_it_was() -> None:
    state = stats(3)
    assert merged([state]) == state


def test_a_draft_that_one_replica_cannot_reach_is_down() -> None:
    assert merged([stats(1), stats(1) | {"draft": "down"}])["draft"] == "down"
    assert merged([stats(1), stats(1)])["draft"] == "up"


def test_the_draft_servers_numbers_are_not_added_up() -> None:
    states = [stats(1) | {"draft_stats": {"rounds": n, "step_ms": n}} for n in (5, 8, 6)]
    assert merged(states)["draft_stats"] == {"rounds": 8, "step_ms": 8}
    assert merged([stats(1) | {"draft_stats": {}}] * 2)["draft_stats"] == {}


def test_the_numbers_of_several_draft_servers_are_those_of_one() -> None:
    one = {
        "rounds": 10, "build_steps": 30, "build_step_ms": 2.0, "step_ms": 2.0, "kv_total": 100,
        "jits": 0, "jit_ms": 0.0, "peers": 2, "sessions": 3, "rows": 10, "missed_of_1": 0.5,
    }  # fmt: skip
    two = one | {"rounds": 5, "build_steps": 10, "build_step_ms": 6.0, "sessions": 1, "peers": 1}
    two |= {"rows": 30, "missed_of_1": 0.1, "missed_of_2": 0.05}
    whole = merged_draft_stats([one, two])
    assert (whole["rounds"], whole["build_steps"], whole["sessions"]) == (15, 40, 4)
    assert whole["kv_total"] == 200 and whole["peers"] == 2
    assert whole["build_step_ms"] == 3.0, "the time of all steps over their number"
    assert whole["missed_of_1"] == 0.2 and whole["missed_of_2"] == 0.05
    assert whole["jit_ms"] == 0.0
    assert merged_draft_stats([one]) == one and merged_draft_stats([]) == {}


def test_draft_servers_are_listed_once_with_the_sessions_of_all_replicas() -> None:
    def seen(endpoint: str, sessions: int, draft: str, home: bool) -> dict[str, Any]:
        return {"endpoint": endpoint, "open_sessions": sessions, "draft": draft, "home": home,
                "timeouts": 1, "ping_ms": 0.5}  # fmt: skip

    first = [seen("a", 3, "up", True), seen("b", 0, "up", False)]
    second = [seen("a", 0, "down", False), seen("b", 4, "up", True), seen("c", 1, "up", True)]
    states = [stats(1) | {"draft_servers": servers} for servers in (first, second)]
    a, b, c = merged(states)["draft_servers"]
    assert (a["open_sessions"], a["draft"], a["home"], a["timeouts"]) == (3, "down", True, 2)
    assert (b["open_sessions"], b["draft"], b["home"]) == (4, "up", True)
    assert c == second[2] and first[0]["open_sessions"] == 3


def test_a_live_view_shows_all_replicas() -> None:
    frames = []
    for count in (1, 2):
        infos = [server_info(seconds) for seconds in (1, 2)]
        for info in infos:
            info["internal_states"] *= count
        frames.append(compare(Look.of(infos[0], 1), Look.of(infos[1], 2)))
    one, both = frames
    assert both.tokens_per_s == 2 * one.tokens_per_s and both.accept_length == one.accept_length
    assert both.round_ms == one.round_ms and both.kv_use == one.kv_use
    assert len(both.requests) == 2 * len(one.requests)
