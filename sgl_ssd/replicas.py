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


_WEIGHTS = {
    "build_step_ms": "build_steps", "launch_ms": "build_steps", "branch_rows": "build_steps",
    "step_ms": "build_steps", "step_rows": "build_steps", "step_row_ms": "build_steps",
    "jit_ms": "jits", "jit_tokens": "jits",
}  # fmt: skip


def merged_draft_stats(servers: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The numbers of several draft servers as those of one: sums, and means over all of them.

    `peers` is that of the server with the most, since a verifier is a peer of all.
    """
    if len(servers) == 1:
        return dict(servers[0])
    whole: dict[str, float] = {}
    for name in {name: None for numbers in servers for name in numbers}:
        having = [numbers for numbers in servers if name in numbers]
        values = [numbers[name] for numbers in having]
        weight = "rows" if name.startswith("missed_of_") else _WEIGHTS.get(name)
        if name == "peers":
            whole[name] = max(values)
        elif weight is None:
            whole[name] = sum(values)
        else:
            weights = [numbers.get(weight, 0.0) for numbers in having]
            total = sum(weights)
            whole[name] = sum(v * w for v, w in zip(values, weights, strict=True)) / (total or 1.0)
    return whole


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
        if "draft_servers" in whole:
            whole["draft_servers"] = _merged_servers(
                whole["draft_servers"], state.get("draft_servers", ())
            )
        # They ask the same draft servers, or one each: the numbers of the busiest.
        drafts = [s.get("draft_stats") or {} for s in (whole, state)]
        whole["draft_stats"] = max(drafts, key=lambda numbers: float(numbers.get("rounds", 0)))
    return whole


def _merged_servers(
    a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The same draft servers as two replicas see them; each that one of them knows, once."""
    whole = {server["endpoint"]: dict(server) for server in a}
    for server in b:
        mine = whole.get(server["endpoint"])
        if mine is None:
            whole[server["endpoint"]] = dict(server)
            continue
        for name in ("open_sessions", "timeouts"):
            mine[name] = mine[name] + server[name]
        mine["home"] = mine["home"] or server["home"]
        if server["draft"] == "down":
            mine["draft"] = "down"
    return list(whole.values())


def _sum(a: Any, b: Any) -> Any:
    """Of numbers, or of lists and objects of them."""
    if a is None:
        return b
    if isinstance(b, Mapping):
        return {key: _sum(a.get(key), b.get(key)) for key in {**a, **b}}
    if isinstance(b, list):
        return [_sum(x, y) for x, y in zip(a, b, strict=True)]
    return a if b is None else a + b
