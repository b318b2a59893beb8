"""KV allocators: the classes SGLang uses on a GPU, with torch in the place of Triton."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

from sgl_ssd.cpu.kernels import paged_slots


def create_allocator(
    size: int, *, page_size: int, dtype: torch.dtype, device: str, kvcache: Any, need_sort: bool
) -> TokenToKVPoolAllocator | PagedTokenToKVPoolAllocator:
    """What the platform returns as its allocator "class": the same choice as SGLang's on a GPU."""
    if page_size == 1:
        return TokenToKVPoolAllocator(
            size, dtype=dtype, device=device, kvcache=kvcache, need_sort=need_sort
        )
    return TorchPagedAllocator(
        size,
        page_size=page_size,
        dtype=dtype,
        device=device,
        kvcache=kvcache,
        need_sort=need_sort,
    )


class TorchPagedAllocator(PagedTokenToKVPoolAllocator):
    """Paged allocator whose two kernels are torch operators."""

    free_pages: torch.Tensor

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        """Slots [extend_num_tokens] for positions prefix..seq of each row; None if out of pages."""
        return self._alloc(prefix_lens, seq_lens, last_loc)

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """Slots [batch] for position seq - 1 of each row; None if out of pages."""
        return self._alloc(seq_lens - 1, seq_lens, last_loc)

    def _alloc(
        self, start: torch.Tensor, end: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        page = self.page_size
        needed = int(((end + page - 1) // page - (start + page - 1) // page).sum())
        if needed > len(self.free_pages):
            self.merge_and_sort_free()
        if needed > len(self.free_pages):
            return None
        slots = paged_slots(start, end, last_loc, self.free_pages, page)
        self.free_pages = self.free_pages[needed:]
        return slots
