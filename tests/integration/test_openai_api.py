"""What a client sees: the OpenAI API, streaming, usage, metrics."""

from __future__ import annotations

import pytest
import requests
from openai import OpenAI

from parity.harness import configure, ssd_state

pytestmark = pytest.mark.integration

ONE_PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJg"
    "gg=="
)


@pytest.fixture(scope="module")
def client(ssd_server):
    configure(ssd_server, ssd_drafting=1, ssd_num_steps=4, ssd_fan_out=4)
    return OpenAI(base_url=ssd_server.url + "/v1", api_key="none")


def test_chat_with_drafts(client, ssd_server):
    before = ssd_state(ssd_server)
    answer = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": "Write a function that adds two numbers."}],
        max_tokens=64,
        temperature=0,
    )
    after = ssd_state(ssd_server)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens <= 64
    assert after["hits"] > before["hits"]
    assert after["accepted"] > before["accepted"]


def test_streamed_deltas_make_the_whole(client):
    question = {
        "model": "default", "prompt": "def add(a, b):\n", "max_tokens": 80, "temperature": 0,
    }  # fmt: skip
    whole = client.completions.create(**question)
    chunks = list(
        client.completions.create(**question, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(c.choices[0].text for c in chunks if c.choices)
    assert text == whole.choices[0].text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_several_choices_differ_unless_seeded(client):
    answer = client.completions.create(
        model="default", prompt="import ", n=4, max_tokens=24, temperature=1.0
    )
    assert len({choice.text for choice in answer.choices}) > 1
    same = [
        client.completions.create(
            model="default", prompt="import ", max_tokens=24, temperature=1.0, seed=5
        )
        .choices[0]
        .text
        for _ in range(2)
    ]
    assert same[0] == same[1]


def test_logprobs_are_those_of_the_target(client):
    answer = client.completions.create(
        model="default", prompt="for i in range(", max_tokens=16, temperature=0, logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert len(logprobs.token_logprobs) == answer.usage.completion_tokens
    assert all(value <= 0 for value in logprobs.token_logprobs)
    assert any(value < 0 for value in logprobs.token_logprobs)


def test_meta_info_counts_drafts(ssd_server):
    answer = ssd_server.generate(
        "class Reader:\n", max_new_tokens=100, temperature=0, ignore_eos=True
    )
    meta = answer["meta_info"]
    assert 1.0 < meta["spec_accept_length"] <= 5.0
    assert 0 < meta["spec_verify_ct"] < 100
    assert meta["completion_tokens"] == 100


def test_rejected_requests_do_no_harm(client, ssd_server):
    with pytest.raises(RuntimeError, match="400"):
        ssd_server.generate("x", max_new_tokens=4, temperature=-1)
    with pytest.raises(RuntimeError, match="400"):
        ssd_server.generate([1, 2, 1 << 30], max_new_tokens=4)
    assert client.completions.create(model="default", prompt="def ", max_tokens=4).choices[0].text


def test_an_image_for_a_model_of_text(ssd_server, plain_bundled):
    """Answered as plain SGLang does, and nothing is left behind."""
    image = "data:image/png;base64," + ONE_PIXEL
    parts = [{"type": "text", "text": "What is this?"}]
    parts.append({"type": "image_url", "image_url": {"url": image}})
    chat = {"messages": [{"role": "user", "content": parts}], "max_tokens": 24, "temperature": 0}
    native = {
        "text": "def f(x):",
        "image_data": image,
        "sampling_params": {"max_new_tokens": 24, "temperature": 0},
    }
    for path, body in (("/v1/chat/completions", chat), ("/generate", native)):
        told = []
        for server in (plain_bundled, ssd_server):
            answer = requests.post(server.url + path, json=body, timeout=120)
            said = answer.json()
            text = (
                said["choices"][0]["message"]["content"]
                if "choices" in said
                else said.get("text", said)
            )
            told.append((answer.status_code, text))
        assert told[0] == told[1]
        print(path, told[0])
    assert ssd_server.is_ready()


def test_bad_settings_change_nothing(ssd_server):
    before = ssd_state(ssd_server)
    for bad in ({"ssd_num_steps": 13}, {"ssd_fan_out": 65}, {"ssd_backup": 4}, {"ssd_typo": 1}):
        with pytest.raises(AssertionError, match="refused"):
            configure(ssd_server, **bad)
    after = ssd_state(ssd_server)
    for name in ("num_steps", "fan_out", "backup", "drafting"):
        assert before[name] == after[name]
