"""Whether two models speak of the same tokens: a fingerprint of id -> token text.

Target and draft may pad their embedding tables differently; what each id *means* must agree.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from typing import Any

from sgl_ssd.errors import ConfigError, PairMismatchError

# Layers whose state cannot be rolled back to an earlier token, so rejected drafts cannot be undone.
_RECURRENT_MODEL_TYPES = frozenset(
    (
        "mamba", "mamba2", "falcon_mamba", "jamba", "bamba", "falcon_h1", "granitemoehybrid",
        "nemotron_h", "qwen3_next", "qwen3_5", "lfm2", "lfm2_moe", "zamba", "zamba2", "rwkv",
        "recurrent_gemma", "kimi_linear", "minimax", "bailing_hybrid", "plamo2", "xlstm",
    )
)  # fmt: skip
_RECURRENT_LAYER_TYPES = frozenset(("linear_attention", "mamba", "recurrent", "conv", "ssm"))


@dataclass(frozen=True)
class Vocabulary:
    """`size`: ids that mean something (0..size-1). `fingerprint`: equal for equal tables."""

    size: int
    fingerprint: str


def read_vocabulary(path: str, trust_remote_code: bool = False) -> Vocabulary:
    """The vocabulary of the model at `path` (a folder, or a name that transformers resolves).

    A model without a tokenizer gets the fingerprint "" (unknown) and its config's vocab_size.
    """
    tokens = _tokens(path, trust_remote_code)
    if tokens is None:
        return Vocabulary(int(text_config(read_config(path))["vocab_size"]), "")
    digest = hashlib.sha256()
    for index, token in enumerate(tokens):
        digest.update(f"{index}\0{token}\0".encode("utf-8", "surrogatepass"))
    return Vocabulary(len(tokens), digest.hexdigest()[:32])


def _tokens(path: str, trust_remote_code: bool) -> list[str | None] | None:
    """Token texts by id (None: an id without a token); None if there is no tokenizer."""
    file = os.path.join(path, "tokenizer.json")
    if os.path.isfile(file):
        # Reading the file itself spares a small process the import of transformers and torch.
        from tokenizers import Tokenizer

        try:
            vocabulary = Tokenizer.from_file(file).get_vocab(with_added_tokens=True)
        except Exception as e:  # the library raises nothing narrower
            raise PairMismatchError(f"cannot read the tokenizer {file}: {e}") from None
    else:
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        except (OSError, ValueError, KeyError):
            return None
        vocabulary = tokenizer.get_vocab()
    tokens: list[str | None] = [None] * (max(vocabulary.values()) + 1)
    for token, index in vocabulary.items():
        tokens[index] = token
    return tokens


def read_config(path: str) -> dict[str, Any]:
    """The model's config.json as a dict."""
    file = os.path.join(path, "config.json")
    if not os.path.isfile(file):
        from transformers.utils import cached_file

        file = cached_file(path, "config.json") or file  # None for a folder without it
    with open(file, encoding="utf-8") as f:
        config: dict[str, Any] = json.load(f)
    return config


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a (perhaps multimodal) config that describes the language model."""
    return config.get("text_config") or config.get("llm_config") or config


def check_rollback(path: str, role: str) -> None:
    """Refuse models with recurrent state: a rejected draft cannot be taken out of it.

    Raises `PairMismatchError`, and `ConfigError` when there is no such model.
    """
    try:
        config = text_config(read_config(path))
    except (OSError, ValueError) as e:
        flag = {"target": "--model-path", "draft": "--speculative-draft-model-path"}.get(role)
        if os.path.isabs(path) or path.startswith((".", "~")):
            raise ConfigError(
                f"the {role} model {path!r} ({flag}): no readable config.json there"
            ) from None
        reason = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise ConfigError(
            f"the {role} model {path!r} ({flag}) has no config.json in a folder of that name, and "
            f"the hub gives none: {reason}"
        ) from None
    layer_types = config.get("layer_types") or config.get("layers_block_type") or ()
    recurrent = _RECURRENT_LAYER_TYPES.intersection(t for t in layer_types if isinstance(t, str))
    if config.get("model_type") in _RECURRENT_MODEL_TYPES or recurrent:
        raise PairMismatchError(
            f"the {role} model {path!r} ({config.get('model_type')}) has recurrent layers whose "
            "state cannot be rolled back after a rejected draft; SSD needs an attention-only model"
        )


def check_pair(target: Vocabulary, draft: Vocabulary, target_path: str, draft_path: str) -> None:
    """Refuse a pair whose ids mean different tokens. Raises `PairMismatchError`."""
    if not target.fingerprint or not draft.fingerprint:
        return
    if target.fingerprint != draft.fingerprint:
        raise PairMismatchError(
            f"target {target_path!r} ({target.size} tokens) and draft {draft_path!r} "
            f"({draft.size} tokens) have different vocabularies: the same id means another token. "
            "Choose a draft of the same model family (--speculative-draft-model-path)"
        )
