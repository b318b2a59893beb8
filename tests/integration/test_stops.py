"""Where a text ends: the first stop in text order wins, as if tokens came one by one.

Plain SGLang is the oracle. Stops are chosen from what the target says anyway, so that they fall
on every place of an accepted run.
"""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from parity.harness import compare, configure, send_all, ssd_state

pytestmark = pytest.mark.integration

RUN = 12
PROMPTS = [
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "def read_lines(path):\n    with open(path) as f:\n",
]


def _greedy(ids: list[int], **params: Any) -> dict[str, Any]:
    return {"input_ids": ids, "sampling_params": {"temperature": 0.0, **params}}


@pytest.fixture(scope="module")
def spoken(plain_bundled, tokenizer):
    """(prompt, what the target says after it), of which the drafts know much."""
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    bodies = [_greedy(ids, max_new_tokens=2 * RUN, ignore_eos=True) for ids in prompts]
    answers = send_all(plain_bundled, bodies, 2)
    return [(ids, answer["output_ids"]) for ids, answer in zip(prompts, answers, strict=True)]


def _check(ssd_server, plain_bundled, bodies, steps: tuple[int, ...] = (1, 4, 7, 12)):
    """Drafting with each K equals plain SGLang; some run of several tokens was accepted."""
    want = send_all(plain_bundled, bodies, 8)
    before = ssd_state(ssd_server)
    for k in steps:
        configure(ssd_server, ssd_drafting=1, ssd_num_steps=k, ssd_fan_out=3, ssd_backup=2)
        # Few at a time: these requests are so short that drafts must come soon.
        got = send_all(ssd_server, bodies, 2)
        configure(ssd_server, ssd_drafting=0)
        compare(ssd_server, bodies, want, got, f"K={k}").check()
        for answer in got:
            meta = answer["meta_info"]
            assert meta["completion_tokens"] == len(answer["output_ids"])
            assert meta.get("reasoning_tokens", 0) <= meta["completion_tokens"]
    after = ssd_state(ssd_server)
    assert after["accepted"] > before["accepted"]
    # With a large K alone a short text is over before a first prediction could have been of use.
    assert after["hits"] > before["hits"] or min(steps) > 4
    return want


def test_stop_token_at_every_place_of_a_run(ssd_server, plain_bundled, spoken):
    """Each token that the target says is declared a stop; min_new_tokens may lie beyond it."""
    bodies = [
        _greedy(ids, max_new_tokens=2 * RUN, stop_token_ids=[said[j]])
        for ids, said in spoken
        for j in range(RUN)
    ]
    ids, said = spoken[0]
    for early in (2, 5, 9):
        body = _greedy(ids, max_new_tokens=2 * RUN, stop_token_ids=[said[3]])
        body["sampling_params"]["min_new_tokens"] = early
        bodies.append(body)
    want = _check(ssd_server, plain_bundled, bodies)
    kinds = [answer["meta_info"]["finish_reason"]["type"] for answer in want]
    assert kinds.count("stop") > RUN


def test_first_of_stop_and_length_cap_wins(ssd_server, plain_bundled, spoken, tokenizer):
    """Every pair of a stop's place and a cap up to 10, as token and as string."""
    ids, said = spoken[0]
    bodies = []
    for place in range(10):
        text = tokenizer.decode(said[place : place + 1])
        for cap in range(1, 11):
            bodies.append(_greedy(ids, max_new_tokens=cap, stop_token_ids=[said[place]]))
            if place % 2 == 0:
                bodies.append(_greedy(ids, max_new_tokens=cap, stop=[text]))
    want = _check(ssd_server, plain_bundled, bodies, (2, 7))
    kinds = {answer["meta_info"]["finish_reason"]["type"] for answer in want}
    assert kinds == {"stop", "length"}


def test_stop_strings_across_token_and_round_borders(ssd_server, plain_bundled, spoken, tokenizer):
    bodies = []
    for ids, said in spoken:
        text = tokenizer.decode(said)
        for start in range(0, min(40, len(text) - 8), 3):
            for length in (1, 4, 8):
                stop = text[start : start + length]
                bodies.append(_greedy(ids, max_new_tokens=2 * RUN, stop=[stop, "never said"]))
        bodies[-1]["sampling_params"]["no_stop_trim"] = True
        bodies.append(_greedy(ids, max_new_tokens=2 * RUN, stop_regex=[r"[a-z]+\s*[=(]"]))
        bodies.append(_greedy(ids, max_new_tokens=2 * RUN, stop_regex=[r"\n +\S"], stop=["never"]))
    want = _check(ssd_server, plain_bundled, bodies, (4, 12))
    assert any(a["meta_info"]["finish_reason"].get("matched") for a in want)


def test_end_of_text_inside_a_run(ssd_server, plain_bundled, spoken, tokenizer):
    """The model's own end of text, made likely by a bias: it ends the text, or is ignored."""
    eos = tokenizer.eos_token_id
    bodies = []
    for ids, _said in spoken:
        for bias in (2.0, 6.0, 12.0):
            for ignore in (False, True):
                body = _greedy(ids, max_new_tokens=RUN, ignore_eos=ignore)
                body["sampling_params"]["logit_bias"] = {str(eos): bias}
                bodies.append(body)
                bodies.append(json.loads(json.dumps(body)))
                bodies[-1]["sampling_params"]["min_new_tokens"] = 4
    want = _check(ssd_server, plain_bundled, bodies, (4, 12))
    for body, answer in zip(bodies, want, strict=True):
        if body["sampling_params"]["ignore_eos"]:
            assert len(answer["output_ids"]) == RUN


def test_context_end_with_a_neighbour(ssd_server, plain_bundled, held_out):
    """Requests that fill the context of 4096, at the greatest K, beside requests that do not."""
    flat = [token for ids in held_out for token in ids]
    while len(flat) < 5000:
        flat += flat
    bodies = [
        _greedy(flat[:length], max_new_tokens=4096 - length, ignore_eos=True)
        for length in (4083, 4075, 4040)
    ]
    bodies += [_greedy(flat[40 * i : 40 * i + 30], max_new_tokens=60) for i in range(3)]
    want = send_all(plain_bundled, bodies, 2)
    configure(ssd_server, ssd_drafting=1, ssd_num_steps=12, ssd_fan_out=2, ssd_backup=2)
    for _ in range(2):
        got = send_all(ssd_server, bodies, 6)
        compare(ssd_server, bodies, want, got, "context end").check()
    configure(ssd_server, ssd_drafting=0)


def test_reasoning_tokens_end_with_the_text(ssd_server, plain_bundled, spoken, tokenizer):
    """Upstream counts a whole run as reasoning, also what it has after the end of the text."""
    think_end = tokenizer.convert_tokens_to_ids("</think>")
    bodies = []
    for ids, said in spoken:
        for j in range(RUN):
            body = _greedy(ids, max_new_tokens=2 * RUN, stop_token_ids=[said[j]])
            bodies.append(body | {"require_reasoning": True})
        for bias in (3.0, 9.0, 30.0):
            body = _greedy(ids, max_new_tokens=RUN, logit_bias={str(think_end): bias})
            bodies.append(body | {"require_reasoning": True})
    want = _check(ssd_server, plain_bundled, bodies, (4, 7))
    counts = {answer["meta_info"]["reasoning_tokens"] for answer in want}
    assert len(counts) > 3


def _streamed(server, body) -> list[dict[str, Any]]:
    request = urllib.request.Request(
        server.url + "/generate",
        data=json.dumps(body | {"stream": True}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        lines = [line.decode().strip() for line in answer]
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(event) for event in events if event != "[DONE]"]


def test_streamed_end_equals_the_whole(ssd_server, plain_bundled, spoken, tokenizer):
    """Each event holds the text so far: it only grows, and ends as the whole answer does."""
    bodies = []
    for ids, said in spoken:
        text = tokenizer.decode(said)
        bodies += [_greedy(ids, max_new_tokens=2 * RUN, stop_token_ids=[said[j]]) for j in (3, 8)]
        bodies += [_greedy(ids, max_new_tokens=2 * RUN, stop=[text[i : i + 5]]) for i in (7, 20)]
        bodies.append(_greedy(ids, max_new_tokens=2 * RUN, ignore_eos=True))
    want = send_all(plain_bundled, bodies, 4)
    configure(ssd_server, ssd_drafting=1, ssd_num_steps=7, ssd_fan_out=3, ssd_backup=2)
    with ThreadPoolExecutor(4) as pool:
        streams = list(pool.map(lambda body: _streamed(ssd_server, body), bodies))
    configure(ssd_server, ssd_drafting=0)
    compare(ssd_server, bodies, want, [events[-1] for events in streams], "streamed").check()
    for events in streams:
        texts = [event["text"] for event in events]
        assert all(b.startswith(a) for a, b in zip(texts, texts[1:], strict=False))
        assert "\ufffd" not in "".join(texts[:-1])
        counts = [event["meta_info"]["completion_tokens"] for event in events]
        assert counts == sorted(counts)
    assert any(len(events) < len(events[-1]["output_ids"]) for events in streams)
