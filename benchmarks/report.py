"""A Markdown report and plots from result files of `benchmarks.serve`.

    python -m benchmarks.report results.json [MORE.json] --out docs/performance

Writes PNG files to the folder and prints the tables.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Result = dict[str, Any]
NAMES = {"ar": "SGLang", "standalone": "STANDALONE", "ssd": "SSD"}


@dataclass(frozen=True)
class Key:
    """What repetitions have in common."""

    pair: str
    temperature: float
    system: str
    setting: str

    @property
    def label(self) -> str:
        if self.system == "ssd" and self.setting == "off":
            return "SSD, drafting off"
        return f"{NAMES[self.system]} {self.setting}".strip()


Groups = dict[Key, dict[int, list[Result]]]


def group(results: Iterable[Result]) -> Groups:
    """Results by key and concurrency."""
    groups: Groups = defaultdict(lambda: defaultdict(list))
    for r in results:
        key = Key(r["pair"], r["temperature"], r["system"], r["setting"])
        groups[key][r["concurrency"]].append(r)
    return groups


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


def text(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def speed_table(groups: Groups, pair: str, temperature: float) -> list[str]:
    """Tokens per second and the ratio to plain SGLang, by system and concurrency."""
    keys = [k for k in groups if (k.pair, k.temperature) == (pair, temperature)]
    levels = sorted({c for k in keys for c in groups[k]})
    base = next((groups[k] for k in keys if k.system == "ar"), None) or next(
        (groups[k] for k in keys if k.setting == "off"), {}
    )
    lines = [
        _row(["system", *(f"{c} at a time" for c in levels), "accept length"]),
        _row(["---"] * (len(levels) + 2)),
    ]
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
        cells.append(text(sum(known) / len(known)) if known else "")
        lines.append(_row([key.label, *cells]))
    return lines


ROUND_TIMES = ("round", "outcome_wait", "draft_wait", "launch", "round_trip")


def time_table(groups: Groups, pair: str, temperature: float) -> list[str]:
    """Where a round goes, in milliseconds, for servers of ours."""
    head = ["setting", "at a time", "hit rate", "drafts accepted"]
    head += ["round", "wait for the target", "wait for drafts", "launch", "the rest"]
    head += ["draft answers after", "build step", "issuing it", "jit"]
    lines = [_row(head), _row(["---"] * len(head))]
    for key in groups:
        if (key.pair, key.temperature, key.system) != (pair, temperature, "ssd"):
            continue
        if key.setting == "off":
            continue
        for level, runs in sorted(groups[key].items()):
            times = {n: mean_of(runs, "ssd", f"{n}_ms") for n in ROUND_TIMES}
            parts = [times[n] for n in ("outcome_wait", "draft_wait", "launch")]
            rest = None
            if times["round"] is not None:
                rest = times["round"] - sum(p for p in parts if p is not None)
            cells = [key.setting, str(level)]
            cells += [text(mean_of(runs, "ssd", n)) for n in ("hit_rate", "accept_rate")]
            cells += [text(times["round"]), *map(text, parts), text(rest)]
            cells.append(text(times["round_trip"]))
            names = ("build_step_ms", "launch_ms", "jit_ms")
            cells += [text(mean_of(runs, "ssd", "draft", n)) for n in names]
            lines.append(_row(cells))
    return lines if len(lines) > 2 else []


def greedy_equality(results: list[Result]) -> list[str]:
    """How many greedy outputs equal plain SGLang's, by system: bf16 rounds differently by width."""
    first: dict[tuple[str, str, str], list[Any]] = {}
    for r in results:
        if r["temperature"] == 0 and r.get("outputs"):
            kept = first.setdefault((r["pair"], r["system"], r["setting"]), r["outputs"])
            if len(r["outputs"]) > len(kept):
                first[r["pair"], r["system"], r["setting"]] = r["outputs"]
    lines = []
    for (pair, system, setting), outputs in first.items():
        base = first.get((pair, "ar", "")) or first.get((pair, "ssd", "off"))
        if base is None or base is outputs:
            continue
        pairs = list(zip(base, outputs, strict=False))
        same = sum(a == b for a, b in pairs)
        label = Key(pair, 0.0, system, setting).label
        lines.append(f"* {pair}, {label}: {same} of {len(pairs)}")
    return lines


def plots(groups: Groups, out: Path) -> list[Path]:
    """Tokens per second of one request, and hit rate: a PNG for each pair and temperature."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    out.mkdir(parents=True, exist_ok=True)
    made = []
    for pair, temperature in sorted({(k.pair, k.temperature) for k in groups}):
        keys = [k for k in groups if (k.pair, k.temperature) == (pair, temperature)]
        if len({c for k in keys for c in groups[k]}) < 2:
            continue
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
        for number, key in enumerate(keys):
            color, levels = f"C{number}", sorted(groups[key])
            per_user = [speed(groups[key][c]) / c for c in levels]
            style = "--" if key.system != "ssd" or key.setting == "off" else "-"
            left.plot(levels, per_user, style, color=color, marker="o", label=key.label)
            if key.system == "ssd" and key.setting != "off":
                hits = [mean_of(groups[key][c], "ssd", "hit_rate") or 0.0 for c in levels]
                right.plot(levels, hits, color=color, marker="o")
        left.set(xscale="log", xlabel="requests at a time", ylabel="tokens/s of one request")
        right.set(xscale="log", xlabel="requests at a time", ylabel="hit rate", ylim=(0, 1))
        for axes in (left, right):
            axes.minorticks_off()
            axes.set_xticks(sorted({c for k in keys for c in groups[k]}))
            axes.get_xaxis().set_major_formatter("{x:.0f}")
            axes.grid(alpha=0.3)
        left.legend(fontsize=7)
        figure.suptitle(f"{pair}, temperature {temperature:g}")
        figure.tight_layout()
        made.append(out / f"{pair}-t{temperature:g}.png")
        figure.savefig(made[-1], dpi=110)
        plt.close(figure)
    return made


def environment_lines(reports: list[dict[str, Any]]) -> list[str]:
    """Hardware, versions and command of each run."""
    lines = []
    for report in reports:
        env = report["environment"]
        packages = ", ".join(f"{n} {v}" for n, v in env["packages"].items() if v)
        gpus = ", ".join(env["gpus"]) or "no GPU"
        lines += [
            f"* {env['date']} UTC; {gpus}; {env['cpu_cores']} CPU cores; Python {env['python']}; "
            f"{packages}; revision {env['revision'][:12]}",
            f"  `python -m benchmarks.serve {' '.join(report['arguments'])}`",
        ]
    return lines


def render(reports: list[dict[str, Any]]) -> str:
    """The whole report as Markdown."""
    results = [r for report in reports for r in report["results"]]
    groups = group(results)
    lines = environment_lines(reports)
    for pair, temperature in sorted({(k.pair, k.temperature) for k in groups}):
        lines += ["", f"### {pair}, temperature {temperature:g}, tokens per second", ""]
        lines += speed_table(groups, pair, temperature)
        times = time_table(groups, pair, temperature)
        if times:
            lines += ["", f"### {pair}, temperature {temperature:g}, a round in milliseconds", ""]
            lines += times
    same = greedy_equality(results)
    if same:
        lines += ["", "### Greedy outputs equal to the baseline's", "", *same]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.report")
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, help="folder for the plots")
    args = parser.parse_args()
    reports = [json.loads(path.read_text()) for path in args.results]
    print(render(reports))
    if args.out is not None:
        plots(group(r for report in reports for r in report["results"]), args.out)


if __name__ == "__main__":
    main()
