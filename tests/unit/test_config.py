"""Settings: validated once, with errors that name flag, value and remedy."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from sgl_ssd.config import ENV, DraftServerConfig, VerifierConfig
from sgl_ssd.errors import ConfigError
from sgl_ssd.protocol import BACKUPS, MAX_STEPS

ENDPOINT = "ipc:///tmp/sgl_ssd_test/draft"
INF, NAN = float("inf"), float("nan")


def draft_config(**changes: Any) -> DraftServerConfig:
    return DraftServerConfig(**{"endpoint": ENDPOINT, "model_path": "m", **changes})


def verifier_config(**changes: Any) -> VerifierConfig:
    return VerifierConfig(**{"endpoints": [ENDPOINT], **changes})


def test_defaults_are_valid_and_fit_together() -> None:
    draft, verifier = draft_config(), verifier_config()
    assert draft.num_steps == verifier.num_steps and draft.fan_out == verifier.fan_out
    assert len(draft.fan_out) == draft.num_steps + 1
    assert draft_config().fan_out is not draft.fan_out, "defaults are not shared"


@pytest.mark.parametrize("config", [draft_config(), verifier_config()])
def test_settings_cannot_be_changed_later(config: Any) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_steps = 5


COMMON = [
    ({"num_steps": 0}, "--speculative-num-steps 0", f"1..{MAX_STEPS}"),
    ({"num_steps": -5}, "--speculative-num-steps -5", f"1..{MAX_STEPS}"),
    ({"num_steps": 65}, "--speculative-num-steps 65", f"1..{MAX_STEPS}"),
    ({"backup": "slow"}, "--ssd-backup 'slow'", "auto, jit, fast, none"),
    ({"fan_out": [4] * 4}, "--ssd-fan-out", "needs 5"),
    ({"fan_out": [4, 4, 4, 4, -1]}, "--ssd-fan-out 4,4,4,4,-1", "0..64"),
    ({"fan_out": [65] * 5}, "--ssd-fan-out 65,65,65,65,65", "0..64"),
]
ENDPOINTS = [
    ("tcp://0.0.0.0:1", "'tcp://0.0.0.0:1'", "sgl_ssd.keys"),
    ("nonsense", "'nonsense'", "tcp://HOST:PORT"),
]


def assert_refused(make: Any, changes: dict, flag_and_value: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as error:
        make(**changes)
    assert flag_and_value in str(error.value) and remedy in str(error.value)


@pytest.mark.parametrize("make", [draft_config, verifier_config])
@pytest.mark.parametrize(("changes", "flag_and_value", "remedy"), COMMON, ids=str)
def test_both_sides_refuse(make: Any, changes: dict, flag_and_value: str, remedy: str) -> None:
    assert_refused(make, changes, flag_and_value, remedy)


@pytest.mark.parametrize(("endpoint", "value", "remedy"), ENDPOINTS)
def test_both_sides_refuse_what_is_no_endpoint(endpoint: str, value: str, remedy: str) -> None:
    assert_refused(draft_config, {"endpoint": endpoint}, value, remedy)
    assert_refused(verifier_config, {"endpoints": [ENDPOINT, endpoint]}, value, remedy)


@pytest.mark.parametrize(
    ("endpoints", "remedy"), [([], "at least one"), ([ENDPOINT, ENDPOINT], "named twice")]
)
def test_a_verifier_needs_draft_servers_and_each_once(endpoints: list[str], remedy: str) -> None:
    assert_refused(verifier_config, {"endpoints": endpoints}, "--ssd-draft-endpoint", remedy)


@pytest.mark.parametrize(
    ("changes", "flag_and_value", "remedy"),
    [
        ({"mem_fraction_static": 0.0}, "--ssd-draft-mem-fraction-static 0.0", "between 0 and 1"),
        ({"mem_fraction_static": 1.0}, "--ssd-draft-mem-fraction-static 1.0", "between 0 and 1"),
        ({"mem_fraction_static": NAN}, "--ssd-draft-mem-fraction-static nan", "between 0 and 1"),
        ({"max_branch_rows": 0}, "--ssd-max-branch-rows 0", "positive"),
        ({"max_total_tokens": -4}, "max-total-tokens -4", "positive"),
        ({"context_length": 0}, "context-length 0", "positive"),
        ({"base_gpu_id": -3}, "base-gpu-id -3", "0"),
        ({"http_port": 99999}, "http-port 99999", "1..65535"),
        ({"prefill_chunk": 0}, "--prefill-chunk 0", "positive"),
        ({"max_sessions": -1}, "-1", "positive"),
        ({"lease_s": 0.0}, "--lease-s 0.0", "positive"),
        ({"lease_s": NAN}, "--lease-s nan", "positive"),
    ],
    ids=str,
)
def test_draft_server_refuses(changes: dict, flag_and_value: str, remedy: str) -> None:
    assert_refused(draft_config, changes, flag_and_value, remedy)


@pytest.mark.parametrize(
    ("changes", "flag_and_value"),
    [
        ({field: value}, f"--ssd-{flag} {value}")
        for field, flag in (
            ("draft_timeout_ms", "draft-timeout-ms"),
            ("draft_start_timeout_s", "draft-start-timeout"),
        )
        for value in (-1.0, 0.0, NAN, INF, -INF)
    ],
    ids=str,
)
def test_verifier_refuses_times_that_are_no_times(changes: dict, flag_and_value: str) -> None:
    """A negative one would block the model's thread for ever, an endless one cannot be polled."""
    assert_refused(verifier_config, changes, flag_and_value, "must be positive")


@pytest.mark.parametrize(
    ("changes", "flag_and_value", "remedy"),
    [
        ({"verification": "greedy"}, "--ssd-verification 'greedy'", "choose one of"),
        ({"saguaro_c": 0.0}, "--ssd-saguaro-c 0.0", "0 < C <= 1"),
        ({"saguaro_c": 1.5}, "--ssd-saguaro-c 1.5", "0 < C <= 1"),
        ({"saguaro_c": float("nan")}, "--ssd-saguaro-c nan", "0 < C <= 1"),
        ({"proposal_top_m": 0}, "--ssd-proposal-top-m 0", "must lie in 1.."),
        ({"proposal_top_m": 5000}, "--ssd-proposal-top-m 5000", "must lie in 1.."),
    ],
    ids=str,
)
def test_verifier_refuses_what_cannot_be_verified_with(
    changes: dict, flag_and_value: str, remedy: str
) -> None:
    assert_refused(verifier_config, changes, flag_and_value, remedy)


@pytest.mark.parametrize("backup", BACKUPS)
def test_every_backup_is_accepted(backup: str) -> None:
    assert draft_config(backup=backup).backup == verifier_config(backup=backup).backup == backup


def test_the_longest_chain_is_accepted() -> None:
    assert draft_config(num_steps=MAX_STEPS, fan_out=[1] * (MAX_STEPS + 1)).num_steps == MAX_STEPS


def test_settings_reach_child_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV, raising=False)
    assert VerifierConfig.from_environment() is None
    everything = verifier_config(
        num_steps=2, fan_out=[3, 2, 1], backup="fast", drafting=False, draft_timeout_ms=1.5,
        draft_required=True, draft_start_timeout_s=7.0, draft_keys="K", verification="rejection",
        saguaro_c=0.5, proposal_top_m=9, fan_out_auto=True, steps_auto=True,
        trace_file="/T", push=False,
    )  # fmt: skip
    defaults = VerifierConfig(endpoints=[ENDPOINT])
    for f in dataclasses.fields(VerifierConfig):
        if f.name != "endpoints":
            assert getattr(everything, f.name) != getattr(defaults, f.name), f.name
    for config in (everything, defaults):
        config.to_environment()
        assert VerifierConfig.from_environment() == config
