"""The text does not depend on drafting: on the bundled pair, in fp32, token for token."""

from __future__ import annotations

import time

import pytest

from parity.harness import compare, configure, send_all, ssd_state
from parity.mixes import RequestMix, make_plain_agree
from servers import ServerProcess

pytestmark = pytest.mark.integration

NEW_TOKENS = 96
CONFIGS = [(1, 1), (4, 3), (7, 8), (12, 3)]


def _bodies(prompts, **sampling):
    params = {"max_new_tokens": NEW_TOKENS, "temperature": 0.0, "ignore_eos": True, **sampling}
    return [
        {"input_ids": ids, "sampling_params": params | {"sampling_seed": 1000 + i}}
        for i, ids in enumerate(prompts)
    ]


def _without_drafts(server: ServerProcess, bodies, concurrency=16):
    configure(server, ssd_drafting=0)
    return send_all(server, bodies, concurrency)


def _with_drafts(server: ServerProcess, bodies, concurrency, **settings):
    """Answers with drafting on; asserts that drafts came, and some of them as hits."""
    configure(server, ssd_drafting=1, **settings)
    before = ssd_state(server)
    answers = send_all(server, bodies, concurrency)
    after = ssd_state(server)
    assert after["drafted"] > before["drafted"]
    assert after["accepted"] > before["accepted"]
    assert after["hits"] > before["hits"]
    configure(server, ssd_drafting=0)
    return answers


@pytest.fixture(scope="module")
def greedy(ssd_server, prompts):
    bodies = _bodies(prompts[:24])
    return bodies, _without_drafts(ssd_server, bodies)


def test_greedy_equals_plain_sglang(ssd_server, plain_bundled, greedy):
    bodies, without = greedy
    plain = send_all(plain_bundled, bodies, 8)
    compare(ssd_server, bodies, plain, without, "drafting off").check()


@pytest.mark.parametrize(("steps", "fan_out"), CONFIGS)
def test_greedy_does_not_depend_on_drafting(ssd_server, greedy, steps, fan_out):
    bodies, without = greedy
    answers = _with_drafts(ssd_server, bodies, 16, ssd_num_steps=steps, ssd_fan_out=fan_out)
    compare(ssd_server, bodies, without, answers, f"K={steps} F={fan_out}").check()
    answers = _with_drafts(ssd_server, bodies[:6], 1, ssd_num_steps=steps, ssd_fan_out=fan_out)
    compare(ssd_server, bodies[:6], without[:6], answers, f"K={steps}, alone").check()


@pytest.mark.parametrize("backup", [0, 1, 2, 3])
def test_seeded_sampling_does_not_depend_on_drafting(ssd_server, prompts, backup):
    bodies = _bodies(prompts[24:40], temperature=0.8, top_p=0.95)
    without = _without_drafts(ssd_server, bodies)
    for _ in range(2):  # the same seed gives the same text, whatever the timing
        answers = _with_drafts(
            ssd_server, bodies, 16, ssd_num_steps=4, ssd_fan_out=4, ssd_backup=backup
        )
        compare(ssd_server, bodies, without, answers, f"T=0.8 backup {backup}").check()
    assert len({tuple(a["output_ids"][:8]) for a in without}) > 8
    configure(ssd_server, ssd_backup=2)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_hits_that_are_sent_ahead(ssd_server, prompts, temperature):
    """Alone, with few branches: caches are complete before the outcome, most of the time."""
    bodies = _bodies(prompts[:8], temperature=temperature)
    without = _without_drafts(ssd_server, bodies)
    counts = []
    for push in (1, 0):
        before = ssd_state(ssd_server)["pushed_hits"]
        settings = {"ssd_num_steps": 2, "ssd_fan_out": 2, "ssd_push": push}
        answers = _with_drafts(ssd_server, bodies, 1, **settings)
        compare(ssd_server, bodies, without, answers, f"push {push}").check()
        counts.append(ssd_state(ssd_server)["pushed_hits"] - before)
    configure(ssd_server, ssd_num_steps=4, ssd_fan_out=4, ssd_push=1)
    assert counts[0] > 0 and counts[1] == 0


def test_drafting_only_after_the_outcome(ssd_server, greedy):
    """What `--ssd-mode sync` sets: ordinary speculative decoding through the same code."""
    bodies, without = greedy
    configure(ssd_server, ssd_drafting=1, ssd_num_steps=4, ssd_fan_out=0, ssd_backup=2)
    for concurrency in (16, 1):
        before = ssd_state(ssd_server)
        answers = send_all(ssd_server, bodies[:12], concurrency)
        after = ssd_state(ssd_server)
        compare(ssd_server, bodies[:12], without[:12], answers, "sync").check()
        assert after["backups"] > before["backups"] and after["accepted"] > before["accepted"]
        assert after["hits"] == before["hits"]
    configure(ssd_server, ssd_drafting=0, ssd_num_steps=4, ssd_fan_out=4)


def test_text_does_not_depend_on_settings_that_follow_the_load(ssd_server, prompts, greedy):
    """Fan-out, backup and K are left to the server, which also measures plain rounds."""
    sampled = _bodies(prompts[24:40], temperature=0.8)
    runs = {16: greedy, 8: (sampled, _without_drafts(ssd_server, sampled)), 1: greedy}
    auto = {"ssd_num_steps": -1, "ssd_fan_out": -1, "ssd_backup": 3}
    configure(ssd_server, ssd_num_steps=4, ssd_fan_out=4)
    for concurrency in (16, 8, 1, 1, 1):
        bodies, without = runs[concurrency]
        answers = _with_drafts(ssd_server, bodies, concurrency, **auto)
        compare(ssd_server, bodies, without, answers, f"auto, {concurrency} at a time").check()
        state = ssd_state(ssd_server)["auto"]
        if concurrency == 1 and state["expected_tokens_per_s"]:
            break  # it has compared all settings once
    assert state["by_batch"] and state["expected_tokens_per_s"] > 0
    configure(ssd_server, ssd_num_steps=4, ssd_fan_out=4, ssd_backup=2)
    assert "auto" not in ssd_state(ssd_server)


def test_every_sampling_field(ssd_server, prompts, tokenizer):
    """Requests drawn over all sampling fields, logprobs and grammars among them."""
    bodies = RequestMix(prompts, len(tokenizer), seed=11).draw_many(120, 48)
    without = _without_drafts(ssd_server, bodies)
    alone = send_all(ssd_server, bodies[:20], 1)
    compare(ssd_server, bodies[:20], without[:20], alone, "off, alone").check()
    answers = _with_drafts(ssd_server, bodies, 16, ssd_num_steps=7, ssd_fan_out=3)
    compare(ssd_server, bodies, without, answers, "mixed").check()


def test_fields_that_plain_sglang_gets_right(ssd_server, plain_bundled, prompts, tokenizer):
    """Greedy requests with penalties, stops, biases and grammars, against plain SGLang itself."""
    bodies = RequestMix(prompts, len(tokenizer), seed=5).draw_many(60, 48)
    for body in bodies:
        make_plain_agree(body)
        body["sampling_params"].pop("sampling_seed")
    plain = send_all(plain_bundled, bodies, 1)
    answers = _with_drafts(ssd_server, bodies, 8, ssd_num_steps=4, ssd_fan_out=4)
    compare(ssd_server, bodies, plain, answers, "plain").check()


def test_accept_length_does_not_fall_on_prefix_hits(ssd_server, held_out):
    """A repeated prompt comes from both caches, and the draft prefills only what is new."""
    prompt = [token for ids in held_out for token in ids][:300]
    body = _bodies([prompt])[0]
    configure(ssd_server, ssd_drafting=1, ssd_num_steps=4, ssd_fan_out=4)
    ssd_server.post("/flush_cache", {})
    first, cold = _traced(ssd_server, body)
    second, warm = _traced(ssd_server, body)
    assert second["meta_info"]["cached_tokens"] > 290
    assert (
        second["meta_info"]["spec_accept_length"] > 0.9 * first["meta_info"]["spec_accept_length"]
    )
    assert cold["prefill_tokens"] >= 299
    assert warm["prefill_tokens"] - warm["prefill_cached_tokens"] <= 8


def test_second_turn_prefills_only_what_is_new(ssd_server, held_out):
    """The draft keeps the text of a finished request, its answer too, for the next turn."""
    flat = [token for ids in held_out for token in ids]
    prompt, more = flat[3000:3200], flat[9000:9020]
    configure(ssd_server, ssd_drafting=1, ssd_num_steps=4, ssd_fan_out=4)
    ssd_server.post("/flush_cache", {})
    first, _ = _traced(ssd_server, _bodies([prompt])[0])
    turn = _bodies([[*prompt, *first["output_ids"], *more]])
    second, moved = _traced(ssd_server, turn[0])
    assert second["meta_info"]["cached_tokens"] >= 200 + NEW_TOKENS - 2
    assert moved["prefill_tokens"] - moved["prefill_cached_tokens"] <= len(more) + 8
    assert second["meta_info"]["spec_accept_length"] > 1
    without = _without_drafts(ssd_server, turn)
    compare(ssd_server, turn, without, [second], "second turn").check()


def _traced(server, body):
    """An answer, and how the draft server's counters moved meanwhile."""
    before = ssd_state(server)["draft_stats"]
    answer = server.post("/generate", body)
    time.sleep(2.5)  # the counters come with the next sign of life
    after = ssd_state(server)["draft_stats"]
    return answer, {name: after[name] - before.get(name, 0.0) for name in after}
