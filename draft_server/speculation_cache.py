"""The speculation cache of one session: outcome -> speculation, as a tree below the committed text.

The *trunk* is the chain in flight: `chain[0..L-1]` are the drafts after the last committed token b.
At depth k of the trunk hang the *branches* for the outcome "k drafts accepted, then bonus token t":
root t, then the tokens drafted after it. The key (k, t) is thus a path, and news of committed
tokens is a walk by tokens:

* it ends at a branch root: a hit, the branch becomes the new trunk;
* it ends on the trunk or inside a branch: partial, what lies below is the new trunk;
* it falls off: a miss, nothing below it is known.

*Guesses* are what the draft thought at a position: the ids of its `width` best-scored tokens there,
best first. `guesses[k]` belongs to depth k (the token after b, s1..sk) and exists once that prefix
has been fed to the model: `len(guesses)` may exceed the chain by the tail's guesses. Fork tokens
come from guesses, so a branch that becomes the trunk brings its own along.

A session that is verified by rejection (`top_m` > 0) samples its own tokens. They stand first in
the guesses, and guesses have more columns, which hold what they were sampled from (see `sampled`).
The first `given` tokens of a chain were not drafted by the model but found in the text.

KV: feeding the token at one node yields the guesses for the next, so a branch with `length` drafted
tokens has KV for exactly `length` nodes (root, then all drafted tokens but the last), held by the
first `length` of its slots. Slots and pool rows are plain numbers here: who owns them is told in
the result of `reroot`, which the engine carries out.

numpy only. A branch keeps its index while the cache object lives (results of a step in flight refer
to it); dropped ones are only marked until `compact`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sgl_ssd.draft_server.sampled import unpack

UNKNOWN_ROOT = -1


@dataclass(frozen=True)
class Walk:
    """How far a path of tokens goes down the tree.

    `trunk` tokens lie on the trunk; if `branch` >= 0 the next one is that branch's root and
    `inside` further ones lie in it. `complete`: the path did not fall off.
    """

    trunk: int
    branch: int
    inside: int
    complete: bool

    @property
    def matched(self) -> int:
        """Tokens of the path that lie in the tree."""
        return self.trunk + (1 + self.inside if self.branch >= 0 else 0)


@dataclass(frozen=True)
class Reroot:
    """What a re-rooting frees and moves.

    `moved`: slots (int32) that now hold the KV of the tokens after the trunk part of the path, in
    order: they become the session's. `freed`: slots that hold nothing any more. `rows`: pool rows
    of dropped branches.
    """

    moved: np.ndarray
    freed: np.ndarray
    rows: np.ndarray


class SpeculationCache:
    """See the module. Arrays are over branches; B of them, `num_steps` K tokens at most each."""

    def __init__(self, num_steps: int, width: int, top_m: int = 0) -> None:
        self.num_steps = num_steps
        self.width = width
        self.top_m = top_m
        self._columns = width + 2 * top_m
        self.chain: list[int] = []
        self.given = 0
        self.guesses: list[np.ndarray] = []
        self.in_flight = 0
        # The branch that became the trunk while steps for it were in flight: its index, and which
        # of its tokens these bring.
        self._coming: tuple[int, int, int] | None = None
        self._clear_branches()

    def _clear_branches(self) -> None:
        self.index: dict[tuple[int, int], int] = {}
        self.depth = np.zeros(0, np.int64)
        self.root = np.zeros(0, np.int64)
        self.row = np.zeros(0, np.int64)
        self.start = np.zeros(0, np.int64)  # absolute position of the root
        self.length = np.zeros(0, np.int64)  # drafted tokens that the host knows
        self.launched = np.zeros(0, np.int64)  # ... that the device was asked for
        self.goal = np.zeros(0, np.int64)
        self.waiting = np.zeros(0, bool)  # the root is not known on the device yet
        self.alive = np.zeros(0, bool)
        self.tokens = np.zeros((0, self.num_steps), np.int64)
        self.ids = np.zeros((0, self.num_steps, self._columns), np.int64)
        self.slots = np.zeros((0, self.num_steps), np.int32)  # the first `goal` of a row are real

    # -- building ------------------------------------------------------------------------------

    def add(
        self,
        depth: np.ndarray,
        root: np.ndarray,
        row: np.ndarray,
        start: np.ndarray,
        goal: np.ndarray,
        slots: np.ndarray,
    ) -> np.ndarray:
        """Hang up branches (all arrays [N], `slots` int32 [N, K]); returns their indices [N].

        A root of `UNKNOWN_ROOT` waits for `name_roots`.
        """
        n, first = len(depth), len(self.depth)
        zeros = np.zeros(n, np.int64)
        for name, values in (
            ("depth", depth), ("root", root), ("row", row), ("start", start), ("goal", goal),
            ("length", zeros), ("launched", zeros), ("waiting", root == UNKNOWN_ROOT),
            ("alive", np.ones(n, bool)), ("slots", slots),
            ("tokens", np.zeros((n, self.num_steps), np.int64)),
            ("ids", np.zeros((n, self.num_steps, self._columns), np.int64)),
        ):  # fmt: skip
            added = np.concatenate((getattr(self, name), values)) if first else values.copy()
            setattr(self, name, added)
        for i, (k, t) in enumerate(zip(depth.tolist(), root.tolist(), strict=True)):
            if t != UNKNOWN_ROOT:
                self.index[k, t] = first + i
        return np.arange(first, first + n)

    def name_roots(self, branches: np.ndarray, roots: np.ndarray) -> None:
        """The roots of `branches` (both int64 [N]) are known now."""
        self.root[branches] = roots
        depths = self.depth[branches].tolist()
        for b, k, t in zip(branches.tolist(), depths, roots.tolist(), strict=True):
            if self.alive[b]:
                self.index[k, t] = b

    def runnable(self) -> np.ndarray:
        """Branches whose next token can be drafted now: int64 [N]."""
        return np.flatnonzero((self.launched < self.goal) & ~self.waiting & self.alive)

    def store(self, branches: np.ndarray, step: np.ndarray, ids: np.ndarray) -> None:
        """Token number `step` (int64 [N]) of `branches` is `ids[:, 0]`; ids int64 [N, width].

        More columns than this cache has are for other sessions.
        """
        self.tokens[branches, step] = ids[:, 0]
        self.ids[branches, step] = ids[:, : self._columns]
        self.length[branches] = step + 1

    @property
    def unlaunched(self) -> bool:
        """Whether a branch still needs steps."""
        return bool(((self.launched < self.goal) & self.alive).any())

    @property
    def complete(self) -> bool:
        """Whether every branch has all the tokens it is meant to get."""
        return bool(((self.length >= self.goal) | ~self.alive).all())

    @property
    def num_branches(self) -> int:
        return int(self.alive.sum())

    def entries(self, num_steps: int, answered: int) -> tuple[np.ndarray, np.ndarray]:
        """The speculation for each outcome of the chain's first `answered` drafts: keys int32
        [N, 3] of (depth, root, drafts), and the drafts int32 [N, num_steps].

        Outcomes without drafts are left out. Where the chain goes on, so may the bonus token.
        """
        found = np.fromiter(self.index.values(), np.int64, len(self.index))
        found = found[(self.length[found] > 0) & (self.depth[found] <= answered)]
        length = self.length[found].clip(max=num_steps)
        keys = np.stack((self.depth[found], self.root[found], length), axis=1)
        tokens = self.tokens[found, :num_steps]
        rest = self.chain[answered + 1 :]
        if len(self.chain) > answered:
            rest = [*rest, *self._beyond(num_steps - len(rest) - 1)][:num_steps]
        if rest:
            keys = np.vstack((keys, (answered, self.chain[answered], len(rest))))
            tokens = np.vstack((tokens, rest + [0] * (num_steps - len(rest))))
        return keys.astype(np.int32), tokens.astype(np.int32)

    # -- walking -------------------------------------------------------------------------------

    def walk(self, path: Sequence[int]) -> Walk:
        """Follow `path` (the tokens after the last committed one) down the tree."""
        chain, n, k = self.chain, len(path), 0
        while k < n and k < len(chain) and path[k] == chain[k]:
            k += 1
        if k == n:
            return Walk(k, -1, 0, True)
        branch = self.index.get((k, path[k]), -1)
        if branch < 0:
            return Walk(k, -1, 0, False)
        length, rest = int(self.length[branch]), n - k - 1
        inside = 0
        tokens = self.tokens[branch]
        while inside < rest and inside < length and path[k + 1 + inside] == tokens[inside]:
            inside += 1
        return Walk(k, branch, inside, inside == rest)

    def reroot(self, walk: Walk) -> Reroot:
        """Make the end of `walk` the root; what is not below it is dropped.

        Tokens that steps in flight bring for the new trunk come with `take_coming`.
        """
        self._coming = None
        if walk.branch >= 0:
            return self._reroot_branch(walk)
        if not walk.complete:
            freed, rows = self._drop(self.alive)
            self.chain, self.guesses, self.given = [], [], 0
            return Reroot(_NO_SLOTS, freed, rows)
        freed, rows = self._drop(self.alive & ((self.depth < walk.trunk) | self.waiting))
        if walk.trunk:
            self.chain = self.chain[walk.trunk :]
            self.guesses = self.guesses[walk.trunk :]
            self.given = max(0, self.given - walk.trunk)
            self.depth = self.depth - walk.trunk
            self.index = {(k - walk.trunk, t): b for (k, t), b in self.index.items()}
        return Reroot(_NO_SLOTS, freed, rows)

    def _reroot_branch(self, walk: Walk) -> Reroot:
        b = walk.branch
        self.given = 0
        length, goal = int(self.length[b]), int(self.goal[b])
        if walk.complete:
            held = int(self.launched[b])
            if held > length:
                self._coming = b, length, held
            self.chain = self.tokens[b, walk.inside : length].tolist()
            self.guesses = list(self.ids[b, walk.inside : length])
        else:
            held = min(1 + walk.inside, length)
            self.chain, self.guesses = [], []
        moved = self.slots[b, :held].copy()
        tail = self.slots[b, held:goal].copy()
        self.slots[b, :] = 0
        self.goal[b] = 0  # nothing of it is freed below
        freed, rows = self._drop(self.alive)
        return Reroot(moved, np.concatenate((tail, freed)), rows)

    @property
    def coming(self) -> bool:
        """Whether steps in flight bring more of the trunk."""
        return self._coming is not None

    @property
    def growing(self) -> bool:
        """Whether they bring more of it or of a branch at its end."""
        at_end = self.alive & (self.depth == len(self.chain)) & (self.launched > self.length)
        return self.coming or (self.in_flight > 0 and bool(at_end.any()))

    def take_coming(self) -> None:
        """Append to the trunk what steps in flight were to bring for it: they are complete."""
        if self._coming is None:
            return
        branch, start, end = self._coming
        self._coming = None
        self.chain += self.tokens[branch, start:end].tolist()
        self.guesses += list(self.ids[branch, start:end])

    def _beyond(self, branch_limit: int) -> list[int]:
        """What `promote` would lengthen the trunk with."""
        if len(self.guesses) <= len(self.chain):
            return []
        root = int(self.guesses[len(self.chain)][0])
        branch = self.index.get((len(self.chain), root), -1)
        if branch < 0:
            return [root]
        take = max(0, min(int(self.length[branch]), branch_limit))
        drafts: list[int] = self.tokens[branch, :take].tolist()
        return [root, *drafts]

    def promote(self, branch_limit: int) -> Reroot:
        """Lengthen a short trunk with the tail's best guess and the branch that hangs there.

        Does nothing unless the tail's guesses are known. At most `branch_limit` of the branch's
        tokens are taken. The moved slots hold the KV of the new trunk tokens from the old tail's
        successor on; what steps in flight bring of them comes with `take_coming`.
        """
        depth = len(self.chain)
        if len(self.guesses) <= depth:
            return Reroot(_NO_SLOTS, _NO_SLOTS, _NO_ROWS)
        root = int(self.guesses[depth][0])
        self.chain = [*self.chain, root]
        branch = self.index.pop((depth, root), -1)
        if branch < 0:
            return Reroot(_NO_SLOTS, _NO_SLOTS, _NO_ROWS)
        length = int(self.length[branch])
        held = take = min(length, branch_limit)
        if take == length:
            held = min(int(self.launched[branch]), branch_limit)
        self.chain += self.tokens[branch, :take].tolist()
        self.guesses = [*self.guesses[: depth + 1], *self.ids[branch, :take]]
        moved = self.slots[branch, :held].copy()
        if held > take:
            self._coming = branch, take, held
        self.slots[branch, : self.goal[branch] - held] = self.slots[
            branch, held : self.goal[branch]
        ].copy()
        self.goal[branch] -= held
        only = np.zeros(len(self.alive), bool)
        only[branch] = True
        freed, rows = self._drop(only)
        return Reroot(moved, freed, rows)

    def proposals(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """What the first `count` tokens of the chain were drawn from: ids int32, probabilities
        float32, both [count, top_m]. A token from the text had no alternative."""
        ids = np.zeros((count, self.top_m), np.int32)
        probs = np.zeros((count, self.top_m), np.float32)
        given = min(self.given, count)
        ids[:given, 0], probs[:given, 0] = self.chain[:given], 1.0
        if given < count:
            drawn = self.guesses[given:count]
            ids[given:], probs[given:] = unpack(drawn, self.width, self.top_m)
        return ids, probs

    def clear(self) -> Reroot:
        """Drop every branch and the trunk."""
        return self.reroot(Walk(0, -1, 0, False))

    def drop_branches(self) -> Reroot:
        """Drop every branch, keep the trunk and its guesses."""
        freed, rows = self._drop(self.alive)
        return Reroot(_NO_SLOTS, freed, rows)

    def slots_held(self) -> int:
        """KV slots that the branches own."""
        return int(self.goal[self.alive].sum())

    def all_slots(self) -> np.ndarray:
        """The slots that the branches own: int32."""
        return self._slots_of(np.flatnonzero(self.alive))

    def _slots_of(self, branches: np.ndarray) -> np.ndarray:
        real = np.arange(self.num_steps) < self.goal[branches][:, None]
        return self.slots[branches][real]

    def _drop(self, which: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        dropped = np.flatnonzero(which)
        if not dropped.size:
            return _NO_SLOTS, _NO_ROWS
        freed, rows = self._slots_of(dropped), self.row[dropped]
        self.alive[dropped] = False
        self.goal[dropped] = 0
        if self.alive.any():
            alive = self.alive
            self.index = {key: b for key, b in self.index.items() if alive[b]}
        else:
            self.index = {}
        return freed, rows

    def compact(self) -> None:
        """Forget dropped branches, unless a step in flight may still refer to them by index."""
        if self.in_flight or self.alive.all():
            return
        if not self.alive.any():
            self._clear_branches()
            return
        keep = np.flatnonzero(self.alive)
        for name in (
            "depth", "root", "row", "start", "length", "launched", "goal", "waiting", "tokens",
            "ids", "slots",
        ):  # fmt: skip
            setattr(self, name, getattr(self, name)[keep])
        self.alive = np.ones(len(keep), bool)
        self.index = {
            (k, t): b
            for b, (k, t) in enumerate(zip(self.depth.tolist(), self.root.tolist(), strict=True))
            if t != UNKNOWN_ROOT
        }


_NO_SLOTS = np.zeros(0, np.int32)
_NO_ROWS = np.zeros(0, np.int64)
