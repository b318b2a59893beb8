"""`--dp-size 2`: two replicas of the target, each a verifier of its own, at one draft server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from documented import DOCS, Recipe
from parity.harness import compare, configure, send_all
from servers import ServerProcess
from sgl_ssd.models import DRAFT_PATH, TARGET_PATH

pytestmark = pytest.mark.integration

NEW_TOKENS = 48


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("replicas") / "server.log"
    models = {"Qwen/Qwen3-8B": str(TARGET_PATH), "Qwen/Qwen3-0.6B": str(DRAFT_PATH)}
    flags = Recipe(DOCS / "deployment.md", models).arguments("--dp-size 2")
    args = [*flags, "--device", "cpu", "--dtype", "float32"]
    with ServerProcess("sgl_ssd.launch_server", args, log=log) as server:
        yield server
        server.assert_ends_cleanly()


def states(server: ServerProcess) -> list[dict[str, Any]]:
    """Section `ssd` of each replica."""
    return [state["ssd"] for state in server.get("/server_info")["internal_states"]]


def bodies(prompts: list[list[int]], temperature: float) -> list[dict[str, Any]]:
    params = {"max_new_tokens": NEW_TOKENS, "temperature": temperature, "ignore_eos": True}
    return [
        {"input_ids": ids, "sampling_params": params | {"sampling_seed": 1000 + i}}
        for i, ids in enumerate(prompts)
    ]


def test_texts_are_those_of_one_replica_without_drafts(replicas, ssd_server, prompts):
    configure(ssd_server, ssd_drafting=0)
    for temperature in (0.0, 0.8):
        requests = bodies(prompts[:16], temperature)
        without = send_all(ssd_server, requests, 8)
        answers = send_all(replicas, requests, 8)
        compare(ssd_server, requests, without, answers, f"two replicas, T={temperature}").check()
    both = states(replicas)
    assert len(both) == 2
    for state in both:
        assert state["accepted"] > 0 and state["hits"] > 0 and state["draft"] == "up"
    deadline = time.monotonic() + 10  # the draft server's numbers come once a second
    while max(s["draft_stats"].get("peers", 0) for s in states(replicas)) != 2:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_samples_without_a_seed_differ_between_replicas(replicas):
    """Both count their requests from the first on: the same number must not be the same noise."""
    params = {"max_new_tokens": 24, "temperature": 1.0, "ignore_eos": True}
    request = {"text": "def ", "sampling_params": params}
    texts = [tuple(a["output_ids"]) for a in send_all(replicas, [request] * 6, 1)]
    assert len(set(texts)) == 6


def test_settings_reach_every_replica(replicas):
    configure(replicas, ssd_num_steps=2, ssd_fan_out=3, ssd_push=0)
    for state in states(replicas):
        assert (state["num_steps"], state["fan_out"], state["push"]) == (2, [3] * 3, "off")
    configure(replicas, ssd_num_steps=4, ssd_fan_out=4, ssd_push=1)


def test_the_draft_server_dies(replicas, ssd_server, prompts):
    requests = bodies(prompts[16:28], 0.0)
    configure(ssd_server, ssd_drafting=0)
    without = send_all(ssd_server, requests, 8)
    (draft,) = [p for p in replicas.processes() if "draft_server" in p.name() + p.cmdline()[0]]
    draft.kill()
    answers = send_all(replicas, requests, 8)
    compare(ssd_server, requests, without, answers, "draft killed").check()
    deadline = time.monotonic() + 120
    while any(state["draft"] != "up" or not state["restarts"] for state in states(replicas)):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    before = [state["hits"] for state in states(replicas)]
    answers = send_all(replicas, requests, 8)
    compare(ssd_server, requests, without, answers, "draft restarted").check()
    after = [state["hits"] for state in states(replicas)]
    assert all(new > old for old, new in zip(before, after, strict=True))
