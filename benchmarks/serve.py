"""Measure SSD beside what else SGLang offers: the same pair, prompts and flags for all.

    python -m benchmarks.serve --pair 8b=DIR,DIR --server 8b:ssd@7:0:1 --server 8b:ar:0 \\
        --server 8b:standalone@3:1 --ssd 4,4 --ssd 6,4 --out results.json -- --dtype bfloat16

All servers start at once and are measured one at a time, in the order given; with `--alternate`
only one runs at any time, started anew in every repetition. A pass measures every server under
every setting, workload and load at one temperature; passes repeat, so that repetitions of one
setting lie apart in time. The result file is rewritten after every measurement, and when the time
is over what is missing is left out. Flags behind `--` go to every server. `benchmarks.suite` fills
in these flags for the hardware at hand.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import open_loop, workloads
from benchmarks.environment import describe
from benchmarks.servers import Attached, Pair, Server, ServerSpec, wait_ready
from benchmarks.workloads import Conversation

SPARE_TOKENS = 32
"""Room in the context behind prompt and answer: speculation writes ahead."""
COUNTERS = (
    "rounds", "drafted", "accepted", "answers", "hits", "partial_hits", "backups", "late_answers",
    "timeouts", "verifies", "verifies_without_drafts",
)  # fmt: skip
DRAFT_MEANS = {
    "build_step_ms": "build_steps", "jit_ms": "jits", "launch_ms": "build_steps",
    "branch_rows": "build_steps",
}  # fmt: skip
BACKUPS = {"none": 0, "fast": 1, "jit": 2, "auto": 3}
VERIFICATIONS = {"coupled": 0, "rejection": 1}
AUTO = -1


@dataclass(frozen=True)
class Setting:
    """What is changed on a running server of ours: drafting off, or K, F, backup, verification.

    K and F of `AUTO` are left to the server.
    """

    steps: int = 0
    fan_out: int = 0
    backup: str = ""
    verification: str = "coupled"

    @staticmethod
    def parse(text: str) -> Setting:
        """`K,F[,BACKUP[,VERIFICATION]]`, where K and F may be `auto`, or `off`, or `auto`.

        Raises `ValueError`.
        """
        if text == "off":
            return Setting()
        if text == "auto":
            return Setting(AUTO, AUTO, "auto")
        steps, fan_out, *rest = text.split(",")
        backup, verification = (*rest, "", "")[:2] if rest else ("", "")
        if (
            len(rest) > 2
            or backup not in ("", *BACKUPS)
            or verification not in ("", *VERIFICATIONS)
        ):
            raise ValueError(f"--ssd {text!r}: write K,F[,BACKUP[,VERIFICATION]] or off or auto")
        numbers = [AUTO if value == "auto" else int(value) for value in (steps, fan_out)]
        return Setting(*numbers, backup, verification or "coupled")

    @property
    def name(self) -> str:
        if not self.steps:
            return "off"
        if self == Setting(AUTO, AUTO, "auto"):
            return "auto"
        shown = [str(value).replace("-1", "auto") for value in (self.steps, self.fan_out)]
        parts = [f"K={shown[0]}", f"F={shown[1]}", self.backup]
        parts.append("" if self.verification == "coupled" else self.verification)
        return " ".join(filter(None, parts))

    def apply(self, server: Server) -> None:
        """Configure the server."""
        if not self.steps:
            server.configure(ssd_drafting=0)
            return
        values = {"ssd_num_steps": self.steps, "ssd_fan_out": self.fan_out}
        if self.backup:
            values["ssd_backup"] = BACKUPS[self.backup]
        values["ssd_verification"] = VERIFICATIONS[self.verification]
        server.configure(ssd_drafting=1, **values)


@dataclass(frozen=True)
class Run:
    """One measurement: closed loop at a concurrency, or open loop at a rate (requests/s)."""

    server: Server
    setting: Setting | None  # None: not a server of ours
    workload: str
    concurrency: int
    requests: int
    temperature: float
    repeat: int
    rate: float = 0.0

    @property
    def name(self) -> str:
        load = f"{self.rate:g}/s" if self.rate else f"c={self.concurrency}"
        setting = self.setting.name if self.setting else ""
        return f"{self.server.spec.name} {setting} {self.workload} {load} T={self.temperature:g}"


class Prompts:
    """Workloads of a pair, made once."""

    def __init__(self, path: str, count: int, tokens: int, limit: int | None) -> None:
        from transformers import AutoConfig, AutoTokenizer

        self.path = path
        self._tokenizer = AutoTokenizer.from_pretrained(path)
        context = AutoConfig.from_pretrained(path).max_position_embeddings
        self._limit = min(limit or context, context - tokens - SPARE_TOKENS)
        self._count = count
        self._made: dict[str, list[Conversation]] = {}

    def of(self, workload: str) -> list[Conversation]:
        """The conversations of a workload. Raises `ValueError` for an unknown one."""
        if workload not in self._made:
            self._made[workload] = workloads.make(
                workload, self._tokenizer, self._count, self._limit
            )
        return self._made[workload]


@dataclass
class Sent:
    """What came back: answers in the order of the prompts, seconds of each request."""

    wall_s: float
    answers: list[Any]
    seconds: list[float]


def send(
    server: Server,
    conversations: Sequence[Conversation],
    concurrency: int,
    tokens: int,
    temperature: float,
) -> Sent:
    """Send at most `concurrency` conversations at a time, each one request after the other."""

    def one(numbered: tuple[int, Conversation]) -> list[tuple[list[Any], float]]:
        seed, conversation = numbered
        results = []
        for request in conversation:
            sampling = {"max_new_tokens": tokens, "temperature": temperature, "ignore_eos": True}
            if request.n > 1:
                sampling["n"] = request.n
            elif server.spec.ours:
                sampling["sampling_seed"] = seed
            body = {"input_ids": request.input_ids, "sampling_params": sampling}
            began = time.perf_counter()
            answer = server.post("/generate", body)
            answers = answer if isinstance(answer, list) else [answer]
            results.append((answers, time.perf_counter() - began))
        return results

    started = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        results = [r for turns in pool.map(one, enumerate(conversations)) for r in turns]
    wall = time.perf_counter() - started
    return Sent(wall, [a for answers, _ in results for a in answers], [s for _, s in results])


def digest(ids: list[int]) -> str:
    """Says whether two outputs are equal."""
    return hashlib.sha1(",".join(map(str, ids)).encode()).hexdigest()[:12]


def quartiles(values: Sequence[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    if len(values) == 1:
        return [values[0]] * 3
    return [float(q) for q in statistics.quantiles(values, n=4, method="inclusive")]


def measure(run: Run, prompts: Prompts, tokens: int) -> dict[str, Any]:
    """Flush, send, and say what happened."""
    server = run.server
    if run.setting is not None:
        run.setting.apply(server)
    used = prompts.of(run.workload)[: run.requests]
    warm = max(run.concurrency, 1)
    send(server, used[:warm], warm, 16, run.temperature)
    server.flush()
    before = server.state().get("ssd")
    result: dict[str, Any] = {
        "pair": server.spec.pair.name,
        "system": server.spec.system,
        "setting": run.setting.name if run.setting else _steps(server.spec),
        "workload": run.workload,
        "concurrency": run.concurrency,
        "rate": run.rate,
        "temperature": run.temperature,
        "repeat": run.repeat,
        "requests": len(used),
        "tokens_per_request": tokens,
    }
    if run.rate:
        result["open_loop"] = open_loop.run(
            server.url, prompts.path, used, rate=run.rate, tokens=tokens,
            temperature=run.temperature, seed=run.repeat,
        )  # fmt: skip
        result["tokens_per_s"] = result["open_loop"]["output_throughput"]
    else:
        result |= _closed_loop(send(server, used, run.concurrency, tokens, run.temperature), tokens)
    if before is not None:
        result["ssd"] = difference(before, server.state()["ssd"])
    return result


def _closed_loop(sent: Sent, tokens: int) -> dict[str, Any]:
    result: dict[str, Any] = {
        "wall_s": sent.wall_s,
        "tokens_per_s": sum(a["meta_info"]["completion_tokens"] for a in sent.answers)
        / sent.wall_s,
        "request_tokens_per_s": quartiles([tokens / s for s in sent.seconds]),
        "outputs": [digest(a["output_ids"]) for a in sent.answers],
    }
    rounds = [
        a["meta_info"]["spec_verify_ct"]
        for a in sent.answers
        if a["meta_info"].get("spec_verify_ct")
    ]
    if rounds:
        result["accept_length"] = len(rounds) * tokens / sum(rounds)
    return result


def _steps(spec: ServerSpec) -> str:
    return f"K={spec.steps}" if spec.speculative else ""


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
    answered = new.get("rounds", 0) - old.get("rounds", 0)
    if answered > 0 and "idle_seconds" in new:
        idle = new["idle_seconds"] - old.get("idle_seconds", 0.0)
        draft["idle_ms"] = 1e3 * idle / answered  # of a round
    result["draft"] = draft
    if "auto" in after:
        result["auto"] = after["auto"] | {n: after[n] for n in ("num_steps", "fan_out", "backup")}
    return result


def plan(servers: list[Server], args: argparse.Namespace, repeat: int) -> Iterator[Run]:
    """All measurements of a pass, the most important first."""
    for temperature in args.temperatures:
        for server in servers:
            settings: list[Setting | None] = [None]
            if server.spec.ours:
                settings = [s for s in args.settings if s.steps <= server.spec.steps]
            for workload in args.workloads:
                for setting in settings:
                    for concurrency, count in args.requests.items():
                        yield Run(
                            server, setting, workload, concurrency, count, temperature, repeat
                        )
                    if workload == args.workloads[0]:
                        for rate, count in args.rates.items():
                            yield Run(
                                server, setting, workload, 0, count, temperature, repeat, rate
                            )


def line(result: dict[str, Any]) -> str:
    """One result as a line of a table."""
    ssd = result.get("ssd") or {}
    draft = ssd.get("draft") or {}

    def number(value: float | None, digits: int = 2) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    cells = [
        f"{result['pair']:>5} {result['system']:<10} {result['setting']:<13}",
        f"{result['workload']:<7} T={result['temperature']:g} "
        + (f"{result['rate']:g}/s" if result["rate"] else f"c={result['concurrency']:<2}"),
        f"{result['tokens_per_s']:7.1f} tok/s len {number(result.get('accept_length'))}",
    ]
    if ssd:
        cells.append(f"hit {number(ssd['hit_rate'])} acc {number(ssd['accept_rate'])}")
        names = ("round", "outcome_wait", "draft_wait", "launch", "round_trip")
        cells.append(" ".join(f"{n} {number(ssd.get(f'{n}_ms'))}" for n in names))
        cells.append(" ".join(f"{n[:-3]} {number(v)}" for n, v in draft.items() if n[-3:] == "_ms"))
        cells.append(f"late {ssd['timeouts']} {ssd['without_drafts'] or ''}")
    return " | ".join(cells)


def split_common(argv: list[str]) -> tuple[list[str], list[str]]:
    """Our own arguments, and those after `--`, which every server gets."""
    end = argv.index("--") if "--" in argv else len(argv)
    return argv[:end], argv[end + 1 :]


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Raises `ValueError` for values of the wrong form."""
    own, common = split_common(argv)
    parser = argparse.ArgumentParser(
        "python -m benchmarks.serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--pair", action="append", required=True, metavar="NAME=TARGET,DRAFT")
    add("--server", action="append", default=[], metavar="PAIR:SYSTEM[@K][:GPU[:DRAFT_GPU]]")
    add(
        "--attach",
        action="append",
        default=[],
        metavar="PAIR:SYSTEM[@K]=URL",
        help="use a running server as that system",
    )
    add("--alternate", action="store_true", help="run one server at a time, anew in every pass")
    add(
        "--ssd",
        action="append",
        default=[],
        metavar="K,F[,BACKUP[,VERIFICATION]]",
        help="settings, or `off`, or `auto`",
    )
    add("--workloads", default="code", metavar="NAME,...", help=", ".join(workloads.WORKLOADS))
    add("--requests", default="1:4,4:8,16:16", metavar="C:N,...", help="requests at concurrencies")
    add(
        "--rates",
        default="",
        metavar="R:N,...",
        help="open loop: N requests at R a second, of the first workload",
    )
    add("--prompt-tokens", type=int, metavar="N", help="cut prompts to N tokens")
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
    attached = (text.partition("=") for text in args.attach)
    args.attached = [(ServerSpec.parse(name, pairs), url) for name, _, url in attached]
    if not args.specs and not args.attached:
        raise ValueError("--server is missing")
    args.settings = [Setting.parse(text) for text in args.ssd or ["off", "4,4"]]
    args.requests = {int(c): n for c, n in _counts(args.requests)}
    args.rates = dict(_counts(args.rates))
    args.workloads = args.workloads.split(",")
    unknown = set(args.workloads) - set(workloads.WORKLOADS)
    if unknown:
        raise ValueError(f"--workloads: there is no {', '.join(sorted(unknown))}")
    args.temperatures = [float(t) for t in args.temperatures.split(",")]
    args.ssd_flags = [part for flag in args.ssd_flag for part in flag.split("=", 1)]
    return args


def _counts(text: str) -> list[tuple[float, int]]:
    items = (item.split(":") for item in filter(None, text.split(",")))
    return [(float(key), int(count)) for key, count in items]


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    try:
        args = parse_args(argv)
    except ValueError as e:
        print(f"benchmarks.serve: {e}", file=sys.stderr)
        return 2
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the servers end with us
    deadline = time.monotonic() + args.budget_s
    args.out.parent.mkdir(parents=True, exist_ok=True)
    servers = [
        Server(s, s.command(args.common, args.ssd_flags), args.out.parent / f"{s.name}.log")
        for s in args.specs
    ]
    servers += [Attached(spec, url) for spec, url in args.attached]
    report: dict[str, Any] = {
        "arguments": argv, "environment": describe(), "servers": {}, "results": []
    }  # fmt: skip
    # One group of servers runs at a time.
    groups = [[server] for server in servers] if args.alternate else [servers]
    most = max([*args.requests.values(), *args.rates.values()])
    prompts = Prompts(servers[0].spec.pair.target, most, args.tokens, args.prompt_tokens)
    total = args.repeats * sum(1 for _ in plan(servers, args, 0))
    failed: set[str] = set()
    with tqdm(total=total, unit="run", disable=None) as bar:
        if args.alternate:
            for repeat in range(args.repeats):
                for group in groups:
                    failed |= _run_group(group, args, prompts, deadline, report, bar, [repeat])
        else:
            failed = _run_group(servers, args, prompts, deadline, report, bar, range(args.repeats))
    return 1 if failed else 0


def _run_group(
    servers: list[Server],
    args: argparse.Namespace,
    prompts: Prompts,
    deadline: float,
    report: dict[str, Any],
    bar: Any,
    repeats: Sequence[int],
) -> set[str]:
    """Start servers, measure the passes, stop them; the names of those that never served."""
    try:
        for server in servers:
            server.ready_after_s = None
            server.start()
        if args.rates:
            open_loop.load()
        ready = wait_ready(servers, args.ready_s)
        for s in servers:
            report["servers"][s.spec.name] = {"command": s.argv, "ready_after_s": s.ready_after_s}
            after = f"ready after {s.ready_after_s:.0f} s" if s in ready else "NOT READY"
            bar.write(f"{s.spec.name}: {after}")
        _measure_all(args, ready, prompts, deadline, report, bar, repeats)
        return {s.spec.name for s in servers} - {s.spec.name for s in ready}
    finally:
        args.out.write_text(json.dumps(report) + "\n")
        with ThreadPoolExecutor(len(servers)) as pool:
            list(pool.map(lambda server: server.stop(2.0), servers))


def _measure_all(
    args: argparse.Namespace,
    ready: list[Server],
    prompts: Prompts,
    deadline: float,
    report: dict[str, Any],
    bar: Any,
    repeats: Sequence[int],
) -> None:
    most = max(args.requests)
    for server in ready:  # kernels compile for this many rows
        with contextlib.suppress(OSError):
            send(server, prompts.of(args.workloads[0])[:most], most, 32, 0.0)
    for run in (run for repeat in repeats for run in plan(ready, args, repeat)):
        if time.monotonic() > deadline:
            bar.write("time is over")
            report["cut_short"] = True
            return
        bar.set_description(run.name)
        try:
            if run.server.dead:
                raise RuntimeError("the server has ended")
            if run.rate and not open_loop.fits(prompts.of(run.workload)):
                raise RuntimeError("SGLang's benchmark cannot send this workload")
            result = measure(run, prompts, args.tokens)
        except (OSError, RuntimeError, KeyError) as e:
            bar.write(f"{run.name}: {type(e).__name__}: {e}")
            report.setdefault("failed", []).append(f"{run.name}: {e}")
        else:
            report["results"].append(result)
            args.out.write_text(json.dumps(report) + "\n")
            bar.write(line(result))
        bar.update()


if __name__ == "__main__":
    sys.exit(main())
