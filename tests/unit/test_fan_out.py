"""Fan-out lists: parsing, limits, and shrinking to a budget."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_ssd.errors import ConfigError
from sgl_ssd.fan_out import MAX_FAN_OUT, check_fan_out, fit_budget, parse_fan_out

FAN_OUTS = st.lists(st.integers(0, MAX_FAN_OUT), min_size=2, max_size=17)


@pytest.mark.parametrize(
    ("text", "num_steps", "expected"),
    [
        ("4", 4, [4] * 5), (3, 1, [3, 3]), ("0", 2, [0, 0, 0]), ("6,4,2", 2, [6, 4, 2]),
        (" 6 , 4,2 ", 2, [6, 4, 2]), ("64,0", 1, [64, 0]),
    ],
)  # fmt: skip
def test_parse(text: str | int, num_steps: int, expected: list[int]) -> None:
    assert parse_fan_out(text, num_steps) == expected


@pytest.mark.parametrize("text", ["", "four", "4;4", "4,,4", "4,", ",", "1.5", "4 4", "0x4"])
def test_what_is_no_number_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_fan_out(text, 4)
    message = str(error.value)
    assert "--ssd-fan-out" in message and repr(text) in message and "5 numbers" in message


@pytest.mark.parametrize("text", ["4,4", "1,2,3,4,5,6", "1,2,3,4"])
def test_a_wrong_count_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_fan_out(text, 4)
    message = str(error.value)
    assert "--ssd-fan-out" in message and f"{text.count(',') + 1} entries" in message
    assert "K = 4 needs 5" in message


@pytest.mark.parametrize("text", ["-1", "65", "1,2,3,4,65", "4,4,4,4,-3", str(2**70)])
def test_a_value_out_of_range_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_fan_out(text, 4)
    message = str(error.value)
    assert "--ssd-fan-out" in message and text.split(",")[-1] in message
    assert f"0..{MAX_FAN_OUT}" in message


def test_check_returns_what_it_accepts() -> None:
    values = [1, 2, 3]
    assert check_fan_out(values, 2) is values


@settings(max_examples=500, deadline=None, database=None)
@given(fan_out=FAN_OUTS, budget=st.integers(-5, 400))
def test_a_fitted_fan_out_keeps_the_budget_and_its_shape(fan_out: list[int], budget: int) -> None:
    before = list(fan_out)
    fitted = fit_budget(fan_out, budget)
    assert fan_out == before, "the argument is not changed"
    assert sum(fitted) == min(sum(fan_out), max(0, budget)), "nothing is given away"
    assert all(0 <= small <= large for small, large in zip(fitted, fan_out, strict=True))
    # Large entries pay first: whoever has lost something is within one of the greatest left.
    top = max(fitted)
    assert all(a == b or a >= top - 1 for a, b in zip(fitted, fan_out, strict=True))


@settings(max_examples=300, deadline=None, database=None)
@given(value=st.integers(0, MAX_FAN_OUT), count=st.integers(2, 17), budget=st.integers(0, 400))
def test_among_equals_the_deepest_shrinks_first(value: int, count: int, budget: int) -> None:
    fitted = fit_budget([value] * count, budget)
    assert fitted == sorted(fitted, reverse=True)


@pytest.mark.parametrize(
    ("fan_out", "budget", "expected"),
    [
        ([4, 4, 4], 12, [4, 4, 4]), ([4, 4, 4], 100, [4, 4, 4]), ([4, 4, 4], 11, [4, 4, 3]),
        ([4, 4, 4], 2, [1, 1, 0]), ([4, 4, 4], 0, [0, 0, 0]), ([4, 4, 4], -3, [0, 0, 0]),
        ([8, 2, 2], 9, [5, 2, 2]), ([2, 2, 8], 6, [2, 2, 2]),
    ],
)  # fmt: skip
def test_fit_by_example(fan_out: list[int], budget: int, expected: list[int]) -> None:
    assert fit_budget(fan_out, budget) == expected
