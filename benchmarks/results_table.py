"""Results by what repetitions have in common, and the numbers that tables and plots show."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Result = dict[str, Any]
NAMES = {
    "ar": "SGLang", "tp2": "SGLang, TP 2", "replicas": "SGLang, 2 replicas",
    "standalone": "STANDALONE", "ngram": "NGRAM", "ssd": "SSD", "ssd-cpu": "SSD, draft on CPU",
}  # fmt: skip
ROUND_PARTS = (
    ("outcome_wait", "wait for the target"),
    ("draft_wait", "wait for drafts"),
    ("launch", "launch"),
)
_NUMBERS = re.compile(r"K=(\d+) F=(\d+)")


@dataclass(frozen=True)
class Key:
    """What repetitions have in common."""

    pair: str
    temperature: float
    workload: str
    system: str
    setting: str

    @property
    def ours(self) -> bool:
        return self.system.startswith("ssd")

    @property
    def is_off(self) -> bool:
        return self.ours and self.setting == "off"

    @property
    def system_name(self) -> str:
        return NAMES[self.system]

    @property
    def label(self) -> str:
        if self.is_off:
            return f"{self.system_name}, drafting off"
        return f"{self.system_name} {self.setting}".strip()

    @property
    def scene(self) -> tuple[str, float, str]:
        """What is compared with each other: pair, temperature, workload."""
        return self.pair, self.temperature, self.workload


Groups = dict[Key, dict[int, list[Result]]]


def key_of(r: Result) -> Key:
    """The key of a result; files before there were workloads hold short code prompts."""
    return Key(r["pair"], r["temperature"], r.get("workload", "code"), r["system"], r["setting"])


def group(results: Iterable[Result]) -> Groups:
    """Closed-loop results by key and concurrency."""
    groups: Groups = defaultdict(lambda: defaultdict(list))
    for r in results:
        if not r.get("rate"):
            groups[key_of(r)][r["concurrency"]].append(r)
    return groups


def scenes(groups: Groups) -> list[tuple[str, float, str]]:
    """Pairs, temperatures and workloads, in order."""
    return sorted({key.scene for key in groups})


def keys_of(groups: Groups, scene: tuple[str, float, str]) -> list[Key]:
    """The keys of a scene, as measured."""
    return [key for key in groups if key.scene == scene]


def baseline(groups: Groups, scene: tuple[str, float, str]) -> dict[int, list[Result]]:
    """Plain SGLang by concurrency, or ours with drafting off where that was not measured."""
    keys = keys_of(groups, scene)
    plain = next((groups[k] for k in keys if k.system == "ar"), None)
    return plain or next((groups[k] for k in keys if k.is_off), {})


def speed(results: list[Result]) -> float:
    """Median tokens per second of repetitions."""
    return statistics.median(r["tokens_per_s"] for r in results)


def spread(results: list[Result]) -> str:
    """Lowest to highest repetition, if there are several."""
    values = [r["tokens_per_s"] for r in results]
    return f" ({min(values):.0f}–{max(values):.0f})" if len(values) > 1 else ""


def mean_of(results: list[Result], *path: str) -> float | None:
    """Mean of a number deep in the results; None where nobody has it."""
    values = []
    for result in results:
        value: Any = result
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            values.append(float(value))
    return sum(values) / len(values) if values else None


def setting_numbers(setting: str) -> tuple[int, int] | None:
    """K and F of a setting's name; None where they are left to the server, or there are none."""
    match = _NUMBERS.match(setting)
    return (int(match[1]), int(match[2])) if match else None


def roofline(groups: Groups, scene: tuple[str, float, str]) -> float | None:
    """Tokens a second of one request that no K exceeds: 1 / ((1-a) T).

    a: the drafts accepted where most were drafted; T: a plain step at the lowest concurrency, which
    reads the weights once.
    """
    base = baseline(groups, scene)
    ours = [
        runs
        for k in keys_of(groups, scene)
        if k.ours and not k.is_off
        for runs in groups[k].values()
    ]
    counts = [
        (r["ssd"]["drafted"], r["ssd"]["accepted"], r["ssd"]["rounds"])
        for runs in ours
        for r in runs
        if r.get("ssd") and r["ssd"]["drafted"]
    ]
    if not base or not counts:
        return None
    drafted, accepted, _ = max(counts)
    a = accepted / drafted
    lowest = min(base)
    return speed(base[lowest]) / lowest / max(1e-3, 1 - a)
