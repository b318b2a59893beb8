"""Frames and alerts: what two looks at the counters say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from live_looks import server_info
from sgl_ssd.errors import SSDError
from sgl_ssd.live import Frame, History, Look, alerts, compare


def look(seconds: float, **changes: Any) -> Look:
    return Look.of(server_info(seconds, **changes), seconds)


@pytest.fixture
def frame() -> Frame:
    return compare(look(10), look(12))


def said(frame: Frame, **changes: Any) -> str:
    return "\n".join(alerts(replace(frame, **changes)))


def test_a_frame_is_what_happened_in_between(frame: Frame) -> None:
    assert (frame.seconds, frame.rounds) == (2, 80)
    assert frame.tokens_per_s == pytest.approx(160)
    assert frame.accept_length == pytest.approx(4) and frame.accept_rate == pytest.approx(0.75)
    assert frame.accepted_per_position == pytest.approx([1, 1, 0.6, 0.4])
    assert frame.hit_rate == pytest.approx(0.8)
    assert frame.outcomes == {"hit": 0.8, "partial": 0, "backup": 0.2, "empty": 0}
    assert frame.model == "some/target" and frame.draft_model == "some/draft"
    assert frame.kv_use == pytest.approx(0.1) and frame.draft_kv_use == pytest.approx(0.25)


def test_a_round_is_split_without_a_rest(frame: Frame) -> None:
    assert frame.round_ms == pytest.approx(25)
    assert list(frame.round_parts) == ["target", "drafts", "launch", "host"]
    assert frame.round_parts["host"] == pytest.approx(4.5)
    assert sum(frame.round_parts.values()) == pytest.approx(frame.round_ms)
    assert frame.verify_ms == pytest.approx(20.5)
    assert frame.verifier_idle == pytest.approx(0.18)
    assert frame.step_ms == pytest.approx(2) and frame.build_ms == pytest.approx(10)
    assert frame.draft_idle == pytest.approx(0.6)


def test_on_a_cpu_the_launch_is_the_verify() -> None:
    frame = compare(look(1, device="cpu"), look(2, device="cpu"))
    assert list(frame.round_parts) == ["drafts", "verify", "host"]
    assert frame.round_parts["verify"] == pytest.approx(18.5)


def test_without_an_earlier_look_the_counters_are_since_the_start() -> None:
    frame = compare(None, look(10))
    assert frame.rounds == 400 and frame.tokens_per_s == 0
    assert frame.accept_length == pytest.approx(4)


def test_a_restart_in_between_does_not_count_backwards() -> None:
    frame = compare(look(100), look(1))
    assert frame.rounds == 40 and frame.hit_rate == pytest.approx(0.8)


def test_draft_numbers_that_did_not_change_are_those_since_the_start() -> None:
    stale = look(10).ssd["draft_stats"]
    frame = compare(look(10), look(10.5, draft_stats=stale))
    assert frame.build_ms == pytest.approx(10)


def test_an_idle_server_has_no_rates() -> None:
    frame = compare(look(10), replace(look(10), at=12.0))
    assert frame.tokens_per_s == 0
    assert frame.accept_length is frame.hit_rate is frame.round_ms is frame.verifier_idle is None
    assert frame.accepted_per_position == [] and frame.round_parts == {}
    assert frame.alerts == []


def test_a_server_without_ssd_is_said_to_be_one() -> None:
    for info in ({}, {"internal_states": []}, {"internal_states": [{"other": 1}]}):
        with pytest.raises(SSDError, match="without SSD"):
            Look.of(info, 0.0)


def test_a_history_compares_over_a_window_that_moves() -> None:
    history = History(5.0)
    assert history.frame(look(0)).seconds == 0
    assert [history.frame(look(t)).seconds for t in (1, 2, 5, 6, 7)] == [1, 2, 5, 5, 5]
    assert history.frame(look(60)).seconds == 0, "old looks say nothing about now"
    for i in range(10_000):
        history.frame(look(60 + i / 1000))
    assert len(history._looks) <= 64


def test_one_of_several_draft_servers_is_down(frame: Frame) -> None:
    servers = [{"endpoint": f"ipc:///d{i}", "draft": d} for i, d in enumerate(("up", "down"))]
    assert said(frame, draft_servers=servers) == (
        "draft server 1 (ipc:///d1) is down: the others do its work"
    )
    all_down = said(frame, draft="down", draft_servers=servers)
    assert all_down == "the draft server is down: serving goes on without drafts"
    assert compare(look(1), look(2, draft_servers=servers)).draft_servers == servers


def test_a_good_frame_has_no_alerts(frame: Frame) -> None:
    assert frame.alerts == []


def test_a_slow_draft_is_the_bottleneck(frame: Frame) -> None:
    slow = {"build_ms": 12.1, "verify_ms": 9.8, "round_ms": 14.0}
    parts = {"target": 6.0, "drafts": 3.0, "launch": 1.2, "host": 3.8}
    assert said(frame, **slow, round_parts=parts) == (
        "draft is the bottleneck: 12.1 ms build for 9.8 ms verify; smaller K or F would help"
    )
    assert said(frame, **slow, round_parts=parts | {"drafts": 1.0}) == ""


def test_waits_for_a_fast_draft_come_from_its_backup(frame: Frame) -> None:
    text = said(frame, round_parts={"target": 16.0, "drafts": 4.0})
    assert text == "verifies wait 4.0 ms of 25.0 ms for drafts; --ssd-backup fast would help"


def test_a_draft_with_time_to_spare_could_predict_more(frame: Frame) -> None:
    assert said(frame, hit_rate=0.55) == (
        "hit rate 55% while the draft is idle 60% of the time; larger F would help"
    )
    assert said(frame, hit_rate=0.55, draft_idle=0.1) == ""


def test_useless_drafts_are_named(frame: Frame) -> None:
    assert "rarely right (1.10 tokens a round)" in said(frame, accept_length=1.1)
    deep = said(frame, accepted_per_position=[0.9, 0.5, 0.04])
    assert deep == "only 4% of the drafts at position 3 are right; smaller K would help"


def test_branches_without_rows(frame: Frame) -> None:
    stats = look(2).ssd["draft_stats"] | {"branches": 750, "branches_short_of_rows": 250}
    crowded = compare(look(1), look(2, draft_stats=stats))
    assert crowded.branches_left_out == pytest.approx(0.25)
    assert crowded.alerts == [
        "25% of the branches found no row; larger --ssd-max-branch-rows or smaller F would help"
    ]


@pytest.mark.parametrize(
    ("reason", "words"),
    [("late", "came late"), ("prefilling", "prompts"), ("context", "context is full"),
     ("no_memory", "KV pool is short"), ("resting", "rests"),
     ("does_not_pay", "plain decoding is faster")],
)  # fmt: skip
def test_rounds_without_drafts_name_their_reason(frame: Frame, reason: str, words: str) -> None:
    text = said(frame, without_drafts={reason: 0.12})
    assert text.startswith("12% of the rounds had no drafts: ") and words in text
    assert said(frame, without_drafts={reason: 0.05}) == ""


def test_faults_are_named_also_while_nothing_runs(frame: Frame) -> None:
    idle = {"rounds": 0, "accept_length": None}
    assert "is down" in said(frame, **idle, draft="down")
    assert said(frame, **idle, drafting="off") == "drafting is off"
    assert "3 invalid messages" in said(frame, **idle, invalid_messages=3)
    assert "97% full" in said(frame, **idle, draft_kv_use=0.97)


def test_a_few_rounds_say_nothing_yet(frame: Frame) -> None:
    assert said(frame, rounds=5, accept_length=1.0, hit_rate=0.1) == ""
