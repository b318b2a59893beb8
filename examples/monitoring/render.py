"""Draw the dashboard without Grafana, from what a Prometheus has seen.

    python examples/monitoring/render.py --from now-15m --out dashboard.png

Every expression of `grafana/ssd.json` is evaluated over the range, and every panel is drawn at its
place on the dashboard's grid, with its title, unit and legend. Panels may be of the types `stat`
and `timeseries`, with the options that this dashboard uses. Needs matplotlib
(`pip install 'sgl-ssd[docs]'`).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyBboxPatch

DASHBOARD = Path(__file__).with_name("grafana") / "ssd.json"
POINTS = 600  # of a series, at most
COLUMNS = 24  # of Grafana's grid
# Pixels.
WIDTH, ROW, GAP, HEADER, PAD = 1400, 38, 8, 52, 12
TITLE, SMALL = 14, 11
CANVAS, CARD, EDGE, INK, SOFT, GRID = (
    "#fbfbfa", "#ffffff", "#e2e4e8", "#1d2126", "#636a73", "#eceef1",
)  # fmt: skip
COLOURS = (
    "#3b6fd4", "#e08e2b", "#3f9a63", "#cf4a3f", "#8e63b0", "#2fa3b5", "#b58a1f", "#d1649d",
    "#6b7785", "#7fae35", "#9c5a3c", "#26418f",
)  # fmt: skip
NAMED = {"green": "#3f9a63", "red": "#cf4a3f"}
Panel = dict[str, Any]
Box = tuple[float, float, float, float]
"""Left, top, width, height."""


class RenderError(Exception):
    """No answer from Prometheus, or a dashboard with something that cannot be drawn."""


@dataclass(frozen=True)
class Range:
    """Evaluation times: unix seconds from `begin` to `end`, both multiples of `step`."""

    begin: float
    end: float
    step: float

    @staticmethod
    def of(begin: float, end: float, scrape_s: float) -> Range:
        """At most `POINTS` times, and none between two scrapes."""
        step = max(scrape_s, float(np.ceil((end - begin) / POINTS)))
        if end - begin < step:
            raise RenderError(f"the range of {end - begin:g} s is shorter than {step:g} s")
        return Range(begin // step * step, end // step * step, step)

    @property
    def times(self) -> np.ndarray:
        return np.arange(self.begin, self.end + self.step / 2, self.step)


@dataclass(frozen=True)
class Series:
    """A name for the legend, and a value for each time; NaN where there is none."""

    name: str
    values: np.ndarray


class Prometheus:
    """The HTTP API at `url`. Its methods raise `RenderError`."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def range(self, expression: str, over: Range) -> list[tuple[dict[str, str], np.ndarray]]:
        """Labels and values of every series that `expression` has."""
        body = {"query": expression, "start": over.begin, "end": over.end, "step": over.step}
        url = f"{self._url}/api/v1/query_range"
        try:
            with urllib.request.urlopen(
                url, urllib.parse.urlencode(body).encode(), timeout=60
            ) as answer:
                result = json.load(answer)["data"]["result"]
        except urllib.error.HTTPError as e:
            said = e.read().decode(errors="replace")
            raise RenderError(f"{url}: HTTP {e.code}: {said}\n{expression}") from None
        except OSError as e:
            raise RenderError(f"{url}: {e}") from None
        found = []
        for series in result:
            values = np.full(len(over.times), np.nan)
            for at, value in series["values"]:
                values[round((float(at) - over.begin) / over.step)] = float(value)
            values[~np.isfinite(values)] = np.nan
            found.append((series["metric"], values))
        return found


def expand(expression: str, dashboard: dict[str, Any], step: float, scrape_s: float) -> str:
    """With the values of Grafana's variables, where a list of the dashboard means all.

    Raises `RenderError`.
    """
    values = {v["name"]: v["allValue"] for v in dashboard["templating"]["list"]}
    values["__rate_interval"] = f"{max(step + scrape_s, 4 * scrape_s):g}s"

    def value(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise RenderError(f"variable {match[0]} is not known: {expression}")
        return str(values[match[1]])

    return re.sub(r"\$(\w+)", value, expression)


def fetch(
    dashboard: dict[str, Any], prometheus: Prometheus, over: Range, scrape_s: float
) -> list[list[Series]]:
    """The series of every panel, in the order of the panels. Raises `RenderError`."""
    return [
        [
            Series(_name(target["legendFormat"], labels), values)
            for target in panel["targets"]
            for labels, values in prometheus.range(
                expand(target["expr"], dashboard, over.step, scrape_s), over
            )
        ]
        for panel in dashboard["panels"]
    ]


def _name(legend: str, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), legend)


# -- numbers -------------------------------------------------------------------------------------


def _digits(value: float) -> str:
    """Three significant digits, never in scientific notation."""
    places = max(0, 2 - int(np.floor(np.log10(abs(value))))) if value else 0
    text = f"{value:.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _short(value: float) -> str:
    for scale, suffix in ((1e9, " B"), (1e6, " M"), (1e3, " K")):
        if abs(value) >= scale:
            return _digits(value / scale) + suffix
    return _digits(value)


def _seconds(value: float) -> str:
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(value) >= scale or not value:
            return f"{_digits(value / scale)} {unit}"
    return f"{_digits(value * 1e9)} ns"


UNITS: dict[str, Callable[[float], str]] = {
    "none": _digits,
    "short": _short,
    "percentunit": lambda value: f"{_digits(100 * value)} %",
    "s": _seconds,
}


def shown(value: float, panel: Panel) -> tuple[str, str]:
    """Text and colour of a single value. Raises `RenderError`."""
    for mapping in panel["fieldConfig"]["defaults"].get("mappings", []):
        mapped = mapping["options"].get(f"{value:g}")
        if mapped:
            return mapped["text"], NAMED[mapped["color"]]
    return _unit(panel)(value), NAMED["green"]


def _unit(panel: Panel) -> Callable[[float], str]:
    unit = panel["fieldConfig"]["defaults"]["unit"]
    if unit not in UNITS:
        raise RenderError(f"panel {panel['title']!r}: unit {unit!r} is not known")
    return UNITS[unit]


# -- the picture ---------------------------------------------------------------------------------


class Page:
    """A figure that is laid out in pixels from its upper left corner."""

    def __init__(self, rows: int) -> None:
        self.height = HEADER + rows * ROW + GAP
        self.figure = Figure((WIDTH / 100, self.height / 100), dpi=100, facecolor=CANVAS)
        self._renderer = FigureCanvasAgg(self.figure).get_renderer()

    def text(self, x: float, y: float, text: str, size: float, colour: str, **style: Any) -> float:
        """Returns the width; `y` is the baseline."""
        at = (x / WIDTH, 1 - y / self.height)
        drawn = self.figure.text(*at, text, fontsize=size * 0.72, color=colour, **style)
        return float(drawn.get_window_extent(self._renderer).width)

    def axes(self, x: float, y: float, w: float, h: float, label: str) -> Axes:
        box = (x / WIDTH, 1 - (y + h) / self.height, w / WIDTH, h / self.height)
        axes = self.figure.add_axes(box, label=label, facecolor="none")
        for spine in axes.spines.values():
            spine.set_visible(False)
        return axes

    def card(self, x: float, y: float, w: float, h: float) -> None:
        self.figure.add_artist(
            FancyBboxPatch(
                (x, self.height - y - h), w, h, boxstyle="round,pad=0,rounding_size=5",
                transform=None, facecolor=CARD, edgecolor=EDGE, linewidth=0.8, zorder=-1,
            )
        )  # fmt: skip

    def legend(self, x: float, bottom: float, w: float, names: Sequence[str]) -> float:
        """A list in as many lines as it takes, down to `bottom`; returns their height."""
        mark, gap, line = 14, 18, 17
        widths = [self._width(name) for name in names]
        lines: list[list[int]] = [[]]
        used = 0.0
        for i, width in enumerate(widths):
            if lines[-1] and used + mark + width > w:
                lines.append([])
                used = 0.0
            lines[-1].append(i)
            used += mark + width + gap
        for number, entries in enumerate(reversed(lines)):
            at, y = x, bottom - number * line
            for i in entries:
                left, level = at / WIDTH, 1 - (y - 4) / self.height
                self.figure.add_artist(
                    Line2D(
                        [left, left + 10 / WIDTH], [level, level], linewidth=2.5,
                        color=COLOURS[i % len(COLOURS)], solid_capstyle="butt",
                    )
                )  # fmt: skip
                self.text(at + mark, y, names[i], SMALL, SOFT)
                at += mark + widths[i] + gap
        return float(len(lines) * line)

    def _width(self, text: str) -> float:
        drawn = self.figure.text(0, 0, text, fontsize=SMALL * 0.72)
        width = float(drawn.get_window_extent(self._renderer).width)
        drawn.remove()
        return width


def draw(dashboard: dict[str, Any], series: list[list[Series]], over: Range) -> Figure:
    """All panels; one of axes for each, labelled with the panel's id. Raises `RenderError`."""
    panels = dashboard["panels"]
    page = Page(max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in panels))
    begin, end = (datetime.fromtimestamp(t, timezone.utc) for t in (over.begin, over.end))
    right = page.text(GAP + PAD, 33, dashboard["title"], 20, INK, weight="bold")
    page.text(
        GAP + PAD + right + 16, 33, f"{begin:%Y-%m-%d %H:%M:%S} to {end:%H:%M:%S} UTC", TITLE, SOFT
    )
    page.text(WIDTH - GAP - PAD, 33, f"drawn by {Path(__file__).name}", SMALL, SOFT, ha="right")
    column = (WIDTH - GAP) / COLUMNS
    for panel, found in zip(panels, series, strict=True):
        at = panel["gridPos"]
        x, y = GAP + at["x"] * column, HEADER + at["y"] * ROW
        w, h = at["w"] * column - GAP, at["h"] * ROW - GAP
        if panel["type"] not in PANELS:
            raise RenderError(f"panel {panel['title']!r}: type {panel['type']!r} is not known")
        page.card(x, y, w, h)
        page.text(x + PAD, y + 22, panel["title"], TITLE, SOFT, weight="bold")
        PANELS[panel["type"]](page, panel, found, over, (x, y + 30, w, h - 30))
    return page.figure


def _stat(page: Page, panel: Panel, series: list[Series], over: Range, box: Box) -> None:
    """The newest value, above an area of all."""
    x, y, w, h = box
    axes = page.axes(x + 1, y + h / 2, w - 2, h / 2 - 1, str(panel["id"]))
    axes.axis("off")
    if len(series) > 1:
        raise RenderError(f"panel {panel['title']!r}: {len(series)} series, where one is shown")
    text, colour = "No data", SOFT
    for one in series:
        there = one.values[np.isfinite(one.values)]
        if not len(there):
            continue
        text, colour = shown(there[-1], panel)
        if panel["options"]["graphMode"] == "area":
            axes.fill_between(over.times, one.values, color=colour, alpha=0.15, linewidth=0)
            axes.plot(over.times, one.values, color=colour, linewidth=1)
            axes.set_xlim(over.begin, over.end)
            axes.set_ylim(0, max(1.2 * there.max(), 1e-9))
    page.text(x + PAD, y + 40, text, 34, colour, weight="bold")


def _timeseries(page: Page, panel: Panel, series: list[Series], over: Range, box: Box) -> None:
    """Lines, or areas on top of each other, above a legend."""
    x, y, w, h = box
    unit = _unit(panel)
    defaults = panel["fieldConfig"]["defaults"]
    custom = defaults["custom"]
    series = [one for one in series if np.isfinite(one.values).any()]
    below = page.legend(x + PAD, y + h - 10, w - 2 * PAD, [one.name for one in series])
    axes = page.axes(x + 58, y + 8, w - 58 - PAD, h - 8 - below - 34, str(panel["id"]))
    stacked = custom.get("stacking", {}).get("mode") == "normal"
    alpha = custom["fillOpacity"] / 100
    base, top = np.zeros(len(over.times)), 0.0
    for i, one in enumerate(series):
        colour = COLOURS[i % len(COLOURS)]
        upper = line = one.values
        if stacked:
            # Where a series has nothing to add, its line is not drawn over the others.
            upper = base + np.nan_to_num(one.values)
            line = np.where(upper > base, upper, np.nan)
        if alpha:
            axes.fill_between(over.times, base, upper, color=colour, alpha=alpha, linewidth=0)
        axes.plot(
            over.times, line, color=colour, linewidth=1.3 * custom["lineWidth"], label=one.name
        )
        top = max(top, np.nanmax(upper))
        if stacked:
            base = upper
    axes.set_xlim(over.begin, over.end)
    axes.set_ylim(defaults.get("min"), defaults.get("max", 1.08 * top or 1.0))
    axes.set_xticks(*_ticks(over))
    axes.locator_params(axis="y", nbins=5)
    axes.yaxis.set_major_formatter(lambda value, _: unit(round(value, 12)))
    axes.tick_params(length=0, pad=5, labelsize=SMALL * 0.72, labelcolor=SOFT)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    if not series:
        axes.text(
            0.5, 0.5, "No data", transform=axes.transAxes, ha="center", va="center", color=SOFT,
            fontsize=TITLE * 0.72,
        )  # fmt: skip


def _ticks(over: Range) -> tuple[list[float], list[str]]:
    """Round times, eight at most, and how they are written."""
    seconds = (5, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 43200, 86400)
    every = next((s for s in seconds if (over.end - over.begin) / s <= 8), seconds[-1])
    first = -(-over.begin // every) * every
    times = np.arange(first, over.end + 1, every).tolist()
    form = "%H:%M:%S" if every < 60 else "%H:%M" if every < 86400 else "%m-%d"
    return times, [datetime.fromtimestamp(t, timezone.utc).strftime(form) for t in times]


PANELS = {"stat": _stat, "timeseries": _timeseries}


# -- command line --------------------------------------------------------------------------------


def _when(text: str, now: float) -> float:
    """`now`, `now-15m`, or unix seconds."""
    match = re.fullmatch(r"now(?:-(\d+)([smhd]))?", text)
    if match is None:
        try:
            return float(text)
        except ValueError:
            raise RenderError(f"{text!r}: write now, now-15m or unix seconds") from None
    unit = {"s": 1, "m": 60, "h": 3600, "d": 86400, None: 0}[match[2]]
    return now - int(match[1] or 0) * unit


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", help="its URL")
    parser.add_argument("--dashboard", type=Path, default=DASHBOARD, help="a JSON of Grafana")
    parser.add_argument("--from", dest="begin", help="now-15m or unix seconds; default: its own")
    parser.add_argument("--to", dest="end", help="likewise")
    parser.add_argument("--scrape-s", type=float, default=5.0, help="seconds between scrapes")
    parser.add_argument("--out", type=Path, default=Path("dashboard.png"))
    args = parser.parse_args(argv)
    now = time.time()
    try:
        dashboard = json.loads(args.dashboard.read_text())
        over = Range.of(
            _when(args.begin or dashboard["time"]["from"], now),
            _when(args.end or dashboard["time"]["to"], now),
            args.scrape_s,
        )
        series = fetch(dashboard, Prometheus(args.prometheus), over, args.scrape_s)
        draw(dashboard, series, over).savefig(args.out)
    except (OSError, RenderError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    print(f"{args.out}: {len(series)} panels, {sum(map(len, series))} series")
    return 0


if __name__ == "__main__":
    sys.exit(main())
