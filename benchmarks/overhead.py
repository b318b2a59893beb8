"""What metrics and a timeline cost, on the bundled pair.

    python -m benchmarks.overhead --repeats 12

Two servers run at once, one with `--enable-metrics` and one without; only one of them is asked at a
time. Three variants take turns: without metrics, with metrics, and with metrics while a timeline is
written. Each difference is taken within a repetition, so what else the machine does meanwhile hits
all variants alike; the processor time of all processes is counted beside the speed, since it
depends less on the neighbours.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.serve import Prompts, quartiles, send
from benchmarks.servers import Pair, Server, ServerSpec, wait_ready
from benchmarks.workloads import Conversation
from sgl_ssd.models import DRAFT_PATH, TARGET_PATH

VARIANTS = ("without metrics", "metrics", "metrics and timeline")
SCRAPE_EVERY_S = 5.0


@dataclass
class Block:
    """One variant in one repetition."""

    tokens_per_s: float
    cpu_ms_per_token: float


def cpu_seconds(server: Server) -> float:
    """Of all processes of a server so far."""
    first = psutil.Process(server._process.pid)
    times = [p.cpu_times() for p in [first, *first.children(recursive=True)]]
    return sum(t.user + t.system for t in times)


def measure(server: Server, conversations: list[Conversation], tokens: int, scrape: bool) -> Block:
    """Send everything; with `scrape`, ask for `/metrics` now and then, as Prometheus does."""
    cpu, produced, began, scraped = cpu_seconds(server), 0, time.perf_counter(), 0.0
    for conversation in conversations:
        sent = send(server, [conversation], 1, tokens, 0.0)
        produced += sum(len(a["output_ids"]) for a in sent.answers)
        if scrape and time.perf_counter() - scraped > SCRAPE_EVERY_S:
            scraped = time.perf_counter()
            urllib.request.urlopen(server.url + "/metrics", timeout=30).read()
    seconds = time.perf_counter() - began
    return Block(produced / seconds, 1e3 * (cpu_seconds(server) - cpu) / produced)


def set_timeline(server: Server, on: bool) -> None:
    """Begin or end one, and wait until that is done."""
    server.configure(ssd_trace=int(on))
    while server.state()["ssd"]["trace"] != ("on" if on else "off"):
        time.sleep(0.1)


def run(servers: dict[str, Server], args: argparse.Namespace) -> dict[str, list[Block]]:
    """All blocks, in the order of the repetitions."""
    prompts = Prompts(str(TARGET_PATH), args.requests, args.tokens, None).of("code")
    blocks: dict[str, list[Block]] = {variant: [] for variant in VARIANTS}
    for repeat in range(-1, args.repeats):  # the first one warms up
        order = VARIANTS[repeat % 3 :] + VARIANTS[: repeat % 3]
        for variant in order:
            server = servers["off" if variant == VARIANTS[0] else "on"]
            timeline = variant == VARIANTS[2]
            if timeline:
                set_timeline(server, True)
            block = measure(server, prompts, args.tokens, scrape=variant != VARIANTS[0])
            if timeline:
                set_timeline(server, False)
            if repeat >= 0:
                blocks[variant].append(block)
                print(repeat, variant, block, flush=True)
    return blocks


def report(blocks: dict[str, list[Block]]) -> str:
    """Medians, and the differences with their quartiles."""
    lines = []
    for variant in VARIANTS:
        speed = statistics.median(b.tokens_per_s for b in blocks[variant])
        cpu = statistics.median(b.cpu_ms_per_token for b in blocks[variant])
        lines.append(f"{variant}: {speed:.1f} tokens/s, {cpu:.2f} ms of processor time a token")
    for name, a, b in (("metrics", *VARIANTS[:2]), ("timeline", *VARIANTS[1:])):
        pairs = list(zip(blocks[a], blocks[b], strict=True))
        slower = quartiles([100 * (1 - y.tokens_per_s / x.tokens_per_s) for x, y in pairs])
        dearer = quartiles([100 * (y.cpu_ms_per_token / x.cpu_ms_per_token - 1) for x, y in pairs])
        lines.append(
            f"{name}: tokens/s {slower[1]:+.2f} % slower (quartiles {slower[0]:+.2f}, "
            f"{slower[2]:+.2f}), processor time {dearer[1]:+.2f} % more "
            f"(quartiles {dearer[0]:+.2f}, {dearer[2]:+.2f})"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--requests", type=int, default=6, help="in each block")
    parser.add_argument("--tokens", type=int, default=128, help="of each request")
    parser.add_argument("--ready-s", type=float, default=420.0, help="longest wait for servers")
    parser.add_argument("--out", type=Path, help="write all blocks to this file as JSON")
    args = parser.parse_args()
    spec = ServerSpec(Pair("bundled", str(TARGET_PATH), str(DRAFT_PATH)), "ssd-cpu", 4, 0, 0)
    common = ["--device", "cpu", "--dtype", "float32"]
    with tempfile.TemporaryDirectory() as folder:
        file = ["--ssd-trace", f"{folder}/trace.json"]
        servers = {
            "off": Server(spec, spec.command(common, []), Path(folder, "off.log")),
            "on": Server(
                spec, spec.command([*common, "--enable-metrics"], file), Path(folder, "on.log")
            ),
        }
        both = list(servers.values())
        try:
            for server in both:
                server.start()
            if len(wait_ready(both, args.ready_s)) < 2:
                raise SystemExit("\n".join(s.log.read_text()[-2000:] for s in both))
            set_timeline(servers["on"], False)
            blocks = run(servers, args)
        finally:
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(lambda s: s.stop(5.0), both))
    if args.out:
        args.out.write_text(json.dumps({k: [vars(b) for b in v] for k, v in blocks.items()}) + "\n")
    print(report(blocks))


if __name__ == "__main__":
    main()
