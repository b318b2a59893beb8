"""What is counted and reported per token ends with the text, also inside an accepted run."""

from __future__ import annotations

import inspect
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from sgl_ssd.scheduler import hooks
from sgl_ssd.scheduler.grammar import GrammarRow

THINK_END, STOP = 6, 300
_stock_finish = inspect.unwrap(Req.update_finish_state)


def make_req() -> Req:
    sampling = SamplingParams(max_new_tokens=100, stop_token_ids=[STOP])
    sampling.normalize(None)
    req = Req("r", "", array("q", [5]), sampling, eos_token_ids={1}, vocab_size=512)
    req.require_reasoning = True
    return req


def drafted(run: list[int]) -> Req:
    req = make_req()
    req.output_ids.extend(run)
    req.update_reasoning_tokens(run, [THINK_END])
    hooks._update_finish_state(_stock_finish, req, len(run))
    return req


def plain(run: list[int]) -> Req:
    req = make_req()
    for token in run:
        if not req.finished():
            req.output_ids.append(token)
            req.update_reasoning_tokens(token, [THINK_END])
            _stock_finish(req, 1)
    return req


@pytest.mark.parametrize("stop_at", range(9))
@pytest.mark.parametrize("think_ends_at", range(9))
def test_reasoning_tokens_are_those_of_single_tokens(stop_at: int, think_ends_at: int) -> None:
    run = [40 + i for i in range(8)]
    for at, token in ((think_ends_at, THINK_END), (stop_at, STOP)):
        if at < len(run):
            run[at] = token
    assert drafted(run).reasoning_tokens == plain(run).reasoning_tokens


@pytest.mark.parametrize(("finished_len", "rows"), [(None, 4), (7, 4), (6, 3), (4, 1), (3, 0)])
@pytest.mark.parametrize("mode", [True, "last"])
def test_hidden_states_end_with_the_text(finished_len: int | None, rows: int, mode: Any) -> None:
    """A run of 4 after 3 tokens; upstream itself does this for "last"."""
    seen: dict[str, Any] = {}
    req = make_req()
    req.output_ids.extend(range(40, 47))
    req.finished_len, req.return_hidden_states = finished_len, mode
    hooks._append_decode_hidden_states(
        lambda **kwargs: seen.update(kwargs), req=req, hidden_states="h", start=8, accept_len=4
    )
    assert (seen["start"], seen["hidden_states"]) == (8, "h")
    assert seen["accept_len"] == (4 if mode == "last" else rows)


def test_a_grammar_that_failed_is_asked_no_more() -> None:
    """Its request ends with the next result; until then a mask could only raise an error."""
    assert GrammarRow(SimpleNamespace(to_finish=None, grammar="g")).grammar == "g"
    assert GrammarRow(SimpleNamespace(to_finish="abort", grammar="g")).grammar is None
