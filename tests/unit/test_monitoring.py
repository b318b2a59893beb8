"""The dashboard asks for metrics and labels that exist, and its files fit together."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import sglang
import yaml

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "examples" / "monitoring"
DASHBOARD: dict[str, Any] = json.loads((MONITORING / "grafana" / "ssd.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
EXPRESSIONS = [(p["title"], target["expr"]) for p in PANELS for target in p["targets"]]
# What SGLang puts on all of its metrics, and Prometheus on histograms.
COMMON_LABELS = {"model_name", "le"}
SUFFIXES = ("_bucket", "_sum", "_count")


def _documented() -> dict[str, tuple[str, set[str]]]:
    """Name -> type and labels, from the tables of docs/metrics.md."""
    found = {}
    for line in (ROOT / "docs" / "metrics.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[1] in ("counter", "gauge", "histogram"):
            names = re.findall(r"`([a-z_:]+)`", cells[0])
            for name in names:
                # `_hits_total` stands for `ssd_draft_hits_total`
                whole = "ssd_draft" + name if name.startswith("_") else name
                found[whole] = (cells[1], set(re.findall(r"`([a-z_]+)`", cells[2])))
    return found


METRICS = _documented()


def _names(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:sglang:|ssd_draft_)[a-z_]+", expression))


def _metric(name: str) -> str:
    """Without the suffix of a histogram's series."""
    base = next((name.removesuffix(s) for s in SUFFIXES if name.endswith(s)), name)
    return base if METRICS.get(base, ("",))[0] == "histogram" else name


def test_metrics_are_documented() -> None:
    assert METRICS["sglang:ssd_verify_seconds"] == ("histogram", set())
    assert METRICS["sglang:ssd_predictions_total"] == ("counter", {"accepted", "result"})
    assert "ssd_draft_partials_total" in METRICS


@pytest.mark.parametrize(("title", "expression"), EXPRESSIONS)
def test_panels_ask_for_metrics_and_labels_that_exist(title: str, expression: str) -> None:
    collector = Path(sglang.__path__[0]) / "srt/observability/metrics_collector.py"
    labels = set(COMMON_LABELS)
    assert _names(expression)
    for name in _names(expression):
        if name.startswith("sglang:") and not name.startswith("sglang:ssd_"):
            assert f'"{name}"' in collector.read_text(), name
            continue
        assert _metric(name) in METRICS, name
        kind, own = METRICS[_metric(name)]
        labels |= own
        counted = kind == "counter" or name != _metric(name)
        assert bool(re.search(rf"(rate|increase)\({name}[{{\[]", expression)) == counted, name
    used = set(re.findall(r"([a-z_]+)=~?\"", expression))
    for group in re.findall(r"by \(([a-z_, ]+)\)", expression):
        used |= set(group.split(", "))
    assert used <= labels


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_legends_name_labels_of_their_expression(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
            assert re.search(rf"by \([^)]*\b{label}\b", target["expr"]), label


def test_the_dashboard_shows_what_ssd_exposes() -> None:
    shown = {_metric(name) for _, expression in EXPRESSIONS for name in _names(expression)}
    ours = {name for name in METRICS if name.startswith("sglang:ssd_")}
    missing = ours - shown
    assert missing <= {
        "sglang:ssd_drafted_tokens_total",  # said by position
        "sglang:ssd_outcome_wait_seconds",  # a part of the verify
        "sglang:ssd_verifies_total",
        "sglang:ssd_verifies_without_drafts_total",
        "sglang:ssd_draft_jit_seconds",  # shown from the draft server
    }, missing


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)


def test_the_files_fit_together() -> None:
    compose = yaml.safe_load((MONITORING / "docker-compose.yaml").read_text())
    for service in compose["services"].values():
        assert ":" in service["image"], "a version"
        for volume in service["volumes"]:
            assert (MONITORING / volume.split(":")[0]).exists(), volume
    environment = compose["services"]["grafana"]["environment"]
    mounted = {v.split(":")[1] for v in compose["services"]["grafana"]["volumes"]}
    assert environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] in mounted
    assert environment["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    provisioning = MONITORING / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    used = {target["datasource"]["uid"] for panel in PANELS for target in panel["targets"]}
    assert used == {source["uid"]}
    listens = [c for c in compose["services"]["prometheus"]["command"] if "listen" in c]
    assert listens == [f"--web.listen-address={source['url'].removeprefix('http://')}"]
    jobs = yaml.safe_load((MONITORING / "prometheus.yaml").read_text())["scrape_configs"]
    assert [job["job_name"] for job in jobs] == ["sglang", "ssd-draft"]
