"""Which branches to build, and how the branches of all sessions share one decode step.

numpy only: shapes and orders are decided here, the engine carries them to the device.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np

from sgl_ssd.draft_server.speculation_cache import UNKNOWN_ROOT, SpeculationCache
from sgl_ssd.fan_out import fit_budget

FIRST_ID = -2
"""In place of a token to leave out: whatever stands first."""


@dataclass(frozen=True)
class Fork:
    """A branch to be: bonus token `root` after `depth` accepted drafts.

    A *late* fork's root is not known yet: it will be number `rank` of the guesses that feeding the
    tail yields, the chain's own next token left out.
    """

    depth: int
    root: int
    rank: int = 0

    @property
    def late(self) -> bool:
        return self.root == UNKNOWN_ROOT


def fan_out_for(fan_out: Sequence[int], answered: int, budget: int, limit: int) -> list[int]:
    """Branches per depth 0..answered, for a chain of which `answered` drafts are being verified.

    The last depth gets the greatest of what the list gives to it and below: nothing lies deeper.
    Sum at most `budget`, each entry at most `limit`.
    """
    wanted = (*fan_out[:answered], max(fan_out[answered:], default=0))
    return list(_fitted(wanted, budget, limit))


@lru_cache(maxsize=4096)
def _fitted(wanted: tuple[int, ...], budget: int, limit: int) -> tuple[int, ...]:
    """The same few questions come for every session in every round."""
    return tuple(fit_budget([min(f, limit) for f in wanted], budget))


def exclude_on_host(ids: np.ndarray, excluded: int) -> list[int]:
    """`ids` ([width]) without `excluded`, which may be `FIRST_ID`."""
    if excluded == FIRST_ID:
        return ids.tolist()[1:]
    return [t for t in ids.tolist() if t != excluded]


def not_a_root(cache: SpeculationCache, depth: int) -> int:
    """Which of the guesses at `depth` cannot be a bonus token there.

    The chain's own token. Below the chain nothing is excluded; where the first guess is not the
    best, but a sample, it is left out, and stands among the best if it belongs there.
    """
    if depth < len(cache.chain):
        return cache.chain[depth]
    return FIRST_ID if cache.top_m else UNKNOWN_ROOT


def plan_forks(cache: SpeculationCache, fan_out: Sequence[int], late: bool) -> list[Fork]:
    """The forks missing in `cache` for `fan_out` (depths 0..answered), shallow ones first.

    `late`: the guesses that are missing will be there after the coming step.
    """
    have = np.bincount(cache.depth[cache.alive], minlength=len(fan_out))
    forks = []
    for depth, count in enumerate(fan_out):
        want = count - int(have[depth])
        if want <= 0:
            continue
        if depth >= len(cache.guesses):
            if late:
                forks += [Fork(depth, UNKNOWN_ROOT, rank) for rank in range(want)]
            continue
        guesses = exclude_on_host(cache.guesses[depth][: cache.width], not_a_root(cache, depth))
        fresh = (t for t in dict.fromkeys(guesses) if (depth, t) not in cache.index)
        forks += [Fork(depth, t) for t in islice(fresh, want)]
    return forks


@dataclass
class Feed:
    """Known tokens to be fed on the home row, one lane each, in one step.

    Positions `start` to `end - 1`. `late` tells which branches get their root from which lane.
    """

    start: int
    end: int
    tokens: np.ndarray  # int64 [end - start]
    generation: int
    late: list[LateRoots] = field(default_factory=list)


@dataclass(frozen=True)
class LateRoots:
    """Branches whose roots are the guesses after position `position`, by rank.

    `excluded`: see `not_a_root`.
    """

    position: int
    excluded: int
    branches: np.ndarray  # int64 [N]
    rows: np.ndarray  # int64 [N]


def make_feed(
    tokens: array[int], chain: Sequence[int], start: int, end: int, generation: int
) -> Feed:
    """Feed positions start..end-1 of the text followed by the chain."""
    n = len(tokens)
    known = [*tokens[start:end], *chain[max(0, start - n) : max(0, end - n)]]
    return Feed(start, end, np.array(known, np.int64), generation)


@dataclass(frozen=True)
class Part:
    """One session's share of a step: feed lanes first, then one lane a branch."""

    draft: Any
    offset: int
    feed: Feed | None
    branches: np.ndarray  # int64 [N]
    step: np.ndarray  # int64 [N]: which of a branch's tokens this is

    @property
    def num_feed(self) -> int:
        return self.feed.end - self.feed.start if self.feed else 0


@dataclass(frozen=True)
class SharedContext:
    """Lanes of one session, and the KV that any of them sees.

    Lanes `first` to `first + N - 1` of the step. `slots` int64 [M]; `visible` bool [N, M]: which
    of them each lane attends to.
    """

    first: int
    slots: np.ndarray
    visible: np.ndarray


def shared_context(part: Part) -> SharedContext:
    """The home row's slots once, then every branch's own."""
    cache, kv, branches, step = part.draft.cache, part.draft.kv, part.branches, part.step
    reach = cache.start[branches]  # a branch sees the home row up to its root
    if part.feed:
        reach = np.concatenate((np.arange(part.feed.start, part.feed.end) + 1, reach))
    shared = int(reach.max())
    steps = int(step.max()) + 1 if len(branches) else 0
    home = kv.slots[:shared].astype(np.int64)
    written = np.arange(steps) <= step[:, None]
    # What is not written yet may hold anything; a masked NaN would still spoil the sum.
    own = np.where(written, cache.slots[branches, :steps], home[0])
    visible = np.zeros((len(reach), shared + own.size), bool)
    visible[:, :shared] = np.arange(shared) < reach[:, None]
    lane = np.arange(len(branches))
    visible[part.num_feed + lane[:, None], shared + np.arange(own.size).reshape(own.shape)] = (
        written
    )
    return SharedContext(part.offset, np.concatenate((home, own.reshape(-1))), visible)


class StepBatch:
    """The lanes of one decode step: sessions add themselves until the cap is reached."""

    def __init__(self, cap: int, scratch: int) -> None:
        self.cap = cap
        self._scratch = scratch  # first of the lane ids that belong to no row
        self.size = 0
        self.full = False  # a session had to be left out
        self.parts: list[Part] = []
        self._lanes: list[np.ndarray] = []
        self._rows: list[np.ndarray] = []
        self._positions: list[np.ndarray] = []
        self._sessions: list[np.ndarray] = []
        # Tokens to write before the step: known ones (lane, token) ...
        self._known: list[tuple[np.ndarray, np.ndarray]] = []
        # ... and after it, late roots: (lane to read, rank, row to write, excluded).
        self.late: list[tuple[int, LateRoots]] = []

    def add(self, draft: Any, feed: Feed | None) -> Part | None:
        """Put the session's runnable lanes in; None if it has none, or they do not fit any more."""
        cache, row = draft.cache, draft.kv.row
        branches = cache.runnable()
        num_feed = feed.end - feed.start if feed else 0
        n = num_feed + len(branches)
        if self.size and self.size + n > self.cap:
            self.full = True
            return None
        if n == 0:
            return None
        if feed:
            lanes = self._scratch + self.size + np.arange(num_feed)
            self._append(lanes, np.full(num_feed, row), np.arange(feed.start, feed.end))
            self._known.append((lanes, feed.tokens))
            for late in feed.late:
                self.late.append((self.size + late.position - feed.start, late))
        step = cache.launched[branches]
        rows = cache.row[branches]
        fresh = (step == 0) & (cache.root[branches] != UNKNOWN_ROOT)
        if fresh.any():
            self._known.append((rows[fresh], cache.root[branches[fresh]]))
        self._append(rows, rows, cache.start[branches] + step)
        self._sessions.append(np.full(n, row))
        part = Part(draft, self.size, feed, branches, step)
        self.parts.append(part)
        self.size += n
        return part

    def _append(self, lanes: np.ndarray, rows: np.ndarray, positions: np.ndarray) -> None:
        self._lanes.append(lanes)
        self._rows.append(rows)
        self._positions.append(positions)

    def packed(self) -> np.ndarray:
        """int64 [4, N]: lanes, rows, positions, sessions."""
        return np.stack(
            [np.concatenate(x) for x in (self._lanes, self._rows, self._positions, self._sessions)]
        )

    def shared(self) -> list[SharedContext]:
        """What each session's lanes attend to, for attention that reads shared KV once."""
        return [shared_context(part) for part in self.parts]

    def depths(self) -> np.ndarray:
        """int64 [N]: how many drafts of its chain come before the token that a lane draws."""
        depths = [np.zeros(0, np.int64)]
        for part in self.parts:
            if part.feed:
                after = np.arange(part.feed.start, part.feed.end) + 1 - len(part.draft.tokens)
                depths.append(after.clip(0))
            depths.append(part.step)
        return np.concatenate(depths)

    def known_tokens(self) -> np.ndarray | None:
        """int64 [2, M]: lanes and the tokens they start with."""
        if not self._known:
            return None
        return np.stack([np.concatenate(x) for x in zip(*self._known, strict=True)])

    def late_roots(self) -> np.ndarray | None:
        """int64 [3, M]: lane number in this step, rank, row that gets the token."""
        if not self.late:
            return None
        lane = np.concatenate([np.full(len(x.rows), at) for at, x in self.late])
        rank = np.concatenate([np.arange(len(x.rows)) for _, x in self.late])
        return np.stack([lane, rank, np.concatenate([x.rows for _, x in self.late])])

    def excluded(self) -> np.ndarray | None:
        """int64 [N]: which id may not be a root after each lane; None if nothing is excluded."""
        if all(x.excluded == UNKNOWN_ROOT for _, x in self.late):
            return None
        excluded = np.full(self.size, UNKNOWN_ROOT)
        for at, late in self.late:
            excluded[at] = late.excluded
        return excluded
