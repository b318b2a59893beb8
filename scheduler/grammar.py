"""Drafts for requests with a grammar, which the draft server does not know.

Before a verify the verifier walks its own grammar over the drafts. One that breaks it could only
fail: there the run goes on with what the grammar forces, and where it forces nothing, with what
followed the same words earlier in the text, as far as the grammar allows. These are guesses, as
drafts are: verification by matching gives the same text whatever is guessed.

Not for drafts with proposals (see `sgl_ssd.rejection`): whether one of those is tested must not
depend on which token was drawn.
"""

from __future__ import annotations

from array import array
from typing import Any

from sglang.srt.constrained.llguidance_backend import GuidanceGrammar
from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarObject

from sgl_ssd.ngram import WINDOW, ngram_continuation


class GrammarRow:
    """A request as the mask builder sees it: without its grammar once that has failed.

    A grammar that refuses a token it has allowed ends its request (`to_finish`). Under the overlap
    loop the request has one more row by then, for which a mask could only raise an error.
    """

    def __init__(self, req: Any) -> None:
        self.grammar = None if req.to_finish is not None else req.grammar


def fit_drafts(
    grammar: Any, tokenizer: Any, drafts: list[int], text: array[int], limit: int
) -> list[int]:
    """At most `limit` drafts that `grammar` allows, for the positions after `text`.

    The first ones are those of `drafts` up to the first that breaks the grammar.

    Args:
        grammar: SGLang's, advanced over `text`. It is left as it was.
        tokenizer: the request's, for grammars that force text rather than tokens.
        text: every committed token of the request.
    """
    run = array(text.typecode)
    recent = text[-WINDOW:]

    def extend(tokens: list[int]) -> bool:
        """Take as many of `tokens` as are allowed; whether that is any."""
        before = len(run)
        for token in tokens[: limit - before]:
            if not _advance(grammar, token):
                break
            run.append(token)
        return len(run) > before

    try:
        extend(drafts)
        while extend(_guess(grammar, tokenizer, recent + run, limit - len(run))):
            pass
    finally:
        if run:
            grammar.rollback(len(run))
    return run.tolist()


def _guess(grammar: Any, tokenizer: Any, text: array[int], limit: int) -> list[int]:
    """Tokens that may follow `text`, which `grammar` has been advanced over."""
    if limit <= 0 or grammar.is_terminated():
        return []
    forced = grammar.try_jump_forward(tokenizer)
    if forced:
        tokens, string = forced  # llguidance knows tokens, xgrammar the text
        return list(tokens) or list(tokenizer.encode(string, add_special_tokens=False))
    return ngram_continuation(text, limit, shortest=1)


def _advance(grammar: Any, token: int) -> bool:
    """Advance `grammar` by `token` if that is allowed; whether it was."""
    if grammar.is_terminated() or not _allows(grammar, token):
        return False
    try:
        grammar.accept_token(token)
    except ValueError:  # so says xgrammar, and stays as it was
        return False
    return True


def _allows(grammar: Any, token: int) -> bool:
    """False where accepting `token` would leave llguidance in an error for good."""
    if isinstance(grammar, ReasonerGrammarObject):
        if not grammar._is_generation() or grammar.grammar is None:
            return True
        grammar = grammar.grammar
    if not isinstance(grammar, GuidanceGrammar):
        return True
    matcher = grammar.ll_matcher
    if matcher.is_stopped():
        return token in grammar.eos_tokens
    return bool(matcher.validate_tokens([token]))
