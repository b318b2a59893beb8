"""Whatever happens on the wire or behind it costs drafts only: same text, no long stall."""

from __future__ import annotations

import random
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from channels import Fault
from draft_double import DraftDouble, Script
from parity.harness import compare, configure, send_all, ssd_state
from rig import Gaps, Rig, eventually, stream
from servers import ServerProcess
from sgl_ssd import protocol
from sgl_ssd.models import DRAFT_PATH, TARGET_PATH
from sgl_ssd.transport import ZmqClient, private_ipc_endpoint, remove_private_ipc
from sgl_ssd.vocabulary import read_vocabulary

pytestmark = pytest.mark.integration

# The longest wait for drafts is half a second a round; the rest is a busy machine.
STALL_S = 8.0
DRAFT_POOL = 3000


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    draft = ("--max-total-tokens", str(DRAFT_POOL), "--lease-s", "4", "--max-sessions", "256")
    target = ("--max-running-requests", "256")
    with Rig(tmp_path_factory.mktemp("faults"), draft=draft, target=target) as rig:
        yield rig
        rig.server.assert_ends_cleanly()
        assert rig.draft.stop() == 0
    assert "Traceback" not in rig.draft.log.read_text()


@pytest.fixture(scope="module")
def bodies(prompts: list[list[int]]) -> list[dict[str, Any]]:
    r = random.Random(5)
    return [
        {
            "input_ids": r.choice(prompts)[:120],
            "sampling_params": {
                "max_new_tokens": r.choice([2, 20, 40]),
                "temperature": r.choice([0.0, 0.8]),
                "sampling_seed": r.randrange(1 << 30),
                "ignore_eos": True,
            },
        }
        for _ in range(12)
    ]


@pytest.fixture(scope="module")
def expected(rig: Rig, bodies: list[dict[str, Any]]) -> list[Any]:
    """The answers without drafts."""
    configure(rig.server, ssd_drafting=0)
    answers = send_all(rig.server, bodies, 4)
    configure(rig.server, ssd_drafting=1)
    return answers


def run(rig: Rig, bodies: list[dict[str, Any]], expected: list[Any], label: str) -> None:
    """Send everything at once, compare, and look at the longest pause within an answer."""
    gaps = Gaps()
    with ThreadPoolExecutor(6) as pool:
        answers = [s.answer for s in pool.map(lambda body: stream(rig.server, body, gaps), bodies)]
    same(rig, bodies, expected, answers, label)
    assert gaps.longest < STALL_S, label


def same(rig: Rig, bodies: Any, expected: Any, answers: Any, label: str) -> None:
    if [a["output_ids"] for a in answers] == [a["output_ids"] for a in expected]:
        return
    configure(rig.server, ssd_drafting=0)
    compare(rig.server, bodies, expected, answers, label).check()
    configure(rig.server, ssd_drafting=1)


def assert_drafting_resumes(rig: Rig, bodies: list[dict[str, Any]], seconds: float = 30) -> None:
    rig.wait_up(seconds)

    def hits_rise() -> bool:
        before = ssd_state(rig.server)["hits"]
        send_all(rig.server, bodies[:3], 3)
        return bool(ssd_state(rig.server)["hits"] > before)

    assert eventually(hits_rise, seconds), "drafting does not resume"
    assert eventually(rig.pools_whole, 20), "something is still held"


@pytest.mark.parametrize(
    ("share", "only"),
    [
        (0.2, ""),
        (0.7, ""),
        (0.9, "Speculations"),
        (0.9, "Speculate"),
        (0.9, "Open"),
        (0.9, "Close"),
    ],
)
def test_a_bad_wire(rig: Rig, bodies: Any, expected: Any, share: float, only: str) -> None:
    rig.proxy.faults(share, only=only)
    try:
        run(rig, bodies, expected, f"{share} {only}")
    finally:
        rig.proxy.heal()
    assert sum(rig.proxy.happened.values()) > 0
    assert_drafting_resumes(rig, bodies)


def test_a_cut_wire(rig: Rig, bodies: Any, expected: Any) -> None:
    rig.proxy.faults(1.0, (Fault.DROP,))
    try:
        run(rig, bodies, expected, "cut")
        assert eventually(lambda: ssd_state(rig.server)["draft"] == "down", 15)
        assert rig.server.is_ready()
    finally:
        rig.proxy.heal()
    assert_drafting_resumes(rig, bodies)


# -- a draft server that lies ----------------------------------------------------------------------


def lies(seed: int = 0) -> Any:
    """Tampers with each answer in another way."""
    r = random.Random(seed)

    def tamper(answer: protocol.Speculations) -> object:
        kind = r.choice(
            ["honest", "ids", "round", "future", "have", "short", "long", "rows", "status", "noise"]
        )
        rows, tokens = answer.rows.copy(), answer.tokens.copy()
        if kind == "ids":
            tokens[:] = r.choice([-1, 1 << 30, 4096, -(1 << 31)])
        elif kind == "round":
            answer.round_id = max(0, answer.round_id - r.randint(1, 3))
        elif kind == "future":
            answer.round_id += 1000
        elif kind == "have":
            rows[:, 2] = r.choice([0, 1 << 40, -5])
        elif kind == "short":
            rows[:, 4] = 0
        elif kind == "rows":
            rows[:, 0] += r.choice([1, -1, 1000])
        elif kind == "noise":
            return [r.randbytes(r.randint(0, 200)) for _ in range(r.randint(1, 4))]
        elif kind in ("long", "status"):
            frames = protocol.encode(answer)
            bad = rows.copy()
            bad[:, 4 if kind == "long" else 3] = r.choice([99, -1])
            return [frames[0], bad.astype("<i8").tobytes(), frames[2]]
        answer.rows, answer.tokens = rows, tokens
        return answer

    return tamper


def test_a_lying_draft_server(rig: Rig, bodies: Any, expected: Any) -> None:
    script = Script(
        [[*b["input_ids"], *e["output_ids"]] for b, e in zip(bodies, expected, strict=True)]
    )
    endpoint = private_ipc_endpoint()
    double = DraftDouble(
        endpoint, script.draft, vocab_size=read_vocabulary(str(TARGET_PATH)).size, wrong=0.2,
        tamper=lies(), num_steps=4,
    )  # fmt: skip
    before = ssd_state(rig.server)
    try:
        rig.proxy.behind(endpoint)
        assert eventually(lambda: double.counts.get("Hello", 0) > 0, 20), double.counts
        rig.wait_up(20)
        for _ in range(2):
            run(rig, bodies, expected, "lies")
    finally:
        double.stop()
        rig.real_draft()
        remove_private_ipc(endpoint)
    after = ssd_state(rig.server)
    assert after["accepted"] > before["accepted"], "the honest answers were used"
    assert after["invalid_messages"] > before["invalid_messages"]
    assert eventually(lambda: ssd_state(rig.server)["draft_model"] not in ("", "double"), 30)
    assert_drafting_resumes(rig, bodies)


# -- memory of the draft ---------------------------------------------------------------------------


def test_a_pool_far_too_small_for_the_crowd(rig: Rig, prompts: list[list[int]]) -> None:
    """24 long prompts on a draft pool that has room for four: fewer drafts, nothing else."""
    flat = [token for prompt in prompts for token in prompt]
    crowd = [
        {
            "input_ids": flat[i * 97 : i * 97 + 600],
            "sampling_params": {"max_new_tokens": 16, "temperature": 0.0, "ignore_eos": True},
        }
        for i in range(24)
    ]
    before = ssd_state(rig.server)
    answers = send_all(rig.server, crowd, 24)
    after = ssd_state(rig.server)
    assert after["outcomes"]["no_memory"] > before["outcomes"]["no_memory"], "the pool was short"

    def missing() -> list[str]:
        numbers = ssd_state(rig.server)["draft_stats"]  # they come once a second
        names = ("branches", "starved")
        return [name for name in names if numbers[name] <= before["draft_stats"][name]]

    assert eventually(lambda: not missing(), 5), missing()
    assert after["draft"] == "up" and rig.draft.running
    configure(rig.server, ssd_drafting=0)
    without = send_all(rig.server, crowd[:6], 3)
    compare(rig.server, crowd[:6], without, answers[:6], "crowd").check()
    configure(rig.server, ssd_drafting=1)
    assert eventually(rig.pools_whole, 30)


# -- a second verifier -----------------------------------------------------------------------------


class Rowdy(threading.Thread):
    """Another verifier: opens sessions without end, asks, sends nonsense, and dies."""

    def __init__(self, endpoint: str, vocab_size: int) -> None:
        super().__init__(daemon=True)
        self._client = ZmqClient(endpoint, b"rowdy")
        self._vocab_size = vocab_size
        self._stop_event = threading.Event()
        self.sent = 0

    def run(self) -> None:
        r = random.Random(1)
        hello = protocol.Hello(
            verifier="rowdy", num_steps=4, context_len=2048, vocab_size=self._vocab_size,
            vocab_hash="", max_running_requests=8,
        )  # fmt: skip
        self._client.send(protocol.encode(hello))
        none = np.empty(0)
        while not self._stop_event.is_set():
            sid, kind = r.randrange(100), r.random()
            if kind < 0.2:
                prompt = np.array([r.randrange(self._vocab_size) for _ in range(r.randint(1, 300))])
                frames = protocol.encode(
                    protocol.Open(
                        sid=sid,
                        epoch=self.sent,
                        seed=0,
                        temperature=0.0,
                        top_k=1,
                        top_p=1.0,
                        min_p=0.0,
                        num_prompt=len(prompt),
                        num_bias=0,
                        prompt=prompt,
                        bias_ids=none,
                        bias_values=none,
                    )  # fmt: skip
                )
            elif kind < 0.6:
                rows = np.array([[sid, self.sent, 1, 2]])
                frames = protocol.encode(
                    protocol.Speculate(
                        round_id=self.sent,
                        num_rows=1,
                        num_tokens=2,
                        rows=rows,
                        tokens=np.array([1, 2]),
                    )  # fmt: skip
                )
            else:
                frames = [r.randbytes(r.randint(0, 3000)) for _ in range(r.randint(1, 5))]
            self.sent += self._client.send(frames)
            self._client.recv(0.0005)
        self._client.close()

    def die(self) -> None:
        """No Close, no goodbye."""
        self._stop_event.set()
        self.join(10)


def test_a_rowdy_second_verifier(rig: Rig, bodies: Any, expected: Any) -> None:
    before = ssd_state(rig.server)
    rowdy = Rowdy(rig.draft_endpoint, read_vocabulary(str(TARGET_PATH)).size)
    rowdy.start()
    try:
        assert eventually(lambda: ssd_state(rig.server)["draft_stats"].get("peers") == 2, 20)
        run(rig, bodies, expected, "rowdy")
        during = ssd_state(rig.server)
    finally:
        rowdy.die()
    assert rowdy.sent > 100
    assert during["draft"] == "up" and during["hits"] > before["hits"]
    assert during["draft_stats"]["malformed"] > before["draft_stats"]["malformed"]
    assert eventually(lambda: ssd_state(rig.server)["draft_stats"].get("peers") == 1, 20), "lease"
    assert_drafting_resumes(rig, bodies)


def test_two_targets_share_a_draft_server(rig: Rig, bodies: Any, expected: Any) -> None:
    """Both draft and hit; one is killed with requests in flight, the other goes on."""
    second = rig.another_target("second")
    servers = (rig.server, second)
    with second:
        assert eventually(lambda: ssd_state(second)["draft"] == "up", 60)
        before = [ssd_state(server) for server in servers]
        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(lambda server: send_all(server, bodies, 4), servers))
        after = [ssd_state(server) for server in servers]
        for i, server in enumerate(servers):
            same(rig, bodies, expected, answers[i], server.log.stem)
            assert after[i]["hits"] > before[i]["hits"], server.log.stem
        assert after[0]["draft_stats"]["peers"] == 2
        params = {"max_new_tokens": 3000, "temperature": 0.0, "ignore_eos": True}
        long = {"input_ids": [1, 2, 3], "sampling_params": params}
        for _ in range(3):
            threading.Thread(target=_ask_in_vain, args=(second, long), daemon=True).start()
        assert eventually(lambda: ssd_state(rig.server)["draft_stats"]["sessions"] == 3, 30)
        family = second.processes()
        second.process.send_signal(signal.SIGKILL)  # type: ignore[union-attr]
        hits = ssd_state(rig.server)["hits"]
        run(rig, bodies, expected, "the other is killed")
        assert ssd_state(rig.server)["hits"] > hits
        assert not psutil.wait_procs(family, timeout=20)[1]
    assert eventually(lambda: ssd_state(rig.server)["draft_stats"]["peers"] == 1, 20), "lease"
    assert_drafting_resumes(rig, bodies)


def _ask_in_vain(server: ServerProcess, body: dict[str, Any]) -> None:
    with suppress(OSError, RuntimeError):
        server.post("/generate", body)


# -- another draft model ---------------------------------------------------------------------------


def test_new_weights_for_the_draft(rig: Rig, bodies: Any, expected: Any, tmp_path: Path) -> None:
    """Started again with other weights, it drafts from them; the text stays."""
    other = tmp_path / "other"
    shutil.copytree(DRAFT_PATH, other)
    (weights,) = other.glob("*.safetensors")
    tensors = load_file(weights)
    noise = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if "down_proj" in name:
            tensor += 0.02 * torch.randn(tensor.shape, generator=noise)
    save_file(tensors, weights, metadata={"format": "pt"})
    rig.draft.model_path = other
    try:
        assert rig.draft.stop() == 0
        rig.draft.start()
        run(rig, bodies, expected, "no draft server")
        assert eventually(lambda: ssd_state(rig.server)["draft_model"] == str(other), 120)
        run(rig, bodies, expected, "other weights")
        assert_drafting_resumes(rig, bodies)
    finally:
        rig.draft.model_path = DRAFT_PATH
