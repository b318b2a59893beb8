"""What a running server does, in numbers that a person can read. Pure Python.

`/server_info` holds counters since the start. Two looks at them make a `Frame`: what happened in
between. `sgl_ssd.top` and the page `/ssd` show frames; `alerts` says in words what to change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sgl_ssd.errors import SSDError
from sgl_ssd.replicas import merged

OUTCOMES = ("hit", "partial", "backup", "empty")  # what a draft server answers to news
MIN_ROUNDS = 20  # fewer say nothing yet


@dataclass(frozen=True)
class Look:
    """The server's counters at one moment (`at`, seconds on any clock)."""

    at: float
    ssd: Mapping[str, Any]
    model: str = ""
    synchronous: bool = False  # a CPU: the launch of a verify returns when it is done

    @classmethod
    def of(cls, info: Mapping[str, Any], at: float) -> Look:
        """From the answer of `/server_info`. Raises `SSDError` on a server without SSD."""
        states = info.get("internal_states") or [{}]
        if "ssd" not in states[0]:
            raise SSDError("this server runs without SSD; start it with sgl_ssd.launch_server")
        return cls(
            at,
            merged([state["ssd"] for state in states]),
            str(info.get("served_model_name") or info.get("model_path") or ""),
            info.get("device") == "cpu",
        )


@dataclass(frozen=True)
class Frame:
    """What happened between two looks. Times in milliseconds, shares and rates in 0..1.

    What nothing was counted for is None.
    """

    seconds: float
    model: str
    draft_model: str
    draft: str  # up, down, or none
    drafting: str  # on, off
    num_steps: int
    fan_out: list[int]
    backup: str
    verification: str

    rounds: int
    tokens_per_s: float
    accept_length: float | None  # tokens a round, the bonus token included
    accept_rate: float | None  # of the drafts
    accepted_per_position: list[float | None]
    hit_rate: float | None
    hit_rate_per_length: list[float | None]  # by accepted length k; empty where it is not counted
    outcomes: dict[str, float]  # shares of the answers
    without_drafts: dict[str, float]  # shares of the rounds, by reason

    round_ms: float | None
    round_parts: dict[str, float]  # of the verifier's host, in the order in which they happen
    round_trip_ms: float | None
    verify_ms: float | None  # from its launch to its outcome on the host
    build_ms: float | None  # the draft's work for a round
    step_ms: float | None  # one step of it
    verifier_idle: float | None  # share of a round in which the target computes nothing
    draft_idle: float | None
    branches_left_out: float | None  # share of those that the fan-out asked for

    sessions: int
    kv_use: float
    draft_kv_use: float | None
    invalid_messages: int
    requests: list[dict[str, Any]]
    draft_servers: list[dict[str, Any]] = field(default_factory=list)  # as in `/server_info`
    alerts: list[str] = field(default_factory=list)


def compare(before: Look | None, after: Look) -> Frame:
    """The frame between two looks; since the start of the server without an earlier one."""
    old = before.ssd if before is not None else {}
    if old.get("rounds", 0) > after.ssd["rounds"]:  # a restart in between
        old, before = {}, None
    new = after.ssd
    seconds = after.at - before.at if before is not None else 0.0

    def count(name: str) -> float:
        return float(new.get(name, 0) - old.get(name, 0))

    rounds, drafted, accepted = int(count("rounds")), count("drafted"), count("accepted")
    outcomes = _differences(new.get("outcomes", {}), old.get("outcomes", {}))
    asked = sum(outcomes.get(name, 0) for name in OUTCOMES)
    times = _Times(new.get("times", {}), old.get("times", {}))
    draft = _Draft(new.get("draft_stats") or {}, old.get("draft_stats") or {})
    parts = _round_parts(times, after.synchronous)
    round_ms = times.mean_ms("round")
    frame = Frame(
        seconds=seconds,
        model=after.model,
        draft_model=str(new.get("draft_model", "")),
        draft=str(new.get("draft", "none")),
        drafting=str(new.get("drafting", "on")),
        num_steps=int(new.get("num_steps", new.get("num_steps_max", 0))),
        fan_out=list(new.get("fan_out", [])),
        backup=str(new.get("backup", "")),
        verification=str(new.get("verification", "")),
        rounds=rounds,
        tokens_per_s=(accepted + rounds) / seconds if seconds > 0 else 0.0,
        accept_length=_ratio(accepted + rounds, rounds),
        accept_rate=_ratio(accepted, drafted),
        accepted_per_position=_ratios(new, old, "accepted_per_position", "drafted_per_position"),
        hit_rate=_ratio(outcomes.get("hit", 0), asked),
        hit_rate_per_length=_ratios(new, old, "hits_per_length", "asked_per_length"),
        outcomes={name: n / asked for name, n in outcomes.items() if asked and name in OUTCOMES},
        without_drafts={
            reason: n / rounds
            for reason, n in _differences(
                new.get("without_drafts", {}), old.get("without_drafts", {})
            ).items()
            if n and rounds
        },
        round_ms=round_ms,
        round_parts=parts,
        round_trip_ms=times.mean_ms("round_trip"),
        verify_ms=times.mean_ms("verify"),
        build_ms=draft.build_ms,
        step_ms=draft.step_ms,
        verifier_idle=times.share("verifier_idle", "verify"),
        draft_idle=_clip(1 - draft.build_ms / round_ms) if draft.build_ms and round_ms else None,
        branches_left_out=draft.branches_left_out,
        sessions=int(new.get("open_sessions", 0)),
        kv_use=_kv_use(new) or 0.0,
        draft_kv_use=_kv_use(new.get("draft_stats") or {}),
        invalid_messages=int(count("invalid_messages")),
        requests=list(new.get("requests", [])),
        draft_servers=list(new.get("draft_servers", [])),
    )
    return replace(frame, alerts=list(alerts(frame)))


def alerts(frame: Frame) -> Iterator[str]:
    """What is wrong, and what to do about it, in words."""
    if frame.drafting == "off":
        yield "drafting is off"
        return
    if frame.draft == "down":
        yield "the draft server is down: serving goes on without drafts"
    else:
        for i, server in enumerate(frame.draft_servers):
            if server["draft"] == "down":
                yield f"draft server {i} ({server['endpoint']}) is down: the others do its work"
    if frame.invalid_messages:
        yield f"{frame.invalid_messages} invalid messages from the draft server were dropped"
    if frame.draft_kv_use is not None and frame.draft_kv_use > 0.95:
        yield (
            f"the draft's KV pool is {frame.draft_kv_use:.0%} full; "
            "a larger --ssd-draft-max-total-tokens would help"
        )
    if frame.rounds < MIN_ROUNDS:
        return
    yield from _waiting(frame)
    if (frame.branches_left_out or 0) > 0.1:
        yield (
            f"{frame.branches_left_out:.0%} of the branches found no row; "
            "larger --ssd-max-branch-rows or smaller F would help"
        )
    for reason, share in frame.without_drafts.items():
        if reason in _REMEDIES and share > 0.1:
            yield f"{share:.0%} of the rounds had no drafts: {_REMEDIES[reason]}"
    if frame.accept_length is not None and frame.accept_length < 1.2 and frame.draft == "up":
        yield (
            f"drafts are rarely right ({frame.accept_length:.2f} tokens a round); "
            "another draft model would help"
        )
    elif (last := _last_position(frame)) is not None:
        position, share = last
        yield (
            f"only {share:.0%} of the drafts at position {position} are right; smaller K would help"
        )


def _waiting(frame: Frame) -> Iterator[str]:
    """The draft is too slow, or has time to spare while it misses."""
    waits = frame.round_parts.get("drafts", 0.0)
    if frame.round_ms is None or frame.build_ms is None or frame.verify_ms is None:
        return
    if waits > 0.1 * frame.round_ms and frame.build_ms > 0.9 * frame.verify_ms:
        yield (
            f"draft is the bottleneck: {frame.build_ms:.1f} ms build for "
            f"{frame.verify_ms:.1f} ms verify; smaller K or F would help"
        )
    elif waits > 0.1 * frame.round_ms:
        yield (
            f"verifies wait {waits:.1f} ms of {frame.round_ms:.1f} ms for drafts; "
            "--ssd-backup fast would help"
        )
    elif frame.hit_rate is not None and frame.hit_rate < 0.7 and (frame.draft_idle or 0) > 0.3:
        yield (
            f"hit rate {frame.hit_rate:.0%} while the draft is idle {frame.draft_idle:.0%} "
            "of the time; larger F would help"
        )


_REMEDIES = {
    "late": "answers came late; smaller K or F would help",
    "does_not_pay": "plain decoding is faster at this load",
    "resting": "drafting rests after late answers; smaller K or F would help",
    "prefilling": "the draft was still reading their prompts",
    "context": "the draft's context is full; a draft model with a longer one would help",
    "no_memory": "the draft's KV pool is short; a larger --ssd-draft-max-total-tokens would help",
}


def _last_position(frame: Frame) -> tuple[int, float] | None:
    """The deepest position that was drafted and its acceptance, if that is below 5 %."""
    drafted = [
        (position, share)
        for position, share in enumerate(frame.accepted_per_position, 1)
        if share is not None
    ]
    return drafted[-1] if len(drafted) > 1 and drafted[-1][1] < 0.05 else None


class History:
    """The looks of the last seconds, for frames over a window that moves."""

    def __init__(self, seconds: float = 5.0) -> None:
        self._seconds = seconds
        self._looks: deque[Look] = deque(maxlen=64)

    def frame(self, look: Look) -> Frame:
        """Take in a look; what happened since the oldest one that is recent enough."""
        while self._looks and look.at - self._looks[0].at > self._seconds:
            self._looks.popleft()
        frame = compare(self._looks[0] if self._looks else None, look)
        if not self._looks or look.at - self._looks[-1].at > self._seconds / 32:
            self._looks.append(look)
        return frame


class _Times:
    """Differences of the counted times: name -> [how often, seconds in all]."""

    def __init__(self, new: Mapping[str, Any], old: Mapping[str, Any]) -> None:
        self._new, self._old = new, old

    def mean_ms(self, name: str) -> float | None:
        count, total = self.difference(name)
        return 1e3 * total / count if count else None

    def per_round_ms(self, name: str) -> float:
        return 1e3 * self.difference(name)[1] / max(1.0, self.difference("round")[0])

    def share(self, name: str, other: str) -> float | None:
        """The time of one in both."""
        part, rest = self.difference(name)[1], self.difference(other)[1]
        return _ratio(part, part + rest)

    def difference(self, name: str) -> tuple[float, float]:
        new, old = self._new.get(name, (0, 0.0)), self._old.get(name, (0, 0.0))
        return new[0] - old[0], new[1] - old[1]


class _Draft:
    """The draft server's work for a round, from its own counters; they come once a second."""

    def __init__(self, new: Mapping[str, float], old: Mapping[str, float]) -> None:
        if new.get("build_steps", 0) <= old.get("build_steps", 0):
            old = {}  # nothing new, or another process: the means since its start
        steps, step_ms = self._since(new, old, "build_steps", "build_step_ms")
        _, jit_ms = self._since(new, old, "jits", "jit_ms")
        rounds = new.get("rounds", 0) - old.get("rounds", 0)
        left_out, planned = (
            new.get(name, 0) - old.get(name, 0) for name in ("branches_short_of_rows", "branches")
        )
        self.branches_left_out = _ratio(left_out, left_out + planned)
        self.step_ms = _ratio(step_ms, steps)
        self.build_ms = _ratio(step_ms + jit_ms, rounds)

    @staticmethod
    def _since(
        new: Mapping[str, float], old: Mapping[str, float], count: str, mean: str
    ) -> tuple[float, float]:
        """How often, and milliseconds in all, from counts and means since the start."""
        total = new.get(count, 0) * new.get(mean, 0) - old.get(count, 0) * old.get(mean, 0)
        return new.get(count, 0) - old.get(count, 0), total


def _round_parts(times: _Times, synchronous: bool) -> dict[str, float]:
    """Where the host of the verifier spends a round, in milliseconds.

    The rest, mostly the results of the last round, runs under the verify on a GPU.
    """
    whole = times.mean_ms("round")
    if whole is None:
        return {}
    target, launch = times.per_round_ms("outcome_wait"), times.per_round_ms("launch")
    drafts = times.per_round_ms("draft_wait")
    if synchronous:
        parts = {"drafts": drafts, "verify": launch + target}
    else:
        parts = {"target": target, "drafts": drafts, "launch": launch}
    parts["host"] = max(0.0, whole - sum(parts.values()))
    return parts


def _differences(new: Mapping[str, int], old: Mapping[str, int]) -> dict[str, int]:
    return {name: value - old.get(name, 0) for name, value in new.items()}


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _ratios(
    new: Mapping[str, Any], old: Mapping[str, Any], parts: str, wholes: str
) -> list[float | None]:
    def since(name: str) -> list[float]:
        values = list(new.get(name, []))
        return [x - y for x, y in zip(values, old.get(name) or [0] * len(values), strict=False)]

    found = [_ratio(p, w) for p, w in zip(since(parts), since(wholes), strict=False)]
    while found and found[-1] is None:
        found.pop()
    return found


def _kv_use(state: Mapping[str, Any]) -> float | None:
    """Share of a KV pool that neither is free nor could be freed."""
    total = state.get("kv_total", 0)
    if not total:
        return None
    free = state.get("kv_available", 0) + state.get("kv_evictable", 0)
    return _clip(1 - free / total)


def _clip(share: float) -> float:
    return min(1.0, max(0.0, share))
