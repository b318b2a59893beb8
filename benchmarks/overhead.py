"""What metrics and a timeline cost, on the bundled pair.

    python -m benchmarks.overhead --minutes 9 --out overhead.json

Three servers run at once and are asked one at a time: two without `--enable-metrics`, alike, which
tell by how much servers differ for no reason, and one with it. Four variants take turns, the last
one being the server with metrics while it writes a timeline, and again in reverse (A B C D D C B
A), so that what drifts hits all alike. Metrics are also asked for, once a block of some seconds, as
Prometheus does. Every difference is taken between blocks of one repetition; of these the median
counts, with the interval in which 95 % of medians lie when repetitions are drawn anew (bootstrap).

Tokens per second are what matters; the processor time a verify, of all processes, is steadier.
Give it a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.environment import describe
from benchmarks.serve import BACKUPS, Prompts, send
from benchmarks.servers import Pair, Server, ServerSpec, wait_ready
from benchmarks.workloads import Conversation
from sgl_ssd.models import DRAFT_PATH, TARGET_PATH

PLAIN, CONTROL, METRICS, TIMELINE = VARIANTS = (
    "without metrics", "without metrics, another server", "metrics", "metrics and timeline",
)  # fmt: skip
DIFFERENCES = {
    "another server": (PLAIN, CONTROL),
    "metrics": (PLAIN, METRICS),
    "timeline": (METRICS, TIMELINE),
}
STEPS, FAN_OUT = 4, 4
DRAWS = 5000
SCRAPE_AFTER_S = 1.0


@dataclass(frozen=True)
class Block:
    """One variant for some seconds."""

    tokens_per_s: float
    wall_ms_per_verify: float
    cpu_ms_per_verify: float


Repetition = dict[str, list[Block]]
"""Of each variant two blocks, in the order they were measured."""


def cpu_seconds(server: Server) -> float:
    """Of all processes of a server so far, those of threads that have ended included."""
    first = psutil.Process(server._process.pid)
    pids = [p.pid for p in (first, *first.children(recursive=True))]
    # What clock_getcpuclockid gives for another process: in ns, where /proc has ticks of 10 ms.
    return sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)


def measure(server: Server, conversations: list[Conversation], tokens: int, scrape: bool) -> Block:
    """Send everything, one at a time; with `scrape`, ask for `/metrics` meanwhile."""
    verifies = server.state()["ssd"]["verifies"]
    scraper = threading.Timer(SCRAPE_AFTER_S, _scrape, [server])
    cpu, began = cpu_seconds(server), time.perf_counter()
    if scrape:
        scraper.start()
    sent = send(server, conversations, 1, tokens, 0.0)
    seconds, cpu = time.perf_counter() - began, cpu_seconds(server) - cpu
    if scrape:
        scraper.join()
    verifies = server.state()["ssd"]["verifies"] - verifies
    produced = sum(len(answer["output_ids"]) for answer in sent.answers)
    return Block(produced / seconds, 1e3 * seconds / verifies, 1e3 * cpu / verifies)


def _scrape(server: Server) -> None:
    urllib.request.urlopen(server.url + "/metrics", timeout=30).read()


def set_timeline(server: Server, on: bool) -> None:
    """Begin or end one, and wait until that is done."""
    server.configure(ssd_trace=int(on))
    while server.state()["ssd"]["trace"] != ("on" if on else "off"):
        time.sleep(0.05)


def repeat(
    block: Callable[[str], Block], timeline: Callable[[bool], None], backwards: bool
) -> Repetition:
    """Every variant twice, in a palindrome, which begins with the last one if `backwards`."""
    order = VARIANTS[::-1] if backwards else VARIANTS
    found: Repetition = {variant: [] for variant in VARIANTS}
    on = False
    for variant in (*order, *order[::-1]):
        if (variant == TIMELINE) != on:
            on = not on
            timeline(on)
        found[variant].append(block(variant))
    if on:
        timeline(False)
    return found


# -- what comes of it ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """A median, and where 95 % of medians lie; in per cent."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:+.2f} % ({self.low:+.2f} to {self.high:+.2f})"


def difference(repetitions: Sequence[Repetition], before: str, after: str, figure: str) -> Estimate:
    """How much larger `figure` is in `after`, from both halves of every repetition."""
    groups = [
        [
            100 * (getattr(y, figure) / getattr(x, figure) - 1)
            for x, y in zip(r[before], r[after], strict=True)
        ]
        for r in repetitions
    ]
    return bootstrap(groups)


def bootstrap(groups: Sequence[Sequence[float]]) -> Estimate:
    """The median of all values; its interval from drawing whole groups anew, always the same."""
    draw = random.Random(0)
    medians = sorted(
        statistics.median([v for group in draw.choices(groups, k=len(groups)) for v in group])
        for _ in range(DRAWS)
    )
    all_values = [value for group in groups for value in group]
    return Estimate(
        statistics.median(all_values), medians[round(0.025 * DRAWS)], medians[round(0.975 * DRAWS)]
    )


def summary(repetitions: Sequence[Repetition]) -> dict[str, dict[str, Estimate]]:
    """Difference -> figure -> how much larger it is."""
    return {
        name: {
            figure: difference(repetitions, *pair, figure) for figure in Block.__dataclass_fields__
        }
        for name, pair in DIFFERENCES.items()
    }


def table(repetitions: Sequence[Repetition]) -> str:
    """Medians of the variants, and the differences, in Markdown."""
    lines = ["| | tokens/s | wall time a verify | processor time a verify |", "|---|---|---|---|"]
    for variant in VARIANTS:
        speed, wall, cpu = (
            statistics.median(getattr(b, figure) for r in repetitions for b in r[variant])
            for figure in Block.__dataclass_fields__
        )
        lines.append(f"| {variant} | {speed:.1f} | {wall:.2f} ms | {cpu:.2f} ms |")
    for name, figures in summary(repetitions).items():
        lines.append(f"| {name} | {' | '.join(map(str, figures.values()))} |")
    return "\n".join(lines)


# -- running it ----------------------------------------------------------------------------------


def run(servers: dict[str, Server], args: argparse.Namespace) -> list[Repetition]:
    """As many repetitions as begin within the time, every second one backwards."""
    prompts = Prompts(str(TARGET_PATH), args.requests, args.tokens, None).of("code")

    def block(variant: str) -> Block:
        return measure(servers[variant], prompts, args.tokens, variant in (METRICS, TIMELINE))

    for server in servers.values():
        # Nothing is left to the tuner, which would set each server differently.
        server.configure(ssd_num_steps=STEPS, ssd_fan_out=FAN_OUT, ssd_backup=BACKUPS["jit"])
    for variant in VARIANTS[:3]:
        block(variant)
    repetitions: list[Repetition] = []
    began = time.monotonic()
    while not repetitions or time.monotonic() - began < 60 * args.minutes:
        repetitions.append(
            repeat(block, lambda on: set_timeline(servers[METRICS], on), len(repetitions) % 2 == 1)
        )
        print(json.dumps(_plain(repetitions[-1])), flush=True)
    return repetitions


def _plain(repetition: Repetition) -> dict[str, list[dict[str, float]]]:
    return {
        variant: [{k: round(v, 4) for k, v in asdict(b).items()} for b in blocks]
        for variant, blocks in repetition.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--minutes", type=float, default=9.0, help="without the start of servers")
    parser.add_argument("--requests", type=int, default=6, help="in each block")
    parser.add_argument("--tokens", type=int, default=128, help="of each request")
    parser.add_argument("--ready-s", type=float, default=420.0, help="longest wait for servers")
    parser.add_argument("--out", type=Path, help="write everything to this file as JSON")
    args = parser.parse_args()
    spec = ServerSpec(Pair("bundled", str(TARGET_PATH), str(DRAFT_PATH)), "ssd-cpu", STEPS, 0, 0)
    common = ["--device", "cpu", "--dtype", "float32"]
    with tempfile.TemporaryDirectory() as folder:
        trace = ["--ssd-trace", f"{folder}/trace.json"]
        flags: dict[str, tuple[list[str], list[str]]] = {
            PLAIN: (common, []),
            CONTROL: (common, []),
            METRICS: ([*common, "--enable-metrics"], trace),
        }
        servers = {
            variant: Server(spec, spec.command(*of), Path(folder, f"{i}.log"))
            for i, (variant, of) in enumerate(flags.items())
        }
        started = list(servers.values())
        try:
            for server in started:
                server.start()
            if len(wait_ready(started, args.ready_s)) < len(started):
                raise SystemExit("\n".join(s.log.read_text()[-2000:] for s in started))
            servers[TIMELINE] = servers[METRICS]
            set_timeline(servers[METRICS], False)
            repetitions = run(servers, args)
        finally:
            with ThreadPoolExecutor(len(started)) as pool:
                list(pool.map(lambda s: s.stop(5.0), started))
    if args.out:
        result: dict[str, Any] = {
            "environment": describe(),
            "requests": args.requests,
            "tokens": args.tokens,
            "differences_percent": {
                name: {figure: asdict(e) for figure, e in figures.items()}
                for name, figures in summary(repetitions).items()
            },
            "repetitions": [_plain(r) for r in repetitions],
        }
        args.out.write_text(json.dumps(result) + "\n")
    print(table(repetitions))


if __name__ == "__main__":
    main()
