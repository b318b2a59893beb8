"""Server processes of a benchmark: how each system is started, and a small HTTP client."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EXTERNAL_MODELS = "benchmarks.grafted_models"
SYSTEMS = ("ar", "tp2", "replicas", "standalone", "ngram", "ssd", "ssd-cpu")
"""Plain SGLang on one GPU, on two (tensor parallel, two replicas), with a draft model beside the
target, with n-grams; ours with the draft on a GPU of its own, or on the host's CPU."""
_SPEC = re.compile(r"(?P<pair>[^:@]+):(?P<system>[^:@]+)(@(?P<steps>\d+))?(?P<gpus>(:\d+){0,2})")


@dataclass(frozen=True)
class Pair:
    """A target and its draft."""

    name: str
    target: str
    draft: str

    @staticmethod
    def parse(text: str) -> Pair:
        """`NAME=TARGET,DRAFT`. Raises `ValueError`."""
        name, _, paths = text.partition("=")
        target, _, draft = paths.partition(",")
        if not (name and target and draft):
            raise ValueError(f"--pair {text!r}: write NAME=TARGET,DRAFT")
        return Pair(name, target, draft)


@dataclass(frozen=True)
class ServerSpec:
    """Which system to start for which pair, and where."""

    pair: Pair
    system: str
    steps: int
    gpu: int
    draft_gpu: int

    @staticmethod
    def parse(text: str, pairs: dict[str, Pair]) -> ServerSpec:
        """`PAIR:SYSTEM[@K][:GPU[:DRAFT_GPU]]`. Raises `ValueError`."""
        match = _SPEC.fullmatch(text)
        if match is None or match["pair"] not in pairs or match["system"] not in SYSTEMS:
            raise ValueError(
                f"--server {text!r}: write PAIR:SYSTEM[@K][:GPU[:DRAFT_GPU]] with a pair of "
                f"{', '.join(pairs)} and a system of {', '.join(SYSTEMS)}"
            )
        gpus = [int(g) for g in match["gpus"].split(":")[1:]]
        gpu = gpus[0] if gpus else 0
        draft_gpu = gpus[1] if len(gpus) > 1 else gpu
        steps = int(match["steps"] or 4)
        return ServerSpec(pairs[match["pair"]], match["system"], steps, gpu, draft_gpu)

    @property
    def name(self) -> str:
        """Unique among the servers of a run."""
        steps = f"-k{self.steps}" if self.speculative else ""
        return f"{self.pair.name}-{self.system}{steps}"

    @property
    def ours(self) -> bool:
        return self.system.startswith("ssd")

    @property
    def speculative(self) -> bool:
        return self.system not in ("ar", "tp2", "replicas")

    def command(self, common: list[str], ssd: list[str]) -> list[str]:
        """Module and flags; `common` go to every system, `ssd` to ours alone."""
        module = "sgl_ssd.launch_server" if self.ours else "sglang.launch_server"
        flags = ["--model-path", self.pair.target, "--base-gpu-id", str(self.gpu), *common]
        if self.system in ("standalone", "ssd", "ssd-cpu"):
            flags += ["--speculative-draft-model-path", self.pair.draft]
            flags += ["--speculative-num-steps", str(self.steps)]
        if self.system == "tp2":
            flags += ["--tp-size", "2"]
        elif self.system == "replicas":
            flags += ["--dp-size", "2"]
        elif self.system == "standalone":
            flags += ["--speculative-algorithm", "STANDALONE", "--speculative-eagle-topk", "1"]
            flags += ["--speculative-num-draft-tokens", str(self.steps + 1)]
        elif self.system == "ngram":
            flags += ["--speculative-algorithm", "NGRAM"]
            flags += ["--speculative-num-draft-tokens", str(self.steps + 1)]
        elif self.system == "ssd":
            flags += ["--ssd-draft-base-gpu-id", str(self.draft_gpu), *ssd]
            if self.draft_gpu == self.gpu:
                flags.append("--ssd-allow-shared-gpu")
        elif self.system == "ssd-cpu":
            flags += ["--ssd-draft-device", "cpu", *ssd]
        return [module, *flags]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Server:
    """One server in a process session of its own."""

    spec: ServerSpec
    argv: list[str]
    log: Path
    port: int = field(default_factory=_free_port)
    ready_after_s: float | None = None

    def start(self) -> None:
        """Returns at once."""
        module, *flags = self.argv
        command = [sys.executable, "-m", module, "--host", "127.0.0.1", "--port", str(self.port)]
        env = {**os.environ, "SGLANG_EXTERNAL_MODEL_PACKAGE": EXTERNAL_MODELS}
        self._started = time.monotonic()
        with self.log.open("wb") as sink:
            self._process = subprocess.Popen(
                command + flags, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT,
                env=env, start_new_session=True,
            )  # fmt: skip

    def is_ready(self) -> bool:
        """Whether it answers requests now; remembers when it first did."""
        if self.ready_after_s is None:
            try:
                with urllib.request.urlopen(self._url("/health"), timeout=5) as answer:
                    answer.read()
            except OSError:
                return False
            self.ready_after_s = time.monotonic() - self._started
        return True

    @property
    def dead(self) -> bool:
        return self._process.poll() is not None

    def stop(self, grace_s: float = 10.0) -> None:
        """SIGTERM, then SIGKILL to what is left of its session."""
        if not self.dead:
            self._process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self._process.wait()

    @property
    def url(self) -> str:
        """Base URL without a slash at the end."""
        return f"http://127.0.0.1:{self.port}"

    def _url(self, path: str) -> str:
        return self.url + path

    def get(self, path: str) -> Any:
        """GET, parsed as JSON."""
        with urllib.request.urlopen(self._url(path), timeout=30) as answer:
            return json.loads(answer.read())

    def post(self, path: str, body: Any, timeout_s: float = 300.0) -> Any:
        """POST of JSON; the answer parsed if it is JSON. Raises `OSError`."""
        request = urllib.request.Request(
            self._url(path), json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            data = answer.read()
        try:
            return json.loads(data)
        except ValueError:
            return data.decode(errors="replace")

    def flush(self, limit_s: float = 10.0) -> None:
        """Empty its caches. It refuses while it still has the end of a request on its hands."""
        deadline = time.monotonic() + limit_s
        while True:
            try:
                self.post("/flush_cache", {})
                return
            except urllib.error.HTTPError as e:
                if e.code != 400 or time.monotonic() > deadline:
                    raise
            time.sleep(0.1)

    def configure(self, **settings: int) -> None:
        """Change `ssd_*` settings. Raises `RuntimeError` if they are refused."""
        answer = self.post("/set_internal_state", {"server_args": settings})
        updated = answer.get("updated") if isinstance(answer, dict) else answer
        if not (all(updated) if isinstance(updated, list) else updated):
            raise RuntimeError(f"{self.spec.name}: settings refused: {settings}: {answer}")

    def state(self) -> dict[str, Any]:
        """SGLang's internal state; section `ssd` is ours."""
        state: dict[str, Any] = self.get("/server_info")["internal_states"][0]
        return state


class Attached(Server):
    """A server that somebody else has started and will end."""

    def __init__(self, spec: ServerSpec, url: str) -> None:
        super().__init__(spec, ["attached", url], Path(os.devnull), port=0)
        self._base = url.rstrip("/")

    @property
    def url(self) -> str:
        return self._base

    def start(self) -> None:
        self._started = time.monotonic()

    @property
    def dead(self) -> bool:
        return False

    def stop(self, grace_s: float = 10.0) -> None:
        return


def wait_ready(servers: list[Server], limit_s: float) -> list[Server]:
    """Wait until all are ready or dead or `limit_s` is over; those that are not ready are stopped.

    Measurements must not run beside the start of another server.
    """
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if all(s.is_ready() or s.dead for s in servers):
            break
        time.sleep(0.5)
    ready = [s for s in servers if s.ready_after_s is not None and not s.dead]
    for server in servers:
        if server not in ready:
            server.stop(0.0)
    return ready
