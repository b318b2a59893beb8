"""Servers side by side on one host, how each of them ends, and what is left of them: nothing."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from rig import eventually
from servers import ServerProcess

pytestmark = pytest.mark.integration

ENDS_WITHIN_S = 60.0


def make(folder: Path, name: str, *flags: str) -> ServerProcess:
    """A server whose temporary files go to a folder of its own."""
    temporary = folder / name
    temporary.mkdir(parents=True)
    args = ["--device", "cpu", "--max-total-tokens", "2000", *flags]
    return ServerProcess(
        "sgl_ssd.launch_server", args, log=folder / f"{name}.log", env={"TMPDIR": str(temporary)},
        ready_seconds=560,
    )  # fmt: skip


def start_all(servers: list[ServerProcess]) -> None:
    """All at the same time."""
    threads = [threading.Thread(target=_start, args=(server,)) for server in servers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _start(server: ServerProcess) -> None:
    with suppress(Exception):  # seen by who uses it
        server.start()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ServerProcess]]:
    folder = tmp_path_factory.mktemp("side-by-side")
    servers = {
        "plain": make(folder, "plain"),
        "required": make(folder, "required", "--ssd-draft-required"),
    }
    start_all(list(servers.values()))
    yield servers
    for server in servers.values():
        server.kill()


def _one(server: ServerProcess, word: str) -> psutil.Process:
    for process in server.processes():
        with suppress(psutil.Error):
            if word in " ".join([process.name(), *process.cmdline()]):
                return process
    raise AssertionError(f"no process {word!r}\n{server.tail()}")


def _nothing_is_left(server: ServerProcess, family: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive, f"{alive}\n{server.tail()}"
    folder = server.log.with_suffix("")
    left = [f for f in folder.rglob("*") if "torchinductor" not in str(f)]
    assert not left, left
    pids = {str(process.pid) for process in family}
    shared = [f.name for f in Path("/dev/shm").iterdir() if pids & set(re.split("[-_.]", f.name))]
    assert not shared, shared


def test_they_say_the_same_and_share_nothing(servers: dict[str, ServerProcess]) -> None:
    answers = [
        server.generate("def main():\n", max_new_tokens=24, temperature=0, ignore_eos=True)
        for server in servers.values()
    ]
    assert len({answer["text"] for answer in answers}) == 1
    for server in servers.values():
        info = server.get("/server_info")
        assert info["internal_states"][0]["ssd"]["rounds"] > 0
        folder = next(server.log.with_suffix("").glob("sgl_ssd_*"))
        assert folder.stat().st_mode & 0o777 == 0o700


def test_idle_processes_use_little_cpu(servers: dict[str, ServerProcess]) -> None:
    family = [p for server in servers.values() for p in server.processes()]
    time.sleep(3)
    before = {p: sum(p.cpu_times()[:2]) for p in family}
    time.sleep(10)
    used = {p: (sum(p.cpu_times()[:2]) - before[p]) / 10 for p in family}
    assert max(used.values()) < 0.05, {p.name(): f"{100 * u:.1f} %" for p, u in used.items()}


def test_a_stopped_scheduler_shows_in_health_generate(servers: dict[str, ServerProcess]) -> None:
    server = servers["plain"]
    scheduler = _one(server, "scheduler")
    scheduler.suspend()
    try:
        assert eventually(lambda: not server.is_ready(), 180)
    finally:
        scheduler.resume()
    assert eventually(server.is_ready, 180)


def test_a_killed_scheduler_ends_everything(servers: dict[str, ServerProcess]) -> None:
    server = servers["plain"]
    family = server.processes()
    _one(server, "scheduler").kill()
    assert server.process is not None
    assert server.process.wait(ENDS_WITHIN_S) not in (0, 1)
    assert "target server ended with exit code" in server.log.read_text()
    _nothing_is_left(server, family)


def test_a_required_draft_server_that_dies_ends_everything(
    servers: dict[str, ServerProcess],
) -> None:
    server = servers["required"]
    family = server.processes()
    _one(server, "draft_server").kill()
    assert server.process is not None
    assert server.process.wait(ENDS_WITHIN_S) == 1
    assert "--ssd-draft-required" in server.log.read_text()
    _nothing_is_left(server, family)


def test_a_launcher_that_is_killed_during_the_start_leaves_nothing(tmp_path: Path) -> None:
    server = make(tmp_path, "orphan")
    command = [sys.executable, "-m", server.module, *server.args, "--port", str(server.port)]
    with server.log.open("wb") as sink:
        launcher = subprocess.Popen(command, env=server.env, stdout=sink, stderr=sink)
    server.process = launcher
    assert eventually(lambda: len(server.processes()) >= 3, 60)
    family = server.processes()
    # The draft server watches its parent once it has read its flags.
    assert eventually(lambda: any("draft" in p.name() for p in family), 60)
    launcher.send_signal(signal.SIGKILL)
    launcher.wait(10)
    _nothing_is_left(server, family)


def test_ctrl_c_during_the_start_ends_it(tmp_path: Path) -> None:
    server = make(tmp_path, "int")
    command = [sys.executable, "-m", server.module, *server.args, "--port", str(server.port)]
    with server.log.open("wb") as sink:
        server.process = subprocess.Popen(command, env=server.env, stdout=sink, stderr=sink)
    assert eventually(lambda: len(server.processes()) >= 3, 60)
    family = server.processes()
    for _ in range(2):  # the second one does not wait
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    assert server.process.wait(30) == 130
    _nothing_is_left(server, family)
