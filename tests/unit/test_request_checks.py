"""Values that would have ended the scheduler are refused; all others pass as they are."""

from __future__ import annotations

import math
from typing import Any

import pytest
from sglang.srt.sampling.sampling_params import SamplingParams

from sgl_ssd.request_checks import FLOAT32_MAX, INTEGERS, NUMBERS, check_types


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


def test_every_parameter_of_these_types_is_checked() -> None:
    """A parameter that a new SGLang adds shows up here."""
    defaults = {name: getattr(SamplingParams(), name) for name in SamplingParams.__struct_fields__}
    numeric = {
        name
        for name, value in defaults.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    internal = {"stop_str_max_len", "stop_regex_max_len"}
    assert numeric - internal == {*INTEGERS, *NUMBERS} - {"sampling_seed"}
