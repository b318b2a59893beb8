"""Neither K nor F, length nor company, repetition nor seed number changes what a request says."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from parity.harness import compare, configure, send_all, ssd_state

pytestmark = pytest.mark.integration


def _bodies(prompts, new_tokens: int, **sampling: Any) -> list[dict[str, Any]]:
    params = {"max_new_tokens": new_tokens, "temperature": 0.0, "ignore_eos": True, **sampling}
    return [{"input_ids": ids, "sampling_params": params} for ids in prompts]


@pytest.fixture
def server(ssd_server):
    configure(ssd_server, ssd_drafting=1, ssd_num_steps=4, ssd_fan_out=3, ssd_backup=2)
    before = ssd_state(ssd_server)
    yield ssd_server
    after = ssd_state(ssd_server)
    configure(ssd_server, ssd_drafting=0)
    assert after["accepted"] > before["accepted"]
    assert after["hits"] > before["hits"]


def test_every_lookahead_and_fan_out(server, plain_bundled, prompts):
    """K from 1 (where each rejection is one of the last draft) to 8, F from 1 to 4."""
    bodies = _bodies(prompts[8:11], 24)
    want = send_all(plain_bundled, bodies, 3)
    for steps in range(1, 9):
        for fan_out in range(1, 5):
            configure(server, ssd_num_steps=steps, ssd_fan_out=fan_out)
            got = send_all(server, bodies, 3)
            compare(server, bodies, want, got, f"K={steps} F={fan_out}").check()


def test_long_texts_and_long_prompts(server, plain_bundled, held_out):
    """Some differences only show after hundreds of tokens, or behind thousands."""
    flat = [token for ids in held_out for token in ids]
    while len(flat) < 4000:
        flat += flat
    bodies = _bodies([flat[:40], flat[1000:1300]], 600) + _bodies([flat[:3600]], 100)
    want = send_all(plain_bundled, bodies, 3)
    compare(server, bodies, want, send_all(server, bodies, 3), "long").check()


def test_a_seed_repeats_and_other_seeds_differ(server, prompts):
    alike = _bodies([prompts[10]] * 6, 24, temperature=2.0, sampling_seed=42)
    texts = {tuple(answer["output_ids"]) for answer in send_all(server, alike, 3)}
    assert len(texts) == 1
    others = [
        body
        for seed in range(1, 7)
        for body in _bodies([prompts[10]], 24, temperature=2.0, sampling_seed=seed)
    ]
    texts = {tuple(answer["output_ids"]) for answer in send_all(server, others, 3)}
    assert len(texts) > 3


def test_unseeded_tokens_follow_the_targets_distribution(server, prompts):
    """First and third token of many draws: neither constant nor greedy, and in due proportion."""
    ids = prompts[10]
    probe = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": 5,
    }
    top = server.post("/generate", probe)["meta_info"]["output_top_logprobs"][0]
    draws = 400
    params = {"max_new_tokens": 4, "temperature": 1.0, "ignore_eos": True, "n": 50}
    answers = []
    for _ in range(draws // 50):
        answers += server.post("/generate", {"input_ids": ids, "sampling_params": params})
    first = Counter(answer["output_ids"][0] for answer in answers)
    for logprob, token, *_ in top:
        p = 2.718281828 ** float(logprob)
        # Four standard deviations.
        assert abs(first[token] / draws - p) < 4 * (p * (1 - p) / draws) ** 0.5 + 1 / draws
    assert len({answer["output_ids"][2] for answer in answers}) > 5
