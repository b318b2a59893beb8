"""The whole comparison in one command, on whatever hardware is at hand.

    python -m benchmarks.suite --pair 32b=TARGET,DRAFT --out results/NAME [-- SGLANG FLAGS]
    python -m benchmarks.suite --smoke --out build/smoke

Which systems run depends on the GPUs: with one, plain SGLang, STANDALONE at several K, NGRAM, and
ours with the draft on the host's CPU; with two, also ours with the draft on the second GPU, tensor
parallelism and two replicas; without, plain SGLang and ours. Ours runs with drafting off, at
several K and F, with every backup and both verifications, and with all of that left to the server.
One server runs at a time, and every repetition starts them anew in turn. `--smoke` runs every
workload on the bundled pair, a few tokens each: that it works, not how fast.

Writes `results.json`, logs, `report.md` and plots to the folder.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks import report, serve, workloads
from benchmarks.environment import describe
from sgl_ssd.models import DRAFT_PATH, TARGET_PATH

STANDALONE_STEPS = (2, 4, 6)
OURS_STEPS = 8
SETTINGS = (
    "off", "2,4", "4,4", "4,8", "6,4", "8,4", "4,4,none", "4,4,fast", "4,4,jit",
    "4,4,auto,rejection", "auto",
)  # fmt: skip


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    workloads: tuple[str, ...]
    requests: str
    rates: str
    tokens: int
    repeats: int
    temperatures: str
    settings: tuple[str, ...]
    prompt_tokens: int | None = None
    budget_s: float = 6 * 3600


FULL = Size(
    tuple(workloads.WORKLOADS), "1:8,4:16,16:32,64:64,128:128", "1:32,4:64", 256, 3, "0,1",
    SETTINGS,
)  # fmt: skip
QUICK = Size(("code", "chat"), "1:4,4:8,16:16", "", 192, 1, "0", ("off", "4,4", "6,4", "auto"))
SMOKE = Size(
    tuple(workloads.WORKLOADS), "2:2", "4:4", 12, 1, "0",
    ("off", "4,4", "3,2,none", "3,2,fast", "3,2,jit", "4,4,auto,rejection", "auto"), 200, 600,
)  # fmt: skip


def systems(pair: str, gpus: int) -> list[str]:
    """What to start, as `--server` takes it: the baselines first."""
    if gpus == 0:
        return [f"{pair}:ar", f"{pair}:ssd@{OURS_STEPS}"]
    found = [f"{pair}:ar:0"]
    if gpus > 1:
        found += [f"{pair}:tp2:0", f"{pair}:replicas:0"]
    found += [f"{pair}:standalone@{k}:0" for k in STANDALONE_STEPS]
    found += [f"{pair}:ngram@8:0", f"{pair}:ssd-cpu@{OURS_STEPS}:0"]
    if gpus > 1:
        found.append(f"{pair}:ssd@{OURS_STEPS}:0:1")
    return found


def arguments(
    pairs: list[str], size: Size, gpus: int, out: Path, attached: list[str], common: list[str]
) -> list[str]:
    """The command line of `benchmarks.serve`."""
    argv = [f"--pair={pair}" for pair in pairs]
    if attached:
        argv += [f"--attach={server}" for server in attached]
    else:
        names = [pair.partition("=")[0] for pair in pairs]
        argv += [f"--server={server}" for name in names for server in systems(name, gpus)]
        if size is not SMOKE:
            argv.append("--alternate")
    argv += [f"--ssd={setting}" for setting in size.settings]
    argv += ["--workloads", ",".join(size.workloads), "--requests", size.requests]
    argv += ["--tokens", str(size.tokens), "--repeats", str(size.repeats)]
    argv += ["--temperatures", size.temperatures, "--budget-s", str(size.budget_s)]
    if size.rates:
        argv += ["--rates", size.rates]
    if size.prompt_tokens is not None:
        argv += ["--prompt-tokens", str(size.prompt_tokens)]
    return [*argv, "--out", str(out / "results.json"), "--", *common]


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    own, common = serve.split_common(argv)
    parser = argparse.ArgumentParser(
        "python -m benchmarks.suite",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    bundled = f"bundled={TARGET_PATH},{DRAFT_PATH}"
    add("--pair", action="append", metavar="NAME=TARGET,DRAFT", help="default: the bundled pair")
    add("--smoke", action="store_true", help="everything once, on the bundled pair, in a minute")
    add("--quick", action="store_true", help="few settings and loads, once")
    add("--attach", action="append", default=[], metavar="NAME:SYSTEM[@K]=URL",
        help="use running servers instead of starting any")  # fmt: skip
    add("--out", type=Path, required=True, help="folder for results, logs, report and plots")
    args = parser.parse_args(own)
    size = SMOKE if args.smoke else QUICK if args.quick else FULL
    gpus = len(describe()["gpus"])
    if gpus == 0 and "--device" not in common:
        common = ["--device", "cpu", "--dtype", "float32", *common]
    pairs = args.pair or [bundled]
    status = serve.main(arguments(pairs, size, gpus, args.out, args.attach, common))
    results = args.out / "results.json"
    if not results.exists():
        return status
    data = json.loads(results.read_text())
    images = []
    if importlib.util.find_spec("matplotlib") is not None:
        images = report.plots([data], args.out)
    else:
        print("no plots: install the extra `bench`", file=sys.stderr)
    (args.out / "report.md").write_text(report.render([data], images), encoding="utf-8")
    print(f"{args.out / 'report.md'}: {len(data['results'])} measurements")
    return status or (1 if data.get("failed") else 0)


if __name__ == "__main__":
    sys.exit(main())
