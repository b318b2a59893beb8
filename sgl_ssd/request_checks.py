"""Values in requests that SGLang takes as they come, and that would end its scheduler.

In the HTTP process, around SGLang's own checks: what is refused there is HTTP 400.
"""

from __future__ import annotations

import math
from typing import Any

FLOAT32_MAX = 3.4028234e38
MAX_COUNT = 1 << 30  # as a top_k, all of the vocabulary
INTEGERS = ("max_new_tokens", "min_new_tokens", "top_k", "n", "sampling_seed")
COUNTS = ("max_new_tokens", "min_new_tokens", "top_k")
NUMBERS = (
    "temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
)  # fmt: skip


def install() -> None:
    """Register the hooks with SGLang; they still have to be applied."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    manager = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
    for target, hook in (
        ("sglang.srt.sampling.sampling_params.SamplingParams.verify", _verify),
        (f"{manager}._validate_token_ids_logprob", _validate_logprobs),
    ):
        HookRegistry.register(target, hook, HookType.AROUND)


def _verify(orig: Any, params: Any, vocab_size: int) -> None:
    check_types(params)
    if params.stop_token_ids:
        # No text has others; SGLang would write at their places to enforce min_new_tokens.
        params.stop_token_ids = {t for t in params.stop_token_ids if 0 <= t < vocab_size} or None
    orig(params, vocab_size)


def _validate_logprobs(orig: Any, manager: Any, obj: Any) -> None:
    count, limit = obj.top_logprobs_num, manager.model_config.vocab_size
    if count is not None and not (type(count) is int and 0 <= count <= limit):
        raise ValueError(f"top_logprobs_num must lie in 0..{limit}, got {count!r}.")
    orig(manager, obj)


def check_types(params: Any) -> None:
    """Raise `ValueError` for a sampling parameter of a wrong type; 5.0 becomes the integer 5.

    Counts that SGLang keeps in 32 bits are cut to those: no text and no vocabulary is as long.
    """
    for name in INTEGERS:
        value = getattr(params, name)
        if isinstance(value, float) and value.is_integer():
            setattr(params, name, int(value))
        elif value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ValueError(f"{name} must be an integer, got {value!r}.")
    for name in COUNTS:
        value = getattr(params, name)
        if value is not None:
            setattr(params, name, min(value, MAX_COUNT))
    for name in NUMBERS:
        value = getattr(params, name)
        if not _is_number(value):
            raise ValueError(f"{name} must be a number, got {value!r}.")
    bias = params.logit_bias
    if bias is None:
        return
    if not isinstance(bias, dict):
        raise ValueError(f"logit_bias must be an object, got {bias!r}.")
    for token, value in bias.items():
        # -inf excludes a token; NaN compares as false.
        if not _is_number(value) or not (abs(value) <= FLOAT32_MAX or value == -math.inf):
            raise ValueError(f"logit_bias of {token} must be a number of 32 bits, got {value!r}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
