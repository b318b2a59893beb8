"""Torch versions of the Triton kernels that SGLang launches whatever the device.

No SGLang import here; `sgl_ssd.cpu.hooks` puts them in place.
"""

from __future__ import annotations

import torch


def ragged_positions(start: torch.Tensor, end: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and positions of the ranges start..end, one after the other.

    `start` and `end` are int [rows]; both results int64 [sum of lengths]. An empty or negative
    range contributes nothing.
    """
    lengths = (end - start).clamp_min(0).long()
    rows = torch.repeat_interleave(torch.arange(len(lengths), device=start.device), lengths)
    before = lengths.cumsum(0) - lengths
    offsets = torch.arange(rows.numel(), device=start.device) - before[rows]
    return rows, start.long()[rows] + offsets


def assign_req_to_token_pool(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Write new KV slots into `req_to_token[req, start..end]`, row after row of the batch.

    Replaces `assign_req_to_token_pool_func` of srt/mem_cache/allocation.py.
    """
    rows, positions = ragged_positions(start_offset[:batch_size], end_offset[:batch_size])
    slots = out_cache_loc[: rows.numel()].to(req_to_token.dtype)
    req_to_token[req_pool_indices.long()[rows], positions] = slots


def paged_slots(
    start: torch.Tensor,
    end: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    page_size: int,
) -> torch.Tensor:
    """KV slots for positions start..end of each row: the rest of its last page, then new pages.

    `last_loc` [rows] is the slot of position start - 1 (-1 if there is none); pages are taken from
    the front of `free_pages` in the order of the rows. int64 [sum of lengths].
    """
    rows, positions = ragged_positions(start, end)
    owned = (start + page_size - 1) // page_size  # pages a row has already
    new = (end + page_size - 1) // page_size - owned
    first_new = new.cumsum(0) - new
    page = positions // page_size - owned[rows]  # below 0: on the row's last page
    fresh = free_pages[(first_new[rows] + page).clamp(0, max(len(free_pages) - 1, 0))]
    in_last_page = last_loc[rows] + 1 + positions - start[rows]
    return torch.where(page < 0, in_last_page, fresh * page_size + positions % page_size).long()


def softcap_logits(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(logits / cap), in place. Replaces `softcap_inplace_logits`."""
    return logits.div_(cap).tanh_().mul_(cap)
