"""Coupled sampling: one sampler makes every token, the target's and the draft's alike.

The token at absolute index n of a sequence is ``argmax_v(log p_n(v) + g(seed, n, v))`` with Gumbel
noise g from a counter-based hash, which is a sample of p_n (the Gumbel-max trick). The text is a
function of the target, the request and its seed; how many positions were computed in one forward,
and what was drafted, cannot change it. The draft draws with the same noise, so it guesses the
target's *samples*, not only its distribution.

Filters follow SGLang's torch sampler (``top_k_top_p_min_p_sampling_from_probs_torch``): on the
probabilities after temperature, sorted downwards, keep the first `top_k`, of those the tokens whose
mass before them is at most `top_p`, of those the ones with at least `min_p` times the greatest
probability. Excluded tokens get -inf before the noise is added and can never win.

Everything here is torch, on any device. On CUDA the draw itself is fused: `fused_draw`.
No SGLang import.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import torch

TOP_K_ALL = 1 << 30
FUSED_ENV = "SGLANG_SSD_FUSED_SAMPLING"  # 0: draw with torch operations on CUDA, too
_MASK32 = 0xFFFFFFFF


@dataclass
class RowSampling:
    """Sampling parameters of N rows (requests, or positions of requests).

    All tensors are [N] on one device: `temperature` float32 (0 = greedy), `top_k` int32 (at least
    TOP_K_ALL or the vocabulary: off), `top_p` float32, `min_p` float32, `seed` int64. The flags
    are known on the host, so that what is off costs nothing and nothing waits for the device.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    all_greedy: bool
    any_filter: bool

    @staticmethod
    def of(
        temperature: list[float],
        top_k: list[int],
        top_p: list[float],
        min_p: list[float],
        seed: list[int],
        device: torch.device | str,
    ) -> RowSampling:
        """Rows from host lists of equal length."""

        def put(values: list[Any], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

        # A greedy row ignores its filters: the greatest logit survives each of them.
        drawn = [t > 0 for t in temperature]
        return RowSampling(
            temperature=put(temperature, torch.float32),
            top_k=put([min(k, TOP_K_ALL) for k in top_k], torch.int32),
            top_p=put(top_p, torch.float32),
            min_p=put(min_p, torch.float32),
            seed=put(seed, torch.int64),
            all_greedy=not any(drawn),
            any_filter=any(
                d and (k < TOP_K_ALL or p < 1.0 or m > 0.0)
                for d, k, p, m in zip(drawn, top_k, top_p, min_p, strict=True)
            ),
        )

    def repeat(self, width: int) -> RowSampling:
        """Each row `width` times in a row: [N] -> [N * width]."""
        if width == 1:
            return self
        tensors = {
            f.name: getattr(self, f.name).repeat_interleave(width)
            for f in fields(self)
            if isinstance(getattr(self, f.name), torch.Tensor)
        }
        return RowSampling(**tensors, all_greedy=self.all_greedy, any_filter=self.any_filter)

    def select(self, index: torch.Tensor) -> RowSampling:
        """Rows `index` (int64 [M])."""
        tensors = {
            f.name: getattr(self, f.name)[index]
            for f in fields(self)
            if isinstance(getattr(self, f.name), torch.Tensor)
        }
        return RowSampling(**tensors, all_greedy=self.all_greedy, any_filter=self.any_filter)


def _signed(value: int) -> int:
    value &= _MASK32
    return value - (1 << 32) if value >= 1 << 31 else value


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A bijection of int32 with full avalanche (Wellons' lowbias32), wrapping like uint32."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * _signed(0x7FEB352D)
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * _signed(0x846CA68B)
    return x ^ ((x >> 16) & 0xFFFF)


def _low32(x: torch.Tensor) -> torch.Tensor:
    """The low 32 bits of int64 `x` as int32."""
    return x.to(torch.int32)  # narrowing keeps the low bits on every torch backend


@lru_cache(maxsize=8)
def _token_counters(vocab_size: int, device: torch.device) -> torch.Tensor:
    ids = torch.arange(vocab_size, dtype=torch.int32, device=device)
    return ids * _signed(0x9E3779B1)


def hash_bits(seed: torch.Tensor, position: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """32 random bits for each (row, token id): int32 [N, vocab_size].

    `seed` int64 [N], `position` int64 [N]: the absolute index of the token to be drawn.
    """
    low = _mix(_low32(seed) ^ _signed(0x243F6A88))
    key = _mix(low + _low32(seed >> 32))
    key = _mix(key ^ _low32(position))
    second = _mix(key + _signed(0x85A308D3))
    x = _mix(_token_counters(vocab_size, seed.device)[None] ^ key[:, None])
    return _mix(x + second[:, None])


def gumbel(bits: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float32 and always finite, from int32 `bits` of any shape.

    With h the bits as an unsigned number, u = (h + 1/2) / 2^32 and g = -log(-log u). Near u = 1
    float32 cannot hold u, so the upper half works on 1 - u instead.
    """
    upper = bits >= 0
    # The distance to the nearer end of (0, 1), at most 1/2 and at least 2^-33.
    distance = (torch.where(upper, bits ^ 0x7FFFFFFF, bits & 0x7FFFFFFF).float() + 0.5) * 2.0**-32
    exponential = torch.where(upper, -torch.log1p(-distance), -torch.log(distance))
    return -torch.log(exponential)


def filter_scores(scores: torch.Tensor, rows: RowSampling) -> torch.Tensor:
    """`scores` float32 [N, V] (logits / temperature) with excluded tokens at -inf."""
    ordered, index = scores.sort(dim=-1, descending=True, stable=True)
    probs = ordered.softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs
    rank = torch.arange(scores.shape[-1], device=scores.device)[None]
    top_p = rows.top_p[:, None]
    drop = (
        (rank >= rows.top_k[:, None])
        # The sum of all may round to more than 1: a row without top-p must lose nothing, or it
        # would depend on whether another row of the batch has a filter.
        | ((before > top_p) & (top_p < 1.0))
        | (probs < probs[:, :1] * rows.min_p[:, None])
    )
    # A greedy row keeps everything: it takes the greatest logit anyway.
    drop &= (rows.temperature > 0)[:, None]
    return scores.masked_fill(torch.empty_like(drop).scatter_(-1, index, drop), float("-inf"))


def filtered_scores(logits: torch.Tensor, rows: RowSampling) -> torch.Tensor:
    """What a softmax turns into the distributions to draw from: float32 [N, V].

    `logits` float [N, V] with every bias, penalty and mask applied. Greedy rows: the logits; else
    logits / T, with -inf for what the filters exclude.
    """
    scores = logits.float()
    if rows.all_greedy:
        return scores
    scores = scores / torch.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
    return filter_scores(scores, rows) if rows.any_filter else scores


def coupled_scores(logits: torch.Tensor, rows: RowSampling, position: torch.Tensor) -> torch.Tensor:
    """Scores whose greatest entry is the token, and whose next ones are the next guesses.

    Args:
        logits: float [N, V], with every bias, penalty and mask applied.
        rows: the N rows' parameters.
        position: int64 [N], the absolute index of the token to be drawn.

    Returns:
        float32 [N, V]: logits for greedy rows; else logits / T, filtered, plus noise.
    """
    scores = filtered_scores(logits, rows)
    if rows.all_greedy:
        return scores
    noise = gumbel(hash_bits(rows.seed, position, scores.shape[-1]))
    return torch.where((rows.temperature > 0)[:, None], scores + noise, scores)


def coupled_sample(logits: torch.Tensor, rows: RowSampling, position: torch.Tensor) -> torch.Tensor:
    """The token of each row: int64 [N], the argmax of `coupled_scores`."""
    if rows.all_greedy:
        return logits.argmax(dim=-1)
    if not rows.any_filter:
        return noisy_argmax(logits, rows.temperature, rows.seed, position)
    scaled = (rows.temperature > 0).float()  # by the temperature already; 0 still means greedy
    return noisy_argmax(filtered_scores(logits, rows), scaled, rows.seed, position)


def fuses(scores: torch.Tensor) -> bool:
    """Whether draws from `scores` are `fused_draw`'s."""
    return scores.is_cuda and os.environ.get(FUSED_ENV) != "0"


def noisy_argmax(
    scores: torch.Tensor, temperature: torch.Tensor, seed: torch.Tensor, position: torch.Tensor
) -> torch.Tensor:
    """argmax over v of scores / temperature + g(seed, position, v): int64 [N].

    `scores` float [N, V], where -inf is never chosen; `temperature` float32 [N], 0 for rows that
    are greedy: no scaling, no noise; `seed` and `position` int64 [N]. Of equals the first wins.
    """
    if fuses(scores):
        from sgl_ssd import fused_draw  # not at the top: the CPU needs no Triton

        return fused_draw.noisy_topk(scores, temperature, seed, position, width=1)[:, 0]
    drawn = (temperature > 0)[:, None]
    scaled = scores.float() / torch.where(drawn, temperature[:, None], 1.0)
    noise = gumbel(hash_bits(seed, position, scores.shape[-1]))
    return torch.where(drawn, scaled + noise, scaled).argmax(dim=-1)


def request_seed(server_seed: int, arrival: int) -> int:
    """The seed of the `arrival`-th unseeded request: int64, equal on every rank."""
    x = (server_seed * 0x9E3779B97F4A7C15 + arrival * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = ((x ^ (x >> shift)) * factor) & (2**64 - 1)
    x ^= x >> 31
    return x - 2**64 if x >= 2**63 else x
