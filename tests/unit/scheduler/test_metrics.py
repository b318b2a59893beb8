"""What `/metrics` shows is what was counted, under the names that the documentation gives."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from sgl_ssd.draft_server import http
from sgl_ssd.protocol import Status
from sgl_ssd.scheduler.metrics import SSDMetrics
from sgl_ssd.scheduler.reporter import LogLine
from sgl_ssd.scheduler.stats import SSDStats

LABELS = {"model_name": "m", "tp_rank": "0"}
DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"


class Rig:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.stats = SSDStats(4)
        self.client: Any = SimpleNamespace(
            sessions=[1, 2], num_steps=4, fan_out=[4, 3, 2, 1, 1], up=True, server_stats={},
            clients=[
                SimpleNamespace(index=0, up=True, sessions=[1, 2], ping_ms=(0.25, 0.5)),
                SimpleNamespace(index=1, up=False, sessions=[], ping_ms=(0.0, 0.0)),
            ],
        )  # fmt: skip
        self.metrics = SSDMetrics(LABELS, self.registry)

    def publish(self) -> dict[str, float]:
        """All samples after a publication: `name{label,...}`, without the common labels."""
        self.metrics.publish(self.stats, self.client, drafting=True)
        samples = {}
        for family in text_string_to_metric_families(generate_latest(self.registry).decode()):
            for name, labels, value, *_ in family.samples:
                if name.endswith("_created"):
                    continue
                assert {k: labels.pop(k) for k in LABELS} == LABELS
                values = ",".join(labels[k] for k in sorted(labels))
                samples[name.removeprefix("sglang:ssd_") + (f"{{{values}}}" if values else "")] = (
                    value
                )
        return samples


@pytest.fixture
def rig() -> Rig:
    return Rig()


def observe(stats: SSDStats) -> None:
    for drafted, accepted in ((4, 4), (4, 2), (3, 0), (0, 0)):
        stats.observe_round(drafted, accepted)
    for status, accepted in ((Status.HIT, 2), (Status.BACKUP, 0), (Status.PREFILLING, 0)):
        stats.observe_answer(status, accepted)
    stats.observe_no_drafts("late")
    stats.verify.add(0.004)
    stats.verify.add(0.2)


def test_counts(rig: Rig) -> None:
    observe(rig.stats)
    shown = rig.publish()
    assert shown["rounds_total"] == 4
    assert shown["drafted_tokens_total"] == 11 and shown["accepted_tokens_total"] == 6
    assert [shown[f"drafted_at_position_total{{{p}}}"] for p in (1, 3, 4)] == [3, 3, 2]
    assert [shown[f"accepted_at_position_total{{{p}}}"] for p in (1, 2, 4)] == [2, 2, 1]
    assert [shown.get(f"outcomes_total{{{k}}}", 0) for k in range(5)] == [2, 0, 1, 0, 1]
    assert shown["predictions_total{2,hit}"] == shown["predictions_total{0,miss}"] == 1
    assert shown["answers_total{prefilling}"] == shown["answers_total{backup}"] == 1
    assert shown["rounds_without_drafts_total{late}"] == 1
    assert shown["verify_seconds_count"] == 2
    assert shown["verify_seconds_sum"] == pytest.approx(0.204)
    assert shown["verify_seconds_bucket{0.005}"] == 1
    assert shown["verify_seconds_bucket{0.2}"] == shown["verify_seconds_bucket{+Inf}"] == 2


def test_publishing_again_adds_only_what_is_new(rig: Rig) -> None:
    observe(rig.stats)
    first = rig.publish()
    assert rig.publish() == first
    observe(rig.stats)
    second = rig.publish()
    for name, value in first.items():
        grows = "_total" in name or "_seconds_" in name
        assert second[name] == pytest.approx((2 if grows else 1) * value), name


def test_gauges(rig: Rig) -> None:
    shown = rig.publish()
    assert (shown["sessions"], shown["num_steps"], shown["fan_out"]) == (2, 4, 11)
    assert (shown["draft_up"], shown["drafting"], shown["draft_step_seconds"]) == (1, 1, 0)
    rig.client.up, rig.client.sessions = False, []
    shown = rig.publish()
    assert (shown["draft_up"], shown["sessions"]) == (0, 0)


def test_each_draft_server_has_its_own_gauges(rig: Rig) -> None:
    shown = rig.publish()
    assert [shown[f"draft_server_up{{{i}}}"] for i in (0, 1)] == [1, 0]
    assert [shown[f"draft_server_sessions{{{i}}}"] for i in (0, 1)] == [2, 0]
    assert shown["draft_server_ping_seconds{0}"] == pytest.approx(0.00025)
    rig.client.clients[0].up = False
    assert rig.publish()["draft_server_up{0}"] == 0


def test_means_of_the_draft_server_are_recent_ones(rig: Rig) -> None:
    numbers = rig.client.server_stats
    numbers.update(build_steps=10, build_step_s=1.0, kv_total=100, kv_available=30, kv_evictable=50)
    shown = rig.publish()
    assert shown["draft_step_seconds"] == pytest.approx(0.1)
    assert (shown["draft_kv_total_tokens"], shown["draft_kv_used_tokens"]) == (100, 20)
    numbers.update(build_steps=20, build_step_s=1.1)
    assert rig.publish()["draft_step_seconds"] == pytest.approx(0.01)
    assert rig.publish()["draft_step_seconds"] == pytest.approx(0.01)
    numbers.update(build_steps=2, build_step_s=0.1)  # it has restarted
    assert rig.publish()["draft_step_seconds"] == pytest.approx(0.05)


def documented(prefix: str) -> dict[str, tuple[str, set[str]]]:
    """Type and labels of each metric in the documentation's tables."""
    found = {}
    for line in DOCS.read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) != 4 or not cells[0].startswith(f"`{prefix}"):
            continue
        first, *others = re.findall(r"`([^`]+)`", cells[0])
        # `ssd_draft_branches_short_of_rows_total`, `_short_of_memory_total`: a common beginning.
        stems = [first]
        for other in others:
            if other.startswith("_"):
                stem = next(s for s in _stems(first) if s + other in ALL_NAMES)
                other = stem + other
            stems.append(other)
        labels = {label for label in re.findall(r"`([^`]+)`", cells[2])}
        for name in stems:
            found[name] = cells[1], labels
    return found


def _stems(name: str) -> list[str]:
    return [name[:i] for i, c in enumerate(name) if c == "_"][::-1]


def draft_metrics() -> dict[str, str]:
    info = {"model_path": "m", "device": "cpu", "num_steps": "4"}
    names = {**http.GAUGES, **http.COUNTERS}
    times = {n: ("", SSDStats(1).verify) for n in ("step", "build", "jit")}
    source = http.Source(lambda: dict.fromkeys(names, 1.0), info, times)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(http._Collector(source))  # type: ignore[arg-type]
    return types_of(registry)


def types_of(registry: CollectorRegistry) -> dict[str, str]:
    """Name as it is queried -> type."""
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        f.name + "_total" * (f.type == "counter"): f.type
        for f in families
        if not f.name.endswith("_created")
    }


ALL_NAMES = set(draft_metrics())


def test_the_verifiers_metrics_are_those_documented(rig: Rig) -> None:
    observe(rig.stats)
    rig.stats.stale_answers = rig.stats.late_answers = 1
    rig.publish()
    docs = documented("sglang:")
    assert {name: kind for name, (kind, _) in docs.items()} == types_of(rig.registry)
    for family in text_string_to_metric_families(generate_latest(rig.registry).decode()):
        for sample in family.samples:
            if family.type != "histogram" and not sample.name.endswith("_created"):
                extra = set(sample.labels) - set(LABELS)
                words = docs[sample.name][1]
                assert extra <= words, sample.name


def test_the_draft_servers_metrics_are_those_documented() -> None:
    assert {name: kind for name, (kind, _) in documented("ssd_draft_").items()} == draft_metrics()


def test_the_log_line_tells_what_was_since_the_last_one() -> None:
    stats, line = SSDStats(4), LogLine()
    assert line.text(stats) == "hit rate: -, draft len: -"
    observe(stats)
    assert line.text(stats, [0.25, 1.0]) == (
        "hit rate: 0.50, draft len: 2.75, draft ping (ms): 0.25/1.00"
    )
    assert line.text(stats) == "hit rate: -, draft len: -"
    stats.observe_answer(Status.HIT, 1)
    stats.observe_round(2, 1)
    assert line.text(stats) == "hit rate: 1.00, draft len: 2.00"
