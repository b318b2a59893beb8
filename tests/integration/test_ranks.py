"""`--tp-size 2`: rank 0 talks to the draft server and decides; the other ranks follow.

Target and draft are the bundled pair, the draft with a larger, padded vocabulary: ids that the
target does not have are never proposed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from parity.harness import Body, compare, configure, send_all, ssd_state
from rank_noise import RankNoise
from rig import eventually
from servers import ServerProcess
from sgl_ssd.models import DRAFT_PATH, TARGET_PATH
from tiny_model import resize

pytestmark = pytest.mark.integration

NEW_TOKENS = 40
CONCURRENCY = 16


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> RankNoise:
    return RankNoise.install(tmp_path_factory.mktemp("rank-noise"))


@pytest.fixture(scope="module")
def ranks(noise: RankNoise, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("ranks")
    draft = resize(DRAFT_PATH, folder / "draft", vocab_size=4160, context_length=4096)
    args = ["--model-path", str(TARGET_PATH), "--speculative-draft-model-path", str(draft)]
    args += ["--device", "cpu", "--dtype", "float32", "--tp-size", "2"]
    log = folder / "server.log"
    env = noise.environment
    with ServerProcess("sgl_ssd.launch_server", args, log=log, env=env) as server:
        configure(server, ssd_fan_out=3, ssd_backup=2)
        yield server


@pytest.fixture(scope="module")
def bodies(prompts: list[list[int]]) -> list[Body]:
    """32 prompts at temperature 0, then the same ones at 0.8."""
    greedy, seeded = (make_bodies(prompts[:32], temperature=t) for t in (0.0, 0.8))
    return greedy + seeded


@pytest.fixture(scope="module")
def expected(ranks: ServerProcess, bodies: list[Body]) -> list[Any]:
    """The answers of two ranks without drafts and without noise."""
    configure(ranks, ssd_drafting=0)
    return send_all(ranks, bodies, CONCURRENCY)


def make_bodies(prompts: list[list[int]], **params: Any) -> list[Body]:
    sampling = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True, **params}
    return [
        {"input_ids": ids, "sampling_params": sampling | {"sampling_seed": 1000 + i}}
        for i, ids in enumerate(prompts)
    ]


def with_drafts(server: ServerProcess, bodies: list[Body]) -> list[Any]:
    """Answers with drafting on, of which there were some, and hits; it is off again afterwards."""
    configure(server, ssd_drafting=1)
    before = ssd_state(server)
    answers = send_all(server, bodies, CONCURRENCY)
    after = ssd_state(server)
    configure(server, ssd_drafting=0)
    for name in ("drafted", "accepted", "hits"):
        assert after[name] > before[name], name
    assert after["invalid_messages"] == before["invalid_messages"]
    return answers


def test_two_ranks_say_what_one_says(ranks, ssd_server, bodies, expected):
    """With drafts as without, and as one rank without: but for near ties, their sums differ."""
    assert ranks.get("/server_info")["tp_size"] == 2
    answers = with_drafts(ranks, bodies[:32]) + with_drafts(ranks, bodies[32:])
    compare(ranks, bodies, expected, answers, "two ranks").check()
    configure(ssd_server, ssd_drafting=0)
    alone = send_all(ssd_server, bodies, CONCURRENCY)
    compare(ssd_server, bodies, alone, expected, "one rank").check()
    compare(ssd_server, bodies, alone, answers, "one rank, drafts on two").check()


def test_noise_on_the_other_rank_changes_nothing(ranks, noise, bodies, expected):
    """Rank 1 would say something else nearly everywhere; its word does not count."""
    some, want = bodies[::4], expected[::4]
    before = noise.flips()
    noise.switch(True)
    try:
        without = send_all(ranks, some, CONCURRENCY)
        answers = with_drafts(ranks, some)
    finally:
        noise.switch(False)
    rows, flipped = (new - old for old, new in zip(before, noise.flips(), strict=True))
    assert flipped > rows / 2 > 100
    compare(ranks, some, want, without, "noise, no drafts").check()
    compare(ranks, some, want, answers, "noise, drafts").check()


def test_grammars_and_rejection_under_noise(ranks, noise, prompts):
    """Grammars walk the same way on both ranks; by rejection, lengths and tokens are rank 0's."""
    words = make_bodies(prompts[:8], temperature=1.0, regex="(cat|dog|fish)+!")
    configure(ranks, ssd_drafting=0)
    without = send_all(ranks, words, CONCURRENCY)
    noise.switch(True)
    try:
        compare(ranks, words, without, with_drafts(ranks, words), "regex").check()
        configure(ranks, ssd_verification=1)
        answers = with_drafts(ranks, make_bodies(prompts[:8], temperature=1.0))
    finally:
        noise.switch(False)
        configure(ranks, ssd_verification=0)
    assert [len(answer["output_ids"]) for answer in answers] == [NEW_TOKENS] * 8


def draft_server(server: ServerProcess) -> psutil.Process:
    (draft,) = (p for p in server.processes() if "draft_server" in p.name() + p.cmdline()[0])
    return draft


def test_the_draft_server_is_killed(ranks, bodies, expected):
    """In the middle of requests: the text stays, the draft server comes back, hits rise again."""
    some, want = bodies[::2], expected[::2]
    configure(ranks, ssd_drafting=1)
    before = ssd_state(ranks)
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        sent = [pool.submit(ranks.post, "/generate", body, 600) for body in some]
        assert eventually(lambda: ssd_state(ranks)["hits"] > before["hits"], 60, every=0.02)
        draft_server(ranks).kill()
        assert not all(answer.done() for answer in sent)
        answers = [answer.result() for answer in sent]
    assert eventually(lambda: ssd_state(ranks)["restarts"] > before["restarts"], 120)
    again = with_drafts(ranks, some)
    compare(ranks, some, want, answers, "killed").check()
    compare(ranks, some, want, again, "restarted").check()


def test_only_the_first_rank_talks_to_the_draft_server(ranks):
    said = re.findall(r" (TP\d)\] draft server (up|down)", ranks.log.read_text())
    assert said and {rank for rank, _ in said} == {"TP0"}
    assert eventually(lambda: ssd_state(ranks)["draft_stats"].get("peers") == 1, 20)
    connections = draft_server(ranks).net_connections("unix")
    sockets = [c.laddr for c in connections if c.laddr.endswith("/draft")]
    assert len(sockets) == 2, "one that listens, and one for the only client"


def test_flush_and_end(ranks):
    """Both pools are whole after a flush, and no process of either rank is left at the end."""
    assert eventually(lambda: ssd_state(ranks)["draft_stats"].get("sessions") == 0, 20)
    ranks.post("/flush_cache", {})
    state = ssd_state(ranks)
    assert state["open_sessions"] == 0 and state["kv_available"] == state["kv_total"]
    names = {process.name() for process in ranks.processes()}
    assert {"sglang::scheduler_TP0", "sglang::scheduler_TP1"} <= names, names
    ranks.assert_ends_cleanly()
