"""Starts, watches and ends the two server processes. No SGLang import: this process stays small.

The launcher is the parent of both servers and does nothing but wait. Each child leads a session of
its own, so that Ctrl-C reaches the launcher alone and the order of the end is ours: the target
first, which must not see its draft server die at a regular end.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from sgl_ssd import protocol
from sgl_ssd.config import DraftServerConfig
from sgl_ssd.errors import DraftUnavailableError, ProtocolError, SSDError, StartRefusedError
from sgl_ssd.keys import load_client_keys
from sgl_ssd.transport import ZmqClient, private_folder, temporary_files_in, wait_for_any

logger = logging.getLogger(__name__)

BACKOFF_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
STABLE_S = 120.0
CONFIG_EXIT = 2  # the exit code of a draft server that was asked for what cannot work
SILENCE_S = 10.0
LAUNCHER_ENV = "SGLANG_SSD_LAUNCHER"  # process id of the launcher, for the target


class Child:
    """One server process and everything it has started."""

    def __init__(self, argv: list[str], env: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            argv, env=None if env is None else {**os.environ, **env}, start_new_session=True
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def wait(self) -> int:
        """Wait for its end; the exit code."""
        return self._process.wait()

    def signal(self, number: int) -> None:
        """Send a signal to the process alone, if it still runs."""
        if self.poll() is None:
            self._process.send_signal(number)

    def stop(self, grace_s: float) -> None:
        """SIGTERM to the process; after `grace_s` seconds, SIGKILL to its whole session."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            logger.warning("process %d did not end within %.0f s; killing it", self.pid, grace_s)
        self.kill()

    def kill(self) -> None:
        """SIGKILL to what is left of its session."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self._process.wait()


def draft_command(config: DraftServerConfig) -> list[str]:
    """The command that starts a draft server with `config`."""
    flags: list[tuple[str, object]] = [
        ("--endpoint", config.endpoint),
        ("--name", config.name),
        ("--model-path", config.model_path),
        ("--num-steps", config.num_steps),
        ("--fan-out", ",".join(map(str, config.fan_out))),
        ("--backup", config.backup),
        ("--max-branch-rows", config.max_branch_rows),
        ("--device", config.device),
        ("--base-gpu-id", config.base_gpu_id),
        ("--dtype", config.dtype),
        ("--attention-backend", config.attention_backend),
        ("--mem-fraction-static", config.mem_fraction_static),
        ("--max-total-tokens", config.max_total_tokens),
        ("--context-length", config.context_length),
        ("--max-sessions", config.max_sessions),
        ("--prefill-chunk", config.prefill_chunk),
        ("--lease-s", config.lease_s),
        ("--log-level", config.log_level),
        ("--http-port", config.http_port),
        ("--keys", config.keys),
        ("--parent-pid", os.getpid()),
    ]
    argv = [sys.executable, "-m", "sgl_ssd.draft_server"]
    for flag, value in flags:
        if value is not None:
            argv += [flag, str(value)]
    if config.trust_remote_code:
        argv.append("--trust-remote-code")
    return argv


class DraftSupervisor:
    """One draft server, restarted with growing pauses when it dies on its own.

    Attributes:
        ready: it has answered since its last start.
    """

    STOP_S = 5.0

    def __init__(
        self, config: DraftServerConfig, on_lost: Callable[[], object] | None = None
    ) -> None:
        """`on_lost`, if given, is called when the draft server dies, which is then restarted only
        if that returns True."""
        self._config = config
        self._on_lost = on_lost
        self._name = "draft server" if config.name is None else f"draft server {config.name}"
        self.ready = False
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._child = self._start()

    def _start(self) -> Child:
        folder = private_folder(self._config.endpoint)
        return Child(draft_command(self._config), temporary_files_in(folder))

    @property
    def pid(self) -> int:
        return self._child.pid

    def wait_ready(self, timeout_s: float, progress: Callable[[float], None]) -> None:
        """Wait until it answers, calling `progress` with the seconds waited.

        Raises `DraftUnavailableError` when it dies or `timeout_s` is over.
        """
        client = ZmqClient(self._config.endpoint, f"launcher-{uuid.uuid4().hex}".encode())
        # Any answer will do: "say Hello first" comes from a server that is ready for a Hello.
        ping = protocol.encode(protocol.Ping(nonce=0))
        started = time.monotonic()
        try:
            while (waited := time.monotonic() - started) < timeout_s:
                progress(waited)
                code = self._child.poll()
                if code == CONFIG_EXIT:
                    raise StartRefusedError()
                if code is not None:
                    raise DraftUnavailableError(
                        f"the {self._name} ended at start with exit code {code}; its own message "
                        "is above"
                    )
                client.send(ping)
                frames = client.recv(0.5)
                if frames is not None:
                    try:
                        protocol.decode(frames)
                    except ProtocolError as e:
                        raise DraftUnavailableError(f"{self._name}: {e}") from None
                    self.ready = True
                    return
        finally:
            client.close()
        raise DraftUnavailableError(
            f"the {self._name} was not ready within {timeout_s:.0f} s "
            "(--ssd-draft-start-timeout); see its log above"
        )

    def watch(self) -> None:
        """Restart the process whenever it dies, from a thread of our own."""
        threading.Thread(target=self._watch, name="draft-watch", daemon=True).start()

    def _watch(self) -> None:
        attempt = 0
        while True:
            started = time.monotonic()
            if self._on_lost is not None and not self.ready:  # it was restarted
                with suppress(SSDError):
                    self.wait_ready(math.inf, lambda seconds: None)
            code = self._child.wait()
            self.ready = False
            if self._stopping.is_set():
                return
            if self._on_lost is not None and not self._on_lost():
                logger.error(
                    "%s ended with exit code %s; stopping (--ssd-draft-required)", self._name, code
                )
                return
            if time.monotonic() - started > STABLE_S:
                attempt = 0
            pause = BACKOFF_S[min(attempt, len(BACKOFF_S) - 1)]
            attempt += 1
            logger.warning(
                "%s ended with exit code %s; restarting in %.1f s", self._name, code, pause
            )
            if self._stopping.wait(pause):
                return
            with self._lock:
                if self._stopping.is_set():
                    return
                self._child = self._start()

    def stop(self) -> None:
        """End the process for good. Idempotent."""
        self._stopping.set()
        with self._lock:
            self._child.stop(self.STOP_S)


class DraftServers:
    """The draft servers of one launcher, each with a supervisor of its own."""

    def __init__(
        self, configs: Sequence[DraftServerConfig], on_lost: Callable[[], None] | None = None
    ) -> None:
        """`on_lost`, if given, is called when none is left, instead of a restart of the last."""
        self._on_lost = on_lost
        self._supervisors: list[DraftSupervisor] = []
        try:
            for config in configs:
                self._supervisors.append(
                    DraftSupervisor(config, None if on_lost is None else self._others_serve)
                )
        except OSError:
            self.stop()
            raise

    def __str__(self) -> str:
        count = len(self._supervisors)
        return "the draft server" if count == 1 else f"{count} draft servers"

    def _others_serve(self) -> bool:
        assert self._on_lost is not None
        if any(supervisor.ready for supervisor in self._supervisors):
            return True
        self._on_lost()
        return False

    def wait_ready(self, timeout_s: float, progress: Callable[[float], None]) -> None:
        """Wait until all of them answer; see `DraftSupervisor.wait_ready`."""
        deadline = time.monotonic() + timeout_s
        for supervisor in self._supervisors:
            supervisor.wait_ready(max(0.1, deadline - time.monotonic()), progress)

    def watch(self) -> None:
        """Restart whichever dies, from threads of our own."""
        for supervisor in self._supervisors:
            supervisor.watch()

    def stop(self) -> None:
        """End all processes for good, at the same time. Idempotent."""
        threads = [threading.Thread(target=s.stop) for s in self._supervisors]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


class TargetProcess(Child):
    """SGLang's HTTP server with the SSD algorithm. `folder` is for its temporary files."""

    STOP_S = 30.0

    def __init__(self, sglang_argv: list[str], folder: str) -> None:
        env = {LAUNCHER_ENV: str(os.getpid()), **temporary_files_in(folder)}
        super().__init__([sys.executable, "-m", "sgl_ssd.target_server", *sglang_argv], env)


def watch_remote(
    endpoints: Sequence[str], keys: str | None, start_s: float, on_lost: Callable[[], None]
) -> None:
    """Call `on_lost` when all `endpoints` are silent for `start_s` seconds, later for `SILENCE_S`.

    For draft servers that are required and were not started here; from a thread of our own.
    """
    name = f"launcher-{uuid.uuid4().hex}".encode()
    client_keys = load_client_keys(keys) if keys is not None else None

    def watch() -> None:
        clients = [ZmqClient(endpoint, name, client_keys) for endpoint in endpoints]
        ping = protocol.encode(protocol.Ping(nonce=0))
        limit, heard = start_s, time.monotonic()
        while (silent := time.monotonic() - heard) < limit:
            for client in clients:
                client.send(ping)
            wait_for_any(clients, 1.0)
            if any([client.recv(0.0) for client in clients]):
                limit, heard = SILENCE_S, time.monotonic()
                time.sleep(1.0)
        logger.error(
            "no draft server on %s for %.0f s; stopping (--ssd-draft-required)",
            ", ".join(endpoints),
            silent,
        )
        for client in clients:
            client.close()
        on_lost()

    threading.Thread(target=watch, name="draft-watch", daemon=True).start()
