"""One view of a server whose scheduler runs several times (`--dp-size`). Pure Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Counted by each replica on its own; what else there is, all have alike.
_COUNTS = frozenset({
    "rounds", "drafted", "accepted", "answers", "hits", "pushed_hits", "partial_hits", "backups",
    "late_answers", "stale_answers", "invalid_messages", "timeouts", "verifies",
    "verifies_without_drafts", "restarts", "open_sessions", "kv_total", "kv_available",
    "kv_evictable",
    "drafted_per_position", "accepted_per_position", "outcomes", "asked_per_length",
    "hits_per_length", "partial_hits_per_length", "without_drafts", "times", "forwards",
    "plain_forwards",
})  # fmt: skip


def merged(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The sections `ssd` of all replicas as one: counts are added up, requests strung together.

    Means that each has made on its own are those of the first; times are in `times` as well.
    """
    whole = dict(states[0])
    for state in states[1:]:
        for name in _COUNTS & state.keys():
            whole[name] = _sum(whole.get(name), state[name])
        whole["requests"] = [*whole.get("requests", ()), *state.get("requests", ())]
        if state.get("draft") == "down":
            whole["draft"] = "down"
        # They ask one draft server, or one each: the numbers of the busiest.
        drafts = [s.get("draft_stats") or {} for s in (whole, state)]
        whole["draft_stats"] = max(drafts, key=lambda numbers: float(numbers.get("rounds", 0)))
    return whole


def _sum(a: Any, b: Any) -> Any:
    """Of numbers, or of lists and objects of them."""
    if a is None:
        return b
    if isinstance(b, Mapping):
        return {key: _sum(a.get(key), b.get(key)) for key in {**a, **b}}
    if isinstance(b, list):
        return [_sum(x, y) for x, y in zip(a, b, strict=True)]
    return a if b is None else a + b
