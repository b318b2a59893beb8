"""Plots of benchmark results: PNG files, one idea each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.predictions import Compared
from benchmarks.results_table import ROUND_PARTS, Groups, Key, mean_of, setting_numbers, speed
from sgl_ssd.measurements import usable

COLORS = {
    "plain": "#444444", "sd": "#d08000", "ngram": "#7b6fb0", "off": "#8aa0b0", "ssd": "#1769aa",
    "other": "#2e8b57",
}  # fmt: skip
PART_COLORS = ("#c8d4dd", "#d9534f", "#e8a33d", "#8fb8de")
SIZE = (10.5, 4.2)
DPI = 110


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            "font.size": 9,
            "axes.grid": True,
            "grid.alpha": 0.25,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "legend.frameon": False,
        }
    )
    return plt


def _save(plt: Any, figure: Any, path: Path, bottom: float = 0.0) -> Path:
    figure.tight_layout(rect=(0, bottom, 1, 1))
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
    return path


def families(keys: Iterable[Key]) -> dict[str, list[Key]]:
    """Keys that are one thing at its best setting: label to members."""
    found: dict[str, list[Key]] = {}
    for key in keys:
        tuned = key.system in ("standalone", "ngram") or (key.ours and not key.is_off)
        label = key.system_name if tuned else key.label
        found.setdefault(label, []).append(key)
    return found


def _color(key: Key) -> str:
    if key.is_off:
        return COLORS["off"]
    if key.ours:
        return COLORS["ssd"]
    return COLORS[{"ar": "plain", "standalone": "sd", "ngram": "ngram"}.get(key.system, "other")]


def best_at(groups: Groups, keys: Sequence[Key], level: int) -> tuple[Key, float] | None:
    """The fastest of `keys` at a concurrency."""
    measured = [(k, speed(groups[k][level])) for k in keys if groups[k].get(level)]
    return max(measured, key=lambda m: m[1], default=None)


def _levels(groups: Groups, keys: Iterable[Key]) -> list[int]:
    return sorted({level for key in keys for level in groups[key]})


def _log_ticks(axis: Any, values: Sequence[float], digits: int = 0) -> None:
    axis.set_ticks(list(values), [f"{v:.{digits}f}" for v in values])
    axis.set_tick_params(which="minor", length=0)
    axis.set_minor_formatter("")


def speeds(
    groups: Groups,
    base: Groups | dict[int, Any],
    keys: list[Key],
    roof: float | None,
    title: str,
    path: Path,
) -> Path:
    """Left: tokens/s of one request against all; right: the ratio to plain decoding by batch."""
    plt = _pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=SIZE)
    levels = _levels(groups, keys)
    for label, members in families(keys).items():
        color = _color(members[0])
        dashed = members[0].is_off or not members[0].ours
        if len(members) > 1:
            for key in members:
                own = sorted(groups[key])
                left.plot(
                    [speed(groups[key][c]) / c for c in own],
                    [speed(groups[key][c]) for c in own],
                    color=color,
                    alpha=0.25,
                    lw=1,
                )
        best = [(c, *found) for c in levels if (found := best_at(groups, members, c))]
        shown = f"{label}, best setting" if len(members) > 1 else members[0].label
        style = "--" if dashed else "-"
        left.plot(
            [v / c for c, _, v in best],
            [v for _, _, v in best],
            style,
            color=color,
            marker="o",
            ms=4,
            label=shown,
        )
        ratios = [(c, v / speed(base[c])) for c, _, v in best if base.get(c)]
        right.plot(
            [c for c, _ in ratios],
            [r for _, r in ratios],
            style,
            color=color,
            marker="o",
            ms=4,
            label=shown,
        )
        if not dashed:
            for (c, ratio), (_, key, _) in zip(ratios, best, strict=False):
                right.annotate(
                    key.setting,
                    (c, ratio),
                    textcoords="offset points",
                    xytext=(0, 6),
                    ha="center",
                    fontsize=7,
                    color=color,
                )
    if roof is not None:
        left.axvline(roof, color="#999999", lw=1, ls=":")
        left.annotate(
            "1 / ((1-a) T)",
            (roof, 0.03),
            xycoords=("data", "axes fraction"),
            xytext=(-3, 0),
            textcoords="offset points",
            rotation=90,
            fontsize=7,
            color="#777777",
            ha="right",
        )
    left.set(
        xlabel="tokens/s of one request",
        ylabel="tokens/s over all requests",
        xscale="log",
        yscale="log",
        title="to the right and up is better",
    )
    right.set(
        xlabel="requests at a time",
        ylabel="tokens/s ÷ decoding without drafts",
        xscale="log",
        title="speed-up",
    )
    right.axhline(1.0, color="#444444", lw=0.8)
    right.margins(x=0.12, y=0.15)
    _log_ticks(right.xaxis, levels)
    for axis, values in ((left.xaxis, left.get_xlim()), (left.yaxis, left.get_ylim())):
        _log_ticks(axis, _nice(values))
    right.set_ylim(bottom=0)
    figure.suptitle(title)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="lower center", ncols=min(6, len(labels)))
    return _save(plt, figure, path, bottom=0.06)


def _nice(limits: tuple[float, float]) -> list[float]:
    """1, 2, 5 times powers of ten within `limits`."""
    values = [m * 10.0**e for e in range(-2, 7) for m in (1, 2, 5)]
    return [v for v in values if limits[0] <= v <= limits[1]]


def rounds(groups: Groups, keys: list[Key], title: str, path: Path) -> Path | None:
    """Where a round of the verifier goes: one bar for a setting at a concurrency."""
    rows = []
    for level in _levels(groups, keys):
        for key in keys:
            runs = groups[key].get(level)
            total = runs and mean_of(runs, "ssd", "round_ms")
            if not runs or total is None:
                continue
            parts = [mean_of(runs, "ssd", f"{name}_ms") or 0.0 for name, _ in ROUND_PARTS]
            rows.append((f"{key.setting}, {level} at a time", [*parts, max(0, total - sum(parts))]))
    if not rows:
        return None
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.27 * len(rows)))
    labels = [text for _, text in ROUND_PARTS] + ["the rest, under the verify"]
    order = (0, 3, 1, 2)  # under the verify first
    starts = [0.0] * len(rows)
    for part in order:
        widths = [parts[part] for _, parts in rows]
        axes.barh(
            range(len(rows)),
            widths,
            left=starts,
            color=PART_COLORS[part],
            label=labels[part],
            height=0.72,
        )
        starts = [a + b for a, b in zip(starts, widths, strict=True)]
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set(xlabel="milliseconds of a round on the verifier's host", title=title)
    axes.legend(
        fontsize=7,
        ncols=4,
        loc="upper center",
        bbox_to_anchor=(0.45, -0.55 / (0.6 + 0.2 * len(rows))),
    )
    return _save(plt, figure, path)


def hits(groups: Groups, keys: list[Key], title: str, path: Path) -> Path | None:
    """Hit rate by fan-out, a line for each temperature; points are settings and concurrencies.

    Measurements that mostly waited for prefills are left out.
    """
    points: dict[float, list[tuple[float, float]]] = {}
    for key in keys:
        numbers = setting_numbers(key.setting)
        if numbers is None or not key.ours:
            continue
        for runs in groups[key].values():
            rate = mean_of([r for r in runs if usable(r)], "ssd", "hit_rate")
            if rate is not None:
                points.setdefault(key.temperature, []).append((numbers[1], rate))
    if not points:
        return None
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(5.6, 4))
    for i, (temperature, found) in enumerate(sorted(points.items())):
        sizes = sorted({f for f, _ in found})
        color = f"C{i}"
        nudge = 1 + 0.04 * i
        axes.plot(
            [f * nudge for f, _ in found], [h for _, h in found], "o", color=color, alpha=0.5, ms=4
        )
        medians = [sorted(h for g, h in found if g == f) for f in sizes]
        axes.plot(
            [f * nudge for f in sizes],
            [m[len(m) // 2] for m in medians],
            "-",
            color=color,
            label=f"T={temperature:g} (line: median)",
        )
    axes.set(xscale="log", xlabel="fan-out F", ylabel="hit rate", ylim=(0, 1.02), title=title)
    axes.margins(x=0.2)
    _log_ticks(axes.xaxis, sorted({f for found in points.values() for f, _ in found}))
    axes.legend(fontsize=8, loc="lower right")
    return _save(plt, figure, path)


def predictions(compared: Sequence[Compared], title: str, path: Path) -> Path:
    """What the planner said from the other settings against what was measured."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(5.6, 4.6))
    values = [v for c in compared for v in (c.steady, c.measured, c.predicted)]
    low, high = 0.8 * min(values), 1.25 * max(values)
    axes.plot([low, high], [low, high], color="#444444", lw=0.8)
    axes.fill_between(
        [low, high],
        [0.9 * low, 0.9 * high],
        [1.1 * low, 1.1 * high],
        color="#444444",
        alpha=0.08,
        label="within 10 %",
    )
    axes.plot(
        [c.steady for c in compared],
        [c.predicted for c in compared],
        "o",
        color=COLORS["ssd"],
        ms=5,
        label="against the measured rounds",
    )
    axes.plot(
        [c.measured for c in compared],
        [c.predicted for c in compared],
        "o",
        mfc="none",
        color=COLORS["sd"],
        ms=5,
        label="against the whole run",
    )
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(low, high),
        ylim=(low, high),
        xlabel="measured tokens/s",
        ylabel="predicted tokens/s",
        title=title,
    )
    for axis in (axes.xaxis, axes.yaxis):
        _log_ticks(axis, _nice((low, high)))
    axes.legend(fontsize=8, loc="upper left")
    return _save(plt, figure, path)
