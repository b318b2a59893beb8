"""Measure SSD beside plain SGLang and STANDALONE: the same pair, prompts and flags for all.

    python -m benchmarks.serve --pair 8b=DIR,DIR --server 8b:ssd@7:0:1 --server 8b:ar:0 \\
        --server 8b:standalone@3:1 --ssd 4,4 --ssd 6,4 --out results.json -- --dtype bfloat16

All servers start at once and are measured one at a time, in the order given. A pass measures every
server under every setting and concurrency at one temperature; passes repeat, so that repetitions of
one setting lie apart in time. The result file is rewritten after every measurement, and when the
time is over what is missing is left out. Flags behind `--` go to every server.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.environment import describe
from benchmarks.servers import Pair, Server, ServerSpec, wait_ready

HELD_OUT = Path(__file__).parent / "pairs" / "held_out.jsonl"
PROMPT_TOKENS = 100
COUNTERS = (
    "rounds", "drafted", "accepted", "answers", "hits", "partial_hits", "backups", "late_answers",
    "timeouts", "verifies", "verifies_without_drafts",
)  # fmt: skip
DRAFT_MEANS = {"build_step_ms": "build_steps", "jit_ms": "jits", "launch_ms": "build_steps"}
BACKUPS = {"none": 0, "fast": 1, "jit": 2}


@dataclass(frozen=True)
class Setting:
    """What is changed on a running server of ours: drafting off, or K, F and perhaps the backup."""

    steps: int = 0
    fan_out: int = 0
    backup: str = ""

    @staticmethod
    def parse(text: str) -> Setting:
        """`K,F[,BACKUP]` or `off`. Raises `ValueError`."""
        if text == "off":
            return Setting()
        steps, fan_out, *backup = text.split(",")
        if len(backup) > 1 or (backup and backup[0] not in BACKUPS):
            raise ValueError(f"--ssd {text!r}: write K,F or K,F,BACKUP or off")
        return Setting(int(steps), int(fan_out), backup[0] if backup else "")

    @property
    def name(self) -> str:
        if not self.steps:
            return "off"
        return f"K={self.steps} F={self.fan_out}" + (f" {self.backup}" if self.backup else "")

    def apply(self, server: Server) -> None:
        """Configure the server."""
        if not self.steps:
            server.configure(ssd_drafting=0)
            return
        values = {"ssd_num_steps": self.steps, "ssd_fan_out": self.fan_out}
        if self.backup:
            values["ssd_backup"] = BACKUPS[self.backup]
        server.configure(ssd_drafting=1, **values)


@dataclass(frozen=True)
class Run:
    """One measurement."""

    server: Server
    setting: Setting | None  # None: not a server of ours
    concurrency: int
    requests: int
    temperature: float
    repeat: int


def load_prompts(tokenizer_path: str, count: int) -> list[list[int]]:
    """Token ids of short held-out texts."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    rows = [json.loads(line) for line in HELD_OUT.read_text(encoding="utf-8").splitlines()]
    texts = [row["text"] for row in rows if row["kind"] == "text"]
    if count > len(texts):
        raise ValueError(f"{count} requests: there are {len(texts)} prompts")
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts[:count]]
    return [[tokenizer.bos_token_id, *tokens[: PROMPT_TOKENS - 1]] for tokens in ids]


def send(
    server: Server, prompts: Sequence[list[int]], concurrency: int, tokens: int, temperature: float
) -> tuple[float, list[Any], list[float]]:
    """Wall seconds, answers and the seconds of each request, at most `concurrency` at a time."""

    def one(numbered: tuple[int, list[int]]) -> tuple[Any, float]:
        seed, ids = numbered
        sampling = {"max_new_tokens": tokens, "temperature": temperature, "ignore_eos": True}
        if server.spec.system == "ssd":
            sampling["sampling_seed"] = seed
        began = time.perf_counter()
        answer = server.post("/generate", {"input_ids": ids, "sampling_params": sampling})
        return answer, time.perf_counter() - began

    started = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        results = list(pool.map(one, enumerate(prompts)))
    wall = time.perf_counter() - started
    return wall, [answer for answer, _ in results], [seconds for _, seconds in results]


def digest(ids: list[int]) -> str:
    """Says whether two outputs are equal."""
    return hashlib.sha1(",".join(map(str, ids)).encode()).hexdigest()[:12]


def quartiles(values: Sequence[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    if len(values) == 1:
        return [values[0]] * 3
    return [float(q) for q in statistics.quantiles(values, n=4, method="inclusive")]


def measure(run: Run, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Flush, send, and say what happened."""
    server = run.server
    if run.setting is not None:
        run.setting.apply(server)
    used = prompts[: run.requests]
    send(server, used[: run.concurrency], run.concurrency, 16, run.temperature)
    server.post("/flush_cache", {})
    before = server.state().get("ssd")
    wall, answers, seconds = send(server, used, run.concurrency, tokens, run.temperature)
    result: dict[str, Any] = {
        "pair": server.spec.pair.name,
        "system": server.spec.system,
        "setting": run.setting.name if run.setting else _steps(server.spec),
        "concurrency": run.concurrency,
        "temperature": run.temperature,
        "repeat": run.repeat,
        "requests": len(used),
        "tokens_per_request": tokens,
        "wall_s": wall,
        "tokens_per_s": sum(a["meta_info"]["completion_tokens"] for a in answers) / wall,
        "request_tokens_per_s": quartiles([tokens / s for s in seconds]),
        "outputs": [digest(a["output_ids"]) for a in answers],
    }
    info = [a["meta_info"] for a in answers]
    rounds = [i["spec_verify_ct"] for i in info if i.get("spec_verify_ct")]
    if rounds:
        result["accept_length"] = len(rounds) * tokens / sum(rounds)
    if before is not None:
        result["ssd"] = difference(before, server.state()["ssd"])
    return result


def _steps(spec: ServerSpec) -> str:
    return "" if spec.system == "ar" else f"K={spec.steps}"


def difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Counts and mean times between two looks at section `ssd`.

    The draft server's own numbers are up to a second old at each look.
    """
    result: dict[str, Any] = {name: after[name] - before[name] for name in COUNTERS}
    asked = sum(after["outcomes"][s] - before["outcomes"][s] for s in ("hit", "partial", "backup"))
    asked += after["outcomes"]["empty"] - before["outcomes"]["empty"]
    result["hit_rate"] = result["hits"] / asked if asked else None
    result["accept_rate"] = result["accepted"] / result["drafted"] if result["drafted"] else None
    for name, (count, total) in after["times"].items():
        count -= before["times"][name][0]
        total -= before["times"][name][1]
        result[f"{name}_ms"] = 1e3 * total / count if count else None
    reasons = after["without_drafts"]
    result["without_drafts"] = {
        r: n - before["without_drafts"].get(r, 0)
        for r, n in reasons.items()
        if n > before["without_drafts"].get(r, 0)
    }
    for position in ("drafted_per_position", "accepted_per_position"):
        result[position] = [a - b for a, b in zip(after[position], before[position], strict=True)]
    old, new = before.get("draft_stats") or {}, after.get("draft_stats") or {}
    draft: dict[str, float] = {}
    for mean, number in DRAFT_MEANS.items():
        count = new.get(number, 0) - old.get(number, 0)
        if count > 0 and mean in new:
            total = new[mean] * new[number] - old.get(mean, 0.0) * old.get(number, 0)
            draft[mean] = total / count
            draft[number] = count
    result["draft"] = draft
    return result


def plan(
    servers: list[Server],
    settings: list[Setting],
    requests: dict[int, int],
    temperatures: list[float],
    repeats: int,
) -> Iterator[Run]:
    """All measurements, the most important first."""
    for repeat in range(repeats):
        for temperature in temperatures:
            for server in servers:
                ours: list[Setting | None] = [None]
                if server.spec.system == "ssd":
                    ours = [s for s in settings if s.steps <= server.spec.steps]
                for setting in ours:
                    for concurrency, count in requests.items():
                        yield Run(server, setting, concurrency, count, temperature, repeat)


def line(result: dict[str, Any]) -> str:
    """One result as a line of a table."""
    ssd = result.get("ssd") or {}
    draft = ssd.get("draft") or {}

    def number(value: float | None, digits: int = 2) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    cells = [
        f"{result['pair']:>5} {result['system']:<10} {result['setting']:<13}",
        f"T={result['temperature']:g} c={result['concurrency']:<2}",
        f"{result['tokens_per_s']:7.1f} tok/s len {number(result.get('accept_length'))}",
    ]
    if ssd:
        cells.append(f"hit {number(ssd['hit_rate'])} acc {number(ssd['accept_rate'])}")
        names = ("round", "outcome_wait", "draft_wait", "launch", "round_trip")
        cells.append(" ".join(f"{n} {number(ssd.get(f'{n}_ms'))}" for n in names))
        cells.append(" ".join(f"{n[:-3]} {number(v)}" for n, v in draft.items() if n[-3:] == "_ms"))
        cells.append(f"late {ssd['timeouts']} {ssd['without_drafts'] or ''}")
    return " | ".join(cells)


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Raises `ValueError` for values of the wrong form."""
    own, common = argv, []
    if "--" in argv:
        own, common = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    parser = argparse.ArgumentParser(
        "python -m benchmarks.serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--pair", action="append", required=True, metavar="NAME=TARGET,DRAFT")
    add("--server", action="append", required=True, metavar="PAIR:SYSTEM[@K][:GPU[:DRAFT_GPU]]")
    add("--ssd", action="append", default=[], metavar="K,F[,BACKUP]", help="settings, or `off`")
    add("--requests", default="1:4,4:8,16:16", metavar="C:N,...", help="requests at concurrencies")
    add("--tokens", type=int, default=192, help="output tokens of each request")
    add("--temperatures", default="0", metavar="T,...")
    add("--repeats", type=int, default=1)
    add("--ready-s", type=float, default=600.0, help="longest wait for the servers to start")
    add("--budget-s", type=float, default=3600.0, help="time for everything, from the start on")
    add("--ssd-flag", action="append", default=[], metavar="FLAG=VALUE", help="for ours alone")
    add("--out", type=Path, required=True, help="result file; logs are written beside it")
    args = parser.parse_args(own)
    args.common = common
    pairs = {p.name: p for p in map(Pair.parse, args.pair)}
    args.specs = [ServerSpec.parse(text, pairs) for text in args.server]
    args.settings = [Setting.parse(text) for text in args.ssd or ["off", "4,4"]]
    counts = (item.split(":") for item in args.requests.split(","))
    args.requests = {int(c): int(n) for c, n in counts}
    args.temperatures = [float(t) for t in args.temperatures.split(",")]
    args.ssd_flags = [part for flag in args.ssd_flag for part in flag.split("=", 1)]
    return args


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    try:
        args = parse_args(argv)
    except ValueError as e:
        print(f"benchmarks.serve: {e}", file=sys.stderr)
        return 2
    deadline = time.monotonic() + args.budget_s
    args.out.parent.mkdir(parents=True, exist_ok=True)
    servers = [
        Server(s, s.command(args.common, args.ssd_flags), args.out.parent / f"{s.name}.log")
        for s in args.specs
    ]
    report: dict[str, Any] = {"arguments": argv, "environment": describe(), "results": []}
    try:
        for server in servers:
            server.start()
        prompts = load_prompts(args.specs[0].pair.target, max(args.requests.values()))
        ready = wait_ready(servers, args.ready_s)
        report["servers"] = {
            s.spec.name: {"command": s.argv, "ready_after_s": s.ready_after_s} for s in servers
        }
        for server in servers:
            after = f"ready after {server.ready_after_s:.0f} s" if server in ready else "NOT READY"
            print(f"{server.spec.name}: {after}", flush=True)
        _measure_all(args, ready, prompts, deadline, report)
    finally:
        args.out.write_text(json.dumps(report) + "\n")
        with ThreadPoolExecutor(len(servers)) as pool:
            list(pool.map(lambda server: server.stop(2.0), servers))
    return 0 if len(ready) == len(servers) else 1


def _measure_all(
    args: argparse.Namespace,
    ready: list[Server],
    prompts: list[list[int]],
    deadline: float,
    report: dict[str, Any],
) -> None:
    for server in ready:
        most = max(args.requests)
        send(server, prompts[:most], most, 32, 0.0)  # kernels compile for this many rows
    for run in plan(ready, args.settings, args.requests, args.temperatures, args.repeats):
        if time.monotonic() > deadline:
            print("time is over", flush=True)
            report["cut_short"] = True
            return
        if run.server.dead:
            continue
        try:
            result = measure(run, prompts, args.tokens)
        except (OSError, RuntimeError, KeyError) as e:
            print(f"{run.server.spec.name}: {type(e).__name__}: {e}", flush=True)
            continue
        report["results"].append(result)
        args.out.write_text(json.dumps(report) + "\n")
        print(line(result), flush=True)


if __name__ == "__main__":
    sys.exit(main())
