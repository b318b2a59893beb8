"""Slots, rows and the radix tree, without a model: what the device would hold is replayed here."""

from __future__ import annotations

import random
from array import array

import numpy as np
import pytest

pytest.importorskip("sglang")

from sgl_ssd.draft_server import kv as kv_module  # noqa: E402
from sgl_ssd.draft_server.kv import (  # noqa: E402
    KVSpace,
    MemoryAccountingError,
    RowCopy,
    RowWrite,
    SessionKV,
    SlotAllocator,
)

pytestmark = pytest.mark.slow  # importing SGLang takes longer than all of this

WIDTH = 64
STEPS = 3


class Device:
    """`req_to_token` as the runner keeps it."""

    def __init__(self, space: KVSpace, rows: int) -> None:
        self.space = space
        self.table = np.zeros((rows, WIDTH), np.int32)

    def flush(self) -> None:
        for write in self.space.take_writes():
            if isinstance(write, RowCopy):
                columns = slice(write.start, write.end)
                self.table[write.rows, columns] = self.table[write.home, columns]
            else:
                assert len(set(write.flat.tolist())) == len(write.flat), "an entry twice"
                self.table.reshape(-1)[write.flat] = write.slots


def space_with(slots: int = 300, sessions: int = 3, branches: int = 8) -> tuple[KVSpace, Device]:
    rows = 1 + sessions + branches
    space = KVSpace(slots, rows, WIDTH, sessions, branches)
    return space, Device(space, rows)


def prefilled(space: KVSpace, tokens: array, key: str = "") -> SessionKV:
    kv = space.open()
    assert kv is not None
    space.match(kv, tokens, key)
    assert space.extend(kv, len(tokens))
    kv.length = len(tokens)
    space.publish(kv, tokens, key)
    return kv


def test_slots_are_handed_out_once_and_never_the_padding_slot() -> None:
    slots = SlotAllocator(10)
    taken = slots.alloc(7)
    assert sorted(taken.tolist()) == list(range(1, 8)) and slots.alloc(4) is None
    slots.free(taken[:3])
    assert slots.available_size() == 6
    rest = slots.alloc(6)
    assert 0 not in rest and not set(rest.tolist()) & set(taken[3:].tolist())


def test_equal_prefixes_end_up_in_the_same_slots() -> None:
    space, _ = space_with()
    text = array("q", range(20))
    # Both compute it at the same time: neither finds it cached.
    first, second = space.open(), space.open()
    for kv in (first, second):
        space.match(kv, text, "")
        assert space.extend(kv, 20)
        kv.length = 20
    for kv in (first, second):
        space.publish(kv, text, "")
    assert first.slots[:20].tolist() == second.slots[:20].tolist()
    space.check([])
    other = prefilled(space, text, "another namespace")
    assert not set(other.slots[:20].tolist()) & set(first.slots[:20].tolist())
    for kv, key in ((first, ""), (second, ""), (other, "another namespace")):
        space.close(kv, text, key, keep=True)
    space.check([])
    assert space.available == 300


def test_the_tree_does_not_grow_with_the_text() -> None:
    space, _ = space_with()
    text = array("q", range(5))
    kv = prefilled(space, text)
    text.extend([7, 8])  # the session's own array goes on growing
    again = space.open()
    assert space.match(again, array("q", [*range(5), 9, 9]), "") == 5
    space.close(again, array("q"), "", keep=False)
    space.close(kv, text[:5], "", keep=True)
    space.check([])


def test_eviction_makes_room_but_spares_what_is_in_use() -> None:
    space, _ = space_with(slots=30)
    old = prefilled(space, array("q", range(10)))
    space.close(old, array("q", range(10)), "", keep=True)
    kept = prefilled(space, array("q", range(50, 60)))
    assert space.alloc(25) is None
    taken = space.alloc(20)
    assert taken is not None and space.radix.evictable_size() == 0
    space.check([taken])
    again = space.open()
    assert space.match(again, array("q", range(11)), "") == 0
    space.free(taken)
    space.close(again, array("q"), "", keep=False)
    space.close(kept, array("q", range(50, 60)), "", keep=False)
    assert space.available == 30


def test_accounting_errors_are_found() -> None:
    space, _ = space_with(slots=5)
    taken = space.alloc(2)
    with pytest.raises(MemoryAccountingError):
        space.check([])
    with pytest.raises(MemoryAccountingError):
        space.check([taken, taken])
    space.check([taken])


def test_homes_run_out_and_come_back() -> None:
    space, _ = space_with(sessions=2)
    a, b = space.open(), space.open()
    assert space.open() is None
    space.close(a, array("q"), "", keep=False)
    assert space.open().row == a.row != b.row


def test_a_small_pool_of_rows_is_shared_out() -> None:
    space = KVSpace(100, 9, WIDTH, max_sessions=256, max_branches=256)
    assert space.max_branches == 4
    assert KVSpace(100, 2, WIDTH, 256, 256).max_branches == 0


@pytest.mark.parametrize("long_copy", [1024, 4], ids=["writes", "copies"])
def test_branch_rows_show_the_home_row_up_to_the_root_and_their_own_slots_from_there(
    monkeypatch: pytest.MonkeyPatch, long_copy: int
) -> None:
    """Random sessions grow, hang up branches and adopt them, with rows passing between them."""
    monkeypatch.setattr(kv_module, "LONG_COPY", long_copy)
    r = random.Random(long_copy)
    space, device = space_with()
    text: dict[int, array] = {}
    open_kvs: list[SessionKV] = []
    for _ in range(300):
        if len(open_kvs) < 3 and r.random() < 0.3:
            tokens = array("q", [r.randrange(3) for _ in range(r.randrange(1, 20))])
            kv = prefilled(space, tokens)
            text[kv.uid] = tokens
            open_kvs.append(kv)
        if not open_kvs:
            continue
        kv = r.choice(open_kvs)
        tokens = text[kv.uid]
        n = len(tokens)
        if n > 40 or r.random() < 0.1:
            open_kvs.remove(kv)
            space.close(kv, tokens[: min(n, kv.length)], "", keep=r.random() < 0.5)
            continue
        trunk = r.randrange(3)
        assert space.extend(kv, n + trunk)
        rows = np.array(space.take_rows(kv, r.randrange(1, 5)), np.int64)
        if len(rows):
            start = n + np.array([r.randrange(trunk + 1) for _ in rows])
            goal = np.array([r.randrange(1, STEPS + 1) for _ in rows])
            slots = np.zeros((len(rows), STEPS), np.int32)
            slots[np.arange(STEPS) < goal[:, None]] = space.alloc(int(goal.sum()))
            space.queue_branches(kv, rows, start, goal, slots, stable=n)
            if r.random() < 0.7:
                device.flush()
                assert device.table[kv.row, : kv.allocated].tolist() == (
                    kv.slots[: kv.allocated].tolist()
                )
                for row, first, count, own in zip(rows, start, goal, slots, strict=True):
                    expected = [*kv.slots[:first].tolist(), *own[:count].tolist()]
                    assert device.table[row, : first + count].tolist() == expected
            winner = r.randrange(len(rows))
            space.append(kv, int(start[winner]), slots[winner, : goal[winner]])
            lost = [own[:count] for own, count in zip(slots, goal, strict=True)]
            del lost[winner]
            for own in lost:
                space.free(own)
            kv.idle_rows += rows.tolist()
            tokens.extend([r.randrange(3) for _ in range(kv.length - n)])
        space.check([k.slots[k.protected : k.allocated] for k in open_kvs])


def test_writes_are_grouped_without_repeats() -> None:
    space, device = space_with()
    kv = space.open()
    space.match(kv, array("q", range(5)), "")
    space.extend(kv, 5)
    space.trim(kv, 2)
    space.extend(kv, 6)  # the same positions again, with other slots
    writes = space.take_writes()
    assert len(writes) > 1 and all(isinstance(w, RowWrite) for w in writes)
    assert space.take_writes() == []
