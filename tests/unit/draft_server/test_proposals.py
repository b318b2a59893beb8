"""The draft's sampler agrees with the one that makes every token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_ssd.draft_server.proposals import (
    FILTER_CANDIDATES_CPU,
    NoiseCache,
    Proposer,
    SamplingParams,
    dropped,
    excluding,
)
from sgl_ssd.sampling import (
    TOP_K_ALL,
    RowSampling,
    coupled_scores,
    filter_scores,
    gumbel,
    hash_bits,
)

VOCAB = 4 * FILTER_CANDIDATES_CPU
CPU = torch.device("cpu")


def proposer(params: list[SamplingParams], width: int = 5, vocab: int = VOCAB) -> Proposer:
    made = Proposer(CPU, vocab, len(params), 4, width)
    for i, p in enumerate(params):
        made.set_session(i, p)
    return made


def propose(made: Proposer, logits: torch.Tensor, sessions: list[int], positions: list[int]):
    s, p = np.array(sessions), np.array(positions)
    return made.propose(logits, s, p, torch.from_numpy(s), torch.from_numpy(p + 1))


def expected_scores(
    logits: torch.Tensor, params: list[SamplingParams], positions: list[int]
) -> torch.Tensor:
    rows = RowSampling.of(
        [p.temperature for p in params], [p.top_k for p in params], [p.top_p for p in params],
        [p.min_p for p in params], [p.seed for p in params], CPU,
    )  # fmt: skip
    return coupled_scores(logits, rows, torch.tensor(positions) + 1)


GREEDY = SamplingParams()
DRAWN = SamplingParams(temperature=1.0, seed=-(2**62) + 5)
FILTERED = SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, seed=2**62)


@pytest.mark.parametrize(
    "params",
    [[GREEDY] * 3, [DRAWN] * 3, [FILTERED] * 3, [GREEDY, DRAWN, FILTERED]],
    ids=["greedy", "drawn", "filtered", "mixed"],
)
def test_the_draft_draws_with_the_shared_sampler(params: list[SamplingParams]) -> None:
    torch.manual_seed(0)
    made = proposer(params)
    for start in range(40):
        sessions, positions = [0, 1, 2, 1, 1], [start, start, start + 3, start, start + 1]
        logits = 3 * torch.randn(5, VOCAB)
        ids = propose(made, logits, sessions, positions)
        scores = expected_scores(logits, [params[s] for s in sessions], positions)
        assert ids[:, 0].tolist() == scores.argmax(dim=-1).tolist()
        for row, got in zip(scores, ids.tolist(), strict=True):
            kept = min(5, int((~row.isneginf()).sum()))
            assert got[:kept] == row.topk(kept).indices.tolist()


def test_excluded_tokens_follow_the_kept_ones() -> None:
    """The target's filters may keep what the draft's exclude: such tokens are still guesses."""
    torch.manual_seed(1)
    params = SamplingParams(temperature=1.0, top_k=2, seed=3)
    logits = torch.randn(1, VOCAB)
    ids = propose(proposer([params]), logits, [0], [7])[0].tolist()
    scores = expected_scores(logits, [params], [7])[0]
    kept = (~scores.isneginf()).nonzero()[:, 0].tolist()
    unfiltered = expected_scores(logits, [SamplingParams(temperature=1.0, seed=3)], [7])[0]
    unfiltered[kept] = float("-inf")
    assert ids[:2] == scores.topk(2).indices.tolist()
    assert ids[2:] == unfiltered.topk(3).indices.tolist()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=4, max_size=4),
    st.lists(st.sampled_from([1, 7, 127, 128, 129, 300, TOP_K_ALL]), min_size=4, max_size=4),
    st.lists(st.sampled_from([0.05, 0.5, 0.95, 1.0]), min_size=4, max_size=4),
    st.lists(st.sampled_from([0.0, 0.001, 0.2, 1.0]), min_size=4, max_size=4),
    st.integers(0, 2**31),
)
def test_dropped_is_what_the_filters_drop(
    temperature: list[float], top_k: list[int], top_p: list[float], min_p: list[float], seed: int
) -> None:
    rows = RowSampling.of(temperature, top_k, top_p, min_p, [0] * 4, CPU)
    generator = torch.Generator().manual_seed(seed)
    scores = 4 * torch.randn(4, VOCAB, generator=generator)
    expected = filter_scores(scores, rows).isneginf()
    # Sums in another order: a token on the very border may go either way.
    assert int((dropped(scores, rows) != expected).sum()) <= 1


def test_logit_bias_counts_before_everything() -> None:
    bias = SamplingParams(
        bias_ids=np.array([3, VOCAB + 5], np.int32), bias_values=np.array([100.0, 5.0], np.float32)
    )
    logits = torch.zeros(3, VOCAB)
    logits[:, 9] = 1
    ids = propose(proposer([GREEDY, bias]), logits, [0, 1, 0], [4, 4, 4])
    assert ids[:, 0].tolist() == [9, 3, 9]
    assert logits[1, 3] == 0, "the model's own buffer stays as it is"


def test_ids_that_the_target_lacks_are_never_proposed() -> None:
    logits = torch.arange(16.0)[None].repeat(2, 1)
    short = SamplingParams(vocab_limit=10)
    made = proposer([SamplingParams(vocab_limit=12), short], vocab=16)
    assert propose(made, logits, [0, 1], [0, 0])[:, 0].tolist() == [11, 9]
    assert propose(made, logits[:1], [1], [0]).max() == 9
    tiny = proposer([SamplingParams(vocab_limit=3)], vocab=16)
    assert propose(tiny, logits[:1], [0], [0])[0, :3].tolist() == [2, 1, 0]


def test_a_place_in_the_tables_forgets_its_last_session() -> None:
    made = proposer([SamplingParams(bias_ids=np.array([3]), bias_values=np.array([9.0]))])
    logits = torch.zeros(1, VOCAB)
    logits[0, 9] = 1
    made.set_session(0, GREEDY)
    assert propose(made, logits, [0], [0])[0, 0] == 9


def test_noise_is_the_same_however_it_was_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sgl_ssd.draft_server.proposals.NOISE_BYTES", 0)
    cache = NoiseCache(CPU, 8)  # 64 places
    rng = np.random.default_rng(0)
    for round_ in range(30):
        n = 200 if round_ == 20 else 40
        keys = [(int(rng.integers(3)), int(p)) for p in rng.integers(round_ * 5, 300, n)]
        seed = torch.tensor([k[0] for k in keys])
        position = torch.tensor([k[1] for k in keys])
        expected = gumbel(hash_bits(seed, position, 8))
        assert torch.equal(cache.rows(keys, seed, position), expected)


def test_excluding_moves_one_id_to_the_end() -> None:
    ids = torch.tensor([[4, 2, 9], [4, 2, 9], [4, 2, 9]])
    out = excluding(ids, torch.tensor([2, -1, 4]))
    assert out.tolist() == [[4, 9, 2], [4, 2, 9], [2, 9, 4]]
