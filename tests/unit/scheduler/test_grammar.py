"""Drafts that keep to a grammar: what is kept, what is guessed, and that nothing is left behind."""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.constrained.llguidance_backend import GuidanceBackend
from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarBackend
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar, XGrammarGrammarBackend
from transformers import AutoTokenizer

from sgl_ssd.config import VerifierConfig
from sgl_ssd.cpu.grammar import serve_reasoning
from sgl_ssd.models import TARGET_PATH
from sgl_ssd.scheduler.exchange import DraftExchange
from sgl_ssd.scheduler.grammar import fit_drafts
from sgl_ssd.scheduler.proposals import Drafts
from sgl_ssd.scheduler.sessions import Session, SessionSampling, StopRule
from sgl_ssd.scheduler.stats import SSDStats

CITY = json.dumps(
    {
        "type": "object",
        "properties": {"city": {"enum": ["Zurich", "Berlin"]}, "days": {"type": "integer"}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
)
GRAMMARS = [("regex", "(cat|dog)+!"), ("regex", "[0-9]{3,9}"), ("json", CITY)]
Make = Callable[[tuple[str, str]], Any]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TARGET_PATH)


@pytest.fixture(scope="module", params=["llguidance", "xgrammar", "after a thought"])
def make(request: pytest.FixtureRequest, tokenizer: Any) -> Make:
    """Makes grammars of each kind that SGLang has."""
    if request.param == "xgrammar":
        backend = XGrammarGrammarBackend(
            tokenizer, len(tokenizer), model_eos_token_ids=[tokenizer.eos_token_id]
        )
        return lambda key: backend._init_value_dispatch(key, False)
    guidance = GuidanceBackend(tokenizer)
    if request.param == "llguidance":
        return lambda key: guidance._init_value_dispatch(key, False)
    serve_reasoning()
    detector = SimpleNamespace(
        think_start_token="<think>", think_end_token="</think>", think_excluded_tokens=None
    )
    reasoner = ReasonerGrammarBackend(guidance, SimpleNamespace(detector=detector), tokenizer)

    def after_a_thought(key: tuple[str, str]) -> Any:
        grammar = reasoner._init_value_dispatch(key, True)
        grammar.maybe_init_reasoning(True)
        for token in [*ids(tokenizer, "hm"), tokenizer.convert_tokens_to_ids("</think>")]:
            grammar.accept_token(token)
        return grammar

    return after_a_thought


def ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def mask_of(grammar: Any, size: int) -> list[int]:
    """What `grammar` allows next, packed; [] at its end."""
    if grammar.is_terminated():
        return []
    inner = getattr(grammar, "grammar", grammar)
    if isinstance(inner, XGrammarGrammar):  # its own masks are pinned, for CUDA
        mask = torch.full((1, (size + 31) // 32), -1, dtype=torch.int32)
    else:
        mask = grammar.allocate_vocab_mask(size, 1, "cpu")
    grammar.fill_vocab_mask(mask, 0)
    return list(mask[0].tolist())


def allows(mask: list[int], token: int) -> bool:
    return bool(mask) and bool(mask[token // 32] >> (token % 32) & 1)


def fit(grammar: Any, tokenizer: Any, drafts: list[int], text: str = "x", limit: int = 8) -> Any:
    committed = array("i", ids(tokenizer, text))
    return fit_drafts(grammar, tokenizer, drafts, committed, limit)


@pytest.mark.parametrize("key", GRAMMARS, ids=[k for _, k in GRAMMARS])
def test_what_comes_back_is_allowed_and_the_grammar_as_it_was(make, tokenizer, key):
    size = len(tokenizer)
    draw = random.Random(0)
    right = ids(tokenizer, '{"city": "Zurich", "days": 12}' if key[0] == "json" else "catdog123")
    for _ in range(40):
        grammar = make(key)
        for _ in range(draw.randrange(6)):  # somewhere inside
            now = mask_of(grammar, size)
            choices = [t for t in range(size) if allows(now, t)]
            if not choices:
                break
            grammar.accept_token(draw.choice(choices))
        drafts = right[: draw.randrange(len(right))] + draw.choices(range(size), k=3)
        limit = draw.randrange(1, 10)
        before = mask_of(grammar, size)
        run = fit(grammar, tokenizer, drafts, "dogcat 123 cat", limit)
        assert mask_of(grammar, size) == before
        assert len(run) <= limit
        for place, token in enumerate(run):
            now = mask_of(grammar, size)
            assert allows(now, token)
            if place < len(drafts) and run[:place] == drafts[:place]:
                # A draft is given up only where it breaks the grammar.
                assert token == drafts[place] or not allows(now, drafts[place])
            grammar.accept_token(token)


def test_forced_text_follows_the_draft_that_breaks_the_grammar(make, tokenizer):
    word = ids(tokenizer, "antidisestablishment")
    grammar = make(("regex", "antidisestablishment!"))
    run = fit(grammar, tokenizer, [word[0], *ids(tokenizer, " = ")], limit=20)
    text = tokenizer.decode(run)
    assert run[0] == word[0] and "antidisestablishment!".startswith(text) and len(text) > 10


def test_without_drafts_forced_text_is_drafted(make, tokenizer):
    text = tokenizer.decode(fit(make(("regex", "antidisestablishment!")), tokenizer, [], limit=20))
    assert "antidisestablishment!".startswith(text) and len(text) > 10


def test_the_text_itself_is_searched_where_nothing_is_forced(make, tokenizer):
    grammar = make(("regex", "(cat|dog|fish)+!"))
    for token in (cat := ids(tokenizer, "cat")):
        grammar.accept_token(token)
    run = fit_drafts(grammar, tokenizer, [], array("i", [*cat, *ids(tokenizer, "dog"), *cat]), 8)
    assert tokenizer.decode(run).startswith("dog")


def test_nothing_is_drafted_past_the_end(make, tokenizer):
    grammar = make(("regex", "no"))
    for token in ids(tokenizer, "no"):
        grammar.accept_token(token)
    run = fit(grammar, tokenizer, ids(tokenizer, "no no"), "no no no", 8)
    assert run in ([], [tokenizer.eos_token_id])


def test_no_room(make, tokenizer):
    assert fit(make(("regex", "a+")), tokenizer, ids(tokenizer, "a"), limit=0) == []


# -- which rows of a batch --------------------------------------------------------------------


def row(grammar: Any, tokenizer: Any, *, room: int = 50, **changes: Any) -> tuple[Any, Any]:
    """A request and its session, whose text is one token."""
    session = Session(
        0, "r", array("i", [5]), SessionSampling(0, 0.0, 1, 1.0, 0.0), StopRule(frozenset(), room)
    )
    req = SimpleNamespace(
        grammar=grammar, tokenizer=tokenizer, to_finish=None, custom_logit_processor=None
    )
    for name, value in changes.items():
        setattr(session if hasattr(session, name) else req, name, value)
    return req, session


def test_rows_without_a_grammar_and_rows_with_proposals_keep_their_drafts(make, tokenizer):
    client: Any = SimpleNamespace(num_steps=6)
    config = VerifierConfig(["ipc:///tmp/unused/draft"], num_steps=8, fan_out=[1] * 9)
    exchange = DraftExchange(config, client, SimpleNamespace(), SSDStats(8), 100)
    by_rejection = SessionSampling(0, 1.0, 50, 1.0, 0.0, top_m=4)
    word = ("regex", "antidisestablishment!")
    rows = [
        row(None, tokenizer),
        row(make(word), tokenizer, sampling=by_rejection),
        row(make(word), tokenizer, done=True),
        row(make(word), tokenizer, custom_logit_processor="forces tokens"),
        row(make(word), tokenizer, to_finish="its grammar has failed"),
        (row(make(word), tokenizer)[0], None),
        row(make(word), tokenizer),
        row(make(word), tokenizer, room=4),
    ]
    drafts = Drafts.none(len(rows), 8, 4)
    for i in range(len(rows)):
        drafts.put(i, ids(tokenizer, " = "), None)
    given = drafts.lens.copy()
    reqs, sessions = [req for req, _ in rows], [session for _, session in rows]
    exchange._fit_drafts(client, reqs, sessions, drafts)
    assert (drafts.lens[:6] == given[:6]).all()
    for i, room in ((6, 6), (7, 2)):
        text = tokenizer.decode(drafts.tokens[i, : drafts.lens[i]])
        assert text and "antidisestablishment!".startswith(text)
        assert 0 < drafts.lens[i] <= room
