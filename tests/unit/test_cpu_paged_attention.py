"""Paged attention on the CPU: right, the same for decode and verify, untouched by neighbours."""

from __future__ import annotations

import pytest
import torch

from sgl_ssd.cpu import paged_attention

torch.set_num_threads(1)  # small products: more threads only wait for each other

SLOTS, CONTEXT, POOL_ROWS = 6000, 1600, 40
KV_HEADS, DIM = 2, 32


class Cache:
    """A KV pool with rows of random slots; whatever no row owns is NaN."""

    def __init__(self, lengths: list[int], seed: int = 0, poison: bool = True) -> None:
        generator = torch.Generator().manual_seed(seed)
        slots = torch.randperm(SLOTS - 1, generator=generator) + 1
        shape = (SLOTS, KV_HEADS, DIM)
        self.keys = torch.full(shape, float("nan")) if poison else torch.zeros(shape)
        self.values = self.keys.clone()
        self.req_to_token = torch.randint(
            1, SLOTS, (POOL_ROWS, CONTEXT), generator=generator, dtype=torch.int32
        )
        self.indices = torch.randperm(POOL_ROWS, generator=generator)[: len(lengths)]
        used = 0
        for row, length in zip(self.indices.tolist(), lengths, strict=True):
            mine = slots[used : used + length]
            used += length
            self.req_to_token[row, :length] = mine.int()
            self.keys[mine] = torch.randn(length, KV_HEADS, DIM, generator=generator)
            self.values[mine] = torch.randn(length, KV_HEADS, DIM, generator=generator)

    def attend(
        self,
        query: torch.Tensor,
        prefix: list[int],
        widths: list[int],
        *,
        rows: list[int] | None = None,
        window: int | None = None,
        invariant: bool = True,
    ) -> torch.Tensor:
        indices = self.indices if rows is None else self.indices[rows]
        plan = paged_attention.plan(self.req_to_token, indices, prefix, widths, invariant=invariant)
        output = torch.full_like(query, float("nan"))
        paged_attention.attend(plan, query, output, self.keys, self.values, DIM**-0.5, window)
        return output

    def reference(
        self, query: torch.Tensor, prefix: list[int], widths: list[int], window: int | None = None
    ) -> torch.Tensor:
        """One query at a time in float64."""
        outputs = []
        place = 0
        for row, (before, width) in enumerate(zip(prefix, widths, strict=True)):
            for step in range(width):
                position = before + step
                first = 0 if window is None else max(0, position - window)
                slots = self.req_to_token[self.indices[row], first : position + 1].long()
                group = query.shape[1] // KV_HEADS
                key = self.keys[slots].double().repeat_interleave(group, 1)
                value = self.values[slots].double().repeat_interleave(group, 1)
                scores = torch.einsum("hd,khd->hk", query[place].double(), key) * DIM**-0.5
                outputs.append(torch.einsum("hk,khd->hd", scores.softmax(-1), value))
                place += 1
        return torch.stack(outputs).float()


def _query(tokens: int, heads: int, seed: int = 7) -> torch.Tensor:
    return torch.randn(tokens, heads, DIM, generator=torch.Generator().manual_seed(seed))


BATCHES = {
    "decode": ([0, 3, 63, 300, 900], [1, 1, 1, 1, 1]),
    "verify": ([1, 3, 63, 300, 900], [5, 5, 5, 5, 5]),
    "prefill": ([0, 0, 0], [40, 7, 700]),
    "chunk": ([100, 0, 33, 700], [64, 5, 5, 90]),
    "mixed": ([100, 20, 0, 55], [64, 1, 3, 1]),
    "empty row": ([100, 20, 0], [1, 0, 3]),
}


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("heads", [2, 8])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("name", BATCHES)
def test_equals_reference(name: str, window: int | None, heads: int, invariant: bool) -> None:
    prefix, widths = BATCHES[name]
    cache = Cache([p + w for p, w in zip(prefix, widths, strict=True)])
    query = _query(sum(widths), heads)
    output = cache.attend(query, prefix, widths, window=window, invariant=invariant)
    torch.testing.assert_close(
        output, cache.reference(query, prefix, widths, window), atol=2e-6, rtol=0
    )


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("limit", ["GATHER_TOKENS", "MASK_ELEMENTS"])
@pytest.mark.parametrize("name", ["decode", "verify", "chunk"])
def test_small_chunks_change_nothing(
    name: str, limit: str, invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, widths = BATCHES[name]
    cache = Cache([p + w for p, w in zip(prefix, widths, strict=True)])
    query = _query(sum(widths), 8)
    whole = cache.attend(query, prefix, widths, invariant=invariant)
    monkeypatch.setattr(paged_attention, limit, 200)
    pieces = cache.attend(query, prefix, widths, invariant=invariant)
    torch.testing.assert_close(pieces, whole, atol=1e-6, rtol=0)


# Bit for bit where it was measured (x86-64, MKL); the bound leaves room for other libraries.
SAME = {"atol": 2e-7, "rtol": 0}


def test_verify_equals_decode_steps() -> None:
    prefix, width, heads = [1, 40, 200, 511, 1030], 8, 8
    cache = Cache([p + width for p in prefix])
    query = _query(len(prefix) * width, heads)
    verify = cache.attend(query, prefix, [width] * len(prefix)).view(len(prefix), width, heads, DIM)
    by_row = query.view(len(prefix), width, heads, DIM)
    for step in range(width):
        decode = cache.attend(
            by_row[:, step].contiguous(), [p + step for p in prefix], [1] * len(prefix)
        )
        torch.testing.assert_close(verify[:, step], decode, **SAME)


@pytest.mark.parametrize("length", [33, 97, 550])
def test_prefill_equals_decode_steps(length: int) -> None:
    cache = Cache([length])
    query = _query(length, 8)
    prefill = cache.attend(query, [0], [length])
    for place in range(length):
        decode = cache.attend(query[place : place + 1], [place], [1])
        torch.testing.assert_close(prefill[place : place + 1], decode, **SAME)


@pytest.mark.parametrize("width", [1, 5, 48])
def test_neighbours_do_not_matter(width: int) -> None:
    prefix = [0, 3, 70, 200, 1500]
    cache = Cache([p + width for p in prefix])
    query = _query(len(prefix) * width, 8)
    together = cache.attend(query, prefix, [width] * len(prefix))
    for row in range(len(prefix)):
        part = slice(row * width, (row + 1) * width)
        alone = cache.attend(query[part], [prefix[row]], [width], rows=[row])
        torch.testing.assert_close(together[part], alone, **SAME)


def test_half_precision_cache_serves_a_float_query() -> None:
    cache = Cache([90, 40], poison=False)
    cache.keys, cache.values = cache.keys.bfloat16(), cache.values.bfloat16()
    query = _query(2, 8)
    output = cache.attend(query, [89, 39], [1, 1])
    torch.testing.assert_close(output, cache.reference(query, [89, 39], [1, 1]), atol=1e-5, rtol=0)


def test_chunks_are_bounded() -> None:
    lengths = [1500] * 3 + [10] * 300 + [700] * 20
    rows = list(range(len(lengths)))
    chunks = paged_attention._chunks(rows, lengths)
    assert sorted(row for chunk in chunks for row in chunk) == rows
    for chunk in chunks:
        longest = max(lengths[row] for row in chunk)
        assert longest * len(chunk) <= paged_attention.GATHER_TOKENS or len(chunk) == 1
        assert longest <= 2 * max(64, min(lengths[row] for row in chunk))
    assert len(chunks) <= 5


def test_no_rows() -> None:
    plan = paged_attention.plan(torch.zeros(4, 8, dtype=torch.int32), torch.tensor([1]), [0], [0])
    assert plan.parts == []
