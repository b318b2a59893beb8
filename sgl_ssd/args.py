"""Command line of `sgl_ssd.launch_server`: SGLang's flags, and ours beside them."""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from sgl_ssd import gpus
from sgl_ssd.config import VERIFICATIONS, DraftServerConfig, VerifierConfig, check_num_steps
from sgl_ssd.errors import ConfigError
from sgl_ssd.fan_out import AUTO, AUTO_MAX_FAN_OUT, parse_fan_out
from sgl_ssd.keys import load_client_keys
from sgl_ssd.models import DRAFT_PATH, TARGET_PATH
from sgl_ssd.protocol import BACKUPS

DEFAULT_NUM_STEPS = 4
DEFAULT_FAN_OUT = "4"
DEFAULT_BACKUP = "auto"
MODES = ("ssd", "sync")
AUTO_NUM_STEPS = 7
"""The K that a start with `auto` makes room for."""


@dataclass(frozen=True)
class LaunchPlan:
    """What to start.

    `drafts` is empty when already running draft servers are used; `sglang_argv` is the command
    line that SGLang parses. GPU ids are those on a host that has GPUs; a target that was told to
    serve on the CPU has none. `mem_fraction_static`, if not None, is the target's of what a draft
    on the same GPU leaves: then that draft must be ready before the target starts.
    """

    target_path: str
    draft_path: str | None
    drafts: list[DraftServerConfig]
    verifier: VerifierConfig
    sglang_argv: list[str]
    trust_remote_code: bool
    target_gpus: list[int]
    drafts_on_gpus: bool
    mem_fraction_static: float | None


def add_ssd_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags that are ours, and those of SGLang's whose meaning we take over."""
    group = parser.add_argument_group(
        "Speculative Speculative Decoding",
        "Every other flag is SGLang's. Without --model-path the bundled pair is served.",
    )
    add = group.add_argument
    add("--model-path", "--model", metavar="PATH", help="the target model")
    add(
        "--speculative-draft-model-path", "--speculative-draft-model",
        metavar="PATH", help="the draft model, of the target's vocabulary",
    )  # fmt: skip
    add(
        "--speculative-num-steps", type=_steps, default=DEFAULT_NUM_STEPS, metavar="K",
        help="drafts per round; auto: at most "
        f"{AUTO_NUM_STEPS}, as the load asks for (default: %(default)s)",
    )  # fmt: skip
    add(
        "--ssd-mode", choices=MODES, default="ssd",
        help="ssd: draft while the target verifies; sync: only after each outcome, which is "
        "ordinary speculative decoding, to compare with (default: %(default)s)",
    )  # fmt: skip
    add(
        "--ssd-fan-out", metavar="F[,F...]",
        help="bonus tokens to pre-speculate for each accepted length: one number for all, or K+1 "
        f"numbers; auto: as the load asks for (default: {DEFAULT_FAN_OUT})",
    )  # fmt: skip
    add(
        "--ssd-backup", choices=BACKUPS,
        help="what the draft server answers when it did not predict the outcome: draft now (jit), "
        "continue from the request's own text (fast), nothing (none); auto: jit for one request "
        f"at a time, fast for more (default: {DEFAULT_BACKUP})",
    )  # fmt: skip
    add(
        "--ssd-drafting",
        choices=("on", "off"),
        default="on",
        help="off: the same verifier without any drafts (default: %(default)s)",
    )
    add(
        "--ssd-push", choices=("on", "off"), default="on",
        help="on: the draft server sends a speculation cache ahead once it is complete, so that a "
        "hit waits for nothing; off: every round waits for its answer (default: %(default)s)",
    )  # fmt: skip
    add(
        "--ssd-verification", choices=VERIFICATIONS, default="coupled",
        help="how drafts are verified at temperature > 0: against the target's own sample, drawn "
        "with noise that the draft shares (coupled), or by rejection sampling, where the text "
        "depends on the drafts too, its distribution does not (default: %(default)s)",
    )  # fmt: skip
    add(
        "--ssd-saguaro-c", type=float, default=1.0, metavar="C",
        help="rejection: what the draft multiplies the mass of the pre-speculated tokens by, "
        "0 < C <= 1; less means more hits and fewer accepted drafts (default: %(default)s)",
    )  # fmt: skip
    add(
        "--ssd-proposal-top-m", type=int, default=64, metavar="M",
        help="rejection: tokens in the distribution that a draft is sampled from "
        "(default: %(default)s)",
    )  # fmt: skip
    add(
        "--ssd-draft-endpoint", metavar="ENDPOINT[,...]", nargs="+",
        help="use the draft server that listens here (ipc:///PATH or tcp://HOST:PORT), or several, "
        "which share the requests, instead of starting one",
    )  # fmt: skip
    add(
        "--ssd-draft-keys", metavar="DIR",
        help="folder with this verifier's keys, made by `python -m sgl_ssd.keys`; for a draft "
        "server that was started with --keys",
    )  # fmt: skip
    add(
        "--ssd-draft-required",
        action="store_true",
        help="stop when the draft server is lost (of several: when none is left), instead of "
        "serving on without drafts",
    )
    add(
        "--ssd-draft-timeout-ms",
        type=float,
        metavar="MS",
        help="longest wait for drafts in a round (default: from measured times)",
    )
    add(
        "--ssd-draft-start-timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="longest wait for the draft server at start, in seconds (default: %(default)s)",
    )
    add(
        "--ssd-draft-device",
        default="auto",
        metavar="DEVICE",
        help="cuda or cpu (default: the target's)",
    )
    add(
        "--ssd-draft-base-gpu-id",
        type=int,
        metavar="ID",
        help="GPU of the first draft server (default: the one after the target's)",
    )
    add(
        "--ssd-draft-replicas", type=int, default=1, metavar="R",
        help="draft servers to start, each on a GPU of its own, that share the requests; with "
        "--dp-size N they are dealt out to the replicas of the target (default: %(default)s)",
    )  # fmt: skip
    add(
        "--ssd-draft-gpu-ids", metavar="ID[,ID...]",
        help="GPU of each draft server (default: those from --ssd-draft-base-gpu-id on)",
    )  # fmt: skip
    add(
        "--ssd-draft-tp-size", type=int, default=1, metavar="1",
        help="a draft server uses one GPU; for more GPUs see --ssd-draft-replicas",
    )  # fmt: skip
    add(
        "--ssd-allow-shared-gpu", action="store_true",
        help="let a draft server use a GPU of the target, each with its share of the memory "
        "(--mem-fraction-static, --ssd-draft-mem-fraction-static)",
    )  # fmt: skip
    add(
        "--ssd-max-branch-rows",
        type=int,
        default=256,
        metavar="N",
        help="most rows in one step of the draft model, over all requests (default: %(default)s)",
    )
    add("--ssd-draft-dtype", default="auto", metavar="DTYPE", help="dtype of the draft model")
    add("--ssd-draft-attention-backend", metavar="NAME",
        help="attention backend of the draft; default: triton on a GPU, whose steps take the host "
        "least time")  # fmt: skip
    add(
        "--ssd-draft-mem-fraction-static", type=float, metavar="F",
        help="share of the draft GPU's memory for weights and KV",
    )  # fmt: skip
    add(
        "--ssd-draft-max-total-tokens",
        type=int,
        metavar="N",
        help="size of the draft's KV pool in tokens",
    )
    add("--ssd-draft-context-length", type=int, metavar="N", help="context of the draft model")
    add(
        "--ssd-trace", metavar="FILE",
        help="write a timeline of rounds in both processes to this file, for "
        "`python -m sgl_ssd.timeline`, Perfetto or chrome://tracing",
    )  # fmt: skip
    add(
        "--ssd-draft-http-port",
        type=int,
        metavar="PORT",
        help="serve the draft server's own /health and /metrics on this loopback port; further "
        "draft servers take the ports after it",
    )


def _steps(text: str) -> int | str:
    return text if text == AUTO else int(text)


def parse(argv: list[str], private_endpoint: str) -> LaunchPlan:
    """Split `argv` between SGLang and us.

    `private_endpoint` is where a draft server of our own will listen. Raises `ConfigError`;
    argparse itself exits with status 2 on malformed flags.
    """
    parser, seen = _parsers()
    ours, rest = parser.parse_known_args(argv)
    _refuse_misspelt(rest, parser)
    theirs, _ = seen.parse_known_args(rest)
    if theirs.speculative_algorithm not in (None, "SSD", "ssd"):
        raise ConfigError(
            f"--speculative-algorithm {theirs.speculative_algorithm}: this launcher serves SSD; "
            "use `python -m sglang.launch_server` for other algorithms"
        )
    plan = _plan(ours, theirs, private_endpoint)
    plan.sglang_argv.extend(rest)
    if theirs.speculative_algorithm is None:
        plan.sglang_argv.extend(["--speculative-algorithm", "SSD"])
    plan.sglang_argv.extend(["--speculative-num-steps", str(ours.speculative_num_steps)])
    if plan.mem_fraction_static is not None:
        plan.sglang_argv.extend(["--mem-fraction-static", str(plan.mem_fraction_static)])
    return plan


def _refuse_misspelt(rest: list[str], parser: argparse.ArgumentParser) -> None:
    """SGLang would refuse them too, but a page of usage and half a start later."""
    for word in rest:
        flag = word.partition("=")[0]
        if flag.startswith("--ssd-"):
            alike = difflib.get_close_matches(flag, parser._option_string_actions, 1)
            hint = f"; did you mean {alike[0]}?" if alike else ""
            raise ConfigError(f"{flag}: there is no such flag{hint}")


def from_keywords(
    kwargs: Mapping[str, Any], private_endpoint: str
) -> tuple[LaunchPlan, dict[str, Any]]:
    """Split the keyword arguments of an engine as `parse` splits a command line.

    Names are those of the flags, with underscores. Returns the plan and the keyword arguments
    for SGLang's `ServerArgs`. Raises `ConfigError`.
    """
    parser, seen = _parsers()
    ours, theirs = parser.parse_args([]), seen.parse_args([])
    rest = dict(kwargs)
    for name in [name for name in rest if hasattr(ours, name)]:
        setattr(ours, name, rest.pop(name))
    unknown = sorted(name for name in rest if name.startswith("ssd_"))
    if unknown:
        raise ConfigError(f"unknown arguments: {', '.join(unknown)}")
    for name in ("ssd_drafting", "ssd_push"):
        if isinstance(getattr(ours, name), bool):
            setattr(ours, name, "on" if getattr(ours, name) else "off")
    if ours.ssd_fan_out is not None and not isinstance(ours.ssd_fan_out, str):
        counts = ours.ssd_fan_out
        ours.ssd_fan_out = ",".join(map(str, [counts] if isinstance(counts, int) else counts))
    if isinstance(ours.ssd_draft_endpoint, str):
        ours.ssd_draft_endpoint = [ours.ssd_draft_endpoint]
    if ours.ssd_draft_gpu_ids is not None and not isinstance(ours.ssd_draft_gpu_ids, str):
        ids = ours.ssd_draft_gpu_ids
        ours.ssd_draft_gpu_ids = ",".join(map(str, [ids] if isinstance(ids, int) else ids))
    for action in parser._actions:
        value = getattr(ours, action.dest)
        if action.choices is not None and value is not None and value not in action.choices:
            choices = ", ".join(action.choices)
            raise ConfigError(f"{action.option_strings[0]} {value!r}: choose one of {choices}")
    for name in [name for name in rest if hasattr(theirs, name)]:
        setattr(theirs, name, rest[name])
    algorithm = rest.pop("speculative_algorithm", None)
    if algorithm not in (None, "SSD", "ssd"):
        raise ConfigError(
            f"speculative_algorithm {algorithm!r}: this engine runs SSD; "
            "use sglang.Engine for other algorithms"
        )
    plan = _plan(ours, theirs, private_endpoint)
    rest |= {
        "model_path": plan.target_path,
        "speculative_algorithm": "SSD",
        "speculative_num_steps": ours.speculative_num_steps,
    }
    if plan.mem_fraction_static is not None:
        rest["mem_fraction_static"] = plan.mem_fraction_static
    return plan, rest


class _OneLineParser(argparse.ArgumentParser):
    """Says what is wrong, not how everything else would be right."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"sgl_ssd: {message}\n")


def _parsers() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """Our flags, and those of SGLang's that we only read."""
    parser = _OneLineParser("sgl_ssd.launch_server", add_help=False, allow_abbrev=False)
    add_ssd_args(parser)
    seen = _OneLineParser(add_help=False, allow_abbrev=False)
    flags: tuple[tuple[str, dict[str, Any]], ...] = (
        ("--device", {}),
        ("--dtype", {}),
        ("--tp-size", {"type": int, "default": 1}),
        ("--tensor-parallel-size", {"type": int, "dest": "tp_size", "default": 1}),
        ("--tp", {"type": int, "dest": "tp_size", "default": 1}),  # SGLang takes abbreviations
        ("--dp-size", {"type": int, "default": 1}),
        ("--data-parallel-size", {"type": int, "dest": "dp_size", "default": 1}),
        ("--dp", {"type": int, "dest": "dp_size", "default": 1}),
        ("--base-gpu-id", {"type": int, "default": 0}),
        ("--gpu-id-step", {"type": int, "default": 1}),
        ("--nnodes", {"type": int, "default": 1}),
        ("--mem-fraction-static", {"type": float}),
        ("--max-total-tokens", {"type": int}),
        ("--max-running-requests", {"type": int}),
        ("--log-level", {"default": "info"}),
        ("--trust-remote-code", {"action": "store_true"}),
        ("--speculative-algorithm", {}),
        ("--config", {}),
    )
    for flag, kwargs in flags:
        seen.add_argument(flag, **kwargs)
    return parser, seen


def _trace_file(path: str | None) -> str | None:
    """The absolute path of a file that can be written. Raises `ConfigError`."""
    if path is None:
        return None
    path = os.path.abspath(path)
    if os.path.isdir(path) or not os.access(os.path.dirname(path), os.W_OK):
        raise ConfigError(f"--ssd-trace {path}: cannot write a file there")
    return path


def _check_mode(ours: argparse.Namespace) -> None:
    """Fill in what the mode decides. Raises `ConfigError` for what contradicts it."""
    if ours.ssd_mode == "ssd":
        if ours.ssd_fan_out is None:
            ours.ssd_fan_out = DEFAULT_FAN_OUT
        ours.ssd_backup = ours.ssd_backup or DEFAULT_BACKUP
        return
    for flag, value, allowed in (
        ("--ssd-fan-out", ours.ssd_fan_out, "0"),
        ("--ssd-backup", ours.ssd_backup, "jit"),
    ):
        if value not in (None, allowed):
            raise ConfigError(
                f"{flag} {value}: --ssd-mode sync predicts no outcome and drafts after each; "
                f"leave {flag} out"
            )
    if ours.speculative_num_steps == AUTO:
        raise ConfigError("--speculative-num-steps auto: not with --ssd-mode sync; give a number")
    ours.ssd_fan_out, ours.ssd_backup = "0", "jit"


def _endpoints(ours: argparse.Namespace, private_endpoint: str) -> list[str]:
    """Of the draft servers, running ones or those to be started. Raises `ConfigError`."""
    replicas, size = ours.ssd_draft_replicas, ours.ssd_draft_tp_size
    if size != 1:
        raise ConfigError(
            f"--ssd-draft-tp-size {size}: a draft server uses one GPU; for more GPUs start more "
            "servers with --ssd-draft-replicas"
        )
    if replicas < 1:
        raise ConfigError(f"--ssd-draft-replicas {replicas}: must be at least 1")
    if ours.ssd_draft_endpoint is None:
        return [private_endpoint, *(f"{private_endpoint}{i}" for i in range(1, replicas))]
    for flag, given in (
        ("--ssd-draft-replicas", replicas != 1), ("--ssd-draft-gpu-ids", ours.ssd_draft_gpu_ids),
    ):  # fmt: skip
        if given:
            raise ConfigError(
                f"{flag}: is for draft servers that are started here, and --ssd-draft-endpoint "
                "names running ones; leave one of the two out"
            )
    return [e.strip() for given in ours.ssd_draft_endpoint for e in given.split(",") if e.strip()]


def _plan(
    ours: argparse.Namespace, theirs: argparse.Namespace, private_endpoint: str
) -> LaunchPlan:
    """What the flags ask for; `sglang_argv` holds the target's path alone. Raises `ConfigError`."""
    target, draft = ours.model_path, ours.speculative_draft_model_path
    if target is None:
        if theirs.config is not None:
            raise ConfigError(
                f"--config {theirs.config}: SGLang alone reads it; give --model-path and the "
                "flags of SSD on the command line"
            )
        if draft is not None:
            raise ConfigError("--speculative-draft-model-path needs --model-path")
        target, draft = str(TARGET_PATH), str(DRAFT_PATH)
    if draft is None and ours.ssd_draft_endpoint is None:
        raise ConfigError(
            "--speculative-draft-model-path is missing: name a small model of the target's "
            "vocabulary, or a running draft server with --ssd-draft-endpoint"
        )
    endpoints = _endpoints(ours, private_endpoint)
    _check_mode(ours)
    steps_auto, fan_out_auto = ours.speculative_num_steps == AUTO, ours.ssd_fan_out == AUTO
    if steps_auto:
        ours.speculative_num_steps = AUTO_NUM_STEPS
    check_num_steps(ours.speculative_num_steps)
    fan_out = parse_fan_out(
        DEFAULT_FAN_OUT if fan_out_auto else ours.ssd_fan_out, ours.speculative_num_steps
    )
    if ours.ssd_draft_keys is not None:
        if ours.ssd_draft_endpoint is None:
            raise ConfigError("--ssd-draft-keys needs --ssd-draft-endpoint")
        load_client_keys(ours.ssd_draft_keys)
    verifier = VerifierConfig(
        endpoints=endpoints,
        num_steps=ours.speculative_num_steps,
        fan_out=fan_out,
        backup=ours.ssd_backup,
        drafting=ours.ssd_drafting == "on",
        fan_out_auto=fan_out_auto,
        steps_auto=steps_auto,
        push=ours.ssd_push == "on",
        verification=ours.ssd_verification,
        saguaro_c=ours.ssd_saguaro_c,
        proposal_top_m=ours.ssd_proposal_top_m,
        draft_timeout_ms=ours.ssd_draft_timeout_ms,
        draft_required=ours.ssd_draft_required,
        draft_start_timeout_s=ours.ssd_draft_start_timeout,
        draft_keys=ours.ssd_draft_keys,
        trace_file=_trace_file(ours.ssd_trace),
    )
    servers, on_gpus = [], False
    ranks = max(1, theirs.tp_size * theirs.dp_size // max(1, theirs.nnodes))  # on this host
    targets = gpus.target_gpus(theirs.base_gpu_id, theirs.gpu_id_step, ranks)
    memory = gpus.Memory(theirs.mem_fraction_static, ours.ssd_draft_mem_fraction_static)
    if ours.ssd_draft_endpoint is None:
        device = ours.ssd_draft_device
        if device == "auto" and theirs.device is not None:
            device = theirs.device
        on_gpus = device != "cpu" and theirs.device != "cpu"
        placed = gpus.draft_gpus(
            max(targets) + 1, ours.ssd_draft_replicas, ours.ssd_draft_base_gpu_id,
            ours.ssd_draft_gpu_ids,
        )  # fmt: skip
        if on_gpus:
            capped = None not in (theirs.max_total_tokens, ours.ssd_draft_max_total_tokens)
            memory = gpus.share(
                targets, placed, ours.ssd_allow_shared_gpu, replace(memory, capped=capped)
            )
        server = DraftServerConfig(
            endpoint=private_endpoint,
            model_path=draft,
            num_steps=ours.speculative_num_steps,
            # The largest that it may be asked for later.
            fan_out=[AUTO_MAX_FAN_OUT] * len(fan_out) if fan_out_auto else fan_out,
            backup=ours.ssd_backup,
            max_branch_rows=ours.ssd_max_branch_rows,
            device=device,
            base_gpu_id=placed[0],
            dtype=ours.ssd_draft_dtype
            if ours.ssd_draft_dtype != "auto"
            else theirs.dtype or "auto",
            attention_backend=ours.ssd_draft_attention_backend,
            mem_fraction_static=memory.draft,
            max_total_tokens=ours.ssd_draft_max_total_tokens,
            context_length=ours.ssd_draft_context_length,
            max_sessions=(theirs.max_running_requests or 256) * theirs.dp_size,
            trust_remote_code=theirs.trust_remote_code,
            log_level=theirs.log_level,
            http_port=ours.ssd_draft_http_port,
        )
        servers = [
            server
            if len(endpoints) == 1
            else replace(
                server, endpoint=endpoint, name=str(i), base_gpu_id=gpu,
                http_port=server.http_port and server.http_port + i,
            )
            for i, (endpoint, gpu) in enumerate(zip(endpoints, placed, strict=True))
        ]  # fmt: skip
    return LaunchPlan(
        target_path=target,
        draft_path=draft,
        drafts=servers,
        verifier=verifier,
        sglang_argv=["--model-path", target],
        trust_remote_code=theirs.trust_remote_code,
        target_gpus=[] if theirs.device == "cpu" else targets,
        drafts_on_gpus=on_gpus,
        mem_fraction_static=memory.target if memory.in_turn else None,
    )
