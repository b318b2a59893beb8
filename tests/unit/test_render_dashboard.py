"""The dashboard is drawn from what a Prometheus answers; here a small one with canned answers."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import parse_qs

import numpy as np
import pytest
import yaml

pytest.importorskip("matplotlib")
from matplotlib.figure import Figure  # noqa: E402

MONITORING = Path(__file__).parents[2] / "examples" / "monitoring"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("render_dashboard", MONITORING / "render.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look for it
    spec.loader.exec_module(module)
    return module


render = _load()
DASHBOARD = json.loads(render.DASHBOARD.read_text())
BEGIN, END, STEP = 1_000_000, 1_000_300, 5
OVER = render.Range.of(BEGIN, END, STEP)
Canned = Callable[[str], list[dict[str, Any]]]


class Fake:
    """A Prometheus that has `answer(expression)`, or an error where that raises ValueError."""

    def __init__(self, answer: Canned) -> None:
        self.asked: list[dict[str, str]] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(handler) -> None:  # noqa: N805
                body = handler.rfile.read(int(handler.headers["Content-Length"])).decode()
                fields = {k: v[0] for k, v in parse_qs(body).items()}
                self.asked.append(fields | {"path": handler.path})
                try:
                    result = answer(fields["query"])
                    status, said = 200, {"status": "success", "data": {"result": result}}
                except ValueError as e:
                    status, said = 400, {"status": "error", "error": str(e)}
                handler.send_response(status)
                handler.end_headers()
                handler.wfile.write(json.dumps(said).encode())

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def prometheus() -> Iterator[Callable[[Canned], Fake]]:
    fakes: list[Fake] = []

    def start(answer: Canned) -> Fake:
        fakes.append(Fake(answer))
        return fakes[-1]

    yield start
    for fake in fakes:
        fake.server.shutdown()
        fake.server.server_close()


def waves(expression: str) -> list[dict[str, Any]]:
    """Two series where there are labels, one otherwise; 0/0 at first, and no points in the end."""
    by = re.search(r"by \((\w+)\)", expression)
    label = by[1] if by and by[1] != "le" else None
    names = [{label: "0"}, {label: "1"}] if label else [{}]
    return [
        {
            "metric": metric,
            "values": [
                [t, "NaN" if t == BEGIN else str(i + 1 + 0.5 * math.sin(t / 30))]
                for t in range(BEGIN, END - 10, STEP)
            ],
        }
        for i, metric in enumerate(names)
    ]


def drawn(fake: Fake, dashboard: dict[str, Any] = DASHBOARD) -> Figure:
    series = render.fetch(dashboard, render.Prometheus(fake.url), OVER, STEP)
    return render.draw(dashboard, series, OVER)


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.texts]


def test_every_panel_is_drawn_at_its_place(prometheus: Any) -> None:
    fake = prometheus(waves)
    figure = drawn(fake)
    axes = {a.get_label(): a for a in figure.axes}
    assert list(axes) == [str(panel["id"]) for panel in DASHBOARD["panels"]]
    said = texts(figure)
    targets = sum(len(panel["targets"]) for panel in DASHBOARD["panels"])
    assert len(fake.asked) == targets
    for panel in DASHBOARD["panels"]:
        assert panel["title"] in said
        at, box = panel["gridPos"], axes[str(panel["id"])].get_position()
        assert at["x"] / 24 - 0.01 < box.x0 < box.x1 < (at["x"] + at["w"]) / 24 + 0.01
        if panel["type"] == "stat":
            continue
        legends = [
            target["legendFormat"].replace(f"{{{{{label}}}}}", value)
            for target in panel["targets"]
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]) or [""]
            for value in (("0", "1") if label else ("",))
        ]
        lines = axes[str(panel["id"])].lines
        assert [line.get_label() for line in lines] == legends
        assert set(legends) <= set(said)
    # One above the other, without overlap.
    boxes = [a.get_position() for a in figure.axes]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_values_are_drawn_as_they_are_with_gaps_where_there_are_none(prometheus: Any) -> None:
    axes = {a.get_label(): a for a in drawn(prometheus(waves)).axes}
    hits = next(p for p in DASHBOARD["panels"] if p["title"] == "Hit rate by accepted length")
    for i, line in enumerate(axes[str(hits["id"])].lines[:2]):
        times, values = line.get_data()
        assert times[0] == BEGIN and times[-1] == END and np.isnan(values[[0, -1, -2]]).all()
        assert np.allclose(values[1:-3], i + 1 + 0.5 * np.sin(times[1:-3] / 30))
    assert axes[str(hits["id"])].get_ylim() == (0, 1)
    outcomes = next(p for p in DASHBOARD["panels"] if p["title"] == "Outcomes")
    first, second = (line.get_ydata() for line in axes[str(outcomes["id"])].lines)
    assert np.allclose(second[1:-3] - first[1:-3], 2 + 0.5 * np.sin(OVER.times[1:-3] / 30))


def test_variables_of_the_dashboard_are_filled_in(prometheus: Any) -> None:
    fake = prometheus(waves)
    drawn(fake)
    for asked in fake.asked:
        assert "$" not in asked["query"] and asked["path"] == "/api/v1/query_range"
        assert (float(asked["start"]), float(asked["end"])) == (BEGIN, END)
        assert float(asked["step"]) == STEP
    asked = fake.asked[0]["query"], fake.asked[1]["query"]
    assert 'model_name=~".*"' in asked[0] and "[20s]" in asked[1]
    with pytest.raises(render.RenderError, match=r"\$other"):
        render.expand("up{job='$other'}", DASHBOARD, 5, 5)


@pytest.mark.parametrize(("value", "text"), [("1", "up"), ("0", "down")])
def test_a_value_with_a_name_is_shown_by_it(prometheus: Any, value: str, text: str) -> None:
    fake = prometheus(lambda _: [{"metric": {}, "values": [[END - STEP, value]]}])
    assert text in texts(drawn(fake))


def test_panels_without_data_say_so(prometheus: Any) -> None:
    figure = drawn(prometheus(lambda _: []))
    stats = sum(panel["type"] == "stat" for panel in DASHBOARD["panels"])
    assert texts(figure).count("No data") == stats
    empty = [a for a in figure.axes if [t.get_text() for t in a.texts] == ["No data"]]
    assert len(empty) == len(DASHBOARD["panels"]) - stats


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"type": "gauge"}, "type 'gauge'"),
        ({"fieldConfig": {"defaults": {"unit": "furlongs"}}}, "unit 'furlongs'"),
    ],
)
@pytest.mark.parametrize("index", [1, 5], ids=["stat", "timeseries"])
def test_what_cannot_be_drawn_is_an_error(
    prometheus: Any, change: dict[str, Any], message: str, index: int
) -> None:
    panels = list(DASHBOARD["panels"])
    panels[index] = panels[index] | change
    with pytest.raises(render.RenderError, match=message):
        drawn(prometheus(waves), DASHBOARD | {"panels": panels})


@pytest.mark.parametrize(
    ("value", "texts"),
    [
        (0.0, ("0", "0", "0 %", "0 s")),
        (0.012345, ("0.0123", "0.0123", "1.23 %", "12.3 ms")),
        (0.000042, ("0.000042", "0.000042", "0.0042 %", "42 µs")),
        (1.0, ("1", "1", "100 %", "1 s")),
        (137.25, ("137", "137", "13725 %", "137 s")),
        (20_500.0, ("20500", "20.5 K", "2050000 %", "20500 s")),
        (-0.5, ("-0.5", "-0.5", "-50 %", "-500 ms")),
    ],
)
def test_numbers_have_three_digits_and_their_unit(value: float, texts: tuple[str, ...]) -> None:
    units = ("none", "short", "percentunit", "s")
    assert tuple(render.UNITS[unit](value) for unit in units) == texts


def test_the_command_writes_a_picture(
    prometheus: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake, out = prometheus(waves), tmp_path / "d.png"
    range_ = ["--from", str(BEGIN), "--to", str(END)]
    assert render.main(["--prometheus", fake.url, *range_, "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG") and out.stat().st_size > 50_000
    assert f"{len(DASHBOARD['panels'])} panels" in capsys.readouterr().out


def test_the_command_says_what_is_wrong(
    prometheus: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(expression: str) -> list[dict[str, Any]]:
        raise ValueError("parse error")

    out = ["--out", str(tmp_path / "d.png")]
    assert render.main(["--prometheus", prometheus(refuse).url, *out]) == 1
    assert "HTTP 400" in (said := capsys.readouterr().err) and "parse error" in said
    assert render.main(["--prometheus", "http://127.0.0.1:9", *out]) == 1
    assert "Connection refused" in capsys.readouterr().err
    assert render.main(["--from", "yesterday", *out]) == 1
    assert "'yesterday': write now" in capsys.readouterr().err
    assert render.main(["--from", "now-1s", *out]) == 1
    assert "shorter than" in capsys.readouterr().err
    assert not (tmp_path / "d.png").exists()


def test_grafana_knows_how_often_prometheus_scrapes() -> None:
    source = yaml.safe_load(
        (MONITORING / "grafana/provisioning/datasources/prometheus.yaml").read_text()
    )["datasources"][0]
    scraped = yaml.safe_load((MONITORING / "prometheus.yaml").read_text())["global"]
    assert source["jsonData"]["timeInterval"] == scraped["scrape_interval"] == "5s"
