"""How many bonus tokens to pre-speculate for each accepted length. Pure Python.

A fan-out is a list F_0..F_K: F_k branches for the outcome "k drafts accepted".
"""

from __future__ import annotations

from sgl_ssd.errors import ConfigError

MAX_FAN_OUT = 64
AUTO = "auto"
AUTO_MAX_FAN_OUT = 16
"""The largest F that is chosen automatically."""


def parse_fan_out(text: str | int, num_steps: int) -> list[int]:
    """`"4"` -> K+1 equal entries; `"6,4,2,2,4"` -> exactly those.

    Raises `ConfigError` naming the flag, the value and the remedy.
    """
    try:
        values = [int(part) for part in str(text).split(",")]
    except ValueError:
        raise ConfigError(
            f"--ssd-fan-out {text!r}: give a number, or {num_steps + 1} numbers separated by commas"
        ) from None
    if len(values) == 1:
        values *= num_steps + 1
    return check_fan_out(values, num_steps)


def check_fan_out(values: list[int], num_steps: int) -> list[int]:
    """`values` if it is a fan-out for K = `num_steps`; raises `ConfigError` otherwise."""
    if len(values) != num_steps + 1:
        raise ConfigError(
            f"--ssd-fan-out: {len(values)} entries, but K = {num_steps} needs {num_steps + 1} "
            "(one for each accepted length 0..K)"
        )
    if any(not 0 <= f <= MAX_FAN_OUT for f in values):
        text = ",".join(map(str, values))
        raise ConfigError(f"--ssd-fan-out {text}: every entry must lie in 0..{MAX_FAN_OUT}")
    return values


def fit_budget(fan_out: list[int], budget: int) -> list[int]:
    """`fan_out` shrunk until its sum is at most `budget` (rows per session).

    The deepest of the largest entries shrinks first: shallow outcomes are the likelier ones.
    """
    fitted = list(fan_out)
    excess = sum(fitted) - max(0, budget)
    while excess > 0:
        top = max(fitted)
        deepest = max(k for k, f in enumerate(fitted) if f == top)
        fitted[deepest] -= 1
        excess -= 1
    return fitted
