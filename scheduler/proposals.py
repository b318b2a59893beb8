"""The drafts of one verify, with the proposals they were drawn from where there are any."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from sgl_ssd.rejection import Proposals

MASS_TOLERANCE = 1e-3


def valid_proposals(
    tokens: np.ndarray, counts: np.ndarray, ids: np.ndarray, probs: np.ndarray, vocab_size: int
) -> np.ndarray:
    """Which rows may be verified by rejection: bool [n].

    tokens int [n, K], of which `counts` [n] are real; ids int32, probs float32 [n, K, M]. At every
    real position: probabilities are finite, not negative and sum to 1 within `MASS_TOLERANCE`; ids
    that have any are of the vocabulary and distinct; the drafted token is one of them. A sound
    draft server never sends anything else, so what is dropped does not depend on what was drawn.
    """
    mass = probs > 0
    sound = (np.isfinite(probs) & (probs >= 0)).all(axis=2)
    total = np.where(mass & np.isfinite(probs), probs, 0.0).sum(axis=2, dtype=np.float64)
    sound &= np.abs(total - 1.0) <= MASS_TOLERANCE
    sound &= (~mass | ((ids >= 0) & (ids < vocab_size))).all(axis=2)
    sound &= (mass & (ids == tokens[:, :, None])).any(axis=2)
    without_mass = -1 - np.arange(ids.shape[2], dtype=np.int64)
    ordered = np.sort(np.where(mass, ids, without_mass), axis=2)
    sound &= (ordered[:, :, 1:] != ordered[:, :, :-1]).all(axis=2)
    unused = np.arange(tokens.shape[1]) >= counts[:, None]
    return np.asarray((sound | unused).all(axis=1))


@dataclass
class Drafts:
    """What a batch of bs rows is verified with.

    Attributes:
        tokens: int64 [bs, K]; `lens` int64 [bs]: how many of them are real.
        sampled: bool [bs], rows that are verified by rejection.
        ids, probs: int32 and float32 [bs, K, M], where `sampled`.
    """

    tokens: np.ndarray
    lens: np.ndarray
    sampled: np.ndarray
    ids: np.ndarray
    probs: np.ndarray

    @staticmethod
    def none(bs: int, num_steps: int, top_m: int) -> Drafts:
        """No drafts yet for `bs` rows."""
        return Drafts(
            np.zeros((bs, num_steps), np.int64),
            np.zeros(bs, np.int64),
            np.zeros(bs, bool),
            np.zeros((0, num_steps, top_m), np.int32),
            np.zeros((0, num_steps, top_m), np.float32),
        )

    def put(
        self, row: int, tokens: list[int], proposals: tuple[np.ndarray, np.ndarray] | None
    ) -> None:
        """Row `row` is verified with `tokens`; proposals [>= len(tokens), <= M] or None."""
        n = len(tokens)
        self.lens[row] = n
        self.tokens[row, :n] = tokens
        if proposals is None or n == 0:
            return
        self._make_room()
        self.sampled[row] = True
        ids, probs = proposals
        self.ids[row, :n, : ids.shape[1]] = ids[:n]
        self.probs[row, :n, : ids.shape[1]] = probs[:n]

    def first(self, count: int) -> np.ndarray:
        """The first `count` drafts of each row: int64 [bs, count]."""
        return np.ascontiguousarray(self.tokens[:, :count])

    def _make_room(self) -> None:
        if len(self.ids) < len(self.lens):
            shape = (len(self.lens), *self.ids.shape[1:])
            self.ids, self.probs = np.zeros(shape, np.int32), np.zeros(shape, np.float32)

    def broadcast(self, group: Any) -> None:
        """Rank 0 of SGLang's `group` talks to the draft server; all ranks verify the same."""
        head = np.concatenate([self.lens[:, None], self.sampled[:, None], self.tokens], axis=1)
        self._send(head, group)
        self.lens, self.sampled, self.tokens = head[:, 0].copy(), head[:, 1] > 0, head[:, 2:]
        if self.sampled.any():
            self._make_room()
            self._send(self.ids, group)
            self._send(self.probs, group)

    @staticmethod
    def _send(values: np.ndarray, group: Any) -> None:
        dist.broadcast(torch.from_numpy(values), src=group.ranks[0], group=group.cpu_group)

    def proposals(
        self, width: int, to_device: Callable[[torch.Tensor], torch.Tensor]
    ) -> Proposals | None:
        """The proposals of the first `width` - 1 drafts; None if every row is coupled."""
        rows = np.flatnonzero(self.sampled)
        if not len(rows):
            return None
        ids, probs = self.ids[rows, : width - 1], self.probs[rows, : width - 1]
        return Proposals(
            to_device(torch.from_numpy(rows)),
            to_device(torch.from_numpy(ids.astype(np.int64))),
            to_device(torch.from_numpy(probs)),
        )
