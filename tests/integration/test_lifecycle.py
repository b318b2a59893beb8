"""Nothing is lost: aborts, retractions, flushes and a draft server that dies."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from parity.harness import compare, configure, send_all, ssd_state
from servers import ServerProcess

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """KV pools so small that requests are retracted, prefill in chunks of 16, strict checks on."""
    log = tmp_path_factory.mktemp("small-server") / "server.log"
    args = ["--device", "cpu", "--dtype", "float32", "--max-total-tokens", "900"]
    args += ["--chunked-prefill-size", "16", "--schedule-conservativeness", "0.1"]
    args += ["--ssd-draft-max-total-tokens", "2500"]
    env = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
    with ServerProcess("sgl_ssd.launch_server", args, log=log, env=env) as server:
        yield server
        server.assert_ends_cleanly()


def _wait_for(condition, seconds: float, what: str):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return
        time.sleep(0.2)
    raise AssertionError(f"not within {seconds} s: {what}")


def _pools_whole(server: ServerProcess) -> bool:
    state = ssd_state(server)
    draft = state["draft_stats"]
    return (
        state["open_sessions"] == 0
        and state["kv_available"] + state["kv_evictable"] == state["kv_total"]
        and draft.get("sessions") == 0
        and draft["kv_available"] + draft["kv_evictable"] == draft["kv_total"]
    )


def _bodies(prompts, count, seed=0):
    r = random.Random(seed)
    return [
        {
            "input_ids": r.choice(prompts)[:200],
            "sampling_params": {
                "max_new_tokens": r.choice([1, 2, 20, 60, 120]),
                "temperature": r.choice([0.0, 0.8]),
                "sampling_seed": r.randrange(1 << 30),
                "ignore_eos": True,
            },
        }
        for _ in range(count)
    ]


def test_retraction_keeps_the_text(small_server, prompts):
    bodies = _bodies(prompts, 30)
    configure(small_server, ssd_drafting=0)
    without = send_all(small_server, bodies, 1)
    configure(small_server, ssd_drafting=1)
    before = ssd_state(small_server)
    answers = send_all(small_server, bodies, 16)
    after = ssd_state(small_server)
    configure(small_server, ssd_drafting=0)
    compare(small_server, bodies, without, answers, "retraction").check()
    configure(small_server, ssd_drafting=1)
    assert "Retract requests" in small_server.log.read_text(), "the pool was never short"
    assert after["hits"] > before["hits"]
    _wait_for(lambda: _pools_whole(small_server), 15, "pools whole after retractions")


def test_aborts_and_flushes_leave_nothing(small_server, prompts):
    bodies = _bodies(prompts, 160, seed=1)
    for i, body in enumerate(bodies):
        body["rid"] = f"request-{i}"
    in_flight: set[str] = set()
    flushes: list[bool] = []
    stop = threading.Event()

    def trouble() -> None:
        r = random.Random(2)
        while not stop.wait(0.05):
            waiting = sorted(in_flight)
            if waiting and r.random() < 0.1:
                small_server.post("/abort_request", {"rid": r.choice(waiting)})
            if r.random() < 0.1:
                flushes.append(_flush(small_server))

    def send(body) -> str:
        in_flight.add(body["rid"])
        try:
            return small_server.post("/generate", body)["meta_info"]["finish_reason"]["type"]
        except RuntimeError as e:
            return "abort" if "abort" in str(e).lower() else str(e)
        finally:
            in_flight.discard(body["rid"])

    troublemaker = threading.Thread(target=trouble)
    troublemaker.start()
    try:
        with ThreadPoolExecutor(24) as pool:
            reasons = list(pool.map(send, bodies))
    finally:
        stop.set()
        troublemaker.join()
    assert set(reasons) <= {"length", "abort"}, set(reasons)
    assert reasons.count("length") > 0 and reasons.count("abort") > 0
    assert flushes, "none was tried"
    _wait_for(lambda: _pools_whole(small_server), 30, "pools whole after aborts")
    _wait_for(lambda: _flush(small_server), 30, "the cache can be flushed when idle")
    state = ssd_state(small_server)
    assert state["kv_available"] == state["kv_total"]
    assert state["invalid_messages"] == 0


def _flush(server: ServerProcess) -> bool:
    """Flush the cache; whether SGLang did (it refuses while requests run)."""
    try:
        server.post("/flush_cache", {})
    except RuntimeError:
        return False
    return True


def _draft_process(server: ServerProcess) -> psutil.Process:
    for process in server.processes():
        try:
            words = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if "sgl_ssd.draft_server" in words or "sgl_ssd::draft_server" in words:
            return process
    raise AssertionError("no draft server process")


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_losing_the_draft_costs_speed_only(small_server, prompts, number):
    """Killed or wedged in the middle of 8 requests: same text, no long stall, drafting resumes."""
    bodies = _bodies(prompts, 12, seed=3)
    for body in bodies:
        body["sampling_params"]["max_new_tokens"] = 120
    configure(small_server, ssd_drafting=0)
    without = send_all(small_server, bodies, 4)
    configure(small_server, ssd_drafting=1)
    _wait_for(lambda: ssd_state(small_server)["draft"] == "up", 120, "draft up")
    victim = _draft_process(small_server)
    timer = threading.Timer(0.5, lambda: victim.send_signal(number))
    timer.start()
    answers = send_all(small_server, bodies, 4)
    timer.join()
    configure(small_server, ssd_drafting=0)
    compare(small_server, bodies, without, answers, number.name).check()
    configure(small_server, ssd_drafting=1)
    assert small_server.is_ready()
    if number == signal.SIGSTOP:
        _wait_for(lambda: ssd_state(small_server)["draft"] == "down", 20, "noticed the silence")
        victim.send_signal(signal.SIGCONT)
    _wait_for(lambda: ssd_state(small_server)["draft"] == "up", 120, "draft up again")
    before = ssd_state(small_server)
    send_all(small_server, bodies[:4], 4)
    assert ssd_state(small_server)["hits"] > before["hits"]
    _wait_for(lambda: _pools_whole(small_server), 20, "pools whole after the loss")
