"""What the planner says of settings that were measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sgl_ssd import measurements, planner
from sgl_ssd.errors import ConfigError
from sgl_ssd.planner import Deployment, Measurements

Data = dict[str, Any]
MIN_ROUNDS = 100
"""Fewer rounds say nothing of a rate."""


@dataclass(frozen=True)
class Compared:
    """One measured setting beside its prediction. Speeds in tokens per second.

    `steady` is what the measured rounds make (batch times accept length over the time of a round),
    `measured` counts the whole run: prefill, HTTP, and the end, when fewer requests are left.
    """

    setting: str
    batch: int
    measured: float
    steady: float
    predicted: float
    round_ms: tuple[float, float]
    hit_rate: tuple[float, float]
    tokens: tuple[float, float]


def of(data: Data, pair: str, temperature: float) -> list[Compared]:
    """Every sound measurement of ours, predicted from those of all other settings."""
    return list(_of(data, pair, temperature))


def _of(data: Data, pair: str, temperature: float) -> Iterator[Compared]:
    known: dict[str, Measurements | None] = {}
    for r in data["results"]:
        setting = measurements.setting_of(r)
        if (r["pair"], r["temperature"], r["system"]) != (pair, temperature, "ssd"):
            continue
        if setting is None or not measurements.usable(r) or not r.get("accept_length"):
            continue
        if r["ssd"]["rounds"] < MIN_ROUNDS:
            continue
        if r["setting"] not in known:
            known[r["setting"]] = _without(data, r["setting"], pair, temperature)
        m = known[r["setting"]]
        if m is None:
            continue
        ssd, batch = r["ssd"], r["concurrency"]
        where = Deployment(batch, width=measurements.width_of(data, r))
        p = planner.predict(m, setting, where)
        yield Compared(
            setting=r["setting"],
            batch=batch,
            measured=r["tokens_per_s"],
            steady=1e3 * batch * r["accept_length"] / ssd["round_ms"],
            predicted=p.tokens_per_s,
            round_ms=(ssd["round_ms"], p.round_ms),
            hit_rate=(ssd["hit_rate"], p.hit_rate),
            tokens=(r["accept_length"], p.tokens_per_round),
        )


def _without(data: Data, name: str, pair: str, temperature: float) -> Measurements | None:
    others = [r for r in data["results"] if r["system"] != "ssd" or r["setting"] != name]
    try:
        return measurements.from_benchmark(
            {**data, "results": others}, pair, temperature, as_measured=True
        )
    except ConfigError:
        return None
