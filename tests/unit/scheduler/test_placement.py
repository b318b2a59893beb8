"""Which draft server a request goes to."""

from __future__ import annotations

from array import array

import pytest

from sgl_ssd.scheduler import placement
from sgl_ssd.scheduler.placement import FIRST_PREFIX, WORTH_SESSIONS, Placement, home_servers


def tokens(count: int, first: int = 1) -> array:
    return array("i", [first, *range(2, count + 1)])


@pytest.mark.parametrize(
    ("servers", "replicas", "expected"),
    [
        (1, 1, [[0]]),
        (3, 1, [[0, 1, 2]]),
        (2, 2, [[0], [1]]),
        (4, 2, [[0, 2], [1, 3]]),
        (5, 2, [[0, 2, 4], [1, 3]]),
        (1, 3, [[0], [0], [0]]),
        (2, 5, [[0], [1], [0], [1], [0]]),
    ],
)
def test_servers_are_dealt_out(servers: int, replicas: int, expected: list[list[int]]) -> None:
    assert [home_servers(servers, i, replicas) for i in range(replicas)] == expected


def test_the_server_with_the_fewest_sessions_and_the_first_of_equals() -> None:
    place = Placement()
    assert place.choose([0, 1, 2], [3, 1, 2], tokens(9), "") == 1
    assert place.choose([0, 2], [1, 1], tokens(9), "") == 0
    assert place.choose([4, 7], [2, 1], tokens(9), "") == 7


def test_a_conversation_stays_where_its_turns_are_cached() -> None:
    place = Placement()
    place.remember(1, tokens(300), "")
    assert place.choose([0, 1], [0, WORTH_SESSIONS], tokens(500), "") == 1
    assert place.choose([0, 1], [0, WORTH_SESSIONS + 1], tokens(500), "") == 0, "not at any price"
    assert place.choose([0, 2], [1, 2], tokens(500), "") == 0, "its server is away"
    assert place.choose([0, 1], [0, 0], tokens(500), "another key") == 0
    assert place.choose([0, 1], [0, 0], tokens(500, first=9), "") == 0, "another beginning"
    assert place.choose([0, 1], [0, 0], tokens(FIRST_PREFIX - 1), "") == 0, "too short to matter"


def test_the_longest_common_beginning_counts() -> None:
    """A system prompt is common to all; what follows it is not."""
    place = Placement()
    mine, other = tokens(200), tokens(200)
    other[100] = 9999
    place.remember(0, mine, "")
    place.remember(1, other, "")
    assert place.choose([0, 1], [1, 0], mine, "") == 0
    assert place.choose([0, 1], [0, 1], other, "") == 1


def test_only_the_newest_beginnings_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "MAX_PREFIXES", 4)
    place = Placement()
    for i in range(10):
        place.remember(1, tokens(FIRST_PREFIX, first=i), "")
    assert len(place._seen) == 4
    assert place.choose([0, 1], [0, 0], tokens(FIRST_PREFIX, first=9), "") == 1
    assert place.choose([0, 1], [0, 0], tokens(FIRST_PREFIX, first=5), "") == 0
