"""Rejection verification end to end: what comes out is distributed as the target says."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest

from parity.harness import configure, send_all, ssd_state
from servers import ServerProcess

pytestmark = pytest.mark.integration

DRAWS = 2000
AT_ONCE = 100
TOKENS = 3  # of each draw, compared with the exact distribution
FILTERS: dict[str, dict[str, float]] = {
    "hot, top-k": {"temperature": 1.6, "top_k": 3},
    "warm, top-k, top-p": {"temperature": 1.0, "top_k": 4, "top_p": 0.95},
}


@pytest.fixture(scope="module")
def server(ssd_server: ServerProcess) -> Iterator[ServerProcess]:
    """The shared server, verifying by rejection meanwhile."""
    configure(
        ssd_server, ssd_drafting=1, ssd_verification=1, ssd_num_steps=4, ssd_fan_out=4,
        ssd_backup=2,
    )  # fmt: skip
    yield ssd_server
    configure(ssd_server, ssd_verification=0, ssd_saguaro_c=1, ssd_proposal_top_m=64)


def moved(server: ServerProcess, before: dict[str, Any]) -> dict[str, int]:
    after = ssd_state(server)
    names = ("rounds", "drafted", "accepted", "hits", "invalid_messages")
    return {name: after[name] - before[name] for name in names}


def next_tokens(server: ServerProcess, prefixes: list[list[int]], filters: dict[str, float]) -> Any:
    """The exact distribution after each prefix, from the target's logprobs: [{token: p}]."""
    body = {
        "input_ids": prefixes,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": 20,
    }
    distributions = []
    for answer in server.post("/generate", body):
        top = answer["meta_info"]["output_top_logprobs"][0]
        # Only as many tokens as top-k keeps have to be known: the others' mass is not.
        logits = sorted(((v / filters["temperature"], t) for v, t, *_ in top), reverse=True)
        kept = logits[: int(filters["top_k"])]
        if filters.get("top_p", 1.0) < 1.0:
            kept = _top_p(server, kept, filters)
        total = math.fsum(math.exp(v) for v, _ in kept)
        distributions.append({t: math.exp(v) / total for v, t in kept})
    return distributions


def _top_p(server: ServerProcess, kept: list[Any], filters: dict[str, float]) -> list[Any]:
    """At temperature 1 logprobs are of the whole vocabulary, which top-p goes by."""
    assert filters["temperature"] == 1.0
    before = list(itertools.accumulate((math.exp(v) for v, _ in kept), initial=0.0))
    return [item for item, mass in zip(kept, before, strict=False) if mass <= filters["top_p"]]


def exact(
    server: ServerProcess, prompt: list[int], filters: dict[str, float]
) -> dict[tuple[int, ...], float]:
    """Probability of every sequence of the next `TOKENS` tokens."""
    known: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(TOKENS):
        found = next_tokens(server, [[*prompt, *path] for path in known], filters)
        known = {
            (*path, token): chance * p
            for (path, chance), distribution in zip(known.items(), found, strict=True)
            for token, p in distribution.items()
        }
    return known


def draw(server: ServerProcess, prompt: list[int], filters: dict[str, float]) -> list[Any]:
    """The first tokens of many short answers, each with a seed of its own."""
    texts = []
    for first in range(0, DRAWS, AT_ONCE):
        body = {
            "input_ids": [prompt] * AT_ONCE,
            "sampling_params": [
                {"max_new_tokens": TOKENS + 2, "ignore_eos": True, "sampling_seed": seed, **filters}
                for seed in range(first, first + AT_ONCE)
            ],
        }
        answers = server.post("/generate", body, timeout=600)
        texts += [tuple(answer["output_ids"][:TOKENS]) for answer in answers]
    return texts


def check_chi_square(seen: list[Any], expected: dict[Any, float]) -> None:
    """Pearson's test at about 1e-5; cells of fewer than five are taken together."""
    n = len(seen)
    assert set(seen) <= set(expected), "a token that the target excludes"
    counts = {key: 0 for key in expected}
    for key in seen:
        counts[key] += 1
    cells = [(counts[k], n * p) for k, p in expected.items() if n * p >= 5]
    rest = (n - sum(c for c, _ in cells), n - math.fsum(e for _, e in cells))
    if rest[1] >= 5:
        cells.append(rest)
    if len(cells) < 2:
        return
    value = math.fsum((c - e) ** 2 / e for c, e in cells)
    k = len(cells) - 1
    # Wilson and Hilferty: the cube root is nearly normal.
    z = ((value / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k))
    assert z < 4.3, f"chi-square {value:.1f} for {k} degrees of freedom"


def marginal(joint: dict[tuple[int, ...], float], place: int) -> dict[int, float]:
    out: dict[int, float] = {}
    for path, p in joint.items():
        out[path[place]] = out.get(path[place], 0.0) + p
    return out


@pytest.mark.parametrize(
    ("name", "saguaro_c", "top_m"),
    [("hot, top-k", 1, 64), ("warm, top-k, top-p", 1, 64), ("hot, top-k", 0.3, 2)],
)
def test_tokens_are_distributed_as_the_target_says(
    server, held_out, name, saguaro_c, top_m
) -> None:
    """The last case weighs the likely tokens down and leaves one of three out of proposals."""
    filters = FILTERS[name]
    prompt = [token for ids in held_out for token in ids][700:760]
    configure(server, ssd_drafting=0, ssd_saguaro_c=saguaro_c, ssd_proposal_top_m=top_m)
    joint = exact(server, prompt, filters)
    configure(server, ssd_drafting=1)
    assert math.isclose(math.fsum(joint.values()), 1.0, abs_tol=1e-6)
    before = ssd_state(server)
    texts = draw(server, prompt, filters)
    counts = moved(server, before)
    assert counts["drafted"] > DRAWS // 2 and counts["hits"] > DRAWS // 4, counts
    # Drafts were rejected too: what replaces them is under test.
    assert counts["accepted"] < 0.95 * counts["drafted"], counts
    assert counts["invalid_messages"] == 0
    check_chi_square([t[0] for t in texts], marginal(joint, 0))
    check_chi_square([t[2] for t in texts], marginal(joint, 2))
    check_chi_square(texts, joint)


def test_greedy_requests_are_the_same_in_both_modes(server, prompts) -> None:
    bodies = [
        {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 40, "temperature": 0.0, "ignore_eos": True},
        }
        for ids in prompts[:8]
    ]
    by_rejection = send_all(server, bodies, 4)
    configure(server, ssd_verification=0)
    coupled = send_all(server, bodies, 4)
    configure(server, ssd_verification=1)
    assert [a["output_ids"] for a in by_rejection] == [a["output_ids"] for a in coupled]


@pytest.mark.parametrize("backup", [0, 1, 2])
def test_every_backup_with_penalties_grammars_and_logprobs(server, prompts, backup) -> None:
    """Drafts that break a grammar have no mass and are replaced; nothing is cut or lost."""
    configure(server, ssd_backup=backup)
    shared = {"max_new_tokens": 24, "temperature": 1.0, "ignore_eos": True}
    kinds: list[dict[str, Any]] = [
        {"regex": "(cat|dog|fish)+!"}, {"frequency_penalty": 0.7, "min_new_tokens": 5},
        {"top_p": 0.8, "min_p": 0.02}, {"logit_bias": {"5": 4.0}, "repetition_penalty": 1.2}, {},
    ]  # fmt: skip
    bodies = [
        {"input_ids": ids, "sampling_params": shared | kind, "return_logprob": True}
        for ids, kind in zip(prompts[8:18], kinds * 2, strict=True)
    ]
    before = ssd_state(server)
    answers = send_all(server, bodies, 4)
    counts = moved(server, before)
    configure(server, ssd_backup=2)
    assert counts["invalid_messages"] == 0 and counts["drafted"] > 0
    for body, answer in zip(bodies, answers, strict=True):
        meta = answer["meta_info"]
        logprobs = meta["output_token_logprobs"]
        assert [t for _, t, *_ in logprobs] == answer["output_ids"]
        assert len(answer["output_ids"]) == meta["completion_tokens"] > 0
        if "regex" in body["sampling_params"]:
            words = answer["text"].rstrip("!")
            for word in ("cat", "dog", "fish"):
                words = words.replace(word, "")
            assert words == "" or any(w.startswith(words) for w in ("cat", "dog", "fish"))
