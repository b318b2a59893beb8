"""A Markdown report and plots from result files of `benchmarks.serve`.

    python -m benchmarks.report results.json [MORE.json] --out docs/performance

Prints the tables, or writes them to `report.md` in the folder with `--write`; plots go to the
folder as PNG files.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import predictions
from benchmarks.predictions import Compared
from benchmarks.results_table import (
    ROUND_PARTS,
    Groups,
    Key,
    Result,
    baseline,
    group,
    key_of,
    keys_of,
    mean_of,
    roofline,
    scenes,
    speed,
    spread,
)

Scene = tuple[str, float, str]


def text(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [_row(head), _row(["---"] * len(head)), *map(_row, rows)] if rows else []


def speed_table(groups: Groups, scene: Scene) -> list[str]:
    """Tokens per second and the ratio to plain SGLang, by system and concurrency."""
    keys = keys_of(groups, scene)
    levels = sorted({c for k in keys for c in groups[k]})
    base = baseline(groups, scene)
    rows = []
    for key in keys:
        cells = []
        for level in levels:
            runs = groups[key].get(level)
            if not runs:
                cells.append("")
                continue
            ratio = f" ×{speed(runs) / speed(base[level]):.2f}" if base.get(level) else ""
            cells.append(f"{speed(runs):.0f}{spread(runs)}{ratio}")
        lengths = [mean_of(groups[key][c], "accept_length") for c in groups[key]]
        known = [x for x in lengths if x is not None]
        rows.append([key.label, *cells, text(sum(known) / len(known)) if known else ""])
    return _table(["system", *(f"{c} at a time" for c in levels), "accept length"], rows)


def time_table(groups: Groups, scene: Scene) -> list[str]:
    """Where a round goes, in milliseconds, for servers of ours."""
    head = ["setting", "at a time", "hit rate", "drafts accepted", "round"]
    head += [name for _, name in ROUND_PARTS]
    head += ["the rest", "target idle", "draft answers after", "draft ahead", "draft behind"]
    head += ["build step", "rows", "issuing it", "jit", "draft idle"]
    rows = []
    for key in keys_of(groups, scene):
        if not key.ours or key.is_off:
            continue
        for level, runs in sorted(groups[key].items()):
            total = mean_of(runs, "ssd", "round_ms")
            parts = [mean_of(runs, "ssd", f"{name}_ms") for name, _ in ROUND_PARTS]
            rest = None if total is None else total - sum(p for p in parts if p is not None)
            numbers = [mean_of(runs, "ssd", n) for n in ("hit_rate", "accept_rate")]
            numbers += [total, *parts, rest]
            names = ("verifier_idle", "round_trip", "draft_ahead", "draft_behind")
            numbers += [mean_of(runs, "ssd", f"{name}_ms") for name in names]
            names = ("build_step_ms", "branch_rows", "launch_ms", "jit_ms", "idle_ms")
            numbers += [mean_of(runs, "ssd", "draft", n) for n in names]
            rows.append([key.setting, str(level), *map(text, numbers)])
    kept = [i for i in range(len(head)) if i < 2 or any(r[i] for r in rows)]
    return _table([head[i] for i in kept], [[r[i] for i in kept] for r in rows])


def open_loop_table(results: Iterable[Result]) -> list[str]:
    """Latencies at random arrivals, from SGLang's own benchmark; medians over repetitions."""
    found: dict[tuple[Key, float], list[Result]] = {}
    for r in results:
        if r.get("rate"):
            found.setdefault((key_of(r), r["rate"]), []).append(r)
    names = ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms")
    rows = []
    for (key, rate), runs in found.items():
        values = [statistics.median(r["open_loop"][n] for r in runs) for n in names]
        row = [key.pair, f"{key.temperature:g}", key.label, f"{rate:g}"]
        rows.append([*row, text(speed(runs), 0), *(text(v, 1) for v in values)])
    head = ["pair", "T", "system", "requests/s", "tokens/s", "first token, ms", "p99"]
    return _table([*head, "a further token, ms", "p99"], rows)


def prediction_table(compared: list[Compared]) -> list[str]:
    """The planner, given all other settings, beside what was measured."""
    rows = []
    for c in compared:
        pairs = (c.tokens, c.hit_rate, c.round_ms)
        rows.append([
            c.setting, str(c.batch), text(c.predicted, 0),
            f"{c.steady:.0f} ({100 * (c.predicted / c.steady - 1):+.0f} %)",
            f"{c.measured:.0f} ({100 * (c.predicted / c.measured - 1):+.0f} %)",
            *(f"{b:.2f} / {a:.2f}" for a, b in pairs),
        ])  # fmt: skip
    head = ["setting", "at a time", "predicted tokens/s", "measured rounds", "whole run"]
    return _table([*head, "tokens a round", "hit rate", "round, ms"], rows)


def greedy_equality(results: list[Result]) -> list[str]:
    """How many greedy outputs equal plain SGLang's, by system: bf16 rounds differently by width."""
    first: dict[tuple[str, str], dict[Key, list[Any]]] = {}
    for r in results:
        if r["temperature"] == 0 and r.get("outputs"):
            key = key_of(r)
            kept = first.setdefault((key.pair, key.workload), {})
            if len(r["outputs"]) > len(kept.get(key, [])):
                kept[key] = r["outputs"]
    lines = []
    for (pair, workload), by_key in first.items():
        base = next((k for k in by_key if k.system == "ar"), None)
        base = base or next((k for k in by_key if k.is_off), None)
        for key, outputs in by_key.items():
            if base is None or key == base:
                continue
            pairs = list(zip(by_key[base], outputs, strict=False))
            same = sum(a == b for a, b in pairs)
            lines.append(f"* {pair}, {workload}, {key.label}: {same} of {len(pairs)}")
    return lines


def environment_lines(reports: list[dict[str, Any]]) -> list[str]:
    """Hardware, versions and command of each run."""
    lines = []
    for report in reports:
        env = report["environment"]
        packages = ", ".join(f"{n} {v}" for n, v in env["packages"].items() if v)
        gpus = ", ".join(env["gpus"]) or "no GPU"
        changed = ", with uncommitted changes" if env.get("modified") else ""
        lines += [
            f"* {env['date']} UTC; {gpus}; {env['cpu_cores']} CPU cores; Python {env['python']}; "
            f"{packages}; revision {env['revision'][:12]}{changed}",
            f"  `python -m benchmarks.serve {' '.join(report['arguments'])}`",
        ]
        lines += [f"  failed: {line}" for line in report.get("failed", [])]
    return lines


def _heading(scene: Scene) -> str:
    pair, temperature, workload = scene
    return f"{pair}, {workload}, T={temperature:g}"


def compared_in(reports: list[dict[str, Any]]) -> dict[tuple[str, float], list[Compared]]:
    """Predictions beside measurements, by pair and temperature; short code prompts only."""
    found: dict[tuple[str, float], list[Compared]] = {}
    for report in reports:
        code = [r for r in report["results"] if key_of(r).workload == "code" and not r.get("rate")]
        for pair, temperature in sorted({(r["pair"], r["temperature"]) for r in code}):
            rows = predictions.of({**report, "results": code}, pair, temperature)
            if rows:
                found.setdefault((pair, temperature), []).extend(rows)
    return found


def render(reports: list[dict[str, Any]], images: Iterable[Path] = ()) -> str:
    """The whole report as Markdown."""
    results = [r for report in reports for r in report["results"]]
    groups = group(results)
    lines = environment_lines(reports)
    for scene in scenes(groups):
        lines += ["", f"### {_heading(scene)}, tokens per second", "", *speed_table(groups, scene)]
        times = time_table(groups, scene)
        if times:
            lines += ["", f"### {_heading(scene)}, a round in milliseconds", "", *times]
    arrivals = open_loop_table(results)
    if arrivals:
        lines += ["", "### Random arrivals", "", *arrivals]
    for (pair, temperature), compared in compared_in(reports).items():
        lines += ["", f"### The planner: {pair}, T={temperature:g}", ""]
        lines += ["Predicted from the other settings of the run / measured.", ""]
        lines += prediction_table(compared)
    same = greedy_equality(results)
    if same:
        lines += ["", "### Greedy outputs equal to the baseline's", "", *same]
    for image in images:
        lines += ["", f"![{image.stem}]({image.name})"]
    return "\n".join(lines) + "\n"


def plots(reports: list[dict[str, Any]], out: Path) -> list[Path]:
    """All plots, as PNG files in `out`."""
    from benchmarks import plots as draw

    out.mkdir(parents=True, exist_ok=True)
    groups = group(r for report in reports for r in report["results"])
    made: list[Path | None] = []
    for scene in scenes(groups):
        pair, temperature, workload = scene
        name = f"{pair}-t{temperature:g}" + ("" if workload == "code" else f"-{workload}")
        keys = keys_of(groups, scene)
        roof = roofline(groups, scene)
        base, title = baseline(groups, scene), _heading(scene)
        if base and len({c for k in keys for c in groups[k]}) > 1:
            made.append(draw.speeds(groups, base, keys, roof, title, out / f"{name}.png"))
        ours = [k for k in keys if k.ours and not k.is_off]
        made.append(draw.rounds(groups, ours, title, out / f"{name}-rounds.png"))
    for pair in sorted({key.pair for key in groups}):
        keys = [k for k in groups if k.pair == pair and k.workload == "code"]
        made.append(
            draw.hits(groups, keys, f"{pair}: predicted outcomes", out / f"{pair}-hits.png")
        )
    for (pair, temperature), compared in compared_in(reports).items():
        title = f"planner: {pair}, T={temperature:g}"
        path = out / f"{pair}-t{temperature:g}-planner.png"
        made.append(draw.predictions(compared, title, path))
    return [path for path in made if path is not None]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.report")
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, help="folder for the plots")
    parser.add_argument("--write", action="store_true", help="write report.md to the folder too")
    args = parser.parse_args(argv)
    reports = [json.loads(path.read_text()) for path in args.results]
    images = plots(reports, args.out) if args.out is not None else []
    if args.write and args.out is not None:
        (args.out / "report.md").write_text(render(reports, images), encoding="utf-8")
    else:
        print(render(reports))


if __name__ == "__main__":
    main()
