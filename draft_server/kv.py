"""KV memory of the draft: slots, rows of `req_to_token`, and the radix tree of shared prefixes.

All bookkeeping is on the host, in numpy: which slot belongs to whom never has to be read back from
the device. The device has one copy, `req_to_token`, and is told of changes in bulk by the runner.

Ownership: every slot is free, or belongs to exactly one of the radix tree, a session (`SessionKV`,
positions from `protected` on) or a branch (`SpeculationCache.slots`). Page size is 1.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from sgl_ssd.errors import SSDError

LONG_COPY = 1024
"""Columns; more than that are copied on the device instead of sent."""


class MemoryAccountingError(SSDError):
    """A KV slot leaked or has two owners: a bug."""


class SlotAllocator:
    """Free KV slots as a stack on the host. Slot 0 is SGLang's padding slot and never handed out.

    Has the methods that `RadixCache` calls on SGLang's own allocators.
    """

    page_size = 1
    device = torch.device("cpu")

    def __init__(self, size: int) -> None:
        self.size = size
        self._stack = np.arange(size, 0, -1, dtype=np.int32)
        self._top = size

    def available_size(self) -> int:
        return self._top

    def alloc(self, need_size: int) -> np.ndarray | None:
        """int32 [need_size], or None if there are not as many."""
        if need_size > self._top:
            return None
        self._top -= need_size
        return self._stack[self._top : self._top + need_size].copy()

    def free(self, slots: np.ndarray | torch.Tensor) -> None:
        values = slots.numpy() if isinstance(slots, torch.Tensor) else slots
        self._stack[self._top : self._top + len(values)] = values
        self._top += len(values)

    def free_segment(self, slots: torch.Tensor, *, start_pos: int) -> None:
        """What the radix tree calls when it evicts."""
        self.free(slots)

    def free_slots(self) -> np.ndarray:
        """The free slots, for checks."""
        return self._stack[: self._top]


@dataclass(frozen=True)
class RowWrite:
    """`slots` int32 [M] for the entries `flat` (int64 [M], none twice) of flat `req_to_token`."""

    flat: np.ndarray
    slots: np.ndarray


@dataclass(frozen=True)
class RowCopy:
    """Columns start..end-1 of row `home`, copied to `rows` (int64 [N])."""

    home: int
    rows: np.ndarray
    start: int
    end: int


@dataclass
class SessionKV:
    """The KV of one session's home row.

    `slots[p]` is the slot of position p (int32) for p < `allocated`. Positions below `protected`
    belong to the radix tree (locked at `node`). The KV of positions below `length` is there and
    known to the host; that of positions below `fed` was asked for.
    """

    row: int
    slots: np.ndarray
    node: Any
    protected: int = 0
    length: int = 0
    fed: int = 0
    allocated: int = 0
    uid: int = 0
    idle_rows: list[int] = field(default_factory=list)


class KVSpace:
    """Slots, rows and prefixes. `write_rows` carries changes to the device's `req_to_token`."""

    def __init__(
        self, num_slots: int, num_rows: int, row_width: int, max_sessions: int, max_branches: int
    ) -> None:
        self.slots = SlotAllocator(num_slots)
        self.radix = RadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=None,
                token_to_kv_pool_allocator=self.slots,
                page_size=1,
            )
        )
        self.row_width = row_width
        # Row 0 is SGLang's padding row. A small KV pool makes SGLang give fewer rows than asked.
        homes = min(max_sessions, max(1, num_rows // 2), num_rows - 1)
        self.max_branches = max(0, min(max_branches, num_rows - 1 - homes))
        self._homes = list(range(homes, 0, -1))
        self._branch_rows = list(range(homes + self.max_branches, homes, -1))
        self._synced = np.zeros(1 + homes + self.max_branches, np.int64)
        self._row_owner = np.zeros(1 + homes + self.max_branches, np.int64)
        self._uid = 0
        self._writes: list[list[RowWrite] | RowCopy] = []
        self._written_rows: set[int] = set()

    # -- slots ---------------------------------------------------------------------------------

    @property
    def available(self) -> int:
        """Slots that can be had at once, by eviction if need be."""
        return self.slots.available_size() + self.radix.evictable_size()

    @property
    def room(self) -> int:
        """Grows when something becomes free that a waiting session might need."""
        return self.available + len(self._homes)

    def alloc(self, n: int) -> np.ndarray | None:
        """n slots (int32), evicting cached prefixes if need be; None if that is not enough."""
        short = n - self.slots.available_size()
        if short > 0:
            if short > self.radix.evictable_size():
                return None
            self.radix.evict(EvictParams(num_tokens=short))
        return self.slots.alloc(n)

    def free(self, slots: np.ndarray) -> None:
        if len(slots):
            self.slots.free(slots)

    # -- sessions ------------------------------------------------------------------------------

    def open(self) -> SessionKV | None:
        """A home row, or None when all are taken."""
        if not self._homes:
            return None
        self._uid += 1
        root = self.radix.root_node  # never evicted: locking it is not needed and does nothing
        return SessionKV(self._homes.pop(), np.zeros(0, np.int32), root, uid=self._uid)

    def match(self, kv: SessionKV, tokens: array[int], extra_key: str) -> int:
        """Take the cached prefix of `tokens` into an empty session; returns its length.

        At least the last token is left to compute: its logits are wanted.
        """
        match = self.radix.match_prefix(
            MatchPrefixParams(key=RadixKey(tokens[:-1], extra_key=extra_key))
        )
        self.radix.inc_lock_ref(match.last_device_node)  # before alloc, which may evict
        kv.node = match.last_device_node
        prefix = match.device_indices.numpy().astype(np.int32)
        kv.protected = kv.length = kv.fed = kv.allocated = len(prefix)
        self._reserve(kv, len(tokens))
        kv.slots[: len(prefix)] = prefix
        self.queue_home(kv, 0, len(prefix))
        return len(prefix)

    def extend(self, kv: SessionKV, end: int) -> bool:
        """Own slots for positions up to `end`; False (and nothing changed) if there are none."""
        need = end - kv.allocated
        if need <= 0:
            return True
        slots = self.alloc(need)
        if slots is None:
            return False
        self._reserve(kv, end)
        kv.slots[kv.allocated : end] = slots
        self.queue_home(kv, kv.allocated, end)
        kv.allocated = end
        return True

    def append(self, kv: SessionKV, start: int, slots: np.ndarray) -> None:
        """Slots of a branch become the session's, for positions from `start` on.

        What the session had there is freed first.
        """
        self.trim(kv, start)
        end = start + len(slots)
        self._reserve(kv, end)
        kv.slots[start:end] = slots
        self.queue_home(kv, start, end)
        kv.allocated = kv.fed = kv.length = end

    def trim(self, kv: SessionKV, end: int) -> None:
        """Free the session's slots from position `end` on."""
        if end < kv.allocated:
            self.free(kv.slots[end : kv.allocated])
            kv.allocated = end
        kv.length = min(kv.length, end)
        kv.fed = min(kv.fed, end)

    def publish(self, kv: SessionKV, tokens: array[int], extra_key: str) -> None:
        """Give the KV of `tokens` to the radix tree and keep on using it.

        Slots that the tree already had under the same tokens are freed here and the home row is
        repointed. Only call this while nothing else refers to the session's slots.
        """
        n = len(tokens)
        key = RadixKey(tokens[:], extra_key=extra_key)  # the tree keeps it, the text grows
        values = kv.slots[:n].copy()
        result = self.radix.insert(
            InsertParams(key=key, value=torch.from_numpy(values.astype(np.int64)))
        )
        duplicates = values[kv.protected : result.prefix_len]
        match = self.radix.match_prefix(MatchPrefixParams(key=key))
        kv.slots[:n] = match.device_indices.numpy()
        if len(duplicates):
            self.free(duplicates)
            self.queue_home(kv, kv.protected, result.prefix_len)
            mine = self._row_owner == kv.uid
            self._synced[mine] = np.minimum(self._synced[mine], kv.protected)
        self.radix.inc_lock_ref(match.last_device_node)
        self.radix.dec_lock_ref(kv.node)
        kv.node, kv.protected = match.last_device_node, n

    def close(self, kv: SessionKV, tokens: array[int], extra_key: str, keep: bool) -> None:
        """Give everything back; with `keep` the KV of `tokens` goes to the radix tree first."""
        if keep and len(tokens) > kv.protected:
            self.trim(kv, len(tokens))
            self.publish(kv, tokens, extra_key)
        self.trim(kv, kv.protected)
        self.radix.dec_lock_ref(kv.node)
        self._branch_rows += kv.idle_rows
        kv.idle_rows = []
        self._homes.append(kv.row)

    # -- rows ----------------------------------------------------------------------------------

    def take_rows(self, kv: SessionKV, n: int) -> list[int]:
        """Up to n rows for branches; surplus idle rows of this session go back to the pool."""
        while len(kv.idle_rows) > n:
            self._branch_rows.append(kv.idle_rows.pop())
        while len(kv.idle_rows) < n and self._branch_rows:
            row = self._branch_rows.pop()
            if self._row_owner[row] != kv.uid:
                self._row_owner[row] = kv.uid
                self._synced[row] = 0
            kv.idle_rows.append(row)
        rows, kv.idle_rows = kv.idle_rows, []
        return rows

    def queue_branches(
        self, kv: SessionKV, rows: np.ndarray, start: np.ndarray, goal: np.ndarray,
        slots: np.ndarray, stable: int,
    ) -> None:  # fmt: skip
        """Fill the rows of new branches: the home row's slots up to `start`, then their own.

        rows, start, goal int64 [N]; slots int32 [N, K], of which the first `goal` are real.
        Columns below `stable` will not change as long as the session has these rows.
        """
        low = int(self._synced[rows].min())
        if int(start.min()) - low > LONG_COPY:
            self._queue_copy(kv.row, rows, low, int(start.min()))
            low = int(start.min())
        high = min(int(start.max()) + slots.shape[1], self.row_width)
        columns = np.arange(low, high)
        home = kv.slots[low:high]
        if len(home) < high - low:
            home = np.concatenate((home, np.zeros(high - low - len(home), np.int32)))
        values = np.broadcast_to(home, (len(rows), high - low)).copy()
        offset = columns - start[:, None]
        own = (offset >= 0) & (offset < goal[:, None])
        values[own] = slots[np.arange(slots.shape[1]) < goal[:, None]]
        flat = rows[:, None] * self.row_width + columns
        self._queue(rows.tolist(), flat.reshape(-1), values.reshape(-1))
        self._synced[rows] = stable

    def queue_home(self, kv: SessionKV, start: int, end: int) -> None:
        """The device does not know the home row's slots of positions start..end-1 yet."""
        if end > start:
            flat = np.arange(start, end) + kv.row * self.row_width
            self._queue([kv.row], flat, kv.slots[start:end].copy())

    def take_writes(self) -> list[RowWrite | RowCopy]:
        """Pending changes of `req_to_token`, to be carried out in order."""
        writes: list[RowWrite | RowCopy] = []
        for group in self._writes:
            if isinstance(group, RowCopy):
                writes.append(group)
            elif len(group) == 1:
                writes.append(group[0])
            else:
                writes.append(
                    RowWrite(
                        np.concatenate([w.flat for w in group]),
                        np.concatenate([w.slots for w in group]),
                    )
                )
        self._writes, self._written_rows = [], set()
        return writes

    def _queue_copy(self, home: int, rows: np.ndarray, start: int, end: int) -> None:
        self._writes.append(RowCopy(home, rows, start, end))
        self._written_rows = set()

    def _queue(self, rows: list[int], flat: np.ndarray, values: np.ndarray) -> None:
        group = self._writes[-1] if self._writes else None
        if not isinstance(group, list) or not self._written_rows.isdisjoint(rows):
            group = []
            self._writes.append(group)
            self._written_rows = set()
        self._written_rows.update(rows)
        group.append(RowWrite(flat, values))

    def check(self, held: list[np.ndarray]) -> None:
        """Free slots, the radix tree's and `held` are all slots, each once."""
        tree = self.radix.all_values_flatten().numpy() if self.radix.root_node.children else []
        owned = np.concatenate((self.slots.free_slots(), tree, *held)).astype(np.int64)
        counts = np.bincount(owned, minlength=self.slots.size + 1)
        if len(counts) != self.slots.size + 1 or counts[0] or (counts[1:] != 1).any():
            wrong = np.flatnonzero(counts[1:] != 1) + 1
            raise MemoryAccountingError(
                f"KV slots owned by nobody or twice: {wrong[:20].tolist()} "
                f"({[int(counts[w]) for w in wrong[:20]]} owners); {len(wrong)} in all"
            )

    def _reserve(self, kv: SessionKV, end: int) -> None:
        if end > len(kv.slots):
            grown = np.zeros(max(end, 2 * len(kv.slots), 64), np.int32)
            grown[: len(kv.slots)] = kv.slots
            kv.slots = grown
