"""One session as the engine knows it."""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np

from sgl_ssd.draft_server.branches import Feed
from sgl_ssd.draft_server.kv import SessionKV
from sgl_ssd.draft_server.proposals import SamplingParams
from sgl_ssd.draft_server.speculation_cache import SpeculationCache


class Stage(enum.Enum):
    """Where a session is."""

    PREFILL = "prefill"  # its text is not in the KV pool yet
    READY = "ready"
    CONTEXT = "context"  # longer than the draft's context: nothing is drafted any more
    TOO_LARGE = "too large"  # longer than the whole KV pool
    CLOSED = "closed"


@dataclass(eq=False)
class Draft:
    """Committed tokens, KV and speculation cache of a session.

    In READY: `kv.length >= len(tokens) - 1 + len(guesses)` of the chain, that is, the KV reaches as
    far as the guesses do. The first `answered` drafts of the chain are being verified; what goes on
    behind them came too late for that, and is ahead for the next round. `generation` rises
    when what is below the committed text is thrown away: results in flight are for an older one.
    """

    tokens: array[int]
    params: SamplingParams
    extra_key: str
    num_steps: int
    fan_out: list[int]
    cache: SpeculationCache
    stage: Stage = Stage.PREFILL
    kv: SessionKV | None = None
    starved: bool = False
    answered: int = 0
    generation: int = 0
    feed: Feed | None = None
    building: bool = False
    name: Any = None  # what the server knows it by
    planned_at: float = 0.0  # when the build was begun
    built_at: float | None = None  # when the build was complete; None: not yet
    ahead_s: float = 0.0  # how long before the last news that was; negative: behind

    @property
    def owner(self) -> str:
        """Whose request it is: the verifier, which is the first part of every namespace."""
        return self.extra_key.partition("/")[0]

    @property
    def chain(self) -> list[int]:
        """The speculation: drafts after the last committed token."""
        return self.cache.chain

    def entries(self, num_steps: int) -> tuple[np.ndarray, np.ndarray]:
        """The speculation cache; see there."""
        return self.cache.entries(num_steps, self.answered)

    def proposals(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """What the first `count` tokens of `chain` were drawn from; see the cache."""
        return self.cache.proposals(count)

    @property
    def home(self) -> SessionKV:
        """`kv` of a session that has one (READY, or in the middle of its prefill)."""
        if self.kv is None:
            raise RuntimeError("this session holds no KV")
        return self.kv
