"""Attention over a paged KV cache in plain torch, without a Python loop over decoding rows.

A *row* is one request (or one branch): `prefix` tokens already in the cache plus `width` tokens of
this forward, whose KV is in the cache too by the time attention runs. Decode is width 1,
speculative verification is a small width, prefill a large one. Query i of a row sees the keys
0..prefix+i.

`plan` does the work that all layers of a forward share (which slots, which mask); `attend` runs one
layer. Rows of a small width are batched, wide ones run one by one in blocks of queries.

A token's output should not depend on whether it was decoded, verified or prefilled, nor on what
else was in the batch. In exact arithmetic it does not; in fp32 the library kernels add up in an
order that depends on the shape, which costs about 1e-6. An `invariant` plan pads every shape to one
of a few (`invariance` tells which and why), and the outputs are the same to the last bit.

No SGLang import here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from sgl_ssd.cpu.invariance import LEAST_ROWS, padded_keys

NARROW_WIDTH = 32
"""Rows up to this many new tokens are batched with others of the same width."""

GATHER_TOKENS = 16 * 1024
"""Upper bound of rows x padded length gathered at once (one long row may exceed it alone)."""

MASK_ELEMENTS = 4 * 1024 * 1024
"""Upper bound of queries x keys in one mask of a wide row."""

_WIDE_BLOCK = 64
"""Invariant plans: queries of a wide row come in multiples of this many."""

_MIN_LENGTH = 64  # lengths below this are not worth a batch of their own


@dataclass
class Narrow:
    """Rows of one small width, gathered together."""

    queries: torch.Tensor | slice
    """Places of these rows' tokens in the flat token axis, row by row."""
    slots: torch.Tensor
    """int64 [rows, length]: KV slots, padded with the row's first slot."""
    prefix: torch.Tensor
    """int64 [rows]."""
    width: int
    group_rows: int
    """Query rows of a KV head are padded to a multiple of this."""
    masks: dict[tuple[int, torch.dtype, int | None], torch.Tensor] = field(default_factory=dict)

    def mask(self, group: int, dtype: torch.dtype, window: int | None) -> torch.Tensor:
        """Additive mask [rows, 1, queries, length], shared by all layers of the forward.

        The queries are group x width, plus padding that sees what the row's first token sees.
        """
        key = (group, dtype, window)
        if key not in self.masks:
            steps = torch.arange(self.width, device=self.prefix.device).repeat(group)
            steps = pad(steps, (0, self.padding(group)))
            bias = _bias(self.prefix[:, None] + steps, self.slots.shape[1], dtype, window)
            self.masks[key] = bias.unsqueeze(1)
        return self.masks[key]

    def padding(self, group: int) -> int:
        """Query rows of a KV head to be added."""
        return -(group * self.width) % self.group_rows


@dataclass
class Wide:
    """One row of a large width."""

    queries: slice
    slots: torch.Tensor
    """int64 [length]: KV slots, in an invariant plan padded with the row's first slot."""
    prefix: int
    invariant: bool


@dataclass
class Plan:
    """How one forward's rows are attended to."""

    parts: list[Narrow | Wide]


def plan(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    prefix_lens: Sequence[int],
    widths: Sequence[int],
    *,
    invariant: bool = False,
) -> Plan:
    """Group the rows of a forward.

    `req_to_token` is int [rows of the pool, context]: the KV slot of each position;
    `req_pool_indices` int [batch]. `prefix_lens` and `widths` are host lists over the batch; the
    tokens of the rows follow each other in the flat token axis in this order.
    """
    starts = [0]
    for width in widths:
        starts.append(starts[-1] + width)
    parts: list[Narrow | Wide] = []
    narrow: dict[int, list[int]] = defaultdict(list)
    for row, width in enumerate(widths):
        if 0 < width <= NARROW_WIDTH:
            narrow[width].append(row)
        elif width > 0:
            length = prefix_lens[row] + width
            slots = _slots(req_to_token, req_pool_indices[row : row + 1], [length], invariant)
            queries = slice(starts[row], starts[row + 1])
            parts.append(Wide(queries, slots[0], prefix_lens[row], invariant))
    for width, rows in narrow.items():
        for chunk in _chunks(rows, [prefix_lens[row] + width for row in rows], invariant):
            lengths = [prefix_lens[row] + width for row in chunk]
            pool_rows = req_pool_indices[torch.tensor(chunk, device=req_pool_indices.device)]
            slots = _slots(req_to_token, pool_rows, lengths, invariant)
            prefix = torch.tensor(lengths, device=slots.device) - width
            group_rows = LEAST_ROWS if invariant else 1
            parts.append(Narrow(_places(starts, width, chunk), slots, prefix, width, group_rows))
    return Plan(parts)


def attend(
    plan: Plan,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scale: float | None,
    window: int | None = None,
) -> None:
    """One layer's attention, written into `output`.

    `query` is [tokens, heads, dim], `output` [tokens, heads, v dim], the caches
    [slots, kv heads, dim] with heads a multiple of kv heads. `window`: keys further back than this
    many positions are not seen (None: all are).
    """
    for part in plan.parts:
        if isinstance(part, Narrow):
            output[part.queries] = _attend_narrow(
                part, query[part.queries], k_cache, v_cache, scale, window
            )
        else:
            _attend_wide(part, query, output, k_cache, v_cache, scale, window)


def _attend_narrow(
    part: Narrow,
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    rows, width = part.slots.shape[0], part.width
    tokens, heads, dim = query.shape
    kv_heads = k_cache.shape[1]
    group = heads // kv_heads
    # [rows, kv heads, length, dim]; the heads of a group become further queries of their KV head,
    # so that keys and values are not repeated.
    key = k_cache[part.slots].transpose(1, 2).to(query.dtype)
    value = v_cache[part.slots].transpose(1, 2).to(query.dtype)
    q = query.view(rows, width, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
    q = pad(q.reshape(rows, kv_heads, group * width, dim), (0, 0, 0, part.padding(group)))
    mask = part.mask(group, query.dtype, window)
    out = scaled_dot_product_attention(q, key, value, attn_mask=mask, scale=scale)
    out = (
        out[:, :, : group * width].reshape(rows, kv_heads, group, width, -1).permute(0, 3, 1, 2, 4)
    )
    return out.reshape(tokens, heads, -1)


def _attend_wide(
    part: Wide,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scale: float | None,
    window: int | None,
) -> None:
    heads, dim = query.shape[1:]
    kv_heads = k_cache.shape[1]
    group = heads // kv_heads
    start, stop = part.queries.start, part.queries.stop
    length = part.slots.numel()
    key = k_cache[part.slots].transpose(0, 1).to(query.dtype)  # [kv heads, length, dim]
    value = v_cache[part.slots].transpose(0, 1).to(query.dtype)
    block = max(1, MASK_ELEMENTS // length // _WIDE_BLOCK) * _WIDE_BLOCK
    for first in range(start, stop, block):
        last = min(first + block, stop)
        begin = part.prefix + first - start  # position of the block's first query
        count = last - first
        end = begin + count
        if part.invariant:
            count += -count % _WIDE_BLOCK
            end = padded_keys(end)
        q = query[first:last].view(last - first, kv_heads, group, dim).permute(1, 2, 0, 3)
        q = pad(q, (0, 0, 0, count - (last - first)))
        # Each KV head is a batch entry whose keys serve all its query heads by a stride of 0.
        k = key[:, None, :end].expand(-1, group, -1, -1)
        v = value[:, None, :end].expand(-1, group, -1, -1)
        mask = None
        if part.invariant or begin > 0 or window is not None:
            positions = torch.arange(begin, begin + count, device=query.device)
            mask = _bias(positions, end, query.dtype, window)
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale
        )
        out = out[:, :, : last - first].permute(2, 0, 1, 3)
        output[first:last] = out.reshape(last - first, heads, -1)


def _bias(
    positions: torch.Tensor, length: int, dtype: torch.dtype, window: int | None
) -> torch.Tensor:
    """Additive mask [*positions, length]: 0 where a query may see a key, else -inf."""
    keys = torch.arange(length, device=positions.device)
    seen = keys <= positions[..., None]
    if window is not None:
        seen &= keys >= positions[..., None] - window
    bias = torch.zeros(seen.shape, dtype=dtype, device=positions.device)
    return bias.masked_fill_(~seen, float("-inf"))


def _chunks(rows: list[int], lengths: list[int], invariant: bool = False) -> list[list[int]]:
    """Split rows so that a chunk's padded size stays bounded and at most half of it is padding."""
    if invariant:
        lengths = [padded_keys(length) for length in lengths]
    longest = max(lengths)
    similar = max(min(lengths), _MIN_LENGTH) * 2 >= longest
    if similar and longest * len(rows) <= GATHER_TOKENS:
        return [rows]
    order = sorted(range(len(rows)), key=lambda i: -lengths[i])
    chunks: list[list[int]] = []
    while order:
        longest = max(lengths[order[0]], _MIN_LENGTH)
        limit = max(1, GATHER_TOKENS // longest)
        take = 1
        while (
            take < min(limit, len(order)) and max(lengths[order[take]], _MIN_LENGTH) * 2 >= longest
        ):
            take += 1
        chunks.append(sorted(rows[i] for i in order[:take]))
        order = order[take:]
    return chunks


def _slots(
    req_to_token: torch.Tensor, pool_rows: torch.Tensor, lengths: list[int], invariant: bool
) -> torch.Tensor:
    """KV slots int64 [rows, longest length], padded with each row's first slot.

    Columns beyond a row's length hold stale slots, whose KV may be anything: a masked NaN would
    still poison the row. Its own first slot is always sane.
    """
    longest = max(lengths)
    width = padded_keys(longest) if invariant else longest
    slots = req_to_token[pool_rows.long(), :width].long()
    slots = pad(slots, (0, width - slots.shape[1]))  # the table may end before the padding does
    valid = (
        torch.arange(width, device=slots.device)
        < torch.tensor(lengths, device=slots.device)[:, None]
    )
    return torch.where(valid, slots, slots[:, :1])


def _places(starts: list[int], width: int, rows: list[int]) -> torch.Tensor | slice:
    """Places of the rows' tokens in the flat token axis; a slice where they are contiguous."""
    first, last = starts[rows[0]], starts[rows[-1]] + width
    if last - first == width * len(rows):
        return slice(first, last)
    begins = torch.tensor([starts[row] for row in rows])
    return (begins[:, None] + torch.arange(width)).reshape(-1)
