"""Values that would have ended the scheduler are refused; all others pass as they are."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.sampling.sampling_params import SamplingParams

from sgl_ssd.request_checks import (
    FLOAT32_MAX,
    INTEGERS,
    NUMBERS,
    _validate_logprobs,
    _verify,
    check_types,
)


def params(**values: Any) -> SamplingParams:
    made = SamplingParams()
    for name, value in values.items():
        setattr(made, name, value)
    return made


def test_what_can_be_served_passes() -> None:
    check_types(params())
    bias = {"5": -math.inf, "6": FLOAT32_MAX, "7": 1}
    check_types(params(sampling_seed=-(2**70), max_new_tokens=None, logit_bias=bias, top_p=1))


def test_whole_numbers_may_be_written_as_floats() -> None:
    made = params(max_new_tokens=5.0, sampling_seed=7.0, top_k=40.0)
    check_types(made)
    found = made.max_new_tokens, made.sampling_seed, made.top_k
    assert found == (5, 7, 40) and all(type(value) is int for value in found)


def test_counts_are_cut_to_what_32_bits_hold() -> None:
    made = params(max_new_tokens=2**40, min_new_tokens=2**33, top_k=2**31, sampling_seed=2**40)
    check_types(made)
    assert (made.max_new_tokens, made.min_new_tokens, made.top_k) == (1 << 30,) * 3
    assert made.sampling_seed == 2**40


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", ["x", "5", 5.5, math.nan, math.inf, True, [5], {}])
def test_integers(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be an integer"):
        check_types(params(**{name: value}))


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", ["x", "0.5", True, [0.5], {}])
def test_numbers(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a number"):
        check_types(params(**{name: value}))


@pytest.mark.parametrize("value", [1e39, -1e39, 10**400, math.inf, math.nan, "1", None, True])
def test_biases(value: Any) -> None:
    with pytest.raises(ValueError, match="logit_bias of 5 must be a number of 32 bits"):
        check_types(params(logit_bias={"5": value}))


def test_biases_that_are_no_object() -> None:
    with pytest.raises(ValueError, match="logit_bias must be an object"):
        check_types(params(logit_bias=[1.0]))


@pytest.mark.parametrize(
    ("given", "kept"), [({1, 2**40, -5, 99, 100}, {1, 99}), ({100}, None), (None, None)]
)
def test_stop_tokens_that_no_text_has_are_left_out(given: Any, kept: Any) -> None:
    made, verified = params(stop_token_ids=given), []
    _verify(lambda *args: verified.append(args), made, 100)
    assert made.stop_token_ids == kept and verified == [(made, 100)]


@pytest.mark.parametrize(
    ("count", "fits"),
    [
        (None, True),
        (0, True),
        (100, True),
        (101, False),
        (-1, False),
        ("5", False),
        (1.5, False),
        (True, False),
    ],
)
def test_no_more_logprobs_than_tokens(count: Any, fits: bool) -> None:
    manager = SimpleNamespace(model_config=SimpleNamespace(vocab_size=100))
    obj, seen = SimpleNamespace(top_logprobs_num=count), []
    if fits:
        _validate_logprobs(lambda *args: seen.append(args), manager, obj)
        assert seen == [(manager, obj)]
        return
    with pytest.raises(ValueError, match=r"top_logprobs_num must lie in 0\.\.100"):
        _validate_logprobs(lambda *args: None, manager, obj)


def test_every_parameter_of_these_types_is_checked() -> None:
    """A parameter that a new SGLang adds shows up here."""
    plain = SamplingParams()
    defaults = {name: getattr(plain, name) for name in SamplingParams.__struct_fields__}
    numeric = {
        name
        for name, value in defaults.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    internal = {"stop_str_max_len", "stop_regex_max_len"}
    assert numeric - internal == {*INTEGERS, *NUMBERS} - {"sampling_seed"}
