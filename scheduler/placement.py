"""Which of several draft servers a request goes to. Pure Python."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

MAX_PREFIXES = 4096
FIRST_PREFIX = 64  # tokens; then twice as many, and so on
# A server that knows a prefix is preferred while it has at most so many sessions more.
WORTH_SESSIONS = 2


def home_servers(servers: int, replica: int, replicas: int) -> list[int]:
    """The draft servers of one of several replicas, dealt out in turn; with fewer servers than
    replicas, several share one."""
    if servers < replicas:
        return [replica % servers]
    return list(range(replica, servers, replicas))


class Placement:
    """The server with the fewest sessions, or one that has seen the prompt's beginning lately.

    A conversation thus stays where its turns are cached. Beginnings of 64, 128, 256, ... tokens
    are known by their hashes, the newest `MAX_PREFIXES`.
    """

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}

    def choose(
        self, candidates: Sequence[int], loads: Sequence[int], tokens: array[int], extra_key: str
    ) -> int:
        """One of `candidates`, which have `loads` sessions; the first of equals."""
        fewest = min(loads)
        known = dict(zip(candidates, loads, strict=True))
        for prefix in reversed(list(_prefixes(tokens, extra_key))):
            server = self._seen.get(prefix, -1)
            if known.get(server, fewest + WORTH_SESSIONS + 1) <= fewest + WORTH_SESSIONS:
                return server
        return candidates[list(loads).index(fewest)]

    def remember(self, server: int, tokens: array[int], extra_key: str) -> None:
        """`server` has these tokens in its cache now."""
        for prefix in _prefixes(tokens, extra_key):
            self._seen.pop(prefix, None)
            self._seen[prefix] = server
        while len(self._seen) > MAX_PREFIXES:
            del self._seen[next(iter(self._seen))]


def _prefixes(tokens: array[int], extra_key: str) -> Iterator[int]:
    length = FIRST_PREFIX
    while length <= len(tokens):
        yield hash((extra_key, tokens[:length].tobytes()))
        length *= 2
