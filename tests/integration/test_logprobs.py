"""What is reported about the target's distribution: log-probabilities and hidden states."""

from __future__ import annotations

import math
from typing import Any

import pytest

from parity.harness import compare, configure, send_all, ssd_state

pytestmark = pytest.mark.integration

FIELDS: list[dict[str, Any]] = [
    {},
    {"top_logprobs_num": 5},
    {"token_ids_logprob": [1, 2, 10, 100]},
    {"top_logprobs_num": 2, "logprob_start_len": 0, "token_ids_logprob": [7]},
    {"logprob_start_len": 3, "top_logprobs_num": 1},
    {"return_text_in_logprobs": True, "logprob_start_len": 0},
]


@pytest.fixture
def drafting(ssd_server):
    """The server with drafts on; fails when a test did not draft at all."""
    configure(ssd_server, ssd_drafting=1, ssd_num_steps=7, ssd_fan_out=3, ssd_backup=2)
    before = ssd_state(ssd_server)
    yield ssd_server
    after = ssd_state(ssd_server)
    configure(ssd_server, ssd_drafting=0)
    assert after["accepted"] > before["accepted"]


def _bodies(prompts, **sampling: Any) -> list[dict[str, Any]]:
    """Half of the requests with logprobs, of different lengths and ends."""
    bodies = []
    for i, ids in enumerate(prompts):
        params = {"max_new_tokens": 5 + 7 * (i % 5), "temperature": 0.0, "ignore_eos": True}
        body: dict[str, Any] = {"input_ids": ids, "sampling_params": params | sampling}
        bodies += [body, body | {"return_logprob": True} | FIELDS[i % len(FIELDS)]]
    return bodies


def test_logprobs_of_every_kind_equal_plain_sglang(drafting, plain_bundled, prompts):
    bodies = _bodies(prompts[4:22])
    # One at a time: plain SGLang ends when such requests stand in one batch with others.
    want = send_all(plain_bundled, bodies, 1)
    got = send_all(drafting, bodies, 8)
    compare(drafting, bodies, want, got, "logprobs").check()
    for body, answer in zip(bodies, got, strict=True):
        if "return_logprob" in body:
            meta = answer["meta_info"]
            assert len(meta["output_token_logprobs"]) == meta["completion_tokens"]
            assert [item[1] for item in meta["output_token_logprobs"]] == answer["output_ids"]


def test_sampled_logprobs_are_those_of_a_rescored_text(drafting, prompts):
    """At T = 1: one number a token, equal to what a prefill of the whole text says."""
    bodies = [
        {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 40, "temperature": 1.0, "sampling_seed": i},
            "return_logprob": True,
            "top_logprobs_num": 5,
        }
        for i, ids in enumerate(prompts[6:14])
    ]
    answers = send_all(drafting, bodies, 4)
    rescore = [
        {
            "input_ids": body["input_ids"] + answer["output_ids"],
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        for body, answer in zip(bodies, answers, strict=True)
    ]
    for body, answer, again in zip(bodies, answers, send_all(drafting, rescore, 4), strict=True):
        meta = answer["meta_info"]
        said = [item[0] for item in meta["output_token_logprobs"]]
        assert len(said) == meta["completion_tokens"]
        scored = again["meta_info"]["input_token_logprobs"][len(body["input_ids"]) :]
        assert said == pytest.approx([item[0] for item in scored], abs=1e-4)
        assert min(said) < -0.1
        for top in meta["output_top_logprobs"]:
            assert sum(math.exp(item[0]) for item in top) <= 1 + 1e-4


def test_requests_with_logprobs_draft_too(drafting, prompts):
    body = _bodies([prompts[10]], max_new_tokens=60)[1]
    meta = drafting.post("/generate", body)["meta_info"]
    assert meta["spec_verify_ct"] < meta["completion_tokens"] == 60


@pytest.mark.parametrize("mode", [True, "last"])
def test_hidden_states_equal_plain_sglang(drafting, plain_bundled, prompts, tokenizer, mode):
    """One vector a token: none missing, none from behind the end of the text."""
    bodies = [
        {
            "input_ids": ids[:40],
            "sampling_params": {"max_new_tokens": 14, "temperature": 0.0, "ignore_eos": True},
            "return_hidden_states": mode,
        }
        for ids in prompts[2:6]
    ]
    said = send_all(plain_bundled, bodies, 1)
    for j in (3, 6):  # ends inside a run
        early = dict(bodies[1]["sampling_params"], ignore_eos=False)
        early["stop_token_ids"] = [said[1]["output_ids"][j]]
        bodies.append(bodies[1] | {"sampling_params": early})
    want = send_all(plain_bundled, bodies, 1)
    got = send_all(drafting, bodies, 4)
    compare(drafting, bodies, want, got, "hidden states").check()
    for a, b in zip(want, got, strict=True):
        a_rows, b_rows = _rows(a), _rows(b)
        assert len(a_rows) == len(b_rows) == (1 if mode == "last" else len(b["output_ids"]))
        for x, y in zip(a_rows, b_rows, strict=True):
            assert y == pytest.approx(x, abs=1e-4, rel=1e-4)


def _rows(answer: Any) -> list[list[float]]:
    """One vector an output token (for "last" the last one alone)."""
    states = answer["meta_info"]["hidden_states"]
    if isinstance(states[0], float):
        return [states]
    # The prompt's come as one block, without those that the prefix cache had.
    first = states[0][-1] if isinstance(states[0][0], list) else states[0]
    return [first, *states[1:]]


def test_embeddings_and_scores_are_sglangs_own(ssd_server, plain_bundled):
    """Endpoints that decode nothing answer as plain SGLang does, refusals included."""
    for path, body in (
        ("/encode", {"text": "def"}),
        ("/v1/embeddings", {"model": "default", "input": "def"}),
        (
            "/v1/score",
            {
                "model": "default",
                "query": "def f(",
                "items": ["self", "x"],
                "label_token_ids": [5, 100],
                "apply_softmax": True,
            },
        ),
    ):
        answers = []
        for server in (plain_bundled, ssd_server):
            try:
                answers.append(server.post(path, body))
            except RuntimeError as refusal:
                answers.append(str(refusal).split(": ", 1)[1][:200])
        if isinstance(answers[0], dict) and "scores" in answers[0]:
            for x, y in zip(answers[0]["scores"], answers[1]["scores"], strict=True):
                assert y == pytest.approx(x, abs=1e-5)
        elif isinstance(answers[0], str):
            assert answers[0] == answers[1]
        else:
            assert type(answers[0]) is type(answers[1])
