"""The draw of `sampling` as one Triton kernel: scale, hash, Gumbel noise and argmax in one pass.

In eager mode the noise of [N, V] scores takes some twenty passes over memory. Here each score is
read once, in float32, and nothing of that size is written. A row's vocabulary is shared out among
several programs, so that few rows keep a whole GPU busy; a second, small kernel takes the best of
their answers.

The hash is `sampling.hash_bits` to the bit (the same wrapping 32-bit operations). The noise differs
from `sampling.gumbel` by the rounding of the device's logarithm, so tokens may differ from the
reference's where two scores are closer than 1e-5.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 2048
PROGRAMS = 512
"""Wanted in all: about four for each multiprocessor of a large GPU."""
MAX_PARTS = 256

_NO_TOKEN = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _mix(x):  # type: ignore[no-untyped-def]
    """`sampling._mix` on uint32."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _gumbel(bits):  # type: ignore[no-untyped-def]
    """`sampling.gumbel` of uint32 `bits`; always finite."""
    upper = bits < 0x80000000
    end = tl.where(upper, bits ^ 0x7FFFFFFF, bits & 0x7FFFFFFF)
    distance = (end.to(tl.int32).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2^-32
    # log1p(-distance), which Triton has on some backends only: the logarithm of the rounded number,
    # scaled by what was rounded away.
    rounded = 1.0 - distance
    kept = 1.0 - rounded
    tiny = kept == 0.0
    near_one = tl.log(rounded) * (distance / tl.where(tiny, 1.0, kept))
    near_one = tl.where(tiny, -distance, near_one)
    return -tl.log(-tl.where(upper, near_one, tl.log(distance)))


# Not specialized: one compilation serves every batch size.
@triton.jit(do_not_specialize=["part_size"])  # type: ignore[untyped-decorator]
def _best_of_part(  # type: ignore[no-untyped-def]
    scores,
    temperatures,
    seeds,
    positions,
    part_best,
    part_token,
    row_stride,
    vocab_size,
    part_size,
    BLOCK: tl.constexpr,
):
    """The greatest noisy score, and its lowest id, of part `program_id(1)` of a row."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    drawn = temperature > 0
    divisor = tl.where(drawn, temperature, 1.0)
    seed = tl.load(seeds + row)
    position = tl.load(positions + row)
    key = _mix(_mix(seed.to(tl.uint32) ^ 0x243F6A88) + (seed >> 32).to(tl.uint32))
    key = _mix(key ^ position.to(tl.uint32))
    second = _mix(key + 0x85A308D3)

    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    token = tl.full([BLOCK], _NO_TOKEN, tl.int32)
    first = part * part_size
    last = tl.minimum(first + part_size, vocab_size)
    for start in range(first, last, BLOCK):
        ids = start + lane
        score = tl.load(scores + row * row_stride + ids, mask=ids < last, other=float("-inf"))
        value = tl.div_rn(score.to(tl.float32), divisor)
        if drawn:
            value += _gumbel(_mix(_mix((ids.to(tl.uint32) * 0x9E3779B1) ^ key) + second))
        # Never true for -inf (excluded, or beyond the row) nor NaN; ids grow, so the first of
        # equals stays.
        better = value > best
        best = tl.where(better, value, best)
        token = tl.where(better, ids, token)
    top = tl.max(best, axis=0)
    out = row * tl.num_programs(1) + part
    tl.store(part_best + out, top)
    tl.store(part_token + out, tl.min(tl.where(best == top, token, _NO_TOKEN), axis=0))


@triton.jit(do_not_specialize=["num_parts"])  # type: ignore[untyped-decorator]
def _best_of_parts(  # type: ignore[no-untyped-def]
    part_best, part_token, tokens, num_parts, PARTS: tl.constexpr
):
    """The best of a row's parts; 0 where every score is -inf or NaN."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, PARTS)
    real = lane < num_parts
    best = tl.load(part_best + row * num_parts + lane, mask=real, other=float("-inf"))
    token = tl.load(part_token + row * num_parts + lane, mask=real, other=_NO_TOKEN)
    token = tl.min(tl.where(best == tl.max(best, axis=0), token, _NO_TOKEN), axis=0)
    tl.store(tokens + row, tl.where(token == _NO_TOKEN, 0, token).to(tl.int64))


def split(num_rows: int, vocab_size: int) -> tuple[int, int]:
    """How many parts a row is cut into, and the size of a part (a multiple of `BLOCK`)."""
    blocks = triton.cdiv(vocab_size, BLOCK)
    per_part = triton.cdiv(blocks, min(MAX_PARTS, triton.cdiv(PROGRAMS, num_rows)))
    return triton.cdiv(blocks, per_part), per_part * BLOCK


def noisy_argmax(
    scores: torch.Tensor, temperature: torch.Tensor, seed: torch.Tensor, position: torch.Tensor
) -> torch.Tensor:
    """argmax over v of scores / temperature + noise(seed, position, v): int64 [N].

    Args:
        scores: float [N, V] of any width; -inf is never chosen, nor is NaN.
        temperature: float32 [N]; rows of 0 are greedy: no scaling, no noise.
        seed, position: int64 [N].

    Of equal scores the lowest id wins. A row without any number gives 0.
    """
    num_rows, vocab_size = scores.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=scores.device)
    if num_rows == 0:
        return tokens
    if scores.stride(1) != 1:
        scores = scores.contiguous()
    num_parts, part_size = split(num_rows, vocab_size)
    best = torch.empty((num_rows, num_parts), dtype=torch.float32, device=scores.device)
    token = torch.empty((num_rows, num_parts), dtype=torch.int32, device=scores.device)
    with torch.cuda.device_of(scores):  # type: ignore[no-untyped-call]
        _best_of_part[(num_rows, num_parts)](
            scores, temperature.contiguous(), seed.contiguous(), position.contiguous(),
            best, token, scores.stride(0), vocab_size, part_size, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
        _best_of_parts[(num_rows,)](best, token, tokens, num_parts, PARTS=MAX_PARTS)
    return tokens
