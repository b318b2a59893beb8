"""Values in requests that SGLang takes as they come, and that would end its scheduler.

In the HTTP process, around `SamplingParams.verify`: what is refused there is HTTP 400.
"""

from __future__ import annotations

import math
from typing import Any

FLOAT32_MAX = 3.4028234e38
INTEGERS = ("max_new_tokens", "min_new_tokens", "top_k", "n", "sampling_seed")
NUMBERS = (
    "temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
)  # fmt: skip


def install() -> None:
    """Register the hook with SGLang; it still has to be applied."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.sampling.sampling_params.SamplingParams.verify"
    HookRegistry.register(target, _verify, HookType.AROUND)


def _verify(orig: Any, params: Any, vocab_size: int) -> None:
    check_types(params)
    orig(params, vocab_size)


def check_types(params: Any) -> None:
    """Raise `ValueError` for a sampling parameter of a wrong type; 5.0 becomes the integer 5."""
    for name in INTEGERS:
        value = getattr(params, name)
        if isinstance(value, float) and value.is_integer():
            setattr(params, name, int(value))
        elif value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ValueError(f"{name} must be an integer, got {value!r}.")
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
