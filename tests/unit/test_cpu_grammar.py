"""A reasoning parser in front of llguidance: grammars are accepted, and wait for the thought."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.constrained.llguidance_backend import GuidanceBackend
from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarBackend
from transformers import AutoTokenizer

from sgl_ssd.cpu import grammar
from sgl_ssd.models import TARGET_PATH


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TARGET_PATH)


@pytest.fixture
def backend(tokenizer: Any) -> ReasonerGrammarBackend:
    grammar.serve_reasoning()
    grammar.serve_reasoning()  # a second time does nothing
    detector = SimpleNamespace(
        think_start_token="<think>", think_end_token="</think>", think_excluded_tokens=None
    )
    return ReasonerGrammarBackend(
        GuidanceBackend(tokenizer), SimpleNamespace(detector=detector), tokenizer
    )


def allowed(backend: ReasonerGrammarBackend, tokenizer: Any, fed: list[str]) -> set[str]:
    """Which of two letters may come after `fed`, for the regex a+."""
    compiled = backend._init_value_dispatch(("regex", "a+"), True)
    compiled.maybe_init_reasoning(True)
    for text in fed:
        compiled.accept_token(tokenizer.convert_tokens_to_ids(text))
    mask = compiled.allocate_vocab_mask(len(tokenizer), 1, "cpu")
    compiled.fill_vocab_mask(mask, 0)
    logits = torch.zeros(1, len(tokenizer))
    compiled.apply_vocab_mask(logits, compiled.move_vocab_mask(mask, "cpu"))
    return {c for c in "ab" if logits[0, tokenizer.convert_tokens_to_ids(c)] == 0}


def test_a_thought_is_free_and_the_answer_is_not(
    backend: ReasonerGrammarBackend, tokenizer: Any
) -> None:
    assert allowed(backend, tokenizer, ["b", "b"]) == {"a", "b"}
    assert allowed(backend, tokenizer, ["b", "</think>"]) == {"a"}
    assert allowed(backend, tokenizer, ["b", "</think>", "a"]) == {"a"}


def test_a_tag_that_ends_with_an_added_token_ends(tokenizer: Any) -> None:
    """As text, `</tool_call>` would be forced by llguidance and then refused by it."""
    tag = {
        "type": "structural_tag",
        "structures": [
            {
                "begin": '<tool_call>\n{"name":"f", "arguments":',
                "schema": {"type": "object", "properties": {"n": {"enum": [1]}}},
                "end": "}\n</tool_call>",
            }
        ],
        "triggers": ["<tool_call>"],
    }
    backend = GuidanceBackend(tokenizer)
    compiled = grammar.dispatch_structural_tag(
        GuidanceBackend.dispatch_structural_tag, backend, json.dumps(tag)
    )
    text = 'x <tool_call>\n{"name":"f", "arguments":{"n": 1}}\n</tool_call> y'
    for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
        mask = compiled.allocate_vocab_mask(len(tokenizer), 1, "cpu")
        compiled.fill_vocab_mask(mask, 0)
        assert mask[0, token // 32] >> (token % 32) & 1, tokenizer.decode([token])
        compiled.accept_token(token)


def test_tags_of_text_alone_stay_as_they_are() -> None:
    structure = {"begin": "<f=", "schema": {"type": "integer"}, "end": "</f>"}
    tag = {"type": "structural_tag", "structures": [structure], "triggers": ["<f="]}
    assert grammar.name_tokens(tag, {"</tool_call>": 8, "plain": 9}) == tag
    assert grammar.name_tokens(tag, {}) == tag
