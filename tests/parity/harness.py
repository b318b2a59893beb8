"""Sends the same requests twice and explains every difference.

A difference is excused only as a near tie: the target computes the same position in forwards of
different widths, whose float sums differ by about 1e-6, so two candidates closer than `TIE` may
swap. The gap is measured on the server that drafts nothing, at the first diverging token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from servers import ServerProcess
from sgl_ssd.sampling import TOP_K_ALL, RowSampling, coupled_scores

TIE = 1e-4
Body = dict[str, Any]


def send_all(server: ServerProcess, bodies: Sequence[Body], concurrency: int) -> list[Any]:
    """Answers of `/generate` in the order of `bodies`, at most `concurrency` at a time."""
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda body: server.post("/generate", body, timeout=600), bodies))


def configure(server: ServerProcess, **settings: Any) -> None:
    """Change `ssd_*` settings of a running server."""
    answer = server.post("/set_internal_state", {"server_args": settings})
    updated = answer.get("updated") if isinstance(answer, dict) else answer[0]
    if isinstance(updated, list):
        updated = all(updated)
    if not updated:
        raise AssertionError(f"settings refused: {settings}: {answer}")


def ssd_state(server: ServerProcess) -> dict[str, Any]:
    """The `ssd` section of `/server_info`."""
    return server.get("/server_info")["internal_states"][0]["ssd"]


@dataclass
class Report:
    """What a comparison found."""

    compared: int = 0
    tokens: int = 0
    ties: int = 0
    differences: list[str] = field(default_factory=list)

    def merge(self, other: Report) -> None:
        self.compared += other.compared
        self.tokens += other.tokens
        self.ties += other.ties
        self.differences += other.differences

    def check(self, ties_per_million: float = 5.0) -> None:
        """Raise AssertionError on any difference, or on too many near ties."""
        if self.differences:
            shown = "\n".join(self.differences[:5])
            raise AssertionError(f"{len(self.differences)} of {self.compared} differ:\n{shown}")
        allowed = max(1.0, self.tokens * ties_per_million / 1e6)
        if self.ties > allowed:
            raise AssertionError(f"{self.ties} near ties in {self.tokens} tokens")


def compare(
    oracle: ServerProcess,
    bodies: Sequence[Body],
    expected: Sequence[Any],
    actual: Sequence[Any],
    label: str = "",
) -> Report:
    """Compare answers field by field; `oracle` must draft nothing now (ties are measured on it)."""
    report = Report()
    for body, want, got in zip(bodies, expected, actual, strict=True):
        report.compared += 1
        report.tokens += len(want["output_ids"])
        problem = _difference(want, got)
        if problem is None:
            continue
        if _is_near_tie(oracle, body, want["output_ids"], got["output_ids"]):
            report.ties += 1
            continue
        report.differences.append(f"{label} {problem}\n  body {_short(body)}")
    return report


def _difference(want: Any, got: Any) -> str | None:
    if want["output_ids"] != got["output_ids"]:
        at = _first_difference(want["output_ids"], got["output_ids"])
        return (
            f"token {at} of {len(want['output_ids'])}/{len(got['output_ids'])}: "
            f"{want['output_ids'][at : at + 4]} became {got['output_ids'][at : at + 4]}"
        )
    if want["text"] != got["text"]:
        return f"text {want['text']!r} became {got['text']!r}"
    for key in ("finish_reason", "prompt_tokens", "completion_tokens", "reasoning_tokens"):
        if want["meta_info"].get(key) != got["meta_info"].get(key):
            return f"{key} {want['meta_info'].get(key)} became {got['meta_info'].get(key)}"
    return _logprob_difference(want["meta_info"], got["meta_info"])


def _logprob_difference(want: dict[str, Any], got: dict[str, Any]) -> str | None:
    for key in (
        "input_token_logprobs",
        "output_token_logprobs",
        "output_top_logprobs",
        "output_token_ids_logprobs",
    ):
        a, b = _numbers(want.get(key)), _numbers(got.get(key))
        if len(a) != len(b):
            return f"{key}: {len(a)} numbers became {len(b)}"
        for x, y in zip(a, b, strict=True):
            if abs(x - y) > 1e-4 * max(1.0, abs(x)) and not (x < -1e30 and y < -1e30):
                return f"{key}: {x} became {y}"
    return None


def _numbers(value: Any) -> list[float]:
    """All numbers in a nested list, in order; the ids of top candidates that tie may swap."""
    if isinstance(value, float):
        return [value]
    if isinstance(value, list | tuple):
        return [number for item in value for number in _numbers(item)]
    return []


def _first_difference(a: list[int], b: list[int]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def _is_near_tie(oracle: ServerProcess, body: Body, want: list[int], got: list[int]) -> bool:
    """Whether the two candidates at the first difference are closer than `TIE`.

    The scores are rebuilt from the target's log-probabilities of the whole vocabulary and the
    request's own noise. Penalties and grammars change logits after the ones reported, so such
    requests are never excused by this rule.
    """
    at = _first_difference(want, got)
    if at >= len(want) or at >= len(got) or "input_ids" not in body:
        return False
    params = body["sampling_params"]
    if any(params.get(name) for name in ("regex", "json_schema", "ebnf")):
        return False
    prefix = [*body["input_ids"], *want[:at]]
    probe = {
        "input_ids": prefix,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
        "return_logprob": True,
        "token_ids_logprob": sorted({want[at], got[at]}),
        "lora_path": body.get("lora_path"),
        "top_logprobs_num": 4096,
    }
    top = oracle.post("/generate", probe)["meta_info"]["output_top_logprobs"][0]
    size = max(item[1] for item in top) + 1
    logits = torch.full((1, size), float("-inf"))
    for value, token, *_ in top:
        logits[0, token] = value
    temperature = float(params.get("temperature", 1.0))
    rows = RowSampling.of(
        [temperature],
        [params.get("top_k", -1) if params.get("top_k", -1) > 0 else TOP_K_ALL],
        [params.get("top_p", 1.0)],
        [params.get("min_p", 0.0)],
        [params.get("sampling_seed", 0)],
        "cpu",
    )
    scores = coupled_scores(logits, rows, torch.tensor([len(prefix)]))[0]
    gap = abs(float(scores[want[at]] - scores[got[at]]))
    # A token on the border of top-p or top-k may be in or out: its score is then -inf on one side.
    border = not torch.isfinite(scores[[want[at], got[at]]]).all()
    return gap < TIE or border


def _short(body: Body) -> str:
    shown = {k: v for k, v in body.items() if k != "input_ids"}
    return f"{len(body.get('input_ids', []))} prompt tokens, {json.dumps(shown)[:400]}"
