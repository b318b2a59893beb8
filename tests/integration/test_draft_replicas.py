"""`--ssd-draft-replicas 2`: one verifier, two draft servers; one of them dies in between."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from parity.harness import compare, configure, send_all, ssd_state
from rig import eventually
from servers import ServerProcess

pytestmark = pytest.mark.integration

NEW_TOKENS = 48


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("d")
    args = ["--device", "cpu", "--dtype", "float32", "--ssd-draft-replicas", "2"]
    files = folder / "t"
    files.mkdir()
    env = {"TMPDIR": str(files), "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
    log = folder / "server.log"
    with ServerProcess("sgl_ssd.launch_server", args, log=log, env=env) as server:
        yield server
        server.assert_ends_cleanly()
    left = [f for f in files.rglob("*") if "torchinductor" not in str(f)]
    assert not left, "sockets and folders go with their processes"


def bodies(prompts: list[list[int]], temperature: float) -> list[dict[str, Any]]:
    params = {"max_new_tokens": NEW_TOKENS, "temperature": temperature, "ignore_eos": True}
    return [
        {"input_ids": ids, "sampling_params": params | {"sampling_seed": 1000 + i}}
        for i, ids in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def requests(prompts: list[list[int]]) -> list[dict[str, Any]]:
    return bodies(prompts[:12], 0.0) + bodies(prompts[:12], 0.8)


@pytest.fixture(scope="module")
def expected(server: ServerProcess, requests: list[dict[str, Any]]) -> list[Any]:
    """The answers without drafts."""
    configure(server, ssd_drafting=0)
    answers = send_all(server, requests, 8)
    configure(server, ssd_drafting=1)
    return answers


def check(server: ServerProcess, requests: Any, expected: Any, answers: Any, label: str) -> None:
    configure(server, ssd_drafting=0)
    compare(server, requests, expected, answers, label).check()
    configure(server, ssd_drafting=1)


def draft_servers(server: ServerProcess) -> list[dict[str, Any]]:
    return ssd_state(server)["draft_servers"]


def hits(server: ServerProcess) -> list[float]:
    """Of each draft server, since its start; they come once a second."""
    time.sleep(1.2)
    return [state["draft_stats"]["hits"] for state in draft_servers(server)]


def processes(server: ServerProcess) -> list[psutil.Process]:
    return [p for p in server.processes() if "draft_server" in p.name() + "".join(p.cmdline())]


def test_both_draft_servers_draft_and_texts_are_those_without(server, requests, expected):
    answers = send_all(server, requests, 8)
    states = draft_servers(server)
    assert [s["draft"] for s in states] == ["up", "up"] and all(s["home"] for s in states)
    assert [s["open_sessions"] for s in states] == [0, 0]
    assert min(hits(server)) > 20
    check(server, requests, expected, answers, "two draft servers")
    text = server.log.read_text()
    assert "waiting for 2 draft servers" in text
    for i in (0, 1):
        assert f"draft server {i} ready" in text and f"draft server {i} up" in text


def test_one_dies_in_the_middle_of_a_run(server, requests, expected):
    before, alone = ssd_state(server), hits(server)
    answers: list[Any] = []
    run = threading.Thread(target=lambda: answers.extend(send_all(server, requests, 8)))
    run.start()
    busy = lambda: min(s["open_sessions"] for s in draft_servers(server)) > 1  # noqa: E731
    assert eventually(busy, 20, every=0.02)
    processes(server)[0].kill()
    down = eventually(lambda: any(s["draft"] == "down" for s in draft_servers(server)), 10, 0.02)
    assert down, "its sessions are asked about at once, and the new process knows them not"
    states = draft_servers(server)
    lost = [s["draft"] for s in states].index("down")
    assert eventually(lambda: draft_servers(server)[lost]["open_sessions"] == 0, 5, 0.02)
    moved = draft_servers(server)[1 - lost]["open_sessions"]
    run.join(120)
    assert len(answers) == len(requests)
    after = ssd_state(server)
    without = after["without_drafts"].get("down", 0) - before["without_drafts"].get("down", 0)
    print(f"moved to {moved} sessions; rounds without drafts, since it was down: {without}")
    assert after["draft"] == "up" and without == 0
    assert hits(server)[1 - lost] > alone[1 - lost] + 20
    check(server, requests, expected, answers, "one draft server killed")

    def back() -> bool:
        return draft_servers(server)[lost]["draft"] == "up"

    assert eventually(back, 120, 0.5) and draft_servers(server)[lost]["restarts"] == 1
    assert f"draft server {lost} ended with exit code -9; restarting" in server.log.read_text()
    answers = send_all(server, requests[12:], 8)
    assert min(hits(server)) > 20, "it gets sessions again"
    check(server, requests[12:], expected[12:], answers, "restarted")
    assert len(processes(server)) == 2
    for state in draft_servers(server):
        stats = state["draft_stats"]
        assert (state["open_sessions"], stats["sessions"]) == (0, 0)
        assert stats["kv_available"] + stats["kv_evictable"] == stats["kv_total"]
