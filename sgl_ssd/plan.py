"""What to set, and how fast that will be: the planner on the command line.

    python -m sgl_ssd.plan --server http://127.0.0.1:30000
    python -m sgl_ssd.plan benchmarks/results/FILE.json --pair 32b --batch 1,16 --draft-speed 2

Measurements come from a running server (its `/server_info`), from a result file of the benchmarks,
or from a file that states them (see `sgl_ssd.measurements`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sgl_ssd import measurements, planner
from sgl_ssd.client import Client, ServerError
from sgl_ssd.errors import ConfigError
from sgl_ssd.planner import Deployment, Measurements, Prediction
from sgl_ssd.protocol import MAX_STEPS


@dataclass(frozen=True)
class Plan:
    """The best settings for one batch, beside what else could be run. Speeds in tokens/s."""

    prediction: Prediction
    plain: float
    sd_steps: int
    sd: float

    @property
    def worth_it(self) -> bool:
        return self.prediction.tokens_per_s > self.plain

    def flags(self) -> str:
        """The launcher's flags for it."""
        if not self.worth_it:
            return "--ssd-drafting off"
        setting = self.prediction.setting
        counts = [str(f) for f in setting.fan_out]
        fan_out = counts[0] if len(set(counts)) == 1 else ",".join(counts)
        return (
            f"--speculative-num-steps {setting.num_steps} --ssd-fan-out {fan_out} "
            f"--ssd-backup {setting.backup}"
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            **asdict(self.prediction),
            "plain_tokens_per_s": self.plain,
            "sd_num_steps": self.sd_steps,
            "sd_tokens_per_s": self.sd,
            "flags": self.flags(),
        }


def make_plan(
    m: Measurements, where: Deployment, max_steps: int, uniform: bool, backups: Sequence[str]
) -> Plan:
    """The best settings of K up to `max_steps` for a deployment."""
    steps = range(1, max_steps + 1)
    sd_steps, sd = planner.best_sd(m, where.batch, steps)
    return Plan(
        planner.best(m, where, steps, backups, uniform),
        planner.plain_tokens_per_s(m, where.batch),
        sd_steps,
        sd,
    )


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        "python -m sgl_ssd.plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = found.add_argument
    add("measurements", nargs="?", type=Path, help="a JSON file; see sgl_ssd.measurements")
    add("--server", metavar="URL", help="measure a running server instead")
    add("--api-key", metavar="KEY", help="what the server was given as --api-key")
    add("--pair", help="which pair of a benchmark with several")
    add("--temperature", type=float, default=0.0, help="which results of a benchmark")
    add("--batch", default="1,4,16,64", metavar="B,...", help="requests at a time")
    add("--max-steps", type=int, default=12, metavar="K", help="largest K to consider")
    add("--max-branch-rows", type=int, default=256, metavar="N", help="rows of a draft step")
    add("--uniform", action="store_true", help="one fan-out for all accepted lengths")
    what_if = found.add_argument_group("what if")
    add = what_if.add_argument
    add("--draft-speed", type=float, default=1.0, metavar="X", help="the draft were X times faster")
    add("--target-speed", type=float, default=1.0, metavar="X", help="so were the target")
    add("--draft-gpus", type=int, default=1, metavar="N", help="N draft servers shared the rows")
    add("--wire-ms", type=float, default=0.0, metavar="MS", help="round trips took MS longer")
    found.add_argument("--json", action="store_true", help="print JSON")
    return found


def _load(args: argparse.Namespace) -> Any:
    if (args.measurements is None) == (args.server is None):
        raise ConfigError("give a file of measurements, or --server URL")
    try:
        if args.server is None:
            return json.loads(args.measurements.read_text())
        return Client(args.server, args.api_key).get("/server_info")
    except ServerError as e:
        raise ConfigError(str(e)) from None
    except (OSError, ValueError) as e:
        raise ConfigError(f"{args.measurements or args.server}: {e}") from None


def plans_for(args: argparse.Namespace) -> tuple[Measurements, list[Plan]]:
    """What is known, and one plan for each batch. Raises `ConfigError`."""
    if not 1 <= args.max_steps <= MAX_STEPS:
        raise ConfigError(f"--max-steps {args.max_steps}: must lie in 1..{MAX_STEPS}")
    if min(args.draft_speed, args.target_speed) <= 0:
        raise ConfigError("--draft-speed and --target-speed must be positive")
    try:
        batches = [int(b) for b in args.batch.split(",")]
    except ValueError:
        raise ConfigError(f"--batch {args.batch!r}: numbers separated by commas") from None
    m = measurements.read(_load(args), args.pair, args.temperature).what_if(
        draft_speed=args.draft_speed, target_speed=args.target_speed, wire_ms=args.wire_ms
    )
    backups = ("jit", "fast") if m.fast else ("jit", "none")
    deployments = [Deployment(b, args.max_branch_rows, args.draft_gpus) for b in batches]
    return m, [make_plan(m, d, args.max_steps, args.uniform, backups) for d in deployments]


def table(plans: Sequence[Plan]) -> Table:
    """What is expected at each batch."""
    made = Table(title="Expected, tokens per second over the batch")
    for name in ("batch", "plain", "SD (K)", "SSD", "/ plain", "/ SD"):
        made.add_column(name, justify="right")
    for name in ("K", "fan-out", "backup"):
        made.add_column(name)
    for name in ("a round", "hits", "ms", "draft steps in time"):
        made.add_column(name, justify="right")
    for plan in plans:
        p = plan.prediction
        made.add_row(
            str(p.batch), f"{plan.plain:.0f}", f"{plan.sd:.0f} ({plan.sd_steps})",
            f"{p.tokens_per_s:.0f}", f"{p.tokens_per_s / plan.plain:.2f}",
            f"{p.tokens_per_s / plan.sd:.2f}", str(p.setting.num_steps),
            ",".join(map(str, p.setting.fan_out)), p.setting.backup,
            f"{p.tokens_per_round:.2f}", f"{p.hit_rate:.2f}", f"{p.round_ms:.1f}",
            f"{p.steps_in_time:.1f}",
            style="" if plan.worth_it else "dim",
        )  # fmt: skip
    return made


def recommendation(plans: Sequence[Plan]) -> str:
    """One line: what to start with for the first batch, and up to which batch drafting pays."""
    first = plans[0]
    if not first.worth_it:
        return f"At {first.prediction.batch} at a time drafting does not pay: {first.flags()}"
    paying = [p.prediction.batch for p in plans if p.worth_it]
    text = f"For {first.prediction.batch} at a time: {first.flags()}"
    if len(paying) < len(plans):
        text += f"  (drafting pays at {', '.join(map(str, paying))} of the batches above)"
    return text


def network(m: Measurements) -> str:
    """One line: how far away the draft server is; empty where that is no network."""
    if not m.wire_ms:
        return ""
    text = f"Network round trip to the draft server: {m.wire_ms:.2f} ms measured"
    if m.longer_ms:
        text += f", {m.wire_ms + m.longer_ms:.2f} ms assumed"
    return text + ("; hits that are sent ahead do not wait for it." if m.push else ".")


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        m, plans = plans_for(args)
    except ConfigError as e:
        print(f"sgl_ssd.plan: {e}", file=sys.stderr)
        return 2
    if args.json:
        wire = {"wire_ms": m.wire_ms + m.longer_ms}
        print(json.dumps([plan.as_dict() | wire for plan in plans], indent=1))
        return 0
    console = Console()
    console.print(table(plans))
    for line in (network(m), recommendation(plans)):
        if line:
            console.print(line, soft_wrap=True, highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
