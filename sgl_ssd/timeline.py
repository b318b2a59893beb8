"""`python -m sgl_ssd.timeline FILE`: a recorded timeline in a few numbers and a picture.

The file comes from `--ssd-trace FILE` or from `ssd_trace` of `/set_internal_state`; Perfetto opens
it too.
"""

from __future__ import annotations

import argparse
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from sgl_ssd.errors import SSDError
from sgl_ssd.recorder import DRAFT, PROCESSES, TRACKS, VERIFIER

Interval = tuple[float, float]
"""Begin and end in milliseconds since the first span."""

TARGET, HOST, WIRE = (VERIFIER, 1), (VERIFIER, 2), (VERIFIER, 3)
ANSWERS, MODEL, CACHES = (DRAFT, 1), (DRAFT, 2), (DRAFT, 3)
PAUSE_MS = 500.0  # a longer gap between two verifies is no part of a round
COLOURS = {
    "verify": "#3b6fb6", "prefill": "#9db8dc", "wait for target": "#d9d9d9", "launch": "#6aa84f",
    "wait for drafts": "#d96459", "host work": "#c9c9c9", "wire": "#8e63b0", "adopt": "#b79ad0",
    "backup": "#9c2b4e", "send ahead": "#4f7f86", "build step": "#e08e2b", "build": "#f3d19e",
}  # fmt: skip


class TimelineError(SSDError):
    """A file that is no timeline, or has no rounds."""


@dataclass(frozen=True)
class Event:
    """One span. Times in milliseconds since the first one."""

    track: tuple[int, int]
    name: str
    begin: float
    end: float
    args: dict[str, int]


def read(path: str | Path) -> list[Event]:
    """All spans of a file, by begin. Raises `TimelineError`.

    A file whose writer was killed ends in the middle of a line, which is left out.
    """
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as e:
        raise TimelineError(f"{path}: {e.strerror}") from None
    if not lines or lines[0] != b"[":
        raise TimelineError(f"{path}: not a timeline of sgl_ssd")
    events = []
    for number, line in enumerate(lines[1:], 2):
        if line == b"]":
            break
        try:
            event = orjson.loads(line.removesuffix(b","))
            if event["ph"] == "X":
                begin = event["ts"] / 1e3
                track = event["pid"], event["tid"]
                end = begin + event["dur"] / 1e3
                events.append(Event(track, event["name"], begin, end, event["args"]))
        except (orjson.JSONDecodeError, KeyError, TypeError):
            if number < len(lines):
                raise TimelineError(f"{path}, line {number}: not a span") from None
    return sorted(events, key=lambda event: event.begin)


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time without overlaps, in order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def common(a: Sequence[Interval], b: Sequence[Interval]) -> float:
    """How long two merged lists overlap."""
    begins = [begin for begin, _ in b]
    total = 0.0
    for begin, end in a:
        for other in b[max(0, bisect_right(begins, begin) - 1) :]:
            if other[0] >= end:
                break
            total += max(0.0, min(end, other[1]) - max(begin, other[0]))
    return total


@dataclass(frozen=True)
class Summary:
    """Times in milliseconds, shares in 0..1.

    `active_ms` is the time between the first and the last verify without pauses; the draft is busy
    when its model runs; `overlap` is the share of that which lies under a verify.
    """

    rounds: int
    active_ms: float
    tokens: float
    verify_ms: float
    idle_ms: float
    wait_ms: float
    host_ms: float
    round_trip_ms: float
    steps: float
    step_ms: float
    target_busy: float
    draft_busy: float
    overlap: float

    def __str__(self) -> str:
        return "\n".join(
            (
                f"{self.rounds} verifies in {self.active_ms / 1e3:.2f} s, "
                f"{self.tokens:.2f} tokens each",
                f"verify       {self.verify_ms:.2f} ms; the target is busy "
                f"{self.target_busy:.0%} of the time",
                f"in between   {self.idle_ms:.2f} ms; of a round, the host waits "
                f"{self.wait_ms:.2f} ms for drafts and works {self.host_ms:.2f} ms",
                f"round trip   {self.round_trip_ms:.2f} ms",
                f"draft model  {self.steps:.1f} steps a verify, {self.step_ms:.2f} ms each; "
                f"busy {self.draft_busy:.0%} of the time",
                f"overlap      {self.overlap:.0%} of the draft's work lies under a verify",
            )
        )


def summarise(events: Sequence[Event]) -> Summary:
    """The rounds of a timeline in numbers. Raises `TimelineError` when there are none."""
    verifies = [e for e in events if e.track == TARGET and e.name == "verify"]
    if len(verifies) < 2:
        raise TimelineError("fewer than two verifies were recorded: ask the server for some text")
    by_name: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        by_name[event.name].append(event)
    target = [e for e in events if e.track == TARGET]
    gaps = [
        max(0.0, b.begin - a.end)
        for a, b in zip(target, target[1:], strict=False)
        if a.name == b.name == "verify" and b.begin - a.end < PAUSE_MS
    ]
    active = merge(
        (a.begin, b.begin if b.begin - a.end < PAUSE_MS else a.end)
        for a, b in zip(verifies, [*verifies[1:], verifies[-1]], strict=True)
    )
    active_ms = _length(active)
    under = merge((e.begin, e.end) for e in verifies)
    work = [e for e in events if e.track == MODEL or e.name == "backup"]
    busy = merge((e.begin, e.end) for e in work)
    rounds, steps = len(verifies), by_name["build step"]
    return Summary(
        rounds=rounds,
        active_ms=active_ms,
        tokens=sum(e.args.get("tokens", 0) for e in verifies) / rounds,
        verify_ms=_mean(verifies),
        idle_ms=sum(gaps) / len(gaps) if gaps else 0.0,
        wait_ms=_total(by_name["wait for drafts"]) / rounds,
        host_ms=_total(by_name["host work"]) / rounds,
        round_trip_ms=_mean(by_name["round trip"]),
        steps=len(steps) / rounds,
        step_ms=_mean(steps),
        target_busy=common(under, active) / active_ms if active_ms else 0.0,
        draft_busy=common(busy, active) / active_ms if active_ms else 0.0,
        overlap=common(busy, under) / _length(busy) if busy else 0.0,
    )


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def _total(events: Iterable[Event]) -> float:
    return sum(e.end - e.begin for e in events)


def _mean(events: Sequence[Event]) -> float:
    return _total(events) / len(events) if events else 0.0


def window(events: Sequence[Event], rounds: int, at_s: float | None = None) -> Interval:
    """A time with `rounds` verifies in a row, none of them after a pause or a prefill if possible:
    from the second `at_s` on, or those that take the median of all times."""
    target = [e for e in events if e.track == TARGET]
    runs = [
        run
        for run in zip(*(target[i:] for i in range(rounds + 1)), strict=False)
        if all(e.name == "verify" for e in run) and run[-1].begin - run[0].begin < PAUSE_MS
    ]
    if at_s is not None:
        runs = [run for run in runs if run[0].begin >= 1e3 * at_s][:1]
    if not runs:
        raise TimelineError(f"no {rounds} verifies in a row: ask for a picture of fewer --rounds")
    run = sorted(runs, key=lambda run: run[-1].begin - run[0].begin)[len(runs) // 2]
    margin = 0.03 * (run[-1].begin - run[0].begin)
    return run[0].begin - margin, run[-1].begin + margin


def draw(events: Sequence[Event], begin: float, end: float, path: str | Path) -> None:
    """A picture of the time from `begin` to `end` (milliseconds). Needs matplotlib."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = [TARGET, HOST, WIRE, ANSWERS, MODEL, CACHES]
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    axes = figure.add_subplot()
    seen: dict[str, str] = {}
    for event in events:
        if event.end < begin or event.begin > end or event.track not in rows:
            continue
        name = event.name
        if event.track == WIRE:
            if name == "round trip":
                continue
            name = "wire"
        elif event.track == ANSWERS and name == "answer":
            name = "adopt"  # what of the answer is neither news nor backup takes no time
        colour = COLOURS.get(name, "#888888")
        y = rows.index(event.track)
        height = 0.76 if event.track != CACHES else 0.5
        left, right = max(begin, event.begin), min(end, event.end)
        edge = "white" if event.track in (TARGET, MODEL) else colour
        axes.barh(
            y, right - left, height, left - begin, color=colour, edgecolor=edge, linewidth=0.6
        )
        seen.setdefault(name, colour)
        if event.track == TARGET and right - left > 0.09 * (end - begin):
            text = f"{event.name}: {event.args.get('tokens', 0)}"
            axes.text(
                (left + right) / 2 - begin, y, text, ha="center", va="center", color="white", size=8
            )
    axes.set_yticks(range(len(rows)), [f"{PROCESSES[t[0]]}: {TRACKS[t]}" for t in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, end - begin)
    axes.set_xlabel("ms; in the bars of the target, the tokens they have brought")
    axes.axhline(2.5, color="#555555", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    order = [name for name in COLOURS if name in seen]
    handles: list[Any] = [Patch(color=seen[name], label=name) for name in order]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(order), frameon=False, fontsize=9,
        handlelength=1.2, columnspacing=1.4,
    )  # fmt: skip
    figure.savefig(path, dpi=130)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m sgl_ssd.timeline", description="Summarise a timeline and draw a few rounds."
    )
    parser.add_argument("file", metavar="FILE", help="what --ssd-trace has written")
    parser.add_argument("--png", metavar="FILE", help="the picture (default: beside FILE)")
    parser.add_argument("--rounds", type=int, default=4, metavar="N", help="rounds in the picture")
    parser.add_argument("--at", type=float, metavar="S", help="where it begins, in seconds")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    args = build_parser().parse_args(argv)
    try:
        events = read(args.file)
        print(summarise(events))
        png = args.png or Path(args.file).with_suffix(".png")
        draw(events, *window(events, max(1, args.rounds), args.at), png)
        print(f"picture      {png}")
    except ImportError:
        print(
            "sgl_ssd.timeline: no picture without matplotlib: pip install 'sgl-ssd[timeline]'",
            file=sys.stderr,
        )
        return 1 if args.png else 0
    except (SSDError, OSError) as e:
        print(f"sgl_ssd.timeline: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
