"""From the target's raw logits to its tokens: one path for prefill, decode and verify.

A batch of bs rows is computed at `width` positions each. For every position this applies exactly
what plain decoding would apply there, in SGLang's order: additive penalties (frequency, presence,
min_new_tokens), repetition penalty, grammar mask, logit_bias, custom logit processor; then
temperature, filters and the coupled draw (`sgl_ssd.sampling`).

SGLang's own penalizers are bypassed: under the overlap loop they lag a round, and they know one
token a round. Counts of each request's output live here, on the device, updated right after accept
and rebuilt from `output_ids` at every prefill.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.logprob_processor import OutputLogprobProcessor, compute_spec_v2_logprobs
from sglang.srt.layers.sampler import apply_custom_logit_processor

from sgl_ssd import rejection
from sgl_ssd.sampling import TOP_K_ALL, RowSampling, coupled_sample

Reqs = list[Any]


def has_count_penalty(params: Any) -> bool:
    """Whether a request's sampling depends on what it has produced so far."""
    return (
        params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
        or params.repetition_penalty != 1.0
    )


class OutputCounts:
    """How often each request has produced each token: int32 [rows, vocab], made on first use.

    Rows are SGLang's `req_pool_idx`. Only requests with count penalties have valid rows.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: Any) -> None:
        self._shape = (num_rows, vocab_size)
        self._device = device
        self._counts: torch.Tensor | None = None

    def _table(self) -> torch.Tensor:
        if self._counts is None:
            self._counts = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        return self._counts

    def rebuild(self, row: int, output_ids: list[int]) -> None:
        """Set `row` to the counts of `output_ids` (at prefill, or after a retraction)."""
        counts = self._table()[row]
        counts.zero_()
        if output_ids:
            ids = torch.tensor(list(output_ids), dtype=torch.int64).to(self._device)
            counts.scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))

    def at_positions(self, rows: torch.Tensor, chain: torch.Tensor) -> torch.Tensor:
        """Counts before the draw at each position of a verify: int32 [n, width, vocab].

        `rows` int64 [n]; `chain` int64 [n, width]: column 0 is the last committed token (already
        counted), column j > 0 the draft that precedes position j.
        """
        width = chain.shape[1]
        counts = self._table()[rows][:, None].repeat(1, width, 1)
        for j in range(1, width):
            index = chain[:, j, None, None].expand(-1, width - j, 1)
            counts[:, j:].scatter_add_(2, index, torch.ones_like(index, dtype=torch.int32))
        return counts

    def add(self, rows: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor) -> None:
        """Count the first `lengths[i]` entries of `tokens[i]`; rows [n], tokens [n, width]."""
        kept = torch.arange(tokens.shape[1], device=tokens.device)[None] < lengths[:, None]
        self._table().index_put_(
            (rows[:, None].expand_as(tokens), tokens), kept.to(torch.int32), accumulate=True
        )


class TargetSampler:
    """Turns logits into tokens for the requests of a batch, whatever the width."""

    def __init__(self, num_rows: int, vocab_size: int, device: Any, eos_of: Any = None) -> None:
        self.counts = OutputCounts(num_rows, vocab_size, device)
        self._device = device
        self._vocab_size = vocab_size
        self._cache_key: tuple | None = None
        self._cache_rows: RowSampling | None = None
        self._logprobs = OutputLogprobProcessor()

    def warm_up(self) -> None:
        """Draw once, so that what the device compiles for it is compiled before anybody waits."""
        logits = torch.zeros((1, self._vocab_size), device=self._device)
        rows = RowSampling.of([1.0], [TOP_K_ALL], [1.0], [0.0], [0], self._device)
        coupled_sample(logits, rows, torch.zeros(1, dtype=torch.int64, device=self._device))

    def begin(self, reqs: Reqs) -> None:
        """Rebuild the counts of requests whose prefill is being computed."""
        for req in reqs:
            if has_count_penalty(req.sampling_params):
                self.counts.rebuild(req.req_pool_idx, req.output_ids)

    def rows(self, reqs: Reqs) -> RowSampling:
        """The parameters of `reqs`, cached while the batch stays the same."""
        params = [req.sampling_params for req in reqs]
        # Clients choose the rid, so it says nothing about the parameters.
        key = tuple(
            (req.ssd_seed, p.temperature, p.top_k, p.top_p, p.min_p)
            for req, p in zip(reqs, params, strict=True)
        )
        if key != self._cache_key:
            self._cache_rows = RowSampling.of(
                # SGLang says temperature 0 as top_k 1.
                temperature=[0.0 if p.top_k == 1 else p.temperature for p in params],
                top_k=[p.top_k if p.top_k > 0 else TOP_K_ALL for p in params],
                top_p=[p.top_p for p in params],
                min_p=[p.min_p for p in params],
                seed=[req.ssd_seed for req in reqs],
                device=self._device,
            )
            self._cache_key = key
        assert self._cache_rows is not None
        return self._cache_rows

    def sample(
        self,
        logits: torch.Tensor,
        reqs: Reqs,
        sampling_info: Any,
        chain: torch.Tensor,
        first_index: torch.Tensor,
        grammar_mask: Any,
    ) -> torch.Tensor:
        """The target's own token at every position.

        Args:
            logits: float [bs * width, vocab]; biases, penalties and masks are applied in place.
            chain: int64 [bs, width], the tokens that were fed (column 0: last committed token).
            first_index: int64 [bs], absolute index of the token that position 0 draws.
            grammar_mask: SGLang's `GrammarMask` of [bs * width] rows, or None.

        Returns:
            int64 [bs, width].
        """
        bs, width = chain.shape
        params = [req.sampling_params for req in reqs]
        view = logits.view(bs, width, -1)
        self._penalize(view, reqs, params, chain, first_index)
        if grammar_mask is not None:
            grammar_mask.apply(logits)
        if sampling_info.logit_bias is not None:
            view.add_(sampling_info.logit_bias[:, None])
        if sampling_info.has_custom_logit_processor:
            # A processor reads the request's own history, which ends at position 0; such rows
            # never carry drafts (see SSDWorker), so position 0 is the only one that is used.
            first = view[:, 0].contiguous()
            apply_custom_logit_processor(first, sampling_info)
            view[:, 0] = first
        rows = self.rows(reqs).repeat(width)
        index = first_index[:, None] + torch.arange(width, device=logits.device)
        return coupled_sample(logits, rows, index.reshape(-1)).view(bs, width)

    def reject(
        self,
        logits: torch.Tensor,
        reqs: Reqs,
        chain: torch.Tensor,
        first_index: torch.Tensor,
        draft_lens: torch.Tensor,
        own: torch.Tensor,
        proposals: rejection.Proposals,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Verify the rows of `proposals` by rejection and the others against `own`.

        Call it after `sample`, whose result `own` is, with the same logits (biases, penalties and
        masks are in them now), chain and index. Returns the tokens int64 [bs, width], and how many
        of them each row commits, int32 [bs].
        """
        tokens, lengths = own.clone(), count_accepted(own, chain, draft_lens)
        tokens[proposals.rows], lengths[proposals.rows] = rejection.verify(
            logits, self.rows(reqs), first_index, chain, draft_lens, own, proposals
        )
        return tokens, lengths

    def _penalize(
        self,
        view: torch.Tensor,
        reqs: Reqs,
        params: list[Any],
        chain: torch.Tensor,
        first_index: torch.Tensor,
    ) -> None:
        counted = [i for i, p in enumerate(params) if has_count_penalty(p)]
        delayed = [i for i, p in enumerate(params) if p.min_new_tokens > 0]
        if not counted and not delayed:
            return
        if counted:
            pick = torch.tensor(counted, device=view.device)
            pool_rows = torch.tensor([reqs[i].req_pool_idx for i in counted], device=view.device)

            def column(name: str) -> torch.Tensor:
                values = [getattr(params[i], name) for i in counted]
                return torch.tensor(values, dtype=torch.float32, device=view.device)[:, None, None]

            counts = self.counts.at_positions(pool_rows, chain[pick])
            seen = counts > 0
            part = view[pick].float()
            part -= counts * column("frequency_penalty")
            part -= torch.where(seen, column("presence_penalty"), 0.0)
        if delayed:
            self._forbid_early_stop(view, reqs, params, delayed, first_index)
            if counted:
                # The stop tokens of `part` were read before they were forbidden.
                part = torch.where(torch.isneginf(view[pick]), view[pick], part)
        if counted:
            scale = torch.where(seen, column("repetition_penalty"), 1.0)
            part = torch.where(part < 0, part * scale, part / scale)
            view[pick] = part.to(view.dtype)

    def _forbid_early_stop(
        self,
        view: torch.Tensor,
        reqs: Reqs,
        params: list[Any],
        delayed: list[int],
        first_index: torch.Tensor,
    ) -> None:
        """Stop tokens get -inf at positions that would end a request before min_new_tokens."""
        width = view.shape[1]
        for i in delayed:
            req, p = reqs[i], params[i]
            stops = set(p.stop_token_ids or ())
            if req.tokenizer is not None:
                stops |= set(getattr(req.tokenizer, "additional_stop_token_ids", None) or ())
                if req.tokenizer.eos_token_id is not None:
                    stops.add(req.tokenizer.eos_token_id)
            # A client may name ids that do not exist.
            stops = {t for t in stops if 0 <= t < view.shape[2]}
            if not stops:
                continue
            ids = torch.tensor(sorted(stops), dtype=torch.int64, device=view.device)
            produced = (
                first_index[i] - len(req.origin_input_ids) + torch.arange(width, device=view.device)
            )
            early = (produced < p.min_new_tokens)[:, None]
            view[i, :, ids] = torch.where(early, float("-inf"), view[i, :, ids])

    def accept(self, reqs: Reqs, tokens: torch.Tensor, lengths: torch.Tensor) -> None:
        """Count what a verify has committed: tokens int64 [bs, width], lengths [bs]."""
        counted = [i for i, r in enumerate(reqs) if has_count_penalty(r.sampling_params)]
        if counted:
            pick = torch.tensor(counted, device=tokens.device)
            rows = torch.tensor([reqs[i].req_pool_idx for i in counted], device=tokens.device)
            self.counts.add(rows, tokens[pick], lengths[pick])

    def prefill_logprobs(self, batch: Any, logits_output: Any, tokens: torch.Tensor) -> None:
        """Output logprobs of a prefill's one token a row, as SGLang's sampler would give them."""
        scaled = logits_output.next_token_logits.float()
        if not envs.SGLANG_RETURN_ORIGINAL_LOGPROB.get():
            scaled = scaled / self._logprob_temperatures(batch.reqs)
        logprobs = torch.log_softmax(scaled, dim=-1)
        self._logprobs.compute_logprobs(
            logprobs, batch.top_logprobs_nums, batch.token_ids_logprobs, tokens
        ).write_output_to(logits_output)
        _only_tensors(logits_output)

    def verify_logprobs(self, batch: Any, logits_output: Any, tokens: torch.Tensor) -> None:
        """Output logprobs of every position of a verify; tokens int64 [bs, width]."""
        bs, width = tokens.shape
        # SGLang divides a greedy request's logits by its temperature or not, depending on the
        # company it keeps in the batch. `sampling_info` is this forward's own copy.
        batch.sampling_info.is_all_greedy = False
        batch.sampling_info.temperatures = self._logprob_temperatures(batch.reqs)
        index = torch.arange(bs * width, device=tokens.device).view(bs, width)
        compute_spec_v2_logprobs(batch, logits_output, tokens.flatten(), index, width - 1)
        _only_tensors(logits_output)

    def _logprob_temperatures(self, reqs: Reqs) -> torch.Tensor:
        """float32 [bs, 1]; 1 for greedy requests."""
        temperature = self.rows(reqs).temperature
        return torch.where(temperature > 0, temperature, 1.0)[:, None]


def _only_tensors(logits_output: Any) -> None:
    """SGLang's result processor expects tensors, but gets [] from SGLang's own logprob code for
    requests without `token_ids_logprob` beside others that have it, and would end the server."""
    values = logits_output.next_token_token_ids_logprobs_val
    if values:
        logits_output.next_token_token_ids_logprobs_val = [
            v if isinstance(v, torch.Tensor) else torch.empty(0) for v in values
        ]


def count_accepted(
    tokens: torch.Tensor, chain: torch.Tensor, draft_lens: torch.Tensor
) -> torch.Tensor:
    """Tokens that a verify commits in each row, the bonus token included: int32 [bs].

    Args:
        tokens: int64 [bs, width], the target's own token at each position.
        chain: int64 [bs, width], what was fed; column j > 0 is the j-th draft.
        draft_lens: int32 [bs], how many of the drafts of a row are real.
    """
    width = tokens.shape[1]
    if width == 1:
        return torch.ones(tokens.shape[0], dtype=torch.int32, device=tokens.device)
    real = torch.arange(width - 1, device=tokens.device)[None] < draft_lens[:, None]
    match = (tokens[:, :-1] == chain[:, 1:]) & real
    return match.to(torch.int32).cumprod(dim=1).sum(dim=1).to(torch.int32) + 1
