"""Custom logit processors see each position's own history, as in plain decoding."""

from __future__ import annotations

from typing import Any

import pytest
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from parity.harness import compare, configure, send_all, ssd_state

pytestmark = pytest.mark.integration

SOURCE = '''
class Force(CustomLogitProcessor):
    """Every token becomes `token_id`."""

    def __call__(self, logits, custom_param_list=None):
        for i, params in enumerate(custom_param_list):
            logits[i] = float("-inf")
            logits[i, params["token_id"]] = 0.0
        return logits


class Budget(CustomLogitProcessor):
    """After `budget` tokens of output, first a line break, then `end`; as thinking budgets do."""

    def __call__(self, logits, custom_param_list=None):
        for i, params in enumerate(custom_param_list):
            said = list(params["__req__"].output_ids)
            if len(said) < params["budget"] or params["end"] in said:
                continue
            logits[i] = float("-inf")
            last = said[-1] if said else None
            logits[i, params["end"] if last == params["line"] else params["line"]] = 0.0
        return logits
'''


def _processor(name: str) -> str:
    # A class of `__main__` is sent by value; the server cannot import this module.
    space: dict[str, Any] = {"__name__": "__main__", "CustomLogitProcessor": CustomLogitProcessor}
    exec(SOURCE, space)
    return space[name].to_str()


@pytest.fixture
def drafting(ssd_server):
    configure(ssd_server, ssd_drafting=1, ssd_num_steps=7, ssd_fan_out=3, ssd_backup=2)
    yield ssd_server
    configure(ssd_server, ssd_drafting=0)


def _body(ids: list[int], name: str | None, params: Any, **sampling: Any) -> dict[str, Any]:
    sampling = {"temperature": 0.0, "max_new_tokens": 20, "ignore_eos": True, **sampling}
    body: dict[str, Any] = {"input_ids": ids, "sampling_params": sampling}
    if name is not None:
        sampling["custom_params"] = params
        body["custom_logit_processor"] = _processor(name)
    return body


def test_a_forced_token_is_the_only_one(drafting):
    bodies = [_body([5, 6, 7 + i], "Force", {"token_id": 5 + i}) for i in range(3)]
    bodies += [_body([5, 6], "Force", {"token_id": 9}, temperature=1.0, top_p=0.9, sampling_seed=1)]
    for body, answer in zip(bodies, send_all(drafting, bodies, 4), strict=True):
        token = body["sampling_params"]["custom_params"]["token_id"]
        assert answer["output_ids"] == [token] * 20


def test_a_budget_that_reads_the_request_equals_plain_sglang(
    drafting, plain_bundled, prompts, tokenizer
):
    """Beside requests without processors, which go on drafting."""
    line, end = tokenizer("\n", add_special_tokens=False)["input_ids"][0], 6
    bodies = []
    for i, ids in enumerate(prompts[6:12]):
        bodies.append(_body(ids, "Budget", {"budget": 2 * i, "line": line, "end": end}))
        bodies.append(_body(ids, None, None, max_new_tokens=30))
    want = send_all(plain_bundled, bodies, 1)
    before = ssd_state(drafting)
    got = send_all(drafting, bodies, 6)
    after = ssd_state(drafting)
    compare(drafting, bodies, want, got, "budget").check()
    assert after["accepted"] > before["accepted"]
    for i, answer in enumerate(got[::2]):
        assert answer["output_ids"].index(end) in (2 * i, 2 * i + 1)


def test_a_forbidden_token_and_min_p_at_every_position(drafting, prompts):
    """logit_bias -100 holds at each of 64 positions, drafted or not; min_p 0.9 is nearly greedy."""
    said = send_all(drafting, [_body(prompts[10], None, None, max_new_tokens=64)], 1)[0]
    common = max(set(said["output_ids"]), key=said["output_ids"].count)
    for temperature in (0.0, 1.0):
        body = _body(
            prompts[10], None, None, max_new_tokens=64, temperature=temperature,
            sampling_seed=3, logit_bias={str(common): -100.0},
        )  # fmt: skip
        assert common not in send_all(drafting, [body], 1)[0]["output_ids"]
    greedy = said["output_ids"]
    narrow = _body(
        prompts[10], None, None, max_new_tokens=64, temperature=0.7, min_p=1.0, sampling_seed=4
    )
    assert send_all(drafting, [narrow], 1)[0]["output_ids"] == greedy


def test_both_signs_of_a_penalty_change_the_text(drafting, plain_bundled, tokenizer):
    ids = tokenizer("class Stack:\n    def __init__(self):\n        self.items = []\n")["input_ids"]
    bodies = [
        _body(ids, None, None, max_new_tokens=48, frequency_penalty=value)
        for value in (-2.0, 0.0, 2.0)
    ]
    want = send_all(plain_bundled, bodies, 1)
    got = send_all(drafting, bodies, 3)
    compare(drafting, bodies, want, got, "frequency_penalty").check()
    assert len({tuple(answer["output_ids"]) for answer in got}) == 3
