"""`python -m sgl_ssd.launch_server`: a SGLang server whose drafts come from a second process.

Starts the draft server and SGLang's own HTTP server with the SSD algorithm, then waits. All
processes end together: on Ctrl-C, on SIGTERM, when the target ends, and when this one is killed.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from sgl_ssd import args as ssd_args
from sgl_ssd import gpus
from sgl_ssd.errors import ConfigError, SSDError, StartRefusedError
from sgl_ssd.host import check_sglang_version
from sgl_ssd.supervisor import DraftServers, TargetProcess, watch_remote
from sgl_ssd.transport import private_ipc_endpoint, remove_private_ipc
from sgl_ssd.vocabulary import check_pair, check_rollback, read_vocabulary

logger = logging.getLogger("sgl_ssd")


def main(argv: list[str] | None = None) -> int:
    """Run until stopped; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if "-h" in argv or "--help" in argv:
        build_parser().print_help()
        return 0
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s] %(message)s", datefmt="%H:%M:%S")
    # Also before `_serve` listens to it, it must not keep us from removing the folder.
    previous = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    endpoint = private_ipc_endpoint()
    try:
        check_sglang_version()
        plan = ssd_args.parse(argv, endpoint)
        check_ports(plan)
        check_models(plan)
        return _serve(plan, os.path.dirname(endpoint.removeprefix("ipc://")))
    except StartRefusedError:
        return 1
    except (SSDError, OSError) as e:
        print(f"sgl_ssd: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        remove_private_ipc(endpoint)
        signal.signal(signal.SIGTERM, previous)


def check_models(plan: ssd_args.LaunchPlan) -> None:
    """Refuse models that cannot work, alone or as a pair. Raises an `SSDError`."""
    check_rollback(plan.target_path, "target")
    if plan.draft_path is not None:
        check_rollback(plan.draft_path, "draft")
        check_pair(
            read_vocabulary(plan.target_path, plan.trust_remote_code),
            read_vocabulary(plan.draft_path, plan.trust_remote_code),
            plan.target_path,
            plan.draft_path,
        )


def check_ports(plan: ssd_args.LaunchPlan) -> None:
    """Refuse ports that are taken, before anything is started. Raises `ConfigError`."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    http, _ = parser.parse_known_args(plan.sglang_argv)
    wanted = [("--port", http.host, http.port)]
    for draft in plan.drafts:
        if draft.http_port is not None:
            wanted.append(("--ssd-draft-http-port", "127.0.0.1", draft.http_port))
    for flag, host, port in wanted:
        if not 0 < port < 65536:
            raise ConfigError(f"{flag} {port}: must lie in 1..65535")
        try:
            family, kind, _, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as e:
            raise ConfigError(f"{flag} {port}: cannot listen on {host}: {e.strerror}") from None


def _serve(plan: ssd_args.LaunchPlan, folder: str) -> int:
    stop = _StopRequest()
    drafts = target = None
    with stop.listening():
        try:
            if plan.drafts:
                lost = stop.set if plan.verifier.draft_required else None
                drafts = DraftServers(plan.drafts, lost)
            plan.verifier.to_environment()
            # All take their time to start: let them do so at once, unless they share a GPU.
            if plan.mem_fraction_static is None:
                target = TargetProcess(plan.sglang_argv, folder)
            if drafts is not None:
                with _progress(str(drafts)) as progress:
                    drafts.wait_ready(plan.verifier.draft_start_timeout_s, stop.check_in(progress))
                drafts.watch()
            elif plan.verifier.draft_required:
                remote = plan.verifier
                watch_remote(
                    remote.endpoints, remote.draft_keys, remote.draft_start_timeout_s, stop.set
                )
            if target is None:
                target = TargetProcess(plan.sglang_argv, folder)
            _log_plan(plan)
            while target.poll() is None and not stop.wait(0.2):
                pass
        finally:
            code = target.poll() if target is not None else None
            if target is not None:
                _stop_target(target, stop)
            if drafts is not None:
                drafts.stop()
    if code is None:
        return 0 if stop.by_user else 1
    logger.error("the target server ended with exit code %d", code)
    return code if code > 0 else 128 - code


def _log_plan(plan: ssd_args.LaunchPlan) -> None:
    logger.info(
        "target %s; draft %s via %s; %s, K=%d, fan-out %s, backup %s, %s verification, drafting %s",
        plan.target_path,
        plan.draft_path or "(running elsewhere)",
        ", ".join(plan.verifier.endpoints),
        "ssd" if any(plan.verifier.fan_out) or plan.verifier.backup != "jit" else "sync",
        plan.verifier.num_steps,
        plan.verifier.fan_out,
        plan.verifier.backup,
        plan.verifier.verification,
        "on" if plan.verifier.drafting else "off",
    )
    if plan.target_gpus and gpus.on_this_host():
        drafts = [draft.base_gpu_id for draft in plan.drafts] if plan.drafts_on_gpus else None
        logger.info("%s", gpus.placement(plan.target_gpus, drafts, not plan.drafts))


def _stop_target(target: TargetProcess, stop: _StopRequest) -> None:
    """Let SGLang drain its requests; a second Ctrl-C or SIGTERM ends it at once."""
    stopper = threading.Thread(target=target.stop, args=(target.STOP_S,), daemon=True)
    stopper.start()
    seen = stop.count
    while stopper.is_alive():
        stopper.join(0.1)
        if stop.count > seen:
            target.kill()


class _StopRequest:
    """Ctrl-C, SIGTERM, or a lost draft server that was required."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.count = 0
        self.by_user = False

    def set(self) -> None:
        self._event.set()

    def wait(self, seconds: float) -> bool:
        return self._event.wait(seconds)

    def check_in(self, progress: Callable[[float], None]) -> Callable[[float], None]:
        """`progress` that also ends a wait when a stop was asked for."""

        def check(seconds: float) -> None:
            if self._event.is_set():
                raise KeyboardInterrupt
            progress(seconds)

        return check

    @contextmanager
    def listening(self) -> Iterator[None]:
        def on_signal(signum: int, frame: FrameType | None) -> None:
            self.count += 1
            self.by_user = True
            self._event.set()

        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
            numbers.append(signal.SIGHUP)
        previous = {s: signal.signal(s, on_signal) for s in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


@contextmanager
def _progress(awaited: str) -> Iterator[Callable[[float], None]]:
    """The seconds waited on a terminal; one log line elsewhere."""
    text = f"waiting for {awaited}"
    if not sys.stderr.isatty():
        logger.info("%s", text)
        yield lambda seconds: None
        return
    from tqdm import tqdm

    started = time.monotonic()
    with tqdm(total=None, desc=text, bar_format="{desc}: {elapsed}", leave=False) as bar:
        yield lambda seconds: bar.refresh()
    logger.info("%s ready after %.0f s", awaited.removeprefix("the "), time.monotonic() - started)


def build_parser() -> argparse.ArgumentParser:
    """SGLang's flags and ours, for `--help`; `sgl_ssd.args` is what takes a command line apart."""
    os.environ.setdefault("SGLANG_LOG_LEVEL", "error")
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(
        "python -m sgl_ssd.launch_server",
        description="Serve a model with Speculative Speculative Decoding in SGLang.",
        conflict_handler="resolve",
        allow_abbrev=False,
    )
    ServerArgs.add_cli_args(parser)
    ssd_args.add_ssd_args(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
