"""One forward of the draft over many lanes, from host arrays to token ids on their way back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sgl_ssd.draft_server.branches import SharedContext, StepBatch
from sgl_ssd.draft_server.kv import KVSpace
from sgl_ssd.draft_server.proposals import HostCopy, Proposer, excluding
from sgl_ssd.draft_server.runner import DraftRunner


class Stepper:
    """Runner, sampler and row table as one: what a step writes, feeds and draws.

    A *lane* is an entry of the table of next tokens. Lane i < num_rows belongs to row i of
    `req_to_token`; those from `scratch` on serve lanes that are fed once.
    """

    def __init__(self, runner: DraftRunner, kv: KVSpace, width: int, max_scratch: int) -> None:
        self.runner = runner
        self.kv = kv
        self.scratch = runner.num_rows
        self.proposer = Proposer(
            runner.device, runner.vocab_size, runner.num_rows, runner.num_rows + max_scratch, width
        )
        runner.capture_graphs(self.proposer.next_token)
        self.proposer.warm_up()
        # Whether results are there when a forward returns. Otherwise the next step is queued while
        # the last one runs: its inputs are on the device already.
        self.synchronous = runner.device.type == "cpu"

    def flush_rows(self) -> None:
        """Tell the device of all changes to its row table."""
        self.runner.write_rows(self.kv.take_writes())

    def set_tokens(self, known: np.ndarray) -> None:
        """`known` int64 [2, M]: lanes, and the tokens they are to be fed next."""
        lanes, tokens = self.runner.put(np.stack((known[0], self._feedable(known[1]))))
        self.proposer.next_token[lanes] = tokens

    def _feedable(self, tokens: np.ndarray) -> np.ndarray:
        """Ids that the target's padded vocabulary has and the draft's embedding has not: replaced.

        They mean no token; only the drafts after them suffer.
        """
        return np.minimum(tokens, self.runner.vocab_size - 1)

    def decode(
        self,
        lanes: np.ndarray,
        rows: np.ndarray,
        positions: np.ndarray,
        sessions: np.ndarray,
        shared: Sequence[SharedContext] = (),
        depths: np.ndarray | int = 0,
    ) -> torch.Tensor:
        """Feed each lane its next token (all int64 [N]); its own choice is the next one then.

        `depths`: how many drafts of its chain come before the token that each lane draws.

        Returns the best ids of each lane: int64 [N, width]; the first is the draft's own token.
        """
        logits, packed = self.runner.decode(np.stack((lanes, rows, positions, sessions)), shared)
        ids = self.proposer.propose(logits, sessions, positions, packed[3], packed[2] + 1, depths)
        self.proposer.next_token[packed[0]] = ids[:, 0]
        return ids

    def run(self, batch: StepBatch) -> HostCopy:
        """A build step; late roots get their tokens."""
        self.flush_rows()
        known = batch.known_tokens()
        if known is not None:
            self.set_tokens(known)
        lanes, rows, positions, sessions = batch.packed()
        shared = batch.shared() if self.runner.reads_shared else ()
        depths = batch.depths() if self.proposer.uses_depths else 0
        ids = self.decode(lanes, rows, positions, sessions, shared, depths)
        late = batch.late_roots()
        if late is not None:
            excluded = batch.excluded()
            roots = ids[:, : self.proposer.width]
            if excluded is not None:
                roots = excluding(roots, self.runner.put(excluded))
            lane, rank, row = self.runner.put(late)
            self.proposer.next_token[row] = roots[lane, rank]
        return HostCopy(ids)

    def extend(
        self, rows: np.ndarray, starts: np.ndarray, lengths: np.ndarray, tokens: np.ndarray
    ) -> HostCopy:
        """Feed runs of known tokens (see `DraftRunner.extend`): the best ids after each run."""
        self.flush_rows()
        logits = self.runner.extend(rows, starts, lengths, self._feedable(tokens))
        ends = starts + lengths
        ids = self.proposer.propose(
            logits, rows, ends - 1, self.runner.put(rows), self.runner.put(ends)
        )
        return HostCopy(ids)
