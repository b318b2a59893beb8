"""Answers of `/server_info`, made up, for the tests of what shows them."""

from __future__ import annotations

from typing import Any


def server_info(seconds: float = 0.0, *, device: str = "cuda", **changes: Any) -> dict[str, Any]:
    """A server `seconds` after its start: 40 rounds a second of 25 ms, F = 4, K = 4.

    In a round the host waits 16 ms for the target and 2 ms for drafts and launches for 2.5 ms; the
    draft steps five times, 2 ms each. 3 of 4 drafts are right, 4 of 5 answers are hits.
    """
    rounds = round(40 * seconds)
    ssd = {
        "rounds": rounds,
        "drafted": 4 * rounds,
        "accepted": 3 * rounds,
        "drafted_per_position": [rounds] * 4,
        "accepted_per_position": [rounds, rounds, rounds * 6 // 10, rounds * 4 // 10],
        "outcomes": {
            "hit": rounds * 4 // 5, "partial": 0, "backup": rounds // 5, "empty": 0, "need": 0,
        },
        "without_drafts": {},
        "invalid_messages": 0,
        "times": {
            "round": [rounds, 0.025 * rounds],
            "round_trip": [rounds, 0.0003 * rounds],
            "outcome_wait": [rounds, 0.016 * rounds],
            "draft_wait": [rounds, 0.002 * rounds],
            "launch": [rounds, 0.0025 * rounds],
            "verify": [rounds, 0.0205 * rounds],
            "verifier_idle": [rounds, 0.0045 * rounds],
        },
        "num_steps_max": 4,
        "num_steps": 4,
        "fan_out": [4] * 5,
        "backup": "auto",
        "verification": "coupled",
        "drafting": "on",
        "draft": "up",
        "draft_model": "some/draft",
        "draft_stats": {
            "rounds": rounds, "build_steps": 5 * rounds, "build_step_ms": 2.0, "jits": 0,
            "jit_ms": 0.0, "kv_total": 1000, "kv_available": 600, "kv_evictable": 150,
        },
        "open_sessions": 1,
        "requests": [
            {"rid": "abc", "prompt_tokens": 9, "tokens": 40, "rounds": 10, "accept_length": 4.0},
        ],
        "kv_total": 1000,
        "kv_available": 900,
        "kv_evictable": 0,
    } | changes  # fmt: skip
    return {
        "served_model_name": "some/target", "device": device, "internal_states": [{"ssd": ssd}],
    }  # fmt: skip
