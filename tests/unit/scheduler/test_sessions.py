"""Sessions as the verifier sees them, and the table that holds them."""

from __future__ import annotations

from array import array

import pytest

from sgl_ssd.scheduler.sessions import Session, SessionSampling, SessionTable, StopRule

SAMPLING = SessionSampling(seed=1, temperature=1.0, top_k=50, top_p=1.0, min_p=0.0)
NO_STOP = StopRule(frozenset(), 1000)


def session(tokens: list[int], stop: StopRule = NO_STOP) -> Session:
    return Session(0, "r", array("i", tokens), SAMPLING, stop)


def test_commit_appends_and_counts() -> None:
    s = session([1, 2, 3])
    s.commit([4, 5])
    assert s.tokens.tolist() == [1, 2, 3, 4, 5] and s.committed == 5 and not s.done


@pytest.mark.parametrize("at", range(4))
def test_a_stop_token_ends_the_session_where_it_stands(at: int) -> None:
    run = [10, 11, 12, 13]
    run[at] = 99
    s = session([1], StopRule(frozenset({99, 98}), 1000))
    s.commit(run)
    assert s.done and s.tokens.tolist() == [1, *run[: at + 1]]


@pytest.mark.parametrize("limit", range(2, 7))
def test_the_length_limit_ends_the_session_exactly_there(limit: int) -> None:
    s = session([1], StopRule(frozenset(), limit))
    s.commit([10, 11, 12, 13])
    assert s.committed == min(limit, 5) and s.done == (limit <= 5)


def test_a_stop_token_in_the_prompt_stops_nothing() -> None:
    s = session([99, 1], StopRule(frozenset({99}), 1000))
    s.commit([5])
    assert not s.done


def test_drafts_count_only_for_what_they_continue() -> None:
    s = session([1, 2])
    assert s.speculation() == []
    s.answered, s.drafts = 2, [7, 8]
    assert s.speculation() == [7, 8]
    s.commit([7])
    assert s.speculation() == []


def test_sessions_are_told_apart_by_identity() -> None:
    assert session([1]) != session([1])


def test_the_table_finds_sessions_by_both_ids() -> None:
    table = SessionTable()
    one = table.add("a", [1], SAMPLING, NO_STOP)
    two = table.add("b", [2], SAMPLING, NO_STOP, "key")
    assert table.get("a") is one and table.by_sid(two.sid) is two and two.extra_key == "key"
    assert table.get("c") is None and table.by_sid(99) is None
    assert len(table) == 2 and list(table) == [one, two]


def test_removing_closes_and_forgets() -> None:
    table = SessionTable()
    one = table.add("a", [1], SAMPLING, NO_STOP)
    assert table.remove("a") is one and one.closed
    assert table.remove("a") is None and table.remove("never") is None
    assert table.get("a") is None and table.by_sid(one.sid) is None and not len(table)


def test_wire_ids_are_never_used_twice() -> None:
    table, seen = SessionTable(), set()
    for _ in range(5):
        seen.add(table.add("same", [1], SAMPLING, NO_STOP).sid)
        table.remove("same")
    assert len(seen) == 5


def test_sessions_may_be_removed_while_the_table_is_walked() -> None:
    table = SessionTable()
    for i in range(5):
        table.add(str(i), [1], SAMPLING, NO_STOP)
    for s in table:
        table.remove(s.rid)
    assert not len(table)
