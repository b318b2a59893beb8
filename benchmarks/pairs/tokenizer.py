"""The pair's tokenizer: byte-level BPE, nine special tokens, a chat template."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from jinja2 import Environment
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm

VOCAB_SIZE = 4096
CONTEXT_LENGTH = 4096
BOS, EOS, USER, ASSISTANT, END = range(5)
# Control tokens never appear in decoded text; the marks of a thought and of a tool call do, for the
# parsers of a server.
CONTROL = ("<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|end|>")
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TEMPLATE_FILE = Path(__file__).with_name("chat_template.jinja")

Ids = npt.NDArray[np.int32]


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Learn the merges. Special tokens hold ids 0..8, the 256 bytes follow, then the merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[*CONTROL, *MARKS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def plain_encoder(tokenizer: Tokenizer) -> Tokenizer:
    """The same merges without special tokens: source text that says "<think>" stays text."""
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = []
    return Tokenizer.from_str(json.dumps(state))


def chat_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer as served: control tokens special, marks kept in text, <|bos|> put first."""
    state = json.loads(tokenizer.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["content"] in CONTROL
    served = Tokenizer.from_str(json.dumps(state))
    served.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", BOS)]
    )
    assert [served.token_to_id(t) for t in (*CONTROL, *MARKS)] == list(range(9))
    return served


def encode(tokenizer: Tokenizer, texts: list[str], name: str) -> Iterator[Ids]:
    """Token ids of each text, without <|bos|>, in parallel over chunks of texts."""
    for i in tqdm(range(0, len(texts), 2000), desc=f"encode {name}", mininterval=5):
        batch = tokenizer.encode_batch_fast(texts[i : i + 2000], add_special_tokens=False)
        for encoding in batch:
            yield np.asarray(encoding.ids, dtype=np.int32)


def chat_renderer() -> Callable[[dict[str, Any]], str]:
    """A function that renders a conversation with the template that is shipped."""
    environment = Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = environment.from_string(TEMPLATE_FILE.read_text())
    return lambda conversation: template.render(bos_token=CONTROL[BOS], **conversation)


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template.

    The configuration is written by hand: what a version of the library would add has no use here.
    """
    added = {
        str(i): {
            "content": content,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": content in CONTROL,
        }
        for i, content in enumerate((*CONTROL, *MARKS))
    }
    config = {
        "added_tokens_decoder": added,
        "additional_special_tokens": [CONTROL[USER], CONTROL[ASSISTANT], CONTROL[END]],
        "bos_token": CONTROL[BOS],
        "clean_up_tokenization_spaces": False,
        "eos_token": CONTROL[EOS],
        "model_max_length": CONTEXT_LENGTH,
        "pad_token": CONTROL[EOS],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(TEMPLATE_FILE.read_text())
