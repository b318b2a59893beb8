"""What llguidance, the grammar backend on the CPU, lacks in SGLang.

* SGLang's reasoning wrapper takes three functions from the backend it wraps that only xgrammar's
  has; llguidance keeps them in its grammars. Without them every grammar is refused as soon as the
  server has a reasoning parser.
* A structural tag that ends with a token like `</tool_call>` names it as text. llguidance then
  forces the token, but takes it for a special one that no text can be, and refuses it when it
  comes; that ends the server. Here such an end names the token itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any


def allocate_vocab_mask(self: Any, vocab_size: int, batch_size: int, device: Any) -> Any:
    """A packed mask that allows everything: int32 [batch_size, vocabulary / 32]."""
    from sglang.srt.constrained.llguidance_backend import allocate_token_bitmask

    return allocate_token_bitmask(batch_size, self.llguidance_tokenizer.vocab_size)


def serve_reasoning() -> None:
    """Give llguidance's backend what the reasoning wrapper asks for, if it has not got it."""
    # Not at the top: SGLang loads this package while it is only half imported itself.
    from sglang.srt.constrained.llguidance_backend import GuidanceBackend, GuidanceGrammar

    for name, function in (
        ("allocate_vocab_mask", allocate_vocab_mask),
        ("move_vocab_mask", staticmethod(GuidanceGrammar.move_vocab_mask)),
        ("apply_vocab_mask", staticmethod(GuidanceGrammar.apply_vocab_mask)),
    ):
        if not hasattr(GuidanceBackend, name):
            setattr(GuidanceBackend, name, function)


def dispatch_structural_tag(orig: Callable[..., Any], backend: Any, key: str) -> Any:
    """SGLang's own, after `name_tokens`."""
    added = backend.tokenizer.get_added_vocab()
    # What is malformed SGLang refuses with its own words.
    with suppress(ValueError, KeyError, TypeError, AttributeError):
        key = json.dumps(name_tokens(json.loads(key), added))
    return orig(backend, key)


def name_tokens(tag: dict[str, Any], added: dict[str, int]) -> dict[str, Any]:
    """A structural tag whose ends name added tokens by id, as a grammar of llguidance.

    `added`: id of each added token by its text. Ends of text alone stay as they are.
    """
    marks = [text for text in added if text.startswith("<") and text.endswith(">")]
    if not marks:
        return tag
    pattern = re.compile("(" + "|".join(map(re.escape, sorted(marks, key=len)[::-1])) + ")")
    structures = []
    for structure in tag["structures"]:
        parts = [part for part in pattern.split(structure["end"]) if part]
        if any(part in added for part in parts):
            schema = structure["schema"]
            body = schema if isinstance(schema, str) else json.dumps(schema)
            end = [f"<[{added[p]}]>" if p in added else json.dumps(p) for p in parts]
            lark = f"start: %json {body} {' '.join(end)}"
            structure = {**structure, "schema": lark, "end": ""}
        structures.append(structure)
    return {**tag, "structures": structures}
