"""A target server, a draft server and a fault proxy between them, for the reliability tests."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from fault_proxy import FaultProxy
from parity.harness import ssd_state
from servers import ServerFailed, ServerProcess
from sgl_ssd.models import DRAFT_PATH
from sgl_ssd.transport import private_ipc_endpoint, remove_private_ipc

DRAFT_READY_SECONDS = 300.0


class DraftProcess:
    """`python -m sgl_ssd.draft_server` on the bundled draft; to be killed, stopped, restarted."""

    def __init__(self, endpoint: str, log: Path, *flags: str) -> None:
        self.endpoint, self.log = endpoint, log
        self.model_path = DRAFT_PATH
        self._flags = flags
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; returns at once."""
        command = [sys.executable, "-m", "sgl_ssd.draft_server", "--endpoint", self.endpoint]
        command += ["--model-path", str(self.model_path), "--device", "cpu", "--die-with-parent"]
        with self.log.open("ab") as sink:
            self.process = subprocess.Popen(
                [*command, *self._flags], stdout=sink, stderr=subprocess.STDOUT
            )

    def signal(self, number: int) -> None:
        """Send a signal; SIGKILL also waits for the end."""
        assert self.process is not None
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait()

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def memory_mb(self) -> float:
        assert self.process is not None
        return float(psutil.Process(self.process.pid).memory_info().rss) / 2**20

    def stop(self) -> int:
        """End it as a user does; its exit code."""
        assert self.process is not None
        if self.running:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.signal(signal.SIGKILL)
        return self.process.wait()


class Rig:
    """Verifier -> proxy -> draft server. Use it as a context manager."""

    def __init__(
        self,
        folder: Path,
        *,
        draft: tuple[str, ...] = (),
        target: tuple[str, ...] = (),
        seed: int = 0,
    ) -> None:
        self.folder = folder
        self._front, self._back = private_ipc_endpoint(), private_ipc_endpoint()
        folder.mkdir(parents=True, exist_ok=True)
        self.draft = DraftProcess(self._back, folder / "draft.log", *draft)
        self.proxy = FaultProxy(self._front, self._back, seed=seed)
        self.server = self._target("server", self._front, *target)

    def another_target(self, name: str, *flags: str) -> ServerProcess:
        """One more target on the same draft server, without the proxy; to be started."""
        return self._target(name, self._back, *flags)

    def _target(self, name: str, endpoint: str, *flags: str) -> ServerProcess:
        args = ["--device", "cpu", "--dtype", "float32", "--ssd-draft-endpoint", endpoint]
        env = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
        log = self.folder / f"{name}.log"
        return ServerProcess("sgl_ssd.launch_server", [*args, *flags], log=log, env=env)

    @property
    def draft_endpoint(self) -> str:
        """Where the draft server listens, without the proxy."""
        return self._back

    def __enter__(self) -> Rig:
        try:
            self.draft.start()
            self.server.start()
            self.wait_up(DRAFT_READY_SECONDS)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def _close(self) -> None:
        self.server.stop()
        if self.draft.process is not None:
            self.draft.stop()
        self.proxy.stop()
        for endpoint in (self._front, self._back):
            remove_private_ipc(endpoint)

    def real_draft(self) -> None:
        """The real draft server is behind the proxy (again)."""
        self.proxy.behind(self._back)

    def wait_up(self, seconds: float) -> None:
        """Wait until the verifier says that its draft server is up."""
        if not eventually(lambda: ssd_state(self.server)["draft"] == "up", seconds):
            raise ServerFailed(f"the draft server is not up\n{self.server.tail(20)}")

    def scheduler(self) -> psutil.Process:
        """The process with the target model."""
        for process in self.server.processes():
            with suppress(psutil.Error):
                if "scheduler" in " ".join(process.cmdline()) or "scheduler" in process.name():
                    return process
        raise ServerFailed("no scheduler process")

    def pools_whole(self) -> bool:
        """Whether nothing is in use: every KV slot of both sides is free or a cached prefix."""
        state = ssd_state(self.server)
        draft = state["draft_stats"]
        return bool(
            state["open_sessions"] == 0
            and state["kv_available"] + state["kv_evictable"] == state["kv_total"]
            and draft.get("sessions") == 0
            and draft["kv_available"] + draft["kv_evictable"] == draft["kv_total"]
        )


def eventually(condition: Any, seconds: float, every: float = 0.2) -> bool:
    """Whether `condition` comes true within `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        if condition():
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(every)


@dataclass
class Streamed:
    """A streamed answer, and the longest time between two of its parts, in seconds."""

    answer: dict[str, Any]
    longest_gap: float


@dataclass
class Gaps:
    """Longest gap of all streams, for several threads."""

    longest: float = 0.0
    count: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, seconds: float) -> None:
        with self._lock:
            self.count += 1
            self.longest = max(self.longest, seconds)


def stream(server: ServerProcess, body: dict[str, Any], gaps: Gaps | None = None) -> Streamed:
    """`/generate` as a stream. The time to the first token is not counted as a gap."""
    request = urllib.request.Request(
        server.url + "/generate",
        data=json.dumps({**body, "stream": True}).encode(),
        headers={"Content-Type": "application/json"},
    )
    answer: dict[str, Any] = {}
    last, longest = 0.0, 0.0
    with urllib.request.urlopen(request, timeout=600) as lines:
        for line in lines:
            if not line.startswith(b"data: {"):
                continue
            now = time.monotonic()
            if last:
                longest = max(longest, now - last)
            last = now
            answer = json.loads(line[6:])
    if gaps is not None:
        gaps.add(longest)
    return Streamed(answer, longest)
