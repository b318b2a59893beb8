"""`python -m sgl_ssd.draft_server`: one draft model, served to verifiers until SIGTERM."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

from sgl_ssd.draft_server.args import ProcessOptions, parse_args
from sgl_ssd.errors import SSDError

if TYPE_CHECKING:
    from sgl_ssd.config import DraftServerConfig
    from sgl_ssd.draft_server.server import DraftServer

logger = logging.getLogger("sgl_ssd.draft_server")


def main(argv: list[str] | None = None) -> int:
    """Run the draft server; returns the exit code."""
    try:
        config, options = parse_args(argv)
        _configure_logging(config.log_level, config.name)
        return serve(config, options)
    except SSDError as e:
        print(f"draft server: {e}", file=sys.stderr)
        return 2


def _configure_logging(level: str, name: str | None) -> None:
    """State changes only: SGLang's own messages about the model it loads count as debugging."""
    me = "draft_server" if name is None else f"draft_server {name.replace('%', '%%')}"
    logging.basicConfig(
        level=level.upper(), format=f"[%(asctime)s {me}] %(levelname)s: %(message)s"
    )
    if level != "debug":
        logging.getLogger("sglang").setLevel(logging.WARNING)
        warnings.filterwarnings("ignore", category=UserWarning, module=r"sglang\.")


def serve(config: DraftServerConfig, options: ProcessOptions) -> int:
    """Load the model, listen, serve until SIGTERM or SIGINT.

    Raises `SSDError` when it cannot start.
    """
    import setproctitle

    from sgl_ssd.folders import keep_tqdm_in_process, make_folder, remove_folder
    from sgl_ssd.transport import temporary_files_in

    setproctitle.setproctitle("sgl_ssd::draft_server")
    keep_tqdm_in_process()
    folder = make_folder()
    stop = _StopSignals(folder)
    try:
        _watch_parent(options, config.endpoint, folder)
        cache = temporary_files_in(folder)["TORCHINDUCTOR_CACHE_DIR"]
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)
        tempfile.tempdir = folder  # SGLang leaves files there
        server, close = _build(config, options)
        stop.server = server
        try:
            if not stop.seen:
                server.run()
        finally:
            close()
    finally:
        tempfile.tempdir = None
        remove_folder(folder)
    logger.info("draft server stopped")
    return 0


class _StopSignals:
    """SIGTERM and SIGINT end the loop; a second one, or one during the start, ends the process.

    `folder` holds the temporary files of this process and goes with it.
    """

    def __init__(self, folder: str) -> None:
        self.server: DraftServer | None = None
        self.seen = False
        self._folder = folder
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: object) -> None:
        if self.server is None or self.seen:
            shutil.rmtree(self._folder, ignore_errors=True)
            os._exit(0)
        self.seen = True
        self.server.stop()


def _watch_parent(options: ProcessOptions, endpoint: str, folder: str) -> None:
    if not options.die_with_parent and options.parent_pid is None:
        return
    from sgl_ssd.draft_server.parent import exit_with
    from sgl_ssd.transport import remove_private_ipc

    def clean_up() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        if options.parent_pid is not None:  # a launcher that was killed could not do it
            remove_private_ipc(endpoint)

    exit_with(os.getppid() if options.parent_pid is None else options.parent_pid, clean_up)


def _build(
    config: DraftServerConfig, options: ProcessOptions
) -> tuple[DraftServer, Callable[[], None]]:
    """The server on its endpoint, and what closes it."""
    from dataclasses import replace

    from sgl_ssd.draft_server.device import default_dtype, prepare_device

    device = prepare_device(config.device, options.num_threads, config.base_gpu_id)
    config = replace(config, device=device, dtype=default_dtype(config.dtype, device))
    from sgl_ssd.draft_server.engine import DraftEngine
    from sgl_ssd.draft_server.runner import DraftRunner
    from sgl_ssd.draft_server.server import DraftServer
    from sgl_ssd.keys import load_server_keys
    from sgl_ssd.protocol import Ready
    from sgl_ssd.transport import ZmqServer
    from sgl_ssd.vocabulary import check_rollback, read_vocabulary

    check_rollback(config.model_path, "draft")
    vocabulary = read_vocabulary(config.model_path, config.trust_remote_code)
    keys = load_server_keys(config.keys) if config.keys is not None else None
    # Before the slow part: a taken endpoint fails at once.
    channel = ZmqServer(config.endpoint, keys)
    runner = DraftRunner(config)
    vocab_size = min(vocabulary.size, runner.vocab_size)
    engine = DraftEngine(
        runner,
        num_steps=config.num_steps,
        fan_out=config.fan_out,
        max_branch_rows=config.max_branch_rows,
        max_sessions=config.max_sessions,
        prefill_chunk=config.prefill_chunk,
        vocab_limit=vocab_size,
    )
    ready = Ready(
        server=f"draft@{os.uname().nodename}:{os.getpid()}",
        model_path=config.model_path,
        num_steps=config.num_steps,
        context_len=runner.context_len,
        vocab_size=vocab_size,
        vocab_hash=vocabulary.fingerprint,
        fan_out=config.fan_out,
        backup=config.backup,
        max_branch_rows=engine.cap,
        device=runner.device.type,
    )
    server = DraftServer(
        channel, engine, ready, max_sessions=config.max_sessions, lease_s=config.lease_s
    )
    http = None
    if config.http_port is not None:
        from sgl_ssd.draft_server.http import HttpSide, Source

        source = Source(
            lambda: server.snapshot,
            {
                "model_path": config.model_path,
                "device": ready.device,
                "num_steps": str(config.num_steps),
            },
            {
                "step": ("Time of a build step.", engine.stats.step_time),
                "build": ("From an answer to the complete cache.", engine.stats.build_time),
                "jit": ("Time of a just-in-time draft.", engine.stats.jit_time),
            },
        )
        http = HttpSide(config.http_port, source, lambda: server.alive)

    def close() -> None:
        channel.close()
        if http is not None:
            http.close()

    name = "" if config.name is None else f"{config.name} "
    print(
        f"draft server {name}ready: {config.endpoint}, {config.model_path} on "
        f"{runner.device.type}, "
        f"K={config.num_steps}, fan-out {config.fan_out}, {runner.num_slots} KV tokens, "
        f"context {runner.context_len}, "
        + (f"graphs up to {runner.graph_rows} rows" if runner.graph_rows else "no graphs"),
        flush=True,
    )
    return server, close


if __name__ == "__main__":
    code = main()
    # Tearing down torch takes many seconds on a busy machine, and nothing is left to be saved.
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)
