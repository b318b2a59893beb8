"""`python -m tests.cycles --count 20`: start the launcher, end it in some way, see what is left.

Each cycle serves requests with drafts on the same port as the one before, ends under load, and
must leave no process, no socket, no file in its temporary folder, no shared memory and no open
port. Prints a table: the way of ending, exit codes, seconds until nothing was left.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import psutil

from parity.harness import ssd_state
from rig import eventually
from servers import ServerProcess, free_port

MARK = "SGL_SSD_CYCLE"
SHM = Path("/dev/shm")
GONE_S = 60.0
FLAGS = ["--device", "cpu", "--max-total-tokens", "2000", "--max-running-requests", "8"]


def family(mark: str) -> set[psutil.Process]:
    """All processes of a cycle, by their environment and by descent.

    One that has renamed itself has overwritten its environment: it is found while it has a parent.
    """
    found: set[psutil.Process] = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                found |= {process, *process.children(recursive=True)}
    return found


def running(processes: set[psutil.Process], mark: str) -> set[psutil.Process]:
    """Those of a cycle that still run; `processes` grows by those that have begun since."""
    processes |= family(mark)
    left = set()
    for process in processes:
        with suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                left.add(process)
    return left


def shared_memory(processes: set[psutil.Process]) -> set[str]:
    """The files in /dev/shm that these processes use, or whose name has one of their ids."""
    names = {
        os.path.basename(m.path)
        for p in processes
        for m in _maps(p)
        if m.path.startswith(f"{SHM}/") and "(deleted)" not in m.path
    }
    pids = {str(p.pid) for p in processes}
    return names | {f.name for f in SHM.iterdir() if pids & set(re.split("[-_.]", f.name))}


def _maps(process: psutil.Process) -> list:
    with suppress(psutil.Error):
        return process.memory_maps()
    return []


def ports(processes: set[psutil.Process]) -> set[int]:
    """The TCP ports these processes listen on."""
    found = set()
    for process in processes:
        with suppress(psutil.Error):
            for c in process.net_connections("tcp"):
                if c.status == psutil.CONN_LISTEN:
                    found.add(c.laddr.port)
    return found


def one(processes: set[psutil.Process], word: str) -> psutil.Process:
    """The process that is called `word`."""
    for process in processes:
        with suppress(psutil.Error):
            if word in " ".join([process.name(), *process.cmdline()]):
                return process
    raise LookupError(f"no process {word!r}")


@dataclass(frozen=True)
class Ending:
    """A way to end: what is done, with which extra flags, and the exit codes that are right."""

    name: str
    act: Callable[[ServerProcess, set[psutil.Process]], None]
    right: Callable[[int], bool]
    flags: tuple[str, ...] = ()
    drains: bool = False


def _signal(*numbers: int) -> Callable[[ServerProcess, set[psutil.Process]], None]:
    def act(server: ServerProcess, processes: set[psutil.Process]) -> None:
        assert server.process is not None
        for number in numbers:
            server.process.send_signal(number)
            time.sleep(0.3)

    return act


def _kill(word: str) -> Callable[[ServerProcess, set[psutil.Process]], None]:
    return lambda server, processes: one(processes, word).kill()


def _kill_draft_then_term(server: ServerProcess, processes: set[psutil.Process]) -> None:
    """The draft server is started again and drafts, then all is ended by SIGTERM."""
    one(processes, "draft_server").kill()
    if not eventually(lambda: ssd_state(server)["draft"] == "down", 30):
        raise AssertionError("the loss of the draft server was not noticed")
    before = ssd_state(server)["hits"]
    if not eventually(lambda: ssd_state(server)["hits"] > before, 180):
        raise AssertionError("drafting does not resume")
    _signal(signal.SIGTERM)(server, processes)


ENDINGS = (
    Ending("SIGTERM", _signal(signal.SIGTERM), lambda code: code == 0, drains=True),
    Ending("Ctrl-C", _signal(signal.SIGINT), lambda code: code == 0, drains=True),
    Ending("Ctrl-C twice", _signal(signal.SIGINT, signal.SIGINT), lambda code: code == 0),
    Ending("SIGKILL of the launcher", _signal(signal.SIGKILL), lambda code: code == -9),
    Ending("SIGKILL of the scheduler", _kill("sglang::scheduler"), lambda code: code > 2),
    Ending("SIGKILL of SGLang's HTTP process", _kill("target_server"), lambda code: code == 137),
    Ending(
        "SIGKILL of a required draft server", _kill("draft_server"), lambda code: code == 1,
        ("--ssd-draft-required",),
    ),
    Ending(
        "SIGKILL of the draft server, restart, SIGTERM", _kill_draft_then_term,
        lambda code: code == 0,
    ),
)  # fmt: skip


class Load:
    """Three clients that ask without a break, until the first error or `last`."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._stop = threading.Event()
        self.answers = 0
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(3)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        with suppress(OSError, RuntimeError):
            while not self._stop.is_set():
                self._server.generate("def f(x):\n", max_new_tokens=100, ignore_eos=True)
                self.answers += 1

    def last(self) -> None:
        """What is under way is the last."""
        self._stop.set()

    def join(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(150)


@dataclass
class Cycle:
    """What came out of one start and end."""

    ending: str
    ready_s: float
    gone_s: float
    code: int | None
    answers: int
    problems: list[str]


def run(ending: Ending, folder: Path, port: int) -> Cycle:
    """One cycle."""
    mark, temporary = uuid.uuid4().hex, folder / "tmp"
    temporary.mkdir(parents=True)
    env = {MARK: mark, "TMPDIR": str(temporary)}
    server = ServerProcess(
        "sgl_ssd.launch_server", [*FLAGS, *ending.flags], log=folder / "server.log", env=env,
        port=port, ready_seconds=560,
    )  # fmt: skip
    server.start()
    problems: list[str] = []
    load = Load(server)
    if not eventually(lambda: load.answers >= 3 and ssd_state(server)["hits"] > 0, 120):
        problems.append("no drafts")
    processes = family(mark)
    memory, listening = shared_memory(processes), ports(processes)
    if ending.drains:
        load.last()  # SGLang ends only when it has answered everything
    began = time.monotonic()
    try:
        ending.act(server, processes)
    except (AssertionError, LookupError) as e:
        problems.append(str(e))
    assert server.process is not None
    eventually(lambda: server.poll() is not None and not running(processes, mark), GONE_S)
    gone_s = time.monotonic() - began
    load.join()
    left = running(processes, mark)
    problems += [f"process {p.pid} {' '.join(p.cmdline())[:80]}" for p in left]
    for process in left:
        process.kill()
    if server.poll() is None or not ending.right(server.poll()):
        problems.append(f"exit code {server.poll()}")
    problems += [f"file {f}" for f in temporary.rglob("*") if "torchinductor" not in str(f)]
    problems += [f"shared memory {n}" for n in sorted(memory) if (SHM / n).exists()]
    open_now = {c.laddr.port for c in psutil.net_connections("tcp") if c.status == "LISTEN"}
    problems += [f"port {p}" for p in sorted(listening & open_now)]
    if "Traceback" in server.log.read_text(errors="replace"):
        problems.append(f"traceback in {server.log}")
    return Cycle(ending.name, server.started_seconds, gone_s, server.poll(), load.answers, problems)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument(
        "--first", type=int, default=0, help="where in the list of endings to begin"
    )
    args = parser.parse_args()
    folder, port = Path(tempfile.mkdtemp(prefix="cycles_")), free_port()
    print(f"logs: {folder}", flush=True)
    cycles: list[Cycle] = []
    for i in range(args.count):
        ending = ENDINGS[(args.first + i) % len(ENDINGS)]
        cycle = run(ending, folder / str(i), port)
        cycles.append(cycle)
        print(
            f"{i + 1}. {cycle.ending}: ready after {cycle.ready_s:.0f} s, {cycle.answers} answers, "
            f"exit code {cycle.code}, gone after {cycle.gone_s:.1f} s, left: "
            f"{'; '.join(cycle.problems) or 'nothing'}",
            flush=True,
        )
    print(
        "\n| way of ending | cycles | exit code | gone after s, longest | left |\n"
        "|---|---|---|---|---|"
    )
    for name in dict.fromkeys(c.ending for c in cycles):
        mine = [c for c in cycles if c.ending == name]
        codes = ", ".join(sorted({str(c.code) for c in mine}))
        left = "; ".join(p for c in mine for p in c.problems) or "nothing"
        print(f"| {name} | {len(mine)} | {codes} | {max(c.gone_s for c in mine):.1f} | {left} |")
    return int(any(c.problems for c in cycles))


if __name__ == "__main__":
    sys.exit(main())
