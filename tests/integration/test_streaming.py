"""Answers that come in pieces: several tokens at once, half a character, half a tool call."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from openai import OpenAI

from parity.harness import configure, ssd_state

pytestmark = pytest.mark.integration

MIXED = "A世🎉e\u0301ß界🙂"
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Zurich", "Berlin"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY}}


@pytest.fixture
def clients(ssd_server, plain_bundled):
    """Plain SGLang, ours; drafts from the request's own text, which is said again and again."""
    configure(ssd_server, ssd_drafting=1, ssd_num_steps=5, ssd_fan_out=3, ssd_backup=1)
    before = ssd_state(ssd_server)
    yield [
        OpenAI(base_url=server.url + "/v1", api_key="none")
        for server in (plain_bundled, ssd_server)
    ]
    after = ssd_state(ssd_server)
    configure(ssd_server, ssd_drafting=0, ssd_backup=2)
    assert after["accepted"] > before["accepted"]


def _pieces(client: OpenAI, question: dict[str, Any]) -> list[str]:
    chunks = client.completions.create(**question, stream=True)
    return [chunk.choices[0].text for chunk in chunks if chunk.choices]


@pytest.mark.parametrize("steps", [1, 2, 4, 5])
def test_characters_of_many_bytes(clients, ssd_server, steps):
    """Runs of 1 to 6 tokens cut characters anywhere; no piece shows half of one."""
    configure(ssd_server, ssd_num_steps=steps)
    text = MIXED * 3
    question = {
        "model": "default", "prompt": f"{text}\n{text}\n", "max_tokens": 200, "temperature": 0,
        "extra_body": {"regex": re.escape(text)},
    }  # fmt: skip
    for client in clients:
        pieces = _pieces(client, question)
        assert "".join(pieces) == client.completions.create(**question).choices[0].text == text
        assert "\ufffd" not in "".join(pieces[:-1])


def test_streamed_logprobs_match_their_tokens(clients):
    question = {
        "model": "default", "prompt": "for i in range(", "max_tokens": 40, "temperature": 0,
        "logprobs": 2, "echo": True,
    }  # fmt: skip
    wholes = [client.completions.create(**question).choices[0] for client in clients]
    assert wholes[0].text == wholes[1].text
    assert wholes[0].logprobs.tokens == wholes[1].logprobs.tokens
    for a, b in zip(
        wholes[0].logprobs.token_logprobs, wholes[1].logprobs.token_logprobs, strict=True
    ):
        assert a == b or a == pytest.approx(b, abs=1e-4)
    question |= {"echo": False}
    tokens: list[str] = []
    for chunk in clients[1].completions.create(**question, stream=True):
        if chunk.choices and chunk.choices[0].logprobs:
            tokens += chunk.choices[0].logprobs.tokens
    assert tokens == wholes[1].logprobs.tokens[-len(tokens) :]


def _chat(content: str, **fields: Any) -> dict[str, Any]:
    return {
        "model": "default", "messages": [{"role": "user", "content": content}],
        "temperature": 0, "max_tokens": 80, **fields,
    }  # fmt: skip


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_tool_calls_whole_and_streamed(clients, choice):
    call = '{"name": "weather", "parameters": {"city": "Zurich", "days": 2}}'
    question = _chat(f"Call {call} {call}", tools=[TOOL], tool_choice=choice)
    answers = []
    for client in clients:
        message = client.chat.completions.create(**question).choices[0].message
        arguments, name = "", None
        for chunk in client.chat.completions.create(**question, stream=True):
            for delta in (chunk.choices[0].delta.tool_calls or []) if chunk.choices else []:
                name = name or delta.function.name
                arguments += delta.function.arguments or ""
        whole = message.tool_calls[0].function
        assert (name, json.loads(arguments)) == (whole.name, json.loads(whole.arguments))
        answers.append((whole.name, json.loads(whole.arguments)))
    assert answers[0] == answers[1]
    assert answers[1][0] == "weather"


def test_reasoning_whole_and_streamed(clients, tokenizer):
    """The parser sees `</think>` anywhere in a run; thought and answer come apart alike."""
    think_end = tokenizer.convert_tokens_to_ids("</think>")
    ended = 0
    for bias in (3, 6, 9):
        question = _chat(
            "Write a function that adds two numbers.", max_tokens=40,
            logit_bias={str(think_end): bias},
            extra_body={"chat_template_kwargs": {"enable_thinking": True}},
        )  # fmt: skip
        parts = []
        for client in clients:
            answer = client.chat.completions.create(**question)
            message = answer.choices[0].message
            thought, content = "", ""
            chunks = client.chat.completions.create(
                **question, stream=True, stream_options={"include_usage": True}
            )
            usage = None
            for chunk in chunks:
                usage = chunk.usage or usage
                if chunk.choices:
                    delta = chunk.choices[0].delta
                    thought += getattr(delta, "reasoning_content", None) or ""
                    content += delta.content or ""
            whole = (message.reasoning_content or "").strip(), (message.content or "").strip()
            assert (thought.strip(), content.strip()) == whole
            assert usage.completion_tokens == answer.usage.completion_tokens
            reasoning = getattr(answer.usage, "reasoning_tokens", 0) or 0
            assert reasoning <= answer.usage.completion_tokens
            parts.append((whole, answer.usage.completion_tokens, reasoning))
        assert parts[0] == parts[1]
        ended += bool(parts[1][0][1])
    assert ended


def test_response_formats(clients):
    said = '{"city": "Zurich", "days": 2}'
    schema = {"type": "json_schema", "json_schema": {"name": "c", "schema": CITY}}
    tag = {
        "type": "structural_tag",
        "structures": [{"begin": "CALL(", "schema": CITY, "end": ")"}],
        "triggers": ["CALL("],
    }
    for form, prompt in ((schema, f"{said} {said}"), (tag, f"CALL({said}) CALL({said})")):
        answers = [
            client.chat.completions.create(**_chat(prompt, response_format=form))
            for client in clients
        ]
        contents = [answer.choices[0].message.content for answer in answers]
        assert contents[0] == contents[1]
        if form is schema:
            assert json.loads(contents[1])["city"] in ("Zurich", "Berlin")


def test_several_choices_in_one_stream(clients):
    """n = 3 with a seed: all choices are equal, and each stream is whole."""
    texts: dict[int, str] = {}
    for chunk in clients[1].completions.create(
        model="default", prompt="import ", n=3, max_tokens=24, temperature=1.0, seed=7, stream=True
    ):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert len(texts) == 3 and len(set(texts.values())) == 1


def test_responses_endpoint(clients):
    answers = [
        client.responses.create(
            model="default", input="Write a function that adds.", temperature=0,
            max_output_tokens=40,
        )
        for client in clients
    ]  # fmt: skip
    assert answers[0].output_text == answers[1].output_text != ""
    events = clients[1].responses.create(
        model="default", input="Write a function that adds.", temperature=0, max_output_tokens=40,
        stream=True,
    )  # fmt: skip
    deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert "".join(deltas) == answers[1].output_text
