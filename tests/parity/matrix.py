"""`python -m tests.parity.matrix`: the bundled pair over all of K, fan-out and concurrency.

64 prompts of 1 to 1500 tokens, 512 new tokens each, in fp32 on the CPU. Greedy texts with drafting
off are compared with plain SGLang, then with every (K, F), many at a time and alone; seeded texts
at temperature 0.8 with drafting off, for every backup, twice.

Prints one JSON object a comparison and a summary; exit status 1 when anything differs, or when a
run had no drafts or no hits. It takes one to two hours of two cores; `--prompts`, `--new-tokens`,
`--steps` and `--fan-outs` make it shorter.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import AutoTokenizer

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from parity.harness import Report, compare, configure, send_all, ssd_state  # noqa: E402
from servers import ServerProcess  # noqa: E402
from sgl_ssd.models import TARGET_PATH  # noqa: E402

HELD_OUT = TESTS.parent / "benchmarks" / "pairs" / "held_out.jsonl"
LENGTHS = [1, 2, 3, 5, 9, 16, 17, 40, 64, 65, 100, 150, 250, 400, 700, 1500]
BACKUPS = {"none": 0, "fast": 1, "jit": 2, "auto": 3}
READY_S = 900.0  # such a run may share its machine
Body = dict[str, Any]


def prompts(count: int) -> list[list[int]]:
    """Token ids of `count` prompts of many lengths and different beginnings."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET_PATH)
    rows = [json.loads(line) for line in HELD_OUT.read_text().splitlines()]
    flat: list[int] = []
    for row in rows:
        flat += (
            tokenizer(row["text"], add_special_tokens=False)["input_ids"] if "text" in row else []
        )
    while len(flat) < count * 1600:
        flat += flat
    return [flat[i * 1531 : i * 1531 + LENGTHS[i % len(LENGTHS)]] for i in range(count)]


def bodies(ids: list[list[int]], new_tokens: int, **sampling: Any) -> list[Body]:
    params = {"max_new_tokens": new_tokens, "temperature": 0.0, "ignore_eos": True, **sampling}
    return [
        {"input_ids": prompt, "sampling_params": params | {"sampling_seed": 1000 + i}}
        for i, prompt in enumerate(ids)
    ]


class Matrix:
    """Compares answers with drafts against answers without, and counts."""

    def __init__(self, server: ServerProcess, log: Path | None) -> None:
        self.server, self.log = server, log
        self.total = Report()

    def without_drafts(self, requests: list[Body], concurrency: int) -> list[Any]:
        configure(self.server, ssd_drafting=0)
        return send_all(self.server, requests, concurrency)

    def check(
        self, name: str, requests: list[Body], want: list[Any], concurrency: int, **settings: int
    ) -> None:
        """Answer `requests` with drafts and compare with `want`."""
        configure(self.server, ssd_drafting=1, **settings)
        before, started = ssd_state(self.server), time.monotonic()
        answers = send_all(self.server, requests, concurrency)
        seconds, after = time.monotonic() - started, ssd_state(self.server)
        configure(self.server, ssd_drafting=0)
        moved = {n: after[n] - before[n] for n in ("rounds", "drafted", "accepted", "hits")}
        report = compare(self.server, requests, want, answers, name)
        if not all(moved.values()):
            report.differences.append(f"{name}: inconclusive, {moved}")
        self.note(
            name, report, concurrency=concurrency, **settings, **moved, seconds=round(seconds)
        )

    def note(self, name: str, report: Report, **more: Any) -> None:
        self.total.merge(report)
        self.write(name, report, **more)

    def write(self, name: str, report: Report, **more: Any) -> None:
        """One line of JSON, and the first differences in words."""
        found = {"compared": report.compared, "tokens": report.tokens, "near_ties": report.ties}
        line = json.dumps({"run": name, **found, "differences": len(report.differences), **more})
        tqdm.write(line, file=sys.stdout)
        sys.stdout.flush()
        if self.log:
            with self.log.open("a") as sink:
                sink.write(line + "\n")
        for difference in report.differences[:5]:
            tqdm.write(difference, file=sys.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 4, 7, 12], metavar="K")
    parser.add_argument("--fan-outs", type=int, nargs="+", default=[1, 3, 8], metavar="F")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[16, 1], metavar="N")
    parser.add_argument("--log", type=Path, help="append the JSON lines to this file")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="parity_"))
    ids = prompts(args.prompts)
    greedy = bodies(ids, args.new_tokens)
    seeded = bodies(ids, args.new_tokens, temperature=0.8, top_p=0.95)
    most = max(args.concurrency)
    common = ["--device", "cpu", "--dtype", "float32"]
    flags = [*common, "--speculative-num-steps", str(max(args.steps))]
    with ServerProcess(
        "sgl_ssd.launch_server", flags, log=folder / "server.log", ready_seconds=READY_S
    ) as server:
        matrix = Matrix(server, args.log)
        want = matrix.without_drafts(greedy, most)
        want_seeded = matrix.without_drafts(seeded, most)
        flags = [*common, "--model-path", str(TARGET_PATH), "--disable-overlap-schedule"]
        with ServerProcess(
            "sglang.launch_server", flags, log=folder / "plain.log", ready_seconds=READY_S
        ) as plain:
            report = compare(server, greedy, send_all(plain, greedy, most), want, "plain")
            matrix.note("drafting off against plain SGLang", report)
        configs = list(product(args.concurrency, args.steps, args.fan_outs))
        for concurrency, steps, fan_out in tqdm(configs, desc="T=0"):
            settings = {"ssd_num_steps": steps, "ssd_fan_out": fan_out, "ssd_backup": 3}
            matrix.check("T=0", greedy, want, concurrency, **settings)
        for (backup, number), _ in tqdm(list(product(BACKUPS.items(), (1, 2))), desc="T=0.8"):
            settings = {"ssd_num_steps": min(4, max(args.steps)), "ssd_fan_out": 3}
            settings["ssd_backup"] = number
            matrix.check(f"T=0.8, backup {backup}", seeded, want_seeded, most, **settings)
    matrix.write("all", matrix.total)
    try:
        matrix.total.check()
    except AssertionError as e:
        print(e)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
