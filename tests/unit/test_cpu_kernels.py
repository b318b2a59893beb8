"""Torch versions of SGLang's Triton kernels, against loops; and the row padding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_ssd.cpu import invariance, kernels

ranges = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8)


@given(ranges)
@settings(deadline=None)
def test_assign_writes_each_range(rows: list[tuple[int, int]]) -> None:
    start = torch.tensor([a for a, _ in rows], dtype=torch.int64)
    end = start + torch.tensor([n for _, n in rows], dtype=torch.int64)
    table = torch.zeros(10, 100, dtype=torch.int32)
    expected = table.clone()
    indices = torch.arange(len(rows)) + 1
    slots = torch.arange(1000, 1000 + sum(n for _, n in rows))
    used = 0
    for row, (first, count) in enumerate(rows):
        expected[row + 1, first : first + count] = slots[used : used + count]
        used += count
    kernels.assign_req_to_token_pool(indices, table, start, end, slots, len(rows))
    assert torch.equal(table, expected)


@given(ranges, st.sampled_from([1, 2, 4, 16]))
@settings(deadline=None)
def test_paged_slots_fill_pages_in_order(rows: list[tuple[int, int]], page: int) -> None:
    free = torch.randperm(1000)
    next_free = 0
    expected: list[int] = []
    last: list[int] = []
    for row, (first, count) in enumerate(rows):
        current = 1000 + row  # the page that holds position first - 1
        last.append(current * page + (first - 1) % page if first else -1)
        for position in range(first, first + count):
            if position % page == 0:
                current = int(free[next_free])
                next_free += 1
            expected.append(current * page + position % page)
    start = torch.tensor([a for a, _ in rows], dtype=torch.int64)
    end = start + torch.tensor([n for _, n in rows], dtype=torch.int64)
    slots = kernels.paged_slots(start, end, torch.tensor(last, dtype=torch.int64), free, page)
    assert slots.tolist() == expected


def test_softcap() -> None:
    logits = torch.randn(3, 50) * 100
    expected = 30 * torch.tanh(logits / 30)
    out = kernels.softcap_logits(logits, 30.0)
    assert out is logits
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 31])
def test_rows_of_a_product_do_not_depend_on_their_number(count: int) -> None:
    x, weight = torch.randn(64, 96), torch.randn(160, 96)
    whole = torch.nn.functional.linear(x, weight)
    padded = invariance.pad_rows(x[:count])
    part = torch.nn.functional.linear(padded, weight)[:count]
    torch.testing.assert_close(part, whole[:count], atol=2e-7, rtol=0)


def test_other_dtypes_and_shapes_are_not_padded() -> None:
    for x in (torch.ones(1, 4, dtype=torch.bfloat16), torch.ones(1, 1, 4), torch.ones(0, 4)):
        assert invariance.pad_rows(x) is x


def test_padded_keys() -> None:
    assert [invariance.padded_keys(n) for n in (1, 128, 129, 512, 513)] == [
        128,
        128,
        512,
        512,
        1024,
    ]
