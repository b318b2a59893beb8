"""Command line of the draft server."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from sgl_ssd.config import DraftServerConfig
from sgl_ssd.errors import ConfigError
from sgl_ssd.fan_out import parse_fan_out
from sgl_ssd.protocol import BACKUPS


@dataclass(frozen=True)
class ProcessOptions:
    """What concerns this process rather than the draft."""

    num_threads: int | None
    die_with_parent: bool
    parent_pid: int | None


def build_parser() -> argparse.ArgumentParser:
    """The parser; every flag says its unit and default."""
    parser = argparse.ArgumentParser(
        prog="python -m sgl_ssd.draft_server",
        description="Draft server of Speculative Speculative Decoding: drafts ahead for the "
        "verifiers that connect to it.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--endpoint", required=True, help="where to listen: ipc:///PATH or tcp://HOST:PORT")
    add(
        "--keys", default=None,
        help="folder with this server's keys and those of the verifiers it lets in, made by "
        "`python -m sgl_ssd.keys`; needed to listen beyond loopback",
    )  # fmt: skip
    add("--name", default=None, help="what its log calls it, where several write to one")
    add("--model-path", required=True, help="the draft model: a folder or a hub name")
    add("--num-steps", type=int, default=4, help="K: draft tokens per speculation")
    add(
        "--fan-out", default="4",
        help="branches for each number of accepted drafts: one number, or K+1 separated by commas",
    )  # fmt: skip
    add(
        "--backup", choices=BACKUPS, default="jit",
        help="what to answer when the outcome was not predicted: draft now (jit), n-grams of the "
        "text (fast), nothing (none), jit for single requests and fast for batches (auto)",
    )  # fmt: skip
    add("--max-branch-rows", type=int, default=256, help="rows per decode step, all sessions")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where the draft runs")
    add("--base-gpu-id", type=int, default=0, help="which GPU")
    add("--dtype", default="auto", help="weights and KV: auto, float32, bfloat16, float16")
    add("--attention-backend", default=None, help="SGLang's name; default: triton on a GPU")
    add("--mem-fraction-static", type=float, default=None, help="GPU memory for weights and KV")
    add("--max-total-tokens", type=int, default=None, help="size of the KV pool in tokens")
    add("--context-length", type=int, default=None, help="in tokens; default: the model's")
    add("--max-sessions", type=int, default=256, help="requests drafted for at the same time")
    add("--prefill-chunk", type=int, default=512, help="prompt tokens between two decode steps")
    add("--lease-s", type=float, default=60.0, help="forget a verifier silent for this long")
    add("--trust-remote-code", action="store_true", help="run code that comes with the model")
    add(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info",
        help="what to write to stderr",
    )  # fmt: skip
    add(
        "--http-port", type=int, default=None,
        help="serve /health, /metrics and /stats on this port of 127.0.0.1",
    )  # fmt: skip
    add("--num-threads", type=int, default=None, help="torch threads; default: 1 on the CPU")
    add("--die-with-parent", action="store_true", help="exit when the parent process is gone")
    add(
        "--parent-pid", type=int, default=None,
        help="exit when this process is gone (implies --die-with-parent if it is the parent)",
    )  # fmt: skip
    return parser


def parse_args(argv: list[str] | None = None) -> tuple[DraftServerConfig, ProcessOptions]:
    """Raises `ConfigError` for values that cannot work."""
    args = build_parser().parse_args(argv)
    if args.num_threads is not None and args.num_threads < 1:
        raise ConfigError(f"--num-threads {args.num_threads}: must be positive")
    if args.prefill_chunk < 1:
        raise ConfigError(f"--prefill-chunk {args.prefill_chunk}: must be positive")
    if args.http_port is not None and not 0 < args.http_port < 65536:
        raise ConfigError(f"--http-port {args.http_port}: must lie in 1..65535")
    try:
        fan_out = parse_fan_out(args.fan_out, args.num_steps)
    except ConfigError as e:
        raise ConfigError(str(e).replace("--ssd-fan-out", "--fan-out")) from None
    config = DraftServerConfig(
        endpoint=args.endpoint,
        model_path=args.model_path,
        name=args.name,
        num_steps=args.num_steps,
        fan_out=fan_out,
        backup=args.backup,
        max_branch_rows=args.max_branch_rows,
        device=args.device,
        base_gpu_id=args.base_gpu_id,
        dtype=args.dtype,
        attention_backend=args.attention_backend,
        mem_fraction_static=args.mem_fraction_static,
        max_total_tokens=args.max_total_tokens,
        context_length=args.context_length,
        max_sessions=args.max_sessions,
        prefill_chunk=args.prefill_chunk,
        lease_s=args.lease_s,
        trust_remote_code=args.trust_remote_code,
        log_level=args.log_level,
        http_port=args.http_port,
        keys=args.keys,
    )
    options = ProcessOptions(args.num_threads, args.die_with_parent, args.parent_pid)
    return config, options
