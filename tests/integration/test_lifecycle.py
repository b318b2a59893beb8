"""Nothing is lost: aborts, retractions, flushes, pauses, new weights, a draft server that dies."""

from __future__ import annotations

import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from sglang.srt.utils import MultiprocessingSerializer, init_custom_process_group

from parity.harness import compare, configure, send_all, ssd_state
from servers import ServerProcess, free_port
from sgl_ssd.models import TARGET_PATH

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
    bodies = _bodies(prompts, 500, seed=1)
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


# -- pauses, sessions, new weights -----------------------------------------------------------------


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_pause_and_continue(small_server, prompts, mode):
    """Paused in the middle of 8 requests: nothing moves meanwhile, and the text is the same."""
    bodies = _bodies(prompts, 10, seed=4)
    for body in bodies:
        body["sampling_params"]["max_new_tokens"] = 100
    configure(small_server, ssd_drafting=0)
    without = send_all(small_server, bodies, 4)
    configure(small_server, ssd_drafting=1)
    before = ssd_state(small_server)
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(_answer, small_server, body) for body in bodies]
        _wait_for(lambda: ssd_state(small_server)["rounds"] > before["rounds"] + 20, 60, "a start")
        small_server.post("/pause_generation", {"mode": mode})
        paused, used = ssd_state(small_server), _cpu_s(small_server)
        time.sleep(3)
        state = ssd_state(small_server)
        now = _cpu_s(small_server)
        assert max(now[pid] - used[pid] for pid in used) < 0.9, "a pause is a rest"
        assert (state["verifies"], state["draft"]) == (paused["verifies"], "up")
        assert (state["open_sessions"] > 0) == (mode == "in_place")
        assert mode == "abort" or not all(future.done() for future in futures)
        if mode == "retract":  # what waits holds no KV: the cache can be flushed
            weights = {"model_path": str(TARGET_PATH)}
            assert small_server.post("/update_weights_from_disk", weights)["success"]
        small_server.post("/continue_generation", {})
        answers = [future.result() for future in futures]
    assert (None in answers) == (mode == "abort")
    if mode == "abort":
        answers = send_all(small_server, bodies, 4)
    configure(small_server, ssd_drafting=0)
    compare(small_server, bodies, without, answers, mode).check()
    configure(small_server, ssd_drafting=1)
    assert ssd_state(small_server)["hits"] > before["hits"]
    _wait_for(lambda: _pools_whole(small_server), 20, "pools whole after a pause")


def _cpu_s(server: ServerProcess) -> dict[int, float]:
    """Seconds of CPU time by process id."""
    return {p.pid: sum(p.cpu_times()[:2]) for p in server.processes()}


def _answer(server: ServerProcess, body):
    """The answer; None if the request was aborted."""
    try:
        answer = server.post("/generate", body, timeout=600)
    except RuntimeError as e:
        assert "abort" in str(e).lower(), e
        return None
    return None if answer["meta_info"]["finish_reason"]["type"] == "abort" else answer


def test_sessions_go_on_from_the_text(small_server, prompts):
    """Each turn follows what the turn before said, also where that ended inside a run of drafts."""
    before = ssd_state(small_server)
    told = {}
    for drafting in (0, 1):
        configure(small_server, ssd_drafting=drafting)
        first = small_server.generate(prompts[7], max_new_tokens=16, temperature=0)["output_ids"]
        told[drafting] = [
            _turns(small_server, f"{drafting}-{at}", prompts, first[at]) for at in range(6, 12)
        ]
    assert told[0] == told[1]
    assert ssd_state(small_server)["accepted"] > before["accepted"]
    _wait_for(lambda: _pools_whole(small_server), 20, "pools whole after sessions")
    with pytest.raises(RuntimeError, match="400.*does not exist"):
        _turn(small_server, "closed", None, prompts[3], -1)


def _turns(server: ServerProcess, name: str, prompts, stop: int) -> list[tuple[int, list[int]]]:
    """Three turns of a SGLang session, each until `stop` comes: tokens before it, and its own."""
    server.post("/open_session", {"capacity_of_str_len": 10000, "session_id": name})
    said, rid = [], None
    for prompt in (prompts[7], prompts[3], prompts[2]):
        answer = _turn(server, name, rid, prompt, stop)
        rid = answer["meta_info"]["id"]
        said.append((answer["meta_info"]["prompt_tokens"], answer["output_ids"]))
    server.post("/close_session", {"session_id": name})
    return said


def _turn(server: ServerProcess, name: str, rid: str | None, prompt: list[int], stop: int):
    body = {
        "input_ids": prompt,
        "session_params": {"id": name, "rid": rid},
        "sampling_params": {"max_new_tokens": 24, "temperature": 0, "stop_token_ids": [stop]},
    }
    return server.post("/generate", body)


def _other_weights() -> tuple[str, torch.Tensor]:
    """A matrix of the target, by name, and what it is changed to."""
    (file,) = TARGET_PATH.glob("*.safetensors")
    tensors = load_file(file)
    name = max(name for name in tensors if "down_proj" in name)
    return name, -tensors[name]


def _from_disk(server: ServerProcess, name: str, value: torch.Tensor, folder: Path) -> None:
    other = folder / f"weights-{len(list(folder.iterdir()))}"
    shutil.copytree(TARGET_PATH, other)
    (file,) = other.glob("*.safetensors")
    save_file(load_file(file) | {name: value}, file, metadata={"format": "pt"})
    assert server.post("/update_weights_from_disk", {"model_path": str(other)})["success"]


def _from_tensor(server: ServerProcess, name: str, value: torch.Tensor, folder: Path) -> None:
    # The tensor stays here, in shared memory; the other way to share one wants a common parent.
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        named = MultiprocessingSerializer.serialize([(name, value)], output_str=True)
        body = {"serialized_named_tensors": [named]}
        assert server.post("/update_weights_from_tensor", body)["success"]
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


def _from_distributed(server: ServerProcess, name: str, value: torch.Tensor, folder: Path) -> None:
    group = {"group_name": "weights", "world_size": 2, "backend": "gloo"}
    port = free_port()
    meeting = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1}
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(server.post, "/init_weights_update_group", group | meeting)
        mine = init_custom_process_group(init_method=f"tcp://127.0.0.1:{port}", rank=0, **group)
        assert joined.result()["success"]
        body = {"names": [name], "dtypes": ["bfloat16"], "shapes": [list(value.shape)]}
        updated = pool.submit(
            server.post, "/update_weights_from_distributed", body | {"group_name": "weights"}
        )
        torch.distributed.broadcast(value, src=0, group=mine)
        assert updated.result()["success"]
    assert server.post("/destroy_weights_update_group", {"group_name": "weights"})["success"]
    torch.distributed.destroy_process_group(mine)


@pytest.mark.parametrize("update", [_from_disk, _from_tensor, _from_distributed])
def test_new_weights_for_the_target(small_server, prompts, tmp_path, update):
    """The text is that of the new weights at once; drafts go on, right or wrong."""
    name, other = _other_weights()
    bodies = _bodies(prompts, 8, seed=5)

    def cached_tokens() -> int:
        return small_server.generate(prompts[8], max_new_tokens=1)["meta_info"]["cached_tokens"]

    texts = [_same_texts(small_server, bodies)]
    for value in (other, -other):
        cached_tokens()
        assert cached_tokens() > 0
        update(small_server, name, value, tmp_path)
        assert cached_tokens() == 0, "KV of the old weights is not used"
        texts.append(_same_texts(small_server, bodies))
    assert texts[0] == texts[2] != texts[1]


def _same_texts(server: ServerProcess, bodies) -> list[list[int]]:
    """Token ids of the answers, which are the same with drafts, right ones among them."""
    before = ssd_state(server)
    ours = send_all(server, bodies, 4)
    after = ssd_state(server)
    assert after["accepted"] > before["accepted"] and after["hits"] > before["hits"]
    configure(server, ssd_drafting=0)
    without = send_all(server, bodies, 4)
    compare(server, bodies, without, ours).check()
    configure(server, ssd_drafting=1)
    return [answer["output_ids"] for answer in without]
