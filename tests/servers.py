"""Real server processes for the integration tests."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

READY_SECONDS = 420.0
STOP_SECONDS = 30.0
TAIL_LINES = 60


class ServerFailed(RuntimeError):
    """The server did not become ready; the message ends with the tail of its log."""


def free_port() -> int:
    """A TCP port of this host that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServerProcess:
    """One server in a process group of its own, logging to a file; use it as a context manager.

    `module` is started with `python -m`, and gets `--host`, `--port` and `args`. `env` is laid over
    this process's environment (a value of None removes the variable). Works for
    `sglang.launch_server` and every launcher that takes the same two flags and answers GET
    `ready_path` with 200 once it can serve.
    """

    def __init__(
        self,
        module: str,
        args: Sequence[str] = (),
        *,
        log: Path,
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
        port: int | None = None,
        ready_path: str = "/health_generate",
        ready_seconds: float = READY_SECONDS,
    ) -> None:
        self.module = module
        self.args = list(args)
        self.log = log
        self.cwd = cwd
        self.port = port or free_port()
        self.ready_path = ready_path
        self.ready_seconds = ready_seconds
        self.started_seconds = 0.0
        self.env = dict(os.environ)
        for name, value in (env or {}).items():
            if value is None:
                self.env.pop(name, None)
            else:
                self.env[name] = value
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Base URL without a slash at the end."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> ServerProcess:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> ServerProcess:
        """Start and wait until ready; raises ServerFailed with the log's tail otherwise."""
        command = [sys.executable, "-m", self.module, "--host", "127.0.0.1"]
        command += ["--port", str(self.port), *self.args]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        with self.log.open("ab") as sink:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=self.env,
                cwd=self.cwd,
                start_new_session=True,
            )
        try:
            self._wait_ready(began + self.ready_seconds)
        except BaseException:
            self.kill()
            raise
        self.started_seconds = time.monotonic() - began
        return self

    def _wait_ready(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            if self.poll() is not None:
                raise ServerFailed(
                    f"{self.module} ended before it was ready, code {self.poll()}\n{self.tail()}"
                )
            if self.is_ready():
                return
            time.sleep(0.25)
        raise ServerFailed(
            f"{self.module} was not ready within {self.ready_seconds:.0f} s\n{self.tail()}"
        )

    def is_ready(self) -> bool:
        """Whether the ready path answers 200 now."""
        try:
            with urllib.request.urlopen(self.url + self.ready_path, timeout=10) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def poll(self) -> int | None:
        """Exit code of the first process, None while it runs."""
        return None if self.process is None else self.process.poll()

    def processes(self) -> list[psutil.Process]:
        """The live processes of the server: its first one and all descendants."""
        if self.process is None:
            return []
        try:
            first = psutil.Process(self.process.pid)
            return [first, *first.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def stop(self, seconds: float = STOP_SECONDS) -> int | None:
        """Ask the first process to end (SIGTERM), then kill what is left; returns its exit code."""
        if self.process is None:
            return None
        family = self.processes()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
        self._reap(family)
        return self.process.poll()

    def assert_ends_cleanly(self, seconds: float = STOP_SECONDS) -> None:
        """End the server the way a user does; nothing may survive and no traceback be logged."""
        family = self.processes()
        if self.process is None or not family:
            raise AssertionError(f"{self.module} ended early\n{self.tail()}")
        self.process.send_signal(signal.SIGTERM)
        _gone, alive = psutil.wait_procs(family, timeout=seconds)
        if alive:
            raise AssertionError(f"still running after SIGTERM: {alive}\n{self.tail()}")
        if "Traceback" in self.log.read_text(errors="replace"):
            raise AssertionError(f"a traceback was logged, see {self.log}\n{self.tail()}")

    def kill(self) -> None:
        """End the whole process group at once."""
        if self.process is not None:
            self._reap(self.processes())

    def _reap(self, family: list[psutil.Process]) -> None:
        # Children may have moved to groups of their own, so the family is killed one by one too.
        if self.process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for member in family:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        self.process.wait()
        psutil.wait_procs(family, timeout=10)

    def tail(self, lines: int = TAIL_LINES) -> str:
        """The end of the log."""
        if not self.log.exists():
            return "(no log)"
        text = self.log.read_text(errors="replace").splitlines()
        return "\n".join(text[-lines:])

    def get(self, path: str, timeout: float = 30.0) -> Any:
        """GET, parsed as JSON."""
        return self._request(urllib.request.Request(self.url + path), timeout)

    def post(self, path: str, body: Any, timeout: float = 120.0) -> Any:
        """POST a JSON body, answer parsed as JSON."""
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        return self._request(request, timeout)

    def generate(self, prompt: str | list[int], **sampling: Any) -> Any:
        """SGLang's native `/generate` for one prompt (text or token ids)."""
        key = "text" if isinstance(prompt, str) else "input_ids"
        return self.post("/generate", {key: prompt, "sampling_params": sampling})

    def _request(self, request: urllib.request.Request, timeout: float) -> Any:
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                body = answer.read()
        except urllib.error.HTTPError as error:
            detail = error.read().decode(errors="replace")
            raise RuntimeError(f"{request.full_url}: {error.code} {detail}") from error
        try:
            return json.loads(body) if body.strip() else None
        except json.JSONDecodeError:  # some endpoints, /flush_cache among them, answer in words
            return body.decode(errors="replace")
