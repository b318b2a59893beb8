"""Child processes: they start, are watched, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import psutil
import pytest

from draft_double import DraftDouble
from sgl_ssd import supervisor
from sgl_ssd.config import DraftServerConfig
from sgl_ssd.draft_server.args import parse_args
from sgl_ssd.errors import DraftUnavailableError, StartRefusedError
from sgl_ssd.supervisor import Child, DraftServers, DraftSupervisor, draft_command
from sgl_ssd.transport import private_ipc_endpoint, remove_private_ipc

SOON = 20.0
IGNORE_TERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
SLEEP = "import time; print('up', flush=True); time.sleep(600)"


def eventually(condition: Callable[[], object], seconds: float = SOON) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def running(pid: int) -> bool:
    """Whether a process does something still (a zombie does not)."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", textwrap.dedent(code)]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No test may leave a process that it has started."""
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    yield
    left = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
    alive = [p for p in left if running(p.pid)]
    for process in alive:
        process.kill()
    assert not alive


@pytest.fixture
def pid_file(tmp_path: Path) -> Path:
    return tmp_path / "pids"


def started(pid_file: Path, count: int) -> list[int]:
    """The process ids in `pid_file`, once there are `count`."""
    assert eventually(lambda: pid_file.exists() and len(pid_file.read_text().split()) >= count)
    return [int(pid) for pid in pid_file.read_text().split()]


def family(pid_file: Path, setup: str = "") -> list[str]:
    """A process, its child and its grandchild, all of which write their pids and sleep."""
    return python(f"""
        import os, time
        {setup}
        depth = 0
        while depth < 2 and os.fork() == 0:
            depth += 1
        with open({str(pid_file)!r}, "a") as f:
            f.write(f"{{os.getpid()}}\\n")
        time.sleep(600)
    """)


# -- one child -----------------------------------------------------------------------------------


def test_stop_ends_a_process_that_obeys_at_once(pid_file: Path) -> None:
    child = Child(family(pid_file))
    pids = started(pid_file, 3)
    begun = time.monotonic()
    child.stop(grace_s=SOON)
    assert time.monotonic() - begun < SOON / 2
    assert child.poll() == -signal.SIGTERM
    assert eventually(lambda: not any(map(running, pids))), "its descendants end with it"


def test_stop_kills_a_family_that_ignores_sigterm(pid_file: Path) -> None:
    child = Child(family(pid_file, IGNORE_TERM))
    pids = started(pid_file, 3)
    begun = time.monotonic()
    child.stop(grace_s=0.3)
    assert 0.3 <= time.monotonic() - begun < SOON / 2
    assert child.poll() == -signal.SIGKILL
    assert eventually(lambda: not any(map(running, pids)))


def test_stop_ends_a_suspended_process(pid_file: Path) -> None:
    child = Child(family(pid_file))
    pids = started(pid_file, 3)
    child.signal(signal.SIGSTOP)
    assert eventually(lambda: psutil.Process(child.pid).status() == psutil.STATUS_STOPPED)
    child.stop(grace_s=SOON)
    assert child.poll() == -signal.SIGTERM
    assert eventually(lambda: not any(map(running, pids)))


def test_stop_ends_what_a_dead_process_has_left(pid_file: Path) -> None:
    child = Child(family(pid_file))
    pids = started(pid_file, 3)
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    child.stop(grace_s=1.0)
    assert eventually(lambda: not any(map(running, pids)))


def test_stop_and_kill_are_idempotent() -> None:
    child = Child(python(SLEEP))
    for _ in range(2):
        child.stop(grace_s=SOON)
        child.kill()
        child.signal(signal.SIGTERM)
    assert child.poll() is not None


def test_exit_codes_and_environment() -> None:
    child = Child(python("import os; raise SystemExit(int(os.environ['CODE']))"), {"CODE": "7"})
    assert child.wait() == 7 == child.poll()
    child.stop(grace_s=1.0)
    assert Child(python("import os; raise SystemExit('PATH' not in os.environ)"), {}).wait() == 0


def test_a_child_leads_a_session_of_its_own() -> None:
    """Ctrl-C in the terminal must reach the launcher alone."""
    child = Child(python(SLEEP))
    try:
        assert os.getsid(child.pid) == child.pid != os.getsid(0)
    finally:
        child.kill()


# -- the draft server's command --------------------------------------------------------------------


def test_every_setting_reaches_the_draft_server() -> None:
    config = DraftServerConfig(
        endpoint="tcp://127.0.0.1:7001", model_path="some model", num_steps=2, fan_out=[3, 2, 1],
        backup="fast", max_branch_rows=8, device="cpu", base_gpu_id=5, dtype="float16",
        attention_backend="a", mem_fraction_static=0.3, max_total_tokens=99, context_length=77,
        max_sessions=9, prefill_chunk=33, lease_s=7.5, trust_remote_code=True, log_level="debug",
        http_port=8099, keys="some folder", name="3",
    )  # fmt: skip
    default = DraftServerConfig(endpoint="tcp://127.0.0.1:7002", model_path="m")
    for f in fields(config):
        assert getattr(config, f.name) != getattr(default, f.name), f"{f.name}: set it in this test"
    for expected in (config, default):
        command = draft_command(expected)
        assert command[:3] == [sys.executable, "-m", "sgl_ssd.draft_server"]
        parsed, options = parse_args(command[3:])
        assert parsed == expected
        assert options.parent_pid == os.getpid()


# -- the draft server, supervised ------------------------------------------------------------------

SERVER = """
    import sys, time
    from sgl_ssd import protocol
    from sgl_ssd.transport import ZmqServer
    endpoint, mode = sys.argv[1:]
    time.sleep(0.2 if mode == "late" else 0)
    server = ZmqServer(endpoint)
    refusal = protocol.encode(protocol.Error(code="hello_first", text="say Hello"))
    while True:
        received = server.recv(60)
        if received is not None and mode != "mute":
            server.send(received[0], [b"nonsense"] if mode == "garbage" else refusal)
"""


class FakeServer:
    """Stands in for the draft server: `command` is what the supervisor starts."""

    def __init__(self, endpoint: str) -> None:
        self.config = DraftServerConfig(endpoint=endpoint, model_path="m")
        self.command = self.serving("good")

    def serving(self, mode: str) -> list[str]:
        return [sys.executable, "-c", textwrap.dedent(SERVER), self.config.endpoint, mode]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    endpoint = private_ipc_endpoint()
    server = FakeServer(endpoint)
    monkeypatch.setattr(supervisor, "draft_command", lambda config: server.command)
    monkeypatch.setattr(supervisor, "BACKOFF_S", (0.02, 0.1, 0.3))
    yield server
    remove_private_ipc(endpoint)


@pytest.fixture
def supervise(fake: FakeServer) -> Iterator[Callable[..., DraftSupervisor]]:
    """Makes supervisors that are stopped at the end."""
    made: list[DraftSupervisor] = []

    def make(on_lost: Callable[[], None] | None = None) -> DraftSupervisor:
        made.append(DraftSupervisor(fake.config, on_lost))
        return made[-1]

    yield make
    for one in made:
        one.stop()


@pytest.mark.parametrize("mode", ["good", "late"])
def test_wait_ready_returns_when_the_server_answers(
    fake: FakeServer, supervise: Callable, mode: str
) -> None:
    fake.command = fake.serving(mode)
    draft, waits = supervise(), []
    draft.wait_ready(SOON, waits.append)
    assert running(draft.pid)
    assert waits and waits == sorted(waits), "progress is told"


def test_wait_ready_is_bounded(fake: FakeServer, supervise: Callable) -> None:
    fake.command = fake.serving("mute")
    draft = supervise()
    begun = time.monotonic()
    with pytest.raises(DraftUnavailableError) as error:
        draft.wait_ready(0.6, lambda seconds: None)
    assert 0.6 <= time.monotonic() - begun < 5.0
    assert "not ready within" in str(error.value)
    assert "--ssd-draft-start-timeout" in str(error.value)


def test_wait_ready_tells_of_a_dead_server_at_once(fake: FakeServer, supervise: Callable) -> None:
    fake.command = python("raise SystemExit(9)")
    draft = supervise()
    begun = time.monotonic()
    with pytest.raises(DraftUnavailableError, match="exit code 9"):
        draft.wait_ready(600.0, lambda seconds: None)
    assert time.monotonic() - begun < SOON


def test_wait_ready_refuses_another_protocol(fake: FakeServer, supervise: Callable) -> None:
    fake.command = fake.serving("garbage")
    with pytest.raises(DraftUnavailableError, match="draft server: "):
        supervise().wait_ready(SOON, lambda seconds: None)


def test_wait_ready_can_be_interrupted(fake: FakeServer, supervise: Callable) -> None:
    fake.command = fake.serving("mute")

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        supervise().wait_ready(600.0, interrupt)


def test_a_dead_server_is_restarted(fake: FakeServer, supervise: Callable) -> None:
    draft = supervise()
    draft.wait_ready(SOON, lambda seconds: None)
    draft.watch()
    for _ in range(2):
        pid = draft.pid
        os.kill(pid, signal.SIGKILL)
        assert eventually(lambda pid=pid: draft.pid != pid)
        draft.wait_ready(SOON, lambda seconds: None)


class CountingChild(Child):
    """Remembers when each one was started."""

    times: list[float]

    def __init__(self, *args: object) -> None:
        self.times.append(time.monotonic())
        super().__init__(*args)


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    CountingChild.times = []
    monkeypatch.setattr(supervisor, "Child", CountingChild)
    return CountingChild.times


def test_pauses_grow_while_the_server_keeps_dying(
    fake: FakeServer, supervise: Callable, starts: list[float]
) -> None:
    fake.command = ["/bin/sh", "-c", "exit 3"]
    draft = supervise()
    draft.watch()
    assert eventually(lambda: len(starts) >= 6)
    draft.stop()
    gaps = [b - a for a, b in zip(starts, starts[1:], strict=False)]
    for gap, pause in zip(gaps, (0.02, 0.1, 0.3, 0.3, 0.3), strict=False):
        assert gap >= pause


def test_pauses_begin_anew_after_a_stable_time(
    fake: FakeServer, supervise: Callable, starts: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "STABLE_S", 0.05)
    monkeypatch.setattr(supervisor, "BACKOFF_S", (0.0, 600.0))
    fake.command = ["/bin/sh", "-c", "sleep 0.1"]
    supervise().watch()
    assert eventually(lambda: len(starts) >= 4), "the second pause of 600 s is never reached"


def test_a_required_server_is_not_restarted(
    fake: FakeServer, supervise: Callable, starts: list[float]
) -> None:
    fake.command = python(SLEEP)
    lost = threading.Event()
    draft = supervise(lost.set)
    draft.watch()
    os.kill(draft.pid, signal.SIGKILL)
    assert lost.wait(SOON)
    time.sleep(0.2)
    assert len(starts) == 1


def test_a_stopped_server_is_neither_lost_nor_restarted(
    fake: FakeServer, supervise: Callable, starts: list[float]
) -> None:
    fake.command = python(SLEEP)
    lost = threading.Event()
    for on_lost in (None, lost.set):
        draft = supervise(on_lost)
        draft.watch()
        draft.stop()
        draft.stop()
        assert not running(draft.pid)
    time.sleep(0.2)
    assert len(starts) == 2 and not lost.is_set()


def test_stop_during_a_pause_starts_nothing_more(
    fake: FakeServer, supervise: Callable, starts: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "BACKOFF_S", (0.3,))
    fake.command = ["/bin/sh", "-c", "exit 3"]
    draft = supervise()
    draft.watch()
    time.sleep(0.1)
    draft.stop()
    time.sleep(0.4)
    assert len(starts) == 1


def test_stop_ends_a_server_that_ignores_sigterm(
    fake: FakeServer, supervise: Callable, pid_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DraftSupervisor, "STOP_S", 0.2)
    fake.command = family(pid_file, IGNORE_TERM)
    draft = supervise()
    draft.watch()
    pids = started(pid_file, 3)
    stoppers = [threading.Thread(target=draft.stop) for _ in range(3)]
    for thread in stoppers:
        thread.start()
    for thread in stoppers:
        thread.join(SOON)
        assert not thread.is_alive()
    assert eventually(lambda: not any(map(running, pids)))


# -- several draft servers -----------------------------------------------------------------------


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., DraftServers]]:
    """Makes three draft servers, which are stopped at the end."""
    first = private_ipc_endpoint()
    configs = [
        DraftServerConfig(endpoint=f"{first}{i}", model_path="m", name=str(i)) for i in range(3)
    ]
    monkeypatch.setattr(
        supervisor, "draft_command",
        lambda config: [sys.executable, "-c", textwrap.dedent(SERVER), config.endpoint, "good"],
    )  # fmt: skip
    monkeypatch.setattr(supervisor, "BACKOFF_S", (0.02, 0.1, 0.3))
    made: list[DraftServers] = []

    def make(on_lost: Callable[[], None] | None = None) -> DraftServers:
        made.append(DraftServers(configs, on_lost))
        made[-1].wait_ready(SOON, lambda seconds: None)
        made[-1].watch()
        return made[-1]

    yield make
    for servers in made:
        servers.stop()
    remove_private_ipc(first)


def test_several_start_and_end_together(three: Callable[..., DraftServers]) -> None:
    servers = three()
    pids = [s.pid for s in servers._supervisors]
    assert str(servers) == "3 draft servers" and len(set(pids)) == 3
    assert all(map(running, pids)) and all(s.ready for s in servers._supervisors)
    servers.stop()
    servers.stop()
    assert eventually(lambda: not any(map(running, pids)))


def test_one_of_several_is_restarted_alone(
    three: Callable[..., DraftServers], caplog: pytest.LogCaptureFixture
) -> None:
    servers = three()
    pids = [s.pid for s in servers._supervisors]
    os.kill(pids[1], signal.SIGKILL)
    assert eventually(lambda: servers._supervisors[1].pid != pids[1])
    assert [s.pid for s in servers._supervisors][::2] == pids[::2]
    assert "draft server 1 ended with exit code -9; restarting" in caplog.text


def test_required_ones_are_lost_when_none_is_left(
    three: Callable[..., DraftServers], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    lost = threading.Event()
    servers = three(lost.set)
    all_of_them = servers._supervisors
    first = all_of_them[0].pid
    os.kill(first, signal.SIGKILL)
    assert eventually(lambda: all_of_them[0].pid != first and all_of_them[0].ready), "restarted"
    assert not lost.is_set()
    # Restarts take a while now: one that is still starting does not count.
    monkeypatch.setattr(supervisor, "draft_command", lambda config: python(SLEEP))
    for one in all_of_them[:2]:
        os.kill(one.pid, signal.SIGKILL)
    assert eventually(lambda: sum(s.ready for s in all_of_them) == 1)
    assert not lost.wait(1.0)
    os.kill(all_of_them[2].pid, signal.SIGKILL)
    assert lost.wait(SOON)
    assert "draft server 2 ended with exit code -9; stopping (--ssd-draft-required)" in caplog.text


# -- a required draft server that runs elsewhere ---------------------------------------------------


@pytest.fixture
def endpoint() -> Iterator[str]:
    name = private_ipc_endpoint()
    yield name
    remove_private_ipc(name)


def test_a_remote_draft_server_that_falls_silent_is_noticed(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "SILENCE_S", 3.0)
    lost = threading.Event()
    double = DraftDouble(endpoint, lambda tokens, count: [], vocab_size=10)
    supervisor.watch_remote([endpoint], None, 30.0, lost.set)
    assert not lost.wait(5.0), "it answers"
    double.stop()
    assert lost.wait(15.0)
    assert "--ssd-draft-required" in caplog.text and endpoint in caplog.text


def test_remote_draft_servers_are_lost_when_all_are_silent(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "SILENCE_S", 2.0)
    lost = threading.Event()
    double = DraftDouble(endpoint, lambda tokens, count: [], vocab_size=10)
    supervisor.watch_remote([f"{endpoint}-never", endpoint], None, 30.0, lost.set)
    assert not lost.wait(4.0), "one answers"
    double.stop()
    assert lost.wait(15.0)


def test_a_remote_draft_server_that_never_comes_is_waited_for_as_long_as_asked(
    endpoint: str,
) -> None:
    lost = threading.Event()
    supervisor.watch_remote([endpoint], None, 1.5, lost.set)
    assert not lost.wait(1.0)
    assert lost.wait(10.0)


def test_settings_that_the_draft_server_refuses_are_told_from_a_crash(endpoint: str) -> None:
    """Exit code 2 means that it has said itself what is wrong: one line is enough."""
    for code, error in ((2, StartRefusedError), (3, DraftUnavailableError)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                supervisor,
                "draft_command",
                lambda config, code=code: python(f"raise SystemExit({code})"),
            )
            draft = supervisor.DraftSupervisor(
                DraftServerConfig(endpoint=endpoint, model_path="m"), None
            )
            with pytest.raises(DraftUnavailableError) as raised:
                draft.wait_ready(20.0, lambda seconds: None)
            assert type(raised.value) is error
            draft.stop()
