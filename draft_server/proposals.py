"""From logits to token ids: the draft's own token and its next-best guesses, drawn coupled.

Sessions that are verified by rejection draw as `sampled` says.

Everything a step needs stays on the device: the next input token of every *lane* (a branch row, a
home row, or a scratch entry), the sessions' sampling parameters, the chosen ids. The host reads the
ids when they have arrived in its memory. Torch only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sgl_ssd.draft_server.branches import FIRST_ID
from sgl_ssd.draft_server.sampled import sampled_columns
from sgl_ssd.sampling import TOP_K_ALL, RowSampling, filter_scores, fuses, gumbel, hash_bits

BELOW_ALL_KEPT = 64.0
"""More than the noise spans (-3.2 to 22.9): kept tokens have the greatest scores without noise."""

FILTER_CANDIDATES_CPU = 128
FILTER_CANDIDATES = 1024

NOISE_BYTES = 64 << 20


@dataclass(frozen=True)
class SamplingParams:
    """A request's sampling as the draft needs it; see `protocol.Open`."""

    temperature: float = 0.0
    top_k: int = TOP_K_ALL
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    bias_ids: np.ndarray | None = None  # int32 [M]
    bias_values: np.ndarray | None = None  # float32 [M]
    vocab_limit: int = 1 << 30  # ids from here on are never proposed
    top_m: int = 0  # size of the proposals for rejection verification; 0: drawn coupled
    saguaro_c: float = 1.0  # see `sgl_ssd.rejection`
    fan_out: tuple[int, ...] = ()  # for Saguaro, by depth, as it was when the session was opened

    @property
    def greedy(self) -> bool:
        return self.temperature <= 0

    @property
    def filters(self) -> bool:
        return not self.greedy and (self.top_k < TOP_K_ALL or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def sampled(self) -> bool:
        """Whether tokens are sampled from proposals (rejection), not drawn coupled."""
        return self.top_m > 0 and not self.greedy


class HostCopy:
    """Device ids on their way to the host."""

    def __init__(self, ids: torch.Tensor) -> None:
        self._event = None
        if ids.device.type == "cpu":
            self._host = ids
        else:
            self._host = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
            self._host.copy_(ids, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def ready(self) -> bool:
        return self._event is None or self._event.query()

    def get(self) -> np.ndarray:
        """The ids, waiting for them if need be."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.numpy()


class NoiseCache:
    """Gumbel noise by (seed, position): branches at the same position share it, and steps too.

    A ring of [V] vectors on the device; what is where is known on the host.
    """

    def __init__(self, device: torch.device, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._size = max(64, min(1024, NOISE_BYTES // (4 * vocab_size)))
        self._device = device
        self._table: torch.Tensor | None = None  # float32 [size, V], made when first needed
        self._places: dict[tuple[int, int], int] = {}

    def rows(
        self, keys: list[tuple[int, int]], seed: torch.Tensor, position: torch.Tensor
    ) -> torch.Tensor:
        """float32 [N, V] for N keys (seed, index of the token to be drawn).

        `seed` and `position` int64 [N] are the same on the device.
        """
        missing = {key: i for i, key in enumerate(keys) if key not in self._places}
        if len(self._places) + len(missing) > self._size:
            self._places.clear()
            missing = {key: i for i, key in enumerate(keys)}
            if len(missing) > self._size:
                return gumbel(hash_bits(seed, position, self._vocab_size))
        if self._table is None:
            self._table = torch.empty((self._size, self._vocab_size), device=self._device)
        if missing:
            which = self._put(list(missing.values()))
            first = len(self._places)
            noise = gumbel(hash_bits(seed[which], position[which], self._vocab_size))
            self._table[first : first + len(missing)] = noise
            self._places.update((key, place) for place, key in enumerate(missing, first))
        return self._table[self._put([self._places[key] for key in keys])]

    def _put(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values).to(self._device, non_blocking=True)


class Proposer:
    """The sampler of all sessions, and the token each lane is to be fed next."""

    def __init__(
        self, device: torch.device, vocab_size: int, num_sessions: int, num_lanes: int, width: int
    ) -> None:
        self.device = device
        self.vocab_size = vocab_size
        self.width = min(width, vocab_size)
        self._noise = NoiseCache(device, vocab_size)
        self.uses_depths = False
        self.next_token = torch.zeros(num_lanes, dtype=torch.int64, device=device)
        self._params: list[SamplingParams] = [SamplingParams()] * num_sessions
        self._bias: dict[int, torch.Tensor] = {}
        self._sampling = RowSampling.of(
            [0.0] * num_sessions, [TOP_K_ALL] * num_sessions, [1.0] * num_sessions,
            [0.0] * num_sessions, [0] * num_sessions, device,
        )  # fmt: skip
        self._limits = torch.full((num_sessions,), vocab_size, dtype=torch.int32, device=device)

    def set_session(self, index: int, params: SamplingParams) -> None:
        """Session `index` (its place in the tables) draws with `params` from now on."""
        self._params[index] = params
        self.uses_depths |= params.sampled and params.saguaro_c < 1
        table = self._sampling
        table.temperature[index] = params.temperature
        table.top_k[index] = min(params.top_k, TOP_K_ALL)
        table.top_p[index] = params.top_p
        table.min_p[index] = params.min_p
        table.seed[index] = params.seed
        self._limits[index] = min(params.vocab_limit, self.vocab_size)
        self._bias.pop(index, None)
        if params.bias_ids is not None and len(params.bias_ids):
            dense = np.zeros(self.vocab_size, np.float32)
            known = (params.bias_ids >= 0) & (params.bias_ids < self.vocab_size)
            np.add.at(dense, params.bias_ids[known], params.bias_values[known])  # type: ignore[index]
            self._bias[index] = torch.from_numpy(dense).to(self.device)

    def warm_up(self) -> None:
        """Propose once: what the device compiles for it is compiled before anybody waits."""
        host = np.zeros(1, np.int64)
        first = torch.zeros(1, dtype=torch.int64, device=self.device)
        logits = torch.zeros((1, self.vocab_size), device=self.device)
        self.propose(logits, host, host, first, first)

    def propose(
        self,
        logits: torch.Tensor,
        sessions: np.ndarray,
        positions: np.ndarray,
        session_ids: torch.Tensor,
        drawn_positions: torch.Tensor,
        depths: np.ndarray | int = 0,
    ) -> torch.Tensor:
        """The `width` best-scored ids of each row, best first: int64 [N, width].

        With a session among them that is verified by rejection there are more columns; its rows
        are as `sampled.sampled_columns` says, for tokens `depths` (int64 [N]) deep in their chain.

        logits float [N, V], after the token at `positions` (int64 [N], host) of `sessions` (int64
        [N], host) was fed. On the device: the same sessions, and the absolute indices of the tokens
        to be drawn, `positions` + 1.
        """
        present = set(sessions.tolist())
        logits = self._add_bias(logits, sessions, present)
        sampled = {s for s in present if self._params[s].sampled}
        if not sampled:
            return self._coupled(logits, sessions, positions, present, session_ids, drawn_positions)
        logits = self._mask(logits, sessions, present)
        rows = self._sampling.select(session_ids)
        temperature = torch.where(rows.temperature > 0, rows.temperature, 1.0)
        columns = sampled_columns(
            logits.float() / temperature[:, None],
            rows,
            [self._params[s] for s in sessions.tolist()],
            np.broadcast_to(depths, sessions.shape),
            drawn_positions,
            self.width,
        )
        others = present - sampled
        if others:
            ids = self._coupled(logits, sessions, positions, others, session_ids, drawn_positions)
            coupled = ~np.isin(sessions, list(sampled))
            where = torch.from_numpy(np.flatnonzero(coupled)).to(self.device)
            columns[where, : self.width] = ids[where]
        return columns

    def _coupled(
        self,
        logits: torch.Tensor,
        sessions: np.ndarray,
        positions: np.ndarray,
        present: set[int],
        session_ids: torch.Tensor,
        drawn_positions: torch.Tensor,
    ) -> torch.Tensor:
        """`propose` for the sessions in `present`, which are drawn coupled: int64 [N, width]."""
        if fuses(logits) and not any(self._params[s].filters for s in present):
            from sgl_ssd import fused_draw  # not at the top: the CPU needs no Triton

            table = self._sampling
            return fused_draw.noisy_topk(
                logits, table.temperature, table.seed, drawn_positions, self.width,
                places=session_ids, limit=self._limits,
            )  # fmt: skip
        logits = self._mask(logits, sessions, present)
        scores = self._scores(logits, sessions, positions, present, session_ids, drawn_positions)
        ids = scores.topk(min(self.width, scores.shape[1]), dim=-1).indices
        if ids.shape[1] < self.width:
            ids = torch.nn.functional.pad(ids, (0, self.width - ids.shape[1]))
        return ids

    def _scores(
        self,
        logits: torch.Tensor,
        sessions: np.ndarray,
        positions: np.ndarray,
        present: set[int],
        session_ids: torch.Tensor,
        drawn_positions: torch.Tensor,
    ) -> torch.Tensor:
        """`sampling.coupled_scores`, but excluded tokens stay in order, below all others.

        They cannot be the draft's own choice, but may be the target's: its filters cut elsewhere.
        """
        scores = logits.float()
        params = [self._params[s] for s in present]
        if all(p.greedy for p in params):
            return scores
        rows = self._sampling.select(session_ids)
        drawn = rows.temperature > 0
        scores = scores / torch.where(drawn, rows.temperature, 1.0)[:, None]
        if any(p.filters for p in params):
            scores = torch.where(dropped(scores, rows), scores - BELOW_ALL_KEPT, scores)
        keys = [
            (self._params[s].seed, p + 1)
            for s, p in zip(sessions.tolist(), positions.tolist(), strict=True)
        ]
        noise = self._noise.rows(keys, rows.seed, drawn_positions)
        scores_with_noise = scores + noise[:, : scores.shape[1]]
        if not any(p.greedy for p in params):
            return scores_with_noise
        return torch.where(drawn[:, None], scores_with_noise, scores)

    def _add_bias(
        self, logits: torch.Tensor, sessions: np.ndarray, present: set[int]
    ) -> torch.Tensor:
        biased = present & self._bias.keys()
        if not biased:
            return logits
        logits = logits.float().clone()
        for session in biased:
            where = torch.from_numpy(np.flatnonzero(sessions == session)).to(self.device)
            logits[where] += self._bias[session]
        return logits

    def _mask(self, logits: torch.Tensor, sessions: np.ndarray, present: set[int]) -> torch.Tensor:
        """Without ids that the target, or the draft's tokenizer, does not have."""
        limits = {min(self._params[s].vocab_limit, self.vocab_size) for s in present}
        logits = logits[:, : max(limits)]
        if len(limits) == 1:
            return logits
        limit = torch.tensor(
            [min(self._params[s].vocab_limit, self.vocab_size) for s in sessions.tolist()],
            device=self.device,
        )
        column = torch.arange(logits.shape[1], device=self.device)
        return logits.masked_fill(column >= limit[:, None], float("-inf"))


def dropped(scores: torch.Tensor, rows: RowSampling) -> torch.Tensor:
    """Which tokens the filters exclude (see `sampling.filter_scores`): bool [N, V].

    Every filter keeps a prefix of the tokens sorted by score, mostly a short one, so only the best
    few are sorted. A row that keeps all of them is sorted whole on the CPU; on a GPU, where asking
    would mean waiting, the rest of it counts as excluded: this is only a draft.
    """
    on_cpu = scores.device.type == "cpu"
    count = FILTER_CANDIDATES_CPU if on_cpu else FILTER_CANDIDATES
    if scores.shape[1] <= 2 * count:
        return filter_scores(scores, rows).isneginf()
    best, index = scores.topk(count, dim=-1)
    probs = (best - scores.logsumexp(dim=-1, keepdim=True)).exp()
    before = probs.cumsum(dim=-1) - probs
    drop = (
        (torch.arange(count, device=scores.device) >= rows.top_k[:, None])
        | (before > rows.top_p[:, None])
        | (probs < probs[:, :1] * rows.min_p[:, None])
    )
    drawn = (rows.temperature > 0)[:, None]
    result = drawn.expand(scores.shape).clone()
    result.scatter_(-1, index, drop & drawn)
    if on_cpu:
        whole = (~drop[:, -1] & drawn[:, 0]).nonzero()[:, 0]
        if len(whole):
            result[whole] = filter_scores(scores[whole], rows.select(whole)).isneginf()
    return result


def excluding(ids: torch.Tensor, excluded: torch.Tensor) -> torch.Tensor:
    """Each row of `ids` ([N, width]) without its entry of `excluded` ([N]), which moves to the end.

    The others keep their order; `FIRST_ID` excludes whatever stands first. The same as
    `branches.exclude_on_host`.
    """
    match = (ids == excluded[:, None]).to(torch.int8)
    match[:, 0] |= excluded == FIRST_ID
    return ids.gather(1, match.sort(dim=1, stable=True).indices)
