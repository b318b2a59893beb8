"""Drafting for rejection verification: tokens sampled from proposals that travel with them.

A lane's ids (see `proposals`) get more columns: after the `width` guesses, M pairs of a token id
and the bits of its float32 probability, best first. So a proposal goes wherever its token goes.
Torch and numpy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from sgl_ssd.rejection import DRAFT_STREAM, ProposalRows, draw, propose, uniform
from sgl_ssd.sampling import RowSampling

if TYPE_CHECKING:
    from sgl_ssd.draft_server.proposals import SamplingParams


def sampled_columns(
    scores: torch.Tensor,
    rows: RowSampling,
    params: Sequence[SamplingParams],
    depths: np.ndarray,
    drawn_positions: torch.Tensor,
    width: int,
) -> torch.Tensor:
    """The columns of N lanes whose sessions are verified by rejection.

    Args:
        scores: float32 [N, V], logits / T with biases, before filters.
        rows: the lanes' sampling.
        params: of each lane's session. Lanes of other sessions get columns too, of no meaning.
        depths: int64 [N] on the host, how many drafts of the same chain come before each token.
        drawn_positions: int64 [N], the absolute indices of the tokens to be drawn.
        width: how many guesses.

    Returns:
        int64 [N, width + 2 M]: the token that was drawn, the likeliest tokens (that one too, where
        it belongs), and the proposal.
    """
    how = _how(params, depths, scores.device)
    ids, probs = propose(scores, rows, how)
    token = draw(ids, probs, uniform(rows.seed, drawn_positions, DRAFT_STREAM))
    likeliest = scores.topk(min(width - 1, scores.shape[1]), dim=-1).indices
    guesses = torch.cat((token[:, None], likeliest), dim=1)
    bits = probs.view(torch.int32).to(torch.int64)
    pairs = torch.stack((ids, bits), dim=2).flatten(1)
    pad = torch.nn.functional.pad
    return torch.cat(
        (
            pad(guesses, (0, width - guesses.shape[1])),
            pad(pairs, (0, 2 * how.max_top_m - pairs.shape[1])),
        ),
        dim=1,
    )


def _how(
    params: Sequence[SamplingParams], depths: np.ndarray, device: torch.device
) -> ProposalRows:
    # Without weighing down it does not matter which tokens would be.
    fan_out = [
        p.fan_out[min(d, len(p.fan_out) - 1)] if p.saguaro_c < 1 and p.fan_out else 0
        for p, d in zip(params, depths.tolist(), strict=True)
    ]
    top_m = [max(1, p.top_m) for p in params]
    table = torch.tensor([fan_out, top_m], dtype=torch.int64).to(device, non_blocking=True)
    weight = torch.tensor([p.saguaro_c for p in params], dtype=torch.float32)
    return ProposalRows(
        table[0], weight.to(device, non_blocking=True), table[1], max(fan_out), max(top_m)
    )


def unpack(rows: Sequence[np.ndarray], width: int, top_m: int) -> tuple[np.ndarray, np.ndarray]:
    """Proposals out of lanes' columns: ids int32 and probabilities float32, both [n, M]."""
    pairs = np.array([row[width : width + 2 * top_m] for row in rows], np.int64)
    pairs = pairs.reshape(len(rows), top_m, 2).astype(np.int32)
    return pairs[:, :, 0], np.ascontiguousarray(pairs[:, :, 1]).view(np.float32)
