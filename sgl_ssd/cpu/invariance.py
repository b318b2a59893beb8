"""Shapes for which the CPU's fp32 kernels compute a row the same way whatever stands beside it.

Exactness is tested by equality of texts: decoding one request alone, verifying six tokens of it, or
decoding it among fifty others should give the same logits. Rounding differs because a library picks
another kernel, or another order of adding up, by the shape. Measured with MKL and torch 2.11 on
x86-64, one product of [rows, k] and [k, n] gives bit for bit the same rows for every number of rows
from 4 on (from 4 a thread, where it is split among threads), and torch's attention the same for
every number of keys that fills its blocks of 512 (or stays below the size at which the library
splits a sum). So rows are padded to at least that many and keys to whole blocks. Elsewhere this may
not hold to the last bit; the results are as good as any other.

No SGLang import; `sgl_ssd.cpu.hooks` wraps SGLang's linear layers with `linear` and `lm_head`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad

LEAST_ROWS = 4
"""Rows of a matrix product, per thread."""
MOST_PADDING = 32
"""With many threads the padding would cost more than it is worth."""
KEY_BLOCK = 512
"""Block of keys in torch's attention kernel for the CPU (kvSplitSize)."""
SHORT_KEYS = 128


def padded_keys(length: int) -> int:
    """Number of keys to attend to, masked beyond `length`."""
    if length <= SHORT_KEYS:
        return SHORT_KEYS
    return -(-length // KEY_BLOCK) * KEY_BLOCK


def pad_rows(rows: torch.Tensor) -> torch.Tensor:
    """fp32 [n, k] with zero rows added up to the least invariant number; others unchanged."""
    if rows.dtype != torch.float32 or rows.dim() != 2 or rows.shape[0] == 0:
        return rows
    least = min(LEAST_ROWS * torch.get_num_threads(), MOST_PADDING)
    missing = least - rows.shape[0]
    return pad(rows, (0, 0, 0, missing)) if missing > 0 else rows


def linear(
    original: Callable[..., torch.Tensor],
    method: Any,
    layer: Any,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Around `UnquantizedLinearMethod.apply`."""
    padded = pad_rows(x)
    out = original(method, layer, padded, bias)
    return out if padded is x else out[: x.shape[0]]


def lm_head(
    original: Callable[..., torch.Tensor],
    processor: Any,
    hidden_states: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Around `LogitsProcessor._compute_lm_head`."""
    padded = pad_rows(hidden_states)
    out = original(processor, padded, *args, **kwargs)
    return out if padded is hidden_states else out[: hidden_states.shape[0]]
