"""`python -m tests.soak --minutes N`: mixed load, random faults, and an account of what they cost.

Every answer is compared with the same request's answer without drafts. Prints a table: per fault
how often it was injected, requests served meanwhile, longest pause within an answer, and the time
until drafting resumed; then differences, leaks and the memory of both processes.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from transformers import AutoTokenizer

from channels import FAULTS, Fault
from parity.harness import Report, compare, configure, send_all, ssd_state
from parity.mixes import RequestMix
from rig import DRAFT_READY_SECONDS, Rig, eventually, stream
from sgl_ssd.models import TARGET_PATH

HELD_OUT = Path(__file__).parents[1] / "benchmarks" / "pairs" / "held_out.jsonl"
BODIES = 40
RESUME_SECONDS = 600.0  # loading the draft anew takes minutes on a busy machine


@dataclass
class Row:
    """What one kind of fault did, over all its injections."""

    injected: int = 0
    messages: int = 0
    requests: int = 0
    aborted: int = 0
    longest_gap: float = 0.0
    resumed: list[float] = field(default_factory=list)


class Load:
    """Clients that send the same few requests over and over, and now and then abort one."""

    def __init__(self, rig: Rig, bodies: list[dict[str, Any]], threads: int, seed: int) -> None:
        self._rig, self._bodies = rig, bodies
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._serial = 0
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(threads)]
        self.row = Row()
        self.answers: list[tuple[int, Any]] = []
        self.errors: list[str] = []
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let what is under way finish."""
        self._stop.set()
        for thread in self._threads:
            thread.join(120)

    def _run(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                index = self._random.randrange(len(self._bodies))
                abort = self._random.random() < 0.1
                self._serial += 1
                body = {**self._bodies[index], "rid": f"soak-{self._serial}"}
            if abort:
                threading.Timer(0.3, self._abort, (body["rid"],)).start()
            try:
                streamed = stream(self._rig.server, body)
            except OSError as e:
                if not abort:
                    self.errors.append(repr(e))
                    time.sleep(1)
                continue
            reason = (streamed.answer.get("meta_info") or {}).get("finish_reason") or {}
            with self._lock:
                self.row.longest_gap = max(self.row.longest_gap, streamed.longest_gap)
                if reason.get("type") == "abort" or "error" in streamed.answer:
                    self.row.aborted += 1
                    if not abort:
                        self.errors.append(json.dumps(streamed.answer)[:300])
                    continue
                self.row.requests += 1
                self.answers.append((index, streamed.answer))

    def _abort(self, rid: str) -> None:
        with suppress(OSError, RuntimeError):
            self._rig.server.post("/abort_request", {"rid": rid})


class Soak:
    """Injects one fault after the other and waits until drafting resumes."""

    def __init__(self, rig: Rig, load: Load, seed: int) -> None:
        self._rig, self._load = rig, load
        self._random = random.Random(seed)
        self.rows: dict[str, Row] = {}
        self.draft_memory: dict[int, list[float]] = {}  # MiB after each fault, by process id
        self._faults: dict[str, Callable[[], None]] = {
            "none": lambda: time.sleep(5),
            "SIGKILL of the draft server": self._kill,
            "SIGSTOP of the draft server, 1 to 8 s": self._pause,
            "wire cut, 8 s": lambda: self._wire(1.0, (Fault.DROP,), 8),
            "flush_cache": self._flush,
            "drafting off and on": self._switch,
            "K and fan-out changed": self._configure,
            "generation paused, in place or retracted, 2 s": self._rest,
            "half of all messages: any of the six": lambda: self._wire(0.5, FAULTS),
        }
        for fault in FAULTS:
            self._faults[f"30 % of messages: {fault.value}"] = lambda f=fault: self._wire(0.3, (f,))

    def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        order: list[str] = []
        while time.monotonic() < end:
            if not order:
                order = list(self._faults)
                self._random.shuffle(order)
            self._inject(order.pop())

    def _inject(self, name: str) -> None:
        row = self._load.row = self.rows.setdefault(name, Row())
        row.injected += 1
        before = sum(self._rig.proxy.happened.values())
        self._faults[name]()
        began = time.monotonic()
        state = ssd_state(self._rig.server)
        if not eventually(lambda: self._hits() > state["hits"], RESUME_SECONDS, 0.1):
            raise RuntimeError(f"after {name!r}: drafting does not resume; {state}")
        row.resumed.append(time.monotonic() - began)
        row.messages += sum(self._rig.proxy.happened.values()) - before
        draft = self._rig.draft
        if draft.process is not None:
            self.draft_memory.setdefault(draft.process.pid, []).append(draft.memory_mb)
        shown = f"{row.requests} requests, resumed after {row.resumed[-1]:.1f} s"
        print(f"[{time.strftime('%H:%M:%S')}] {name}: {shown}", flush=True)

    def _hits(self) -> int:
        return int(ssd_state(self._rig.server)["hits"])

    def _kill(self) -> None:
        self._rig.draft.signal(signal.SIGKILL)
        time.sleep(self._random.uniform(0, 3))
        self._rig.draft.start()

    def _pause(self) -> None:
        self._rig.draft.signal(signal.SIGSTOP)
        time.sleep(self._random.uniform(1, 8))
        self._rig.draft.signal(signal.SIGCONT)

    def _wire(self, share: float, faults: tuple[Fault, ...], seconds: float = 6) -> None:
        self._rig.proxy.faults(share, faults)
        time.sleep(seconds)
        self._rig.proxy.heal()

    def _rest(self) -> None:
        mode = self._random.choice(("in_place", "retract"))
        self._rig.server.post("/pause_generation", {"mode": mode})
        time.sleep(2)
        self._rig.server.post("/continue_generation", {})

    def _flush(self) -> None:
        with suppress(RuntimeError):  # SGLang refuses while requests run
            self._rig.server.post("/flush_cache", {})

    def _switch(self) -> None:
        configure(self._rig.server, ssd_drafting=0)
        time.sleep(3)
        configure(self._rig.server, ssd_drafting=1)

    def _configure(self) -> None:
        k, f = self._random.randint(1, 4), self._random.randint(1, 6)
        configure(self._rig.server, ssd_num_steps=k, ssd_fan_out=f)
        time.sleep(4)
        configure(self._rig.server, ssd_num_steps=4, ssd_fan_out=4)


def make_bodies(seed: int) -> list[dict[str, Any]]:
    """Requests of every kind on held-out texts."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET_PATH)
    texts = [json.loads(line).get("text", "") for line in HELD_OUT.read_text().splitlines()]
    flat = [t for text in texts for t in tokenizer(text, add_special_tokens=False)["input_ids"]]
    r = random.Random(seed)
    prompts = []
    for _ in range(32):
        at = r.randrange(len(flat) - 700)
        prompts.append(flat[at : at + r.choice([1, 5, 17, 64, 65, 200, 600])])
    return RequestMix(prompts, len(tokenizer), seed).draw_many(BODIES, max_new_tokens=48)


def judge(rig: Rig, bodies: list[dict[str, Any]], expected: list[Any], load: Load) -> Report:
    """Compare every answer with the one without drafts."""
    configure(rig.server, ssd_drafting=0)
    report = Report()
    for index, answer in load.answers:
        report.merge(compare(rig.server, [bodies[index]], [expected[index]], [answer], "soak"))
    return report


def _print_table(rows: dict[str, Row]) -> None:
    print("\n| fault | injected | messages hit | requests served | longest pause s | resumed s |")
    print("|---|---|---|---|---|---|")
    for name, row in sorted(rows.items()):
        row.resumed = row.resumed or [float("inf")]
        worst, mean = max(row.resumed), sum(row.resumed) / len(row.resumed)
        print(
            f"| {name} | {row.injected} | {row.messages} | {row.requests} | "
            f"{row.longest_gap:.2f} | mean {mean:.1f}, max {worst:.1f} |"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    bodies = make_bodies(args.seed)
    folder = Path(tempfile.mkdtemp(prefix="soak_"))
    print(f"logs: {folder}", flush=True)
    flags = ("--max-total-tokens", "6000", "--max-sessions", "64")
    with Rig(folder, draft=flags, target=("--max-total-tokens", "8000"), seed=args.seed) as rig:
        configure(rig.server, ssd_drafting=0)
        expected = send_all(rig.server, bodies, 2)
        configure(rig.server, ssd_drafting=1)
        load = Load(rig, bodies, args.concurrency, args.seed)
        memory = [(rig.scheduler().memory_info().rss / 2**20, rig.draft.memory_mb)]
        soak = Soak(rig, load, args.seed)
        for _ in range(4):
            try:
                soak.run(args.minutes * 15)
            except RuntimeError as e:
                load.errors.append(str(e))
            memory.append((rig.scheduler().memory_info().rss / 2**20, rig.draft.memory_mb))
        load.stop()
        rig.wait_up(DRAFT_READY_SECONDS)
        whole = eventually(rig.pools_whole, 60)
        report = judge(rig, bodies, expected, load)
        state = ssd_state(rig.server)
    _print_table(soak.rows)
    served = sum(row.requests for row in soak.rows.values())
    aborted = sum(row.aborted for row in soak.rows.values())
    print(
        f"\n{served} requests served, {aborted} aborted, {report.tokens} tokens compared: "
        f"{len(report.differences)} differences, {report.ties} near ties, "
        f"{len(load.errors)} errors\nKV pools whole: {whole}\n"
        "memory of scheduler and (restarted) draft server in MiB, by quarters: "
        f"{[(round(a), round(b)) for a, b in memory]}\n"
        "memory of each draft server after its first and its last fault: "
        f"{[(round(m[0]), round(m[-1]), len(m)) for m in soak.draft_memory.values()]}\n"
        f"faults by message: {dict(rig.proxy.happened)}\n"
        f"verifier: {json.dumps({k: v for k, v in state.items() if k != 'draft_stats'})}"
    )
    for line in (*report.differences[:10], *load.errors[:10]):
        print(line)
    return int(bool(report.differences or load.errors or not whole))


if __name__ == "__main__":
    sys.exit(main())
