"""The launcher before it starts anything: one line, no child, no folder left."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from sgl_ssd import launch_server
from sgl_ssd.draft_server.device import prepare_device
from sgl_ssd.errors import ConfigError


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    handler = signal.getsignal(signal.SIGTERM)
    before = psutil.Process().children()  # such as a compiler's workers
    yield
    assert not list(tmp_path.glob("sgl_ssd_*"))
    assert set(psutil.Process().children()) <= set(before)
    assert signal.getsignal(signal.SIGTERM) is handler


def launch(*argv: str) -> int:
    return launch_server.main(list(argv))


def said(capsys: pytest.CaptureFixture[str]) -> str:
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.parametrize("flag", ["--port", "--ssd-draft-http-port"])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_a_busy_port_names_its_flag(flag: str, host: str, capsys: pytest.CaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ports = {"--port": _free(), flag: port}
        argv = [word for name, number in ports.items() for word in (name, str(number))]
        assert launch(*argv, "--host", host) == 1
    line = said(capsys)
    assert f"{flag} {port}" in line and "in use" in line


def test_the_port_of_a_further_draft_server_may_be_busy(capsys: pytest.CaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        argv = ["--port", str(_free()), "--ssd-draft-http-port", str(port - 1)]
        assert launch(*argv, "--ssd-draft-replicas", "2") == 1
    line = said(capsys)
    assert f"--ssd-draft-http-port {port}" in line or f"--ssd-draft-http-port {port - 1}" in line


@pytest.mark.parametrize("port", ["0", "-1", "65536", "70000"])
def test_a_port_that_is_none(port: str, capsys: pytest.CaptureFixture) -> None:
    assert launch("--port", port) == 1
    assert f"--port {port}" in said(capsys)


def test_a_host_that_is_not_ours(capsys: pytest.CaptureFixture) -> None:
    assert launch("--host", "192.0.2.1") == 1
    assert "192.0.2.1" in said(capsys)


def test_a_port_is_free_again_at_once() -> None:
    """Connections of an earlier server that linger in TIME_WAIT are no reason to refuse."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            server.accept()[0].close()
    launch_server.check_ports(_plan("--port", str(port)))


def _plan(*argv: str) -> launch_server.ssd_args.LaunchPlan:
    return launch_server.ssd_args.parse(list(argv), "ipc:///tmp/sgl_ssd_test/draft")


def test_a_missing_model_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pair = ["--model-path", "/nowhere", "--speculative-draft-model-path", "/nowhere2"]
    assert launch("--port", str(_free()), *pair) == 1
    assert "'/nowhere' (--model-path)" in said(capsys)


def _free() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_sigterm_during_the_checks_leaves_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(plan: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    monkeypatch.setattr(launch_server, "check_ports", check)
    with pytest.raises(SystemExit) as end:
        launch()
    assert end.value.code == 128 + signal.SIGTERM


def test_a_gpu_that_is_not_there_names_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"--ssd-draft-base-gpu-id 2: .* GPUs 0 to 1"):
        prepare_device("cuda", None, 2)
