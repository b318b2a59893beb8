"""The draw of `sampling` as Triton kernels: each row's token, or its `width` best ones in order.

In eager mode the noise of [N, V] scores takes some twenty passes over memory. Here each score is
read once, in float32, and nothing of that size is written. The first kernel scales, adds the noise
and keeps the greatest of each group of `GROUP` neighbours; a row's groups are shared out among
several programs, so that few rows keep a whole GPU busy. The `width` best of a row lie in the
`width` groups with the greatest maxima: the second kernel finds those groups, computes them again
and sorts out the ids.

The hash is `sampling.hash_bits` to the bit (the same wrapping 32-bit operations). The noise differs
from `sampling.gumbel` by the rounding of the device's logarithm, so tokens may differ from the
reference's where two scores are closer than 1e-5.

Nothing here waits for the device or depends on its values: it may be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

GROUP = 128
BLOCK = 2048
"""Scores that a program of the first kernel takes at once; a multiple of `GROUP`."""
PROGRAMS = 512
"""Wanted in all: about four for each multiprocessor of a large GPU."""

_GROUP = tl.constexpr(GROUP)
_NO_PLACE = tl.constexpr(0x7FFFFFFF)
_LOWEST = tl.constexpr(-(1 << 63))


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
    log = tl.log(tl.where(upper, rounded, distance))
    near_one = tl.where(tiny, -distance, log * (distance / tl.where(tiny, 1.0, kept)))
    return -tl.log(-tl.where(upper, near_one, log))


@triton.jit
def _row_inputs(  # type: ignore[no-untyped-def]
    temperatures, seeds, limits, places, positions, vocab_size
):
    """This program's row, its temperature, its two hash keys, and where its vocabulary ends."""
    row = tl.program_id(0).to(tl.int64)
    place = row
    if places is not None:
        place = tl.load(places + row)
    end = vocab_size
    if limits is not None:
        end = tl.minimum(vocab_size, tl.load(limits + place))
    seed = tl.load(seeds + place)
    key = _mix(_mix(seed.to(tl.uint32) ^ 0x243F6A88) + (seed >> 32).to(tl.uint32))
    key = _mix(key ^ tl.load(positions + row).to(tl.uint32))
    return row, tl.load(temperatures + place), key, _mix(key + 0x85A308D3), end


@triton.jit
def _noisy(scores, ids, end, temperature, key, second):  # type: ignore[no-untyped-def]
    """The row's scores with noise at `ids` (int32): float32, -inf from `end` on and for NaN."""
    value = tl.load(scores + ids, mask=ids < end, other=float("-inf")).to(tl.float32)
    if temperature > 0:
        noise = _gumbel(_mix(_mix((ids.to(tl.uint32) * 0x9E3779B1) ^ key) + second))
        value = tl.div_rn(value, temperature) + noise
    return tl.where(value == value, value, float("-inf"))


@triton.jit
def _rank(value, place):  # type: ignore[no-untyped-def]
    """int64 that grows with `value` (float32) and, among equals, falls with `place` (int32)."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)  # -0 equals 0
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) | (place ^ _NO_PLACE).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def _best(ranks, WIDTH: tl.constexpr, SLOTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The places of the `WIDTH` greatest `ranks`, greatest first: int32 [SLOTS].

    `_NO_PLACE` where all are taken, and in the slots from `WIDTH` on.
    """
    slot = tl.arange(0, SLOTS)
    places = tl.full([SLOTS], _NO_PLACE, tl.int32)
    for i in range(WIDTH):
        top = tl.max(ranks, axis=0)
        ranks = tl.where(ranks == top, _LOWEST, ranks)
        places = tl.where(slot == i, top.to(tl.int32) ^ _NO_PLACE, places)
    return places


# Not specialized: one compilation serves every batch size, and every column of a packed upload.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["part_blocks"], do_not_specialize_on_alignment=["places", "positions"]
)
def _group_maxima(  # type: ignore[no-untyped-def]
    scores,
    temperatures,
    seeds,
    limits,
    places,
    positions,
    maxima,
    row_stride,
    vocab_size,
    num_groups,
    part_blocks,
    BLOCK: tl.constexpr,
):
    """The greatest noisy score of each group in part `program_id(1)` of a row."""
    row, temperature, key, second, end = _row_inputs(
        temperatures, seeds, limits, places, positions, vocab_size
    )
    group = tl.arange(0, BLOCK // _GROUP)
    lane = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    first = tl.program_id(1) * part_blocks
    last = tl.minimum(first + part_blocks, tl.cdiv(vocab_size, BLOCK))
    for block in range(first, last):
        ids = block * BLOCK + lane
        value = _noisy(scores + row * row_stride, ids, end, temperature, key, second)
        groups = block * (BLOCK // _GROUP) + group
        out = maxima + row * num_groups + groups
        tl.store(out, tl.max(value, axis=1), mask=groups < num_groups)


@triton.jit(do_not_specialize_on_alignment=["places", "positions"])  # type: ignore[untyped-decorator]
def _best_of_groups(  # type: ignore[no-untyped-def]
    scores,
    temperatures,
    seeds,
    limits,
    places,
    positions,
    maxima,
    tokens,
    row_stride,
    vocab_size,
    num_groups,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """The best ids of a row from its groups' maxima; 0 where the vocabulary has no more."""
    row, temperature, key, second, end = _row_inputs(
        temperatures, seeds, limits, places, positions, vocab_size
    )
    group = tl.arange(0, GROUPS)
    maxima += row * num_groups
    value = tl.load(maxima + group, mask=group < num_groups, other=float("-inf"))
    # Of equal maxima the first group has the lowest id: neighbours, not strided ids, are grouped.
    groups = _best(_rank(value, group), WIDTH, SLOTS)
    groups = tl.minimum(groups, num_groups)  # _NO_PLACE would overflow; beyond the end either way
    ids = groups[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    value = _noisy(scores + row * row_stride, ids, end, temperature, key, second)
    ranks = tl.where(ids < end, _rank(value, ids), _LOWEST)
    best = _best(tl.reshape(ranks, [SLOTS * _GROUP]), WIDTH, SLOTS)
    slot = tl.arange(0, SLOTS)
    best = tl.where(best == _NO_PLACE, 0, best).to(tl.int64)
    tl.store(tokens + row * WIDTH + slot, best, mask=slot < WIDTH)


def split(num_rows: int, vocab_size: int) -> tuple[int, int]:
    """How many parts a row is cut into, and the size of a part in blocks."""
    blocks = triton.cdiv(vocab_size, BLOCK)
    per_part = triton.cdiv(blocks, triton.cdiv(PROGRAMS, num_rows))
    return triton.cdiv(blocks, per_part), per_part


def noisy_topk(
    scores: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    width: int,
    places: torch.Tensor | None = None,
    limit: torch.Tensor | None = None,
) -> torch.Tensor:
    """The `width` ids v with the greatest scores / temperature + noise(seed, position, v).

    Args:
        scores: float [N, V] of any width.
        temperature: float32 [S]; rows of 0 are greedy: no scaling, no noise.
        seed: int64 [S].
        position: int64 [N].
        width: at least 1; made for up to 16.
        places: int64 [N], the place in the tables [S] of each row; None: row i is at place i.
        limit: int32 [S]; ids from there on are left out.

    Returns:
        int64 [N, width], best first, of equals the lowest id. -inf and NaN come last and equal;
        where the vocabulary has too few ids there is 0.
    """
    num_rows, vocab_size = scores.shape
    tokens = torch.empty((num_rows, width), dtype=torch.int64, device=scores.device)
    if num_rows == 0:
        return tokens
    if scores.stride(1) != 1:
        scores = scores.contiguous()
    num_groups = triton.cdiv(vocab_size, GROUP)
    maxima = torch.empty((num_rows, num_groups), dtype=torch.float32, device=scores.device)
    num_parts, part_blocks = split(num_rows, vocab_size)
    inputs = (temperature, seed, limit, places, position)
    rows = (*(None if x is None else x.contiguous() for x in inputs), maxima)
    sizes = (scores.stride(0), vocab_size, num_groups)
    with torch.cuda.device_of(scores):  # type: ignore[no-untyped-call]
        _group_maxima[(num_rows, num_parts)](
            scores, *rows, *sizes, part_blocks, BLOCK=BLOCK, num_warps=8
        )
        _best_of_groups[(num_rows,)](
            scores, *rows, tokens, *sizes, GROUPS=triton.next_power_of_2(num_groups),
            WIDTH=width, SLOTS=triton.next_power_of_2(width), num_warps=8,
        )  # fmt: skip
    return tokens
