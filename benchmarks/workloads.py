"""Workloads from local text: the same token ids for every system, in every run.

A workload is a list of conversations; the requests of one are sent one after another. Later turns
continue a text from the data, not what a model said, so prompts are equal across systems.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HELD_OUT = Path(__file__).parent / "pairs" / "held_out.jsonl"
PROMPT_TOKENS = 100
TURNS = 3
TURN_TOKENS = 60
SHARED_TOKENS = 512
EDIT_TOKENS = 400
EDIT_BEGUN = 40
EDIT_NOTE = "\n\n# The same once more, with one name changed:\n"


@dataclass(frozen=True)
class Request:
    """One prompt and how many answers are wanted."""

    input_ids: list[int]
    n: int = 1


Conversation = list[Request]


class Texts:
    """The held-out texts under a tokenizer. `limit`: most tokens of a prompt."""

    def __init__(self, tokenizer: Any, limit: int) -> None:
        lines = HELD_OUT.read_text(encoding="utf-8").splitlines()
        self._rows = [json.loads(line) for line in lines]
        self._tokenizer = tokenizer
        self.limit = limit
        bos = tokenizer.bos_token_id
        self._begin = [] if bos is None else [bos]

    def encode(self, text: str) -> list[int]:
        """Token ids without special tokens."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def prompt(self, ids: list[int], tokens: int | None = None) -> list[int]:
        """The first `tokens` of `ids` after the beginning of a text, as far as `limit` allows."""
        most = min(self.limit, tokens or self.limit)
        return [*self._begin, *ids][:most]

    def of(self, kind: str) -> list[str]:
        """Texts of a kind."""
        return [row["text"] for row in self._rows if row["kind"] == kind]

    def chats(self) -> list[list[int]]:
        """Conversations up to the answer that is wanted."""
        chats = [row["messages"] for row in self._rows if row["kind"] == "chat"]
        return [
            self.encode(
                self._tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True
                )
            )
            for messages in chats
        ]

    def stretches(self, tokens: int) -> Iterator[list[int]]:
        """Runs of `tokens` tokens over all texts, each beginning at another text."""
        ids = [self.encode(text) for text in (*self.of("long"), *self.of("text"))]
        for start in itertools.count():
            flow = itertools.chain.from_iterable(
                ids[(start + i) % len(ids)] for i in itertools.count()
            )
            yield list(itertools.islice(flow, tokens))


def _code(texts: Texts) -> Iterator[Conversation]:
    for text in texts.of("text"):
        yield [Request(texts.prompt(texts.encode(text), PROMPT_TOKENS))]


def _chat(texts: Texts) -> Iterator[Conversation]:
    for ids in texts.chats():
        yield [Request(ids[: texts.limit])]


def _edit(texts: Texts) -> Iterator[Conversation]:
    """A text, and its beginning again: what comes is mostly a copy."""
    note = texts.encode(EDIT_NOTE)
    room = texts.limit - len(note) - EDIT_BEGUN - 1
    for ids in texts.stretches(min(EDIT_TOKENS, room)):
        yield [Request(texts.prompt([*ids, *note, *ids[:EDIT_BEGUN]]))]


def _long(tokens: int) -> Callable[[Texts], Iterator[Conversation]]:
    def make(texts: Texts) -> Iterator[Conversation]:
        for ids in texts.stretches(min(tokens, texts.limit)):
            yield [Request(texts.prompt(ids))]

    return make


def _samples(texts: Texts) -> Iterator[Conversation]:
    """Four answers to each prompt."""
    for (request,) in _code(texts):
        yield [Request(request.input_ids, n=4)]


def _turns(texts: Texts) -> Iterator[Conversation]:
    """A long beginning that all share, then turns that each continue the last."""
    shared = next(texts.stretches(min(SHARED_TOKENS, texts.limit // 2)))
    turn = min(TURN_TOKENS, (texts.limit - len(shared) - 1) // TURNS)
    for ids in itertools.islice(texts.stretches(TURNS * turn), 1, None):
        ends = [(i + 1) * turn for i in range(TURNS)]
        yield [Request(texts.prompt([*shared, *ids[:end]])) for end in ends]


WORKLOADS: dict[str, Callable[[Texts], Iterator[Conversation]]] = {
    "code": _code,
    "chat": _chat,
    "edit": _edit,
    "long4k": _long(4096),
    "long16k": _long(16384),
    "samples": _samples,
    "turns": _turns,
}


def make(name: str, tokenizer: Any, count: int, limit: int) -> list[Conversation]:
    """`count` conversations of a workload, prompts of at most `limit` tokens.

    Where there are fewer texts than that they come again. Raises `ValueError` for other names.
    """
    if name not in WORKLOADS:
        raise ValueError(f"workload {name!r}: choose among {', '.join(WORKLOADS)}")
    made = list(itertools.islice(WORKLOADS[name](Texts(tokenizer, limit)), count))
    return list(itertools.islice(itertools.cycle(made), count))
