"""Requests that make no sense get an answer that says so, and the server goes on."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from parity.harness import configure, ssd_state

pytestmark = pytest.mark.integration

REFUSED: list[dict[str, Any]] = [
    {"sampling_seed": "x"}, {"sampling_seed": [1]}, {"sampling_seed": 1.5},
    {"logit_bias": {"5": 1e39}}, {"logit_bias": {"5": "1"}}, {"logit_bias": {"5": None}},
    {"logit_bias": {"x": 1}}, {"logit_bias": {"99999": 1}}, {"logit_bias": [1]},
    {"max_new_tokens": 5.5}, {"max_new_tokens": -1}, {"max_new_tokens": 2**40},
    {"min_new_tokens": 2.5}, {"min_new_tokens": 9, "max_new_tokens": 5},
    {"top_k": 1.5}, {"top_k": 0}, {"top_p": 0}, {"top_p": "x"}, {"min_p": 2},
    {"temperature": -1}, {"repetition_penalty": 0},
    {"frequency_penalty": 9}, {"presence_penalty": [1]},
    {"regex": "(", "max_new_tokens": 4}, {"json_schema": "{", "max_new_tokens": 4},
    {"regex": "a", "ebnf": 'root ::= "a"'},
    {"custom_params": {"return_ssd_trace": "yes"}},
]  # fmt: skip
SERVED: list[dict[str, Any]] = [
    {"stop_token_ids": [10**12, -5], "min_new_tokens": 3},
    {"sampling_seed": 2**70}, {"sampling_seed": -(2**70)}, {"max_new_tokens": 5.0},
    {"logit_bias": {"5": -3e38}}, {"temperature": 1e-9}, {"temperature": 1e6}, {"top_p": 1e-9},
    {"top_k": 2**40}, {"stop": ""}, {"stop": []},
    {"max_new_tokens": 0},
]  # fmt: skip
BODIES: list[dict[str, Any]] = [
    {}, {"text": ""}, {"text": 5}, {"text": None}, {"input_ids": []}, {"input_ids": [10**9]},
    {"input_ids": [-1]}, {"input_ids": ["a"]}, {"input_ids": [1.5]}, {"text": ["a", 5]},
    {"text": "a", "input_ids": [1]}, {"text": "a", "sampling_params": "x"},
    {"text": "a", "return_logprob": True, "top_logprobs_num": 10**9},
    {"text": "a", "return_logprob": True, "top_logprobs_num": -1},
    {"text": "a", "return_logprob": True, "token_ids_logprob": [10**9]},
    {"text": "a", "return_logprob": True, "token_ids_logprob": [-1]},
    {"text": "a", "return_logprob": True, "logprob_start_len": 10**9},
    {"text": "a", "lora_path": "none"}, {"text": "a", "rid": 5}, {"text": "a", "stream": "x"},
    {"text": "a", "return_ssd_trace": 3}, {"text": "a", "priority": "x"},
    {"input_ids": [5] * 5000}, {"text": "a", "session_params": {"id": "none"}},
]  # fmt: skip


def status(server: Any, body: dict[str, Any]) -> tuple[int, str]:
    """Of the answer to `body`, and its text."""
    request = urllib.request.Request(
        server.url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as e:
        return e.code, e.read().decode()


@pytest.fixture(scope="module")
def server(ssd_server):
    configure(ssd_server, ssd_drafting=1, ssd_num_steps=4, ssd_fan_out=4, ssd_backup=2)
    yield ssd_server
    before = ssd_state(ssd_server)["accepted"]
    body = {"text": "def f(", "sampling_params": {"temperature": 0, "max_new_tokens": 32}}
    assert status(ssd_server, body)[0] == 200
    assert ssd_state(ssd_server)["accepted"] > before
    configure(ssd_server, ssd_drafting=0)


@pytest.mark.parametrize("values", REFUSED, ids=str)
def test_values_that_cannot_be_served_are_refused(server, values):
    code, text = status(server, {"text": "a", "sampling_params": {"max_new_tokens": 5, **values}})
    assert code == 400, text
    assert "Traceback" not in text


@pytest.mark.parametrize("values", SERVED, ids=str)
def test_values_that_look_odd_are_served(server, values):
    code, text = status(server, {"text": "a", "sampling_params": {"max_new_tokens": 5, **values}})
    assert code == 200, text


@pytest.mark.parametrize("body", BODIES, ids=lambda body: str(body)[:60])
def test_no_request_ends_the_server(server, body):
    sampling = {"sampling_params": {"max_new_tokens": 4}} if "sampling_params" not in body else {}
    code, text = status(server, {**sampling, **body})
    assert code in (200, 400, 422), text
    assert status(server, {"text": "a", "sampling_params": {"max_new_tokens": 2}})[0] == 200
