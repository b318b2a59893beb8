"""Grammars under drafts that do not know them: same text, clean end, at every place of a run."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from parity.harness import compare, configure, send_all, ssd_state

pytestmark = pytest.mark.integration

CITY = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Zurich", "Berlin"]},
        "unit": {"enum": ["c", "f"]},
        "days": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
}
PROMPT = 'result = {"city": "Zurich", "unit": "c", "days": [1, 2]}\nresult = '


def _greedy(text: str, max_new_tokens: int = 96, **params: Any) -> dict[str, Any]:
    params = {"temperature": 0.0, "max_new_tokens": max_new_tokens, **params}
    return {"text": text, "sampling_params": params}


def _check(ssd_server, plain_bundled, bodies, backups: tuple[int, ...] = (1, 2), steps: int = 7):
    """Equal to plain SGLang with model drafts and with drafts from the request's own text."""
    want = send_all(plain_bundled, bodies, 8)
    before = ssd_state(ssd_server)
    for backup in backups:
        configure(ssd_server, ssd_drafting=1, ssd_num_steps=steps, ssd_fan_out=3, ssd_backup=backup)
        got = send_all(ssd_server, bodies, 8)
        compare(ssd_server, bodies, want, got, f"grammar, backup {backup}").check()
    after = ssd_state(ssd_server)
    configure(ssd_server, ssd_drafting=0, ssd_backup=2)
    assert after["accepted"] > before["accepted"]
    return want


def test_grammar_ends_at_every_place_of_a_run(ssd_server, plain_bundled):
    """The grammar is a piece of what the target says anyway, so that runs cross its end."""
    prompt = "class Point:\n    def __init__(self, x, y):\n"
    said = send_all(plain_bundled, [_greedy(prompt, 24, ignore_eos=True)], 1)[0]["text"]
    bodies = [_greedy(prompt, 60, regex=re.escape(said[:n])) for n in range(1, 33)]
    want = _check(ssd_server, plain_bundled, bodies)
    for n, answer in enumerate(want, 1):
        assert answer["text"] == said[:n]
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"


def test_object_closes_at_every_place_of_a_run(ssd_server, plain_bundled):
    bodies = []
    for n in range(1, 17):
        schema = {"type": "object", "properties": {"k" * n: {"enum": [n]}}, "required": ["k" * n]}
        schema["additionalProperties"] = False
        text = f'x = {{"{"k" * n}": {n}}}\nx = {{"{"k" * n}": {n}}}\nx = '
        bodies.append(_greedy(text, json_schema=json.dumps(schema)))
    want = _check(ssd_server, plain_bundled, bodies)
    for n, answer in enumerate(want, 1):
        assert json.loads(answer["text"]) == {"k" * n: n}


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0}])
def test_regex_is_matched_to_its_end(ssd_server, sampling):
    """Drafts leave the grammar all the time; the text never does, nor does it end early."""
    pattern = r"((cat|dog){1,4}!|\d{2}:\d{2})"
    bodies = [
        {
            "text": PROMPT,
            "sampling_params": sampling
            | {"max_new_tokens": 40, "regex": pattern, "sampling_seed": i},
        }
        for i in range(12)
    ]
    configure(ssd_server, ssd_drafting=0)
    want = send_all(ssd_server, bodies, 6)
    configure(ssd_server, ssd_drafting=1, ssd_num_steps=7, ssd_fan_out=3, ssd_backup=2)
    got = send_all(ssd_server, bodies, 6)
    configure(ssd_server, ssd_drafting=0)
    compare(ssd_server, bodies, want, got, "regex").check()
    for answer in got:
        assert re.fullmatch(pattern, answer["text"]), answer["text"]
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"


def test_every_kind_of_grammar(ssd_server, plain_bundled):
    tag = {
        "type": "structural_tag",
        "structures": [{"begin": "<f=", "schema": CITY, "end": "</f>"}],
        "triggers": ["<f="],
    }
    bodies = [
        _greedy(PROMPT, json_schema=json.dumps(CITY)),
        _greedy(PROMPT, 24, json_schema=json.dumps({"type": "integer"})),
        _greedy(PROMPT, regex=r'\{"city": "(Zurich|Berlin)", "unit": "[cf]"\}'),
        _greedy(PROMPT, ebnf='root ::= ("cat" | "dog") " " [0-9] "!"'),
        _greedy(PROMPT, 40, structural_tag=json.dumps(tag)),
        _greedy("<f={}</f> <f=", 60, structural_tag=json.dumps(tag)),
        _greedy(PROMPT, 5, json_schema=json.dumps(CITY)),
        _greedy(PROMPT, regex="[a-z]{2,6}", min_new_tokens=2),
        _greedy(PROMPT, json_schema=json.dumps(CITY), stop=["unit"]),
    ]
    bodies += [body | {"return_logprob": True, "top_logprobs_num": 2} for body in bodies[:3]]
    want = _check(ssd_server, plain_bundled, bodies)
    value = json.loads(want[0]["text"])
    assert value["city"] in ("Zurich", "Berlin") and value["days"]
    assert "unit" not in want[8]["text"]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_keep_to_the_grammar(ssd_server, prompts, temperature):
    """The draft server knows no grammar, yet most drafts are right; the text stays the same."""
    kinds = [{"json_schema": json.dumps(CITY)}, {"regex": "[0-9]{40}"}, {"regex": "(cat|dog){20}"}]
    params = {"max_new_tokens": 48, "temperature": temperature}
    configure(ssd_server, ssd_num_steps=4, ssd_fan_out=3, ssd_backup=2)
    for kind in kinds:
        bodies = [
            {"input_ids": ids, "sampling_params": params | kind | {"sampling_seed": seed}}
            for seed, ids in enumerate(prompts[4:12])
        ]
        configure(ssd_server, ssd_drafting=0)
        want = send_all(ssd_server, bodies, 4)
        configure(ssd_server, ssd_drafting=1)
        before = ssd_state(ssd_server)
        got = send_all(ssd_server, bodies, 4)
        after = ssd_state(ssd_server)
        configure(ssd_server, ssd_drafting=0)
        compare(ssd_server, bodies, want, got, str(kind)).check()
        right, drafted = (after[name] - before[name] for name in ("accepted", "drafted"))
        assert right > 0.5 * drafted > 0, (kind, right, drafted)


def test_malformed_grammars_are_refused_alike(ssd_server, plain_bundled):
    for params in ({"regex": "(["}, {"json_schema": "{"}, {"ebnf": "root = = "}):
        answers = []
        for server in (plain_bundled, ssd_server):
            try:
                answers.append(server.post("/generate", _greedy("x", 8, **params))["text"])
            except RuntimeError as refusal:
                answers.append(re.sub(r"^\S+ |\d+\.\d+|'id': '\w+'", "", str(refusal))[:60])
        assert answers[0] == answers[1]
    assert ssd_server.is_ready()


def test_grammar_begins_inside_a_run_that_ends_thinking(ssd_server, plain_bundled, tokenizer):
    """`</think>` and the first character of the answer may be accepted in one run."""
    think_end = str(tokenizer.convert_tokens_to_ids("</think>"))
    bodies = []
    for bias in (2.0, 4.0, 6.0, 8.0, 30.0):
        for thought in ("<think>\nx = 1\n", "<think>\n</think>\n{}<think>\n"):
            body = _greedy(thought, 40, json_schema=json.dumps(CITY), logit_bias={think_end: bias})
            bodies.append(body | {"require_reasoning": True})
    want = _check(ssd_server, plain_bundled, bodies)
    ended = [a["text"].split("</think>", 1)[1] for a in want if "</think>" in a["text"]]
    assert ended
    for text in ended:
        assert text.lstrip().startswith("{") and not text.lstrip().startswith("{{")
