"""What a client is told of its rounds, and when."""

from __future__ import annotations

import pytest

from sgl_ssd.scheduler.request_trace import LAST_ROUNDS, RequestTrace


def trace(prompt_len: int = 10) -> RequestTrace:
    return RequestTrace(prompt_len, lambda: None)


def play(rounds: RequestTrace, count: int, start: int = 11, accepted: int = 1) -> int:
    """Rounds of `accepted` drafts each; the length of the text afterwards."""
    for _ in range(count):
        rounds.answered(0.0002)
        rounds.verified(2, "hit", 0.0001)
        rounds.committed(start, accepted, 99, 0.008)
        start += accepted + 1
    return start


def test_a_round() -> None:
    rounds = trace()
    play(rounds, 1)
    assert rounds[0:3] == [
        {
            "round": 1, "drafts": "hit", "drafted": 2, "k": 1, "bonus": 99, "answer_ms": 0.2,
            "wait_ms": 0.1, "verify_ms": 8.0,
        }
    ]  # fmt: skip


def test_each_round_is_sent_once_and_with_its_tokens() -> None:
    rounds = trace()
    play(rounds, 3)  # the output: a first token, then two a round
    assert [e["round"] for e in rounds[0:2]] == [1]
    assert [e["round"] for e in rounds[2:3]] == []
    assert [e["round"] for e in rounds[3:7]] == [2, 3]
    assert rounds[7:8] == []


def test_a_row_after_the_end_of_the_text_is_no_round_of_it() -> None:
    rounds = trace()
    play(rounds, 3)
    # The text ends inside the second round: at its third token.
    assert [e["round"] for e in rounds[0:4]] == [1, 2]
    assert rounds[0:4] == []


def test_only_the_newest_are_kept() -> None:
    rounds = trace()
    end = play(rounds, LAST_ROUNDS + 7)
    sent = rounds[0 : end - 10]
    assert [e["round"] for e in sent] == list(range(8, LAST_ROUNDS + 8))


def test_outcomes_that_are_there_are_taken_in_first() -> None:
    late = RequestTrace(0, lambda: late.committed(1, 0, 5, 0.001))
    late.verified(0, "down", 0.0)
    assert [(e["drafts"], e["k"], e["bonus"]) for e in late[0:9]] == [("down", 0, 5)]


def test_an_outcome_without_a_verify_is_no_round() -> None:
    rounds = trace()
    rounds.committed(10, 0, 5, 0.001)  # the first token is the prefill's
    assert rounds[0:9] == []


def test_the_time_of_an_answer_is_told_once() -> None:
    rounds = trace()
    rounds.answered(0.5)
    for source in ("hit", "late"):
        rounds.verified(0, source, 0.0)
        rounds.committed(11, 0, 5, 0.001)
    assert [e["answer_ms"] for e in rounds[0:9]] == [pytest.approx(500.0), 0.0]
