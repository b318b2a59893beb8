"""Rejection verification: drafts with their probabilities, kept or replaced as in the paper.

The draft draws x from a *proposal* q' and sends q' along. The target keeps x with probability
min(1, p(x)/q'(x)); if it does not, its own token comes from the residual norm(max(p - q', 0)).
The result is a sample of p whatever q' is, as long as x was really drawn from the q' that was sent,
with noise that the target does not use, and nothing but time and lengths decides whether x is
tested at all. A deterministic draft is the proposal that gives it probability 1.

Three streams of noise belong to the token at absolute index n of a request with seed s: the
target's Gumbel noise (that of `sampling`, so that a token drawn without a draft is the same in both
ways of verifying), one number for the acceptance test, one for the draft.

Saguaro (section 4 of the paper): the mass of the F tokens that the draft server pre-speculates as
bonus tokens is multiplied by C < 1 in the proposal. What the proposal lacks there the residual has,
so a bonus token is more often one of those F; fewer drafts are kept.

Torch only: no SGLang import.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl_ssd.sampling import RowSampling, filtered_scores, hash_bits, noisy_argmax

ACCEPT_STREAM = 0x5851F42D4C957F2D
DRAFT_STREAM = 0x14057B7EF767814F
LEAST_WEIGHT = 1e-30
"""Of a token that Saguaro weighs down: below it float32 would make the proposal 0/0."""


def uniform(seed: torch.Tensor, position: torch.Tensor, stream: int) -> torch.Tensor:
    """One random number for each row: float64 [N], never 0 and never 1.

    `seed` and `position` int64 [N] as in `sampling.hash_bits`.
    """
    bits = hash_bits(seed ^ stream, position, 1)[:, 0]
    return ((bits.to(torch.int64) & 0xFFFFFFFF).to(torch.float64) + 0.5) * 2.0**-32


# -- the draft's side --------------------------------------------------------------------------


@dataclass
class ProposalRows:
    """How N rows make their proposals; all tensors [N] on one device.

    `fan_out` int64: F. `saguaro_c` float32: C. `top_m` int64: M, at most `max_top_m`.
    """

    fan_out: torch.Tensor
    saguaro_c: torch.Tensor
    top_m: torch.Tensor
    max_fan_out: int
    max_top_m: int


def propose(
    scores: torch.Tensor, rows: RowSampling, how: ProposalRows
) -> tuple[torch.Tensor, torch.Tensor]:
    """The proposals of N rows: ids int64 [N, M] and probabilities float32 [N, M], best first.

    `scores` float32 [N, V] are logits / T before filters (the draft's own biases are in). In this
    order: filters, Saguaro, the M likeliest, normalised. Filters keep the first of the tokens
    sorted by score, and Saguaro moves tokens past at most F others, so the best M + F are enough.
    M is at most V; entries without mass have probability 0.
    """
    vocab = scores.shape[-1]
    top_m = min(how.max_top_m, vocab)
    best, index = scores.topk(min(vocab, top_m + how.max_fan_out), dim=-1)
    probs = (best - scores.logsumexp(dim=-1, keepdim=True)).exp()
    before = probs.cumsum(dim=-1) - probs
    rank = torch.arange(best.shape[-1], device=scores.device)
    drop = (
        (rank >= rows.top_k[:, None])
        | ((before > rows.top_p[:, None]) & (rows.top_p < 1.0)[:, None])
        | (probs < probs[:, :1] * rows.min_p[:, None])
    )
    # Relative to the best one: its weight stays representable in every row.
    mass = (best - best[:, :1]).exp().masked_fill(drop, 0.0)
    mass = torch.where(
        rank < how.fan_out[:, None], mass * how.saguaro_c.clamp_min(LEAST_WEIGHT)[:, None], mass
    )
    kept, place = mass.topk(top_m, dim=-1)
    kept = torch.where(rank[:top_m] < how.top_m[:, None], kept, 0.0)
    return index.gather(1, place), kept / kept.sum(dim=-1, keepdim=True)


def draw(ids: torch.Tensor, probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """A token of each proposal: int64 [N]. `u` float64 [N] in (0, 1).

    Uses the very numbers that are sent: id i gets the share probs[i] / sum(probs) of (0, 1).
    """
    edges = probs.to(torch.float64).cumsum(dim=-1)
    place = torch.searchsorted(edges, (u * edges[:, -1])[:, None], right=True)
    return ids.gather(1, place).squeeze(1)


# -- the target's side -------------------------------------------------------------------------


@dataclass
class Proposals:
    """What the drafts of a verify were drawn from.

    Attributes:
        rows: int64 [n], the rows of the batch that are verified by rejection.
        ids: int64 [n, width - 1, M], for each draft; probs: float32, of the same shape.
    """

    rows: torch.Tensor
    ids: torch.Tensor
    probs: torch.Tensor


def kept(p: torch.Tensor, q: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Whether drafts of target probability `p` and proposal probability `q` are kept: bool.

    In float64: there u * q < q holds for every u below 1, so a draft with p >= q is always kept.
    """
    return u * q.to(torch.float64) < p.to(torch.float64)


def residual(p: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """max(p - q', 0), not normalised: float32 [n, V]; `ids`, `probs` [n, M] are q'."""
    return p.scatter_add(1, ids, -probs).clamp_min(0.0)


def verify(
    logits: torch.Tensor,
    rows: RowSampling,
    first_index: torch.Tensor,
    chain: torch.Tensor,
    draft_lens: torch.Tensor,
    own: torch.Tensor,
    proposals: Proposals,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep or replace the drafts of `proposals.rows`.

    Args:
        logits: float [bs * width, V], with every bias, penalty and mask applied.
        rows: the parameters of the bs requests.
        first_index: int64 [bs], absolute index of the token that position 0 draws.
        chain: int64 [bs, width], what was fed; column j > 0 is the j-th draft.
        draft_lens: int [bs], how many of the drafts of a row are real.
        own: int64 [bs, width], tokens drawn from the target at each position without a draft.

    Returns:
        tokens int64 [n, width] and the number of them that is committed, int32 [n].
    """
    pick = proposals.rows
    (n,), width = pick.shape, chain.shape[1]
    mine = rows.select(pick)
    part = logits.view(len(chain), width, -1)[pick].flatten(0, 1)
    p = filtered_scores(part, mine.repeat(width)).softmax(dim=-1).view(n, width, -1)

    drafts, lens = chain[pick, 1:], draft_lens[pick].to(torch.int64)
    step = torch.arange(width - 1, device=logits.device)
    index = (first_index[pick][:, None] + step).reshape(-1)
    u = uniform(mine.seed.repeat_interleave(width - 1), index, ACCEPT_STREAM).view(n, -1)
    p_draft = p[:, :-1].gather(2, drafts[..., None]).squeeze(2)
    q_draft = (proposals.probs * (proposals.ids == drafts[..., None])).sum(dim=2)
    ok = kept(p_draft, q_draft, u) & (step < lens[:, None])
    count = ok.to(torch.int64).cumprod(dim=1).sum(dim=1)

    row = torch.arange(n, device=logits.device)
    tested = count.clamp(max=width - 2)  # of a full chain nothing was rejected
    rest = residual(p[row, tested], proposals.ids[row, tested], proposals.probs[row, tested])
    scaled = torch.ones_like(mine.temperature)  # `rest` has the temperature in it
    replaced = noisy_argmax(rest.log(), scaled, mine.seed, first_index[pick] + count)
    # Nothing may be left when p = q' but for rounding; then p itself is as good.
    rejected = (count < lens) & (rest.amax(dim=-1) > 0)
    bonus = torch.where(rejected, replaced, own[pick, count])
    tokens = torch.cat((drafts, drafts[:, :1]), dim=1).scatter(1, count[:, None], bonus[:, None])
    return tokens, (count + 1).to(torch.int32)
