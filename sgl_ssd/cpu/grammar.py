"""Grammars behind a reasoning parser on the CPU, where llguidance is the grammar backend.

SGLang's reasoning wrapper takes three functions from the backend it wraps that only xgrammar's
has; llguidance keeps them in its grammars. Without them every grammar is refused as soon as the
server has a reasoning parser.
"""

from __future__ import annotations

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
