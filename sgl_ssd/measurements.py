"""What the planner needs, read from a file of measurements, a benchmark or a running server.

Three forms of JSON are understood:

* measurements themselves: `verify_ms`, `plain_ms` and `step_ms` as lists of [size, ms] (tokens in
  the forward, batch, rows), `answer_ms`, `acceptance` (a number or one for each position), and if
  known `miss` ({"c", "r"}), `fast` (acceptance of a fast backup's tokens), `jit_ms` (a token, by
  rows), `sync_step_ms` (a draft step beside the target, by batch), `push` (true or false) and
  `wire_ms` (the network's share of a round trip);
* a result file of `benchmarks.serve`;
* the answer of `/server_info`, or its section `ssd`.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from sgl_ssd.errors import ConfigError
from sgl_ssd.planner import Chain, Curve, Deployment, Measurements, MissLaw, Setting, predict
from sgl_ssd.replicas import merged

MIN_DRAFTED = 20
"""A position that fewer drafts reached says nothing; the one before it holds on."""
PRIOR_DRAFTS = 50
FAULTY_SHARE = 0.1
"""Measurements in which more rounds than this found their prompt still in prefill are left out."""
_SETTING = re.compile(
    r"K=(?P<steps>\d+)(?: F=(?P<fan_out>\d+))?(?: (?P<backup>none|fast|jit|auto))?"
)


def read(data: Any, pair: str | None = None, temperature: float = 0.0) -> Measurements:
    """Measurements from any of the three forms. Raises `ConfigError`.

    `pair` and `temperature` choose among the results of a benchmark.
    """
    if not isinstance(data, dict):
        raise ConfigError("measurements: a JSON object is needed")
    if "results" in data:
        return from_benchmark(data, pair, temperature)
    if "internal_states" in data:
        data = merged([state.get("ssd", {}) for state in data["internal_states"]])
    if "forwards" in data:
        return from_server(data)
    return from_numbers(data)


def from_numbers(data: dict[str, Any]) -> Measurements:
    """Measurements that are written down as such. Raises `ConfigError`."""
    try:
        acceptance = data["acceptance"]
        return Measurements(
            verify=Curve(data["verify_ms"]),
            plain=Curve(data["plain_ms"]),
            step=Curve(data["step_ms"]),
            answer_ms=float(data["answer_ms"]),
            acceptance=tuple(acceptance) if isinstance(acceptance, list) else (float(acceptance),),
            miss=MissLaw(**data.get("miss", {})),
            fast=tuple(data.get("fast", ())),
            jit=Curve(data["jit_ms"]) if data.get("jit_ms") else None,
            sync_step=Curve(data["sync_step_ms"]) if data.get("sync_step_ms") else None,
            push=bool(data.get("push", False)),
            wire_ms=float(data.get("wire_ms", 0.0)),
        )
    except (KeyError, TypeError, ValueError) as e:
        raise ConfigError(f"measurements: {type(e).__name__}: {e}") from None


def acceptance_by_position(drafted: Sequence[int], accepted: Sequence[int]) -> Chain:
    """Acceptance at each position given that all before it were accepted.

    Which chains were long does not depend on their tokens, so the share of drafts accepted at one
    position over that at the position before is the conditional one. Few drafts say little: each
    position is averaged with `PRIOR_DRAFTS` of the mean over all.
    """
    tried: list[float] = []
    shares: list[float] = []
    before = 1.0
    for total, good in zip(drafted, accepted, strict=True):
        if total < MIN_DRAFTED or before <= 0:
            break
        share = good / total
        tried.append(total * before)
        shares.append(min(1.0, share / before))
        before = share
    if not tried:
        return ()
    mean = sum(n * a for n, a in zip(tried, shares, strict=True)) / sum(tried)
    return tuple(
        (n * a + PRIOR_DRAFTS * mean) / (n + PRIOR_DRAFTS)
        for n, a in zip(tried, shares, strict=True)
    )


def fit_miss_law(points: Iterable[tuple[float, float, float]]) -> MissLaw:
    """c and r through points (guesses, share of misses, weight), by least squares of logarithms.

    With one point r is the default law's.
    """
    known = [(math.log(f), math.log(max(miss, 1e-3)), w) for f, miss, w in points if f >= 1 and w]
    if not known:
        return MissLaw()
    total = sum(w for _, _, w in known)
    x = sum(w * f for f, _, w in known) / total
    y = sum(w * miss for _, miss, w in known) / total
    spread = sum(w * (f - x) ** 2 for f, _, w in known)
    r = MissLaw.r
    if spread > 1e-9:
        r = -sum(w * (f - x) * (miss - y) for f, miss, w in known) / spread
        r = min(3.0, max(0.05, r))
    return MissLaw(c=min(1.0, math.exp(y + r * x)), r=r)


# -- a running server -----------------------------------------------------------------------------


def from_server(state: dict[str, Any]) -> Measurements:
    """From section `ssd` of `/server_info`, or the difference of two looks at it.

    Raises `ConfigError` while the server has not drafted enough.
    """
    draft = state.get("draft_stats") or {}
    acceptance = acceptance_by_position(
        state["drafted_per_position"], state["accepted_per_position"]
    )
    if not any(state.get("fan_out", [1])):
        raise ConfigError("the server predicts no outcomes (fan-out 0): give it a fan-out first")
    forwards = [cell for cell in state["forwards"].values() if cell[0]]
    if not acceptance or not forwards or not draft.get("step_ms"):
        raise ConfigError("the server has not drafted enough yet: send it some requests")
    verify = Curve([(tokens / n, 1e3 * (s - wait) / n) for n, tokens, s, wait in forwards])
    plain = [(rows / n, 1e3 * s / n) for n, rows, s in state["plain_forwards"].values() if n]
    rows, slope = draft["step_rows"], draft["step_row_ms"]
    lowest = max(1e-3, draft["step_ms"] - slope * (rows - 1))
    miss = [
        (float(name.removeprefix("missed_of_")), value, 1.0)
        for name, value in draft.items()
        if name.startswith("missed_of_")
    ]
    jit = draft.get("jit_ms") and draft.get("jit_tokens")
    return Measurements(
        verify=verify,
        plain=Curve(plain) if plain else verify,
        step=Curve([(1, lowest), (rows + 1, lowest + slope * rows)]),
        answer_ms=1e3 * sum(c[3] for c in forwards) / sum(c[0] for c in forwards),
        acceptance=acceptance,
        miss=fit_miss_law(miss),
        jit=Curve([(1, draft["jit_ms"] / draft["jit_tokens"])]) if jit else None,
        push=state.get("push") == "on",
        wire_ms=max(pings_ms(state), default=0.0),
    )


def pings_ms(state: dict[str, Any]) -> list[float]:
    """Measured round trips to the draft servers that are reached by tcp, without work there."""
    return [
        server["ping_ms"]
        for server in state.get("draft_servers", ())
        if server["ping_ms"] and server["endpoint"].startswith("tcp:")
    ]


# -- a benchmark ----------------------------------------------------------------------------------


def setting_of(result: dict[str, Any]) -> Setting | None:
    """K, F and backup of a result; None where nothing was drafted."""
    match = _SETTING.fullmatch(result["setting"])
    if match is None:
        return None
    steps, fan_out = int(match["steps"]), int(match["fan_out"] or 0)
    backup = match["backup"] or "auto"
    if backup == "auto":
        backup = "jit" if result["concurrency"] == 1 else "fast"
    return Setting(steps, (fan_out,) * (steps + 1), backup)


def usable(result: dict[str, Any]) -> bool:
    """Whether a result of ours with drafts shows the system rather than waits for prefills."""
    ssd = result.get("ssd") or {}
    waiting = (ssd.get("without_drafts") or {}).get("prefilling", 0)
    return bool(ssd.get("round_ms")) and waiting <= FAULTY_SHARE * ssd["rounds"]


def width_of(data: dict[str, Any], result: dict[str, Any]) -> int | None:
    """Tokens a row of a verify on a GPU: as wide as the start's K; None where K decides (CPU)."""
    if not data["environment"]["gpus"]:
        return None
    for name, server in data["servers"].items():
        if name.startswith(f"{result['pair']}-ssd"):
            command = server["command"]
            return int(command[command.index("--speculative-num-steps") + 1]) + 1
    return None


def from_benchmark(
    data: dict[str, Any],
    pair: str | None = None,
    temperature: float = 0.0,
    as_measured: bool = False,
) -> Measurements:
    """From the results of a pair at a temperature. Raises `ConfigError`.

    The miss law is the one whose predicted hit rates come closest to those measured. A run of a
    server whose chains after full acceptance were short says so (`short_after_full`); the result
    speaks of a server whose chains are not, unless it is wanted `as_measured`.
    """
    names = sorted({r["pair"] for r in data["results"]})
    pair = pair or (names[0] if len(names) == 1 else None)
    if pair not in names:
        raise ConfigError(f"--pair: choose one of {', '.join(names)}")
    results = [r for r in data["results"] if (r["pair"], r["temperature"]) == (pair, temperature)]
    ours = [r for r in results if r["system"] == "ssd" and setting_of(r) and usable(r)]
    plain = [r for r in results if r["system"] == "ar"] or [
        r for r in results if r["setting"] == "off"
    ]
    if not ours or not plain:
        raise ConfigError(f"pair {pair}, T={temperature:g}: no results with and without drafts")
    verify, step, jit = [], [], []
    drafted = [0] * max(len(r["ssd"]["drafted_per_position"]) for r in ours)
    accepted = list(drafted)
    for r in ours:
        setting, ssd, batch = _of(r), r["ssd"], r["concurrency"]
        tokens = batch * (width_of(data, r) or setting.num_steps + 1)
        verify.append((tokens, ssd["round_ms"] - ssd["draft_wait_ms"]))
        if ssd["draft"].get("build_step_ms"):
            rows = ssd["draft"].get("branch_rows") or min(256, batch * (1 + sum(setting.fan_out)))
            step.append((rows, ssd["draft"]["build_step_ms"]))
        if ssd["draft"].get("jit_ms"):
            jit.append((1, ssd["draft"]["jit_ms"] / setting.num_steps))
        for i, (a, b) in enumerate(
            zip(ssd["drafted_per_position"], ssd["accepted_per_position"], strict=True)
        ):
            drafted[i] += a
            accepted[i] += b
    base = Curve([(r["concurrency"], 1e3 * r["concurrency"] / r["tokens_per_s"]) for r in plain])
    # A round of STANDALONE is a plain step and its draft's steps.
    sync = []
    for r in results:
        if r["system"] == "standalone" and r.get("accept_length"):
            round_ms = 1e3 * r["concurrency"] * r["accept_length"] / r["tokens_per_s"]
            steps = int(r["setting"].removeprefix("K="))
            sync.append((r["concurrency"], max(0.01, (round_ms - base(r["concurrency"])) / steps)))
    acceptance = acceptance_by_position(drafted, accepted)
    if not acceptance or not step:
        raise ConfigError(f"pair {pair}, T={temperature:g}: too few drafts")
    known = Measurements(
        verify=Curve(verify),
        plain=base,
        step=straight(step),
        answer_ms=statistics.median(map(_answer_ms, ours)),
        acceptance=acceptance,
        jit=Curve(jit) if jit else None,
        sync_step=Curve(sync) if sync else None,
        short_after_full=data.get("short_after_full", 0),
    )
    fitted = _with_fitted_misses(known, data, ours)
    return fitted if as_measured else replace(fitted, short_after_full=0)


def straight(points: Sequence[tuple[float, float]]) -> Curve:
    """The straight line closest to `points` (size, ms), from size 1 on; it does not fall.

    Where points lie close together their scatter must not decide what is beyond them.
    """
    if len({size for size, _ in points}) < 2:
        return Curve(points)
    slope, start = statistics.linear_regression(*zip(*points, strict=True))
    slope = max(0.0, slope)
    start = max(1e-3, statistics.fmean(ms - slope * size for size, ms in points))
    largest = max(2.0, *(size for size, _ in points))
    return Curve([(1.0, start + slope), (largest, start + slope * largest)])


def _answer_ms(result: dict[str, Any]) -> float:
    """The wait for drafts without that for drafts made just in time."""
    ssd = result["ssd"]
    jit_ms = ssd["draft"].get("jits", 0.0) * ssd["draft"].get("jit_ms", 0.0)
    return float(max(0.0, ssd["draft_wait_ms"] - jit_ms / ssd["verifies"]))


def _of(result: dict[str, Any]) -> Setting:
    setting = setting_of(result)
    assert setting is not None
    return setting


def _with_fitted_misses(
    m: Measurements, data: dict[str, Any], ours: list[dict[str, Any]]
) -> Measurements:
    cases = [
        (_of(r), Deployment(r["concurrency"], width=width_of(data, r)), r["ssd"]["hit_rate"])
        for r in ours
        if r["ssd"]["hit_rate"] is not None
    ]

    def error(law: MissLaw) -> float:
        tried = replace(m, miss=law)
        return float(sum((predict(tried, s, w).hit_rate - hit) ** 2 for s, w, hit in cases))

    laws = [MissLaw(c / 20, r / 20) for c in range(2, 21, 2) for r in range(3, 37, 4)]
    return replace(m, miss=min(laws, key=error))
