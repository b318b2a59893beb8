"""The launcher's command line: what is ours, what is SGLang's, and that nothing is lost."""

from __future__ import annotations

import argparse
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from sgl_ssd.args import AUTO_NUM_STEPS, LaunchPlan, add_ssd_args, from_keywords, parse
from sgl_ssd.config import DraftServerConfig
from sgl_ssd.errors import ConfigError
from sgl_ssd.fan_out import AUTO_MAX_FAN_OUT
from sgl_ssd.keys import make_keys
from sgl_ssd.models import DRAFT_PATH, TARGET_PATH

PRIVATE = "ipc:///tmp/sgl_ssd_test/draft"
PAIR = ["--model-path", "T", "--speculative-draft-model-path", "D"]
OURS = ["--speculative-algorithm", "SSD", "--speculative-num-steps", "4"]


def plan(*argv: str) -> LaunchPlan:
    return parse(list(argv), PRIVATE)


def pair(*argv: str) -> LaunchPlan:
    return plan(*PAIR, *argv)


def draft(*argv: str) -> DraftServerConfig:
    (config,) = pair(*argv).drafts
    return config


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as error:
        plan(*argv)
    return str(error.value)


# -- models --------------------------------------------------------------------------------------


def test_without_arguments_the_bundled_pair_is_served() -> None:
    p = plan()
    assert (p.target_path, p.draft_path) == (str(TARGET_PATH), str(DRAFT_PATH))
    assert [d.model_path for d in p.drafts] == [str(DRAFT_PATH)]
    assert p.sglang_argv == ["--model-path", str(TARGET_PATH), *OURS]
    assert p.verifier.endpoints == [PRIVATE] == [d.endpoint for d in p.drafts]
    assert p.verifier.drafting and not p.verifier.draft_required


@pytest.mark.parametrize(
    "argv",
    [
        ["--model-path", "T", "--speculative-draft-model-path", "D"],
        ["--model", "T", "--speculative-draft-model", "D"],
        ["--model-path=T", "--speculative-draft-model-path=D"],
        ["--model=T", "--speculative-draft-model=D"],
        ["--speculative-draft-model", "D", "--model", "T"],
        ["--model", "X", "--model", "T", "--speculative-draft-model", "D"],
    ],
    ids=" ".join,
)
def test_every_way_to_name_the_models(argv: list[str]) -> None:
    p = plan(*argv)
    assert (p.target_path, p.draft_path) == ("T", "D")
    assert [d.model_path for d in p.drafts] == ["D"]
    assert p.sglang_argv == ["--model-path", "T", *OURS]


def test_a_target_without_a_draft_is_refused() -> None:
    message = refusal("--model-path", "T")
    assert "--speculative-draft-model-path" in message and "--ssd-draft-endpoint" in message


def test_a_draft_without_a_target_is_refused() -> None:
    message = refusal("--speculative-draft-model", "D")
    assert "--speculative-draft-model-path" in message and "--model-path" in message


def test_a_draft_server_that_runs_elsewhere() -> None:
    p = plan("--model-path", "T", "--ssd-draft-endpoint", "tcp://127.0.0.1:7000")
    assert not p.drafts and p.draft_path is None
    assert p.verifier.endpoints == ["tcp://127.0.0.1:7000"]
    message = refusal("--model-path", "T", "--ssd-draft-endpoint", "tcp://10.0.0.1:7000")
    assert "tcp://10.0.0.1:7000" in message


# -- SGLang's flags pass through -----------------------------------------------------------------


@pytest.mark.parametrize(
    "argv",
    [
        ["--port", "30001"], ["--port=30001"], ["--host", "0.0.0.0"], ["--tp-size", "2"],
        ["--unknown-flag-of-tomorrow"], ["--unknown-flag-of-tomorrow", "7"],
        ["--device", "cpu"], ["--dtype=float32"], ["--trust-remote-code"], ["--base-gpu-id", "3"],
        ["--max-running-requests", "9"], ["--log-level", "debug"], ["--tp", "2"],
        ["--cuda-graph-bs", "1", "2", "4"], ["--chat-template", "a b"], ["--json", '{"a": 1}'],
        ["--port", "1", "--port", "2"], ["--config", "file.yaml"], ["--stop", "-1"],
        ["--model-impl", "sglang"], ["--speculative-attention-mode", "decode"],
        ["--speculative-draft-model-quantization", "fp8"], ["--speculative-num-draft-tokens", "5"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_sglang_gets_its_flags_untouched(argv: list[str]) -> None:
    expected = ["--model-path", "T", *argv, *OURS]
    assert pair(*argv).sglang_argv == expected
    assert plan(*argv, *PAIR).sglang_argv == expected
    assert plan(*PAIR[:2], *argv, *PAIR[2:]).sglang_argv == expected


def test_our_flags_do_not_reach_sglang() -> None:
    argv = [
        "--ssd-fan-out", "2", "--ssd-backup=fast", "--ssd-drafting", "off", "--ssd-draft-required",
        "--ssd-draft-timeout-ms", "3", "--ssd-draft-start-timeout=9", "--ssd-draft-device", "cpu",
        "--ssd-draft-base-gpu-id", "1", "--ssd-max-branch-rows", "8", "--ssd-draft-dtype", "half",
        "--ssd-draft-attention-backend", "a", "--ssd-draft-mem-fraction-static", "0.3",
        "--ssd-draft-max-total-tokens", "99", "--ssd-draft-context-length", "77",
        "--ssd-draft-http-port", "8099", "--ssd-verification", "rejection",
        "--ssd-saguaro-c", "0.5", "--ssd-proposal-top-m", "32", "--ssd-trace", "T.json",
        "--ssd-mode", "ssd", "--ssd-push", "off", "--ssd-draft-replicas", "2",
        "--ssd-draft-tp-size", "1", "--ssd-allow-shared-gpu",
    ]  # fmt: skip
    parser = argparse.ArgumentParser(add_help=False)
    add_ssd_args(parser)
    flags = {f for a in parser._actions for f in a.option_strings if f.startswith("--ssd-")}
    given = {a.split("=")[0] for a in argv if a.startswith("--")}
    elsewhere = {"--ssd-draft-endpoint", "--ssd-draft-keys", "--ssd-draft-gpu-ids"}
    assert given == flags - elsewhere, "this test gives every other flag"
    assert pair(*argv).sglang_argv == ["--model-path", "T", *OURS]


def test_settings_that_follow_the_load() -> None:
    plan = pair("--ssd-fan-out", "auto")
    assert plan.verifier.fan_out_auto and not plan.verifier.steps_auto
    assert plan.verifier.fan_out == [4] * 5
    assert plan.drafts[0].fan_out == [AUTO_MAX_FAN_OUT] * 5
    plan = pair("--speculative-num-steps", "auto", "--ssd-fan-out", "2")
    assert plan.verifier.steps_auto and not plan.verifier.fan_out_auto
    assert plan.verifier.fan_out == [2] * (AUTO_NUM_STEPS + 1)
    at = plan.sglang_argv.index("--speculative-num-steps")
    assert plan.sglang_argv[at + 1] == str(AUTO_NUM_STEPS)
    plan, rest = from_keywords({"ssd_fan_out": "auto", "speculative_num_steps": "auto"}, PRIVATE)
    assert plan.verifier.fan_out_auto and rest["speculative_num_steps"] == AUTO_NUM_STEPS


def test_synchronous_mode_predicts_nothing_and_drafts_after_each_outcome() -> None:
    plan = pair("--ssd-mode", "sync", "--speculative-num-steps", "3")
    assert (plan.verifier.fan_out, plan.verifier.backup) == ([0] * 4, "jit")
    (draft,) = plan.drafts
    assert (draft.fan_out, draft.backup) == ([0] * 4, "jit")
    same = pair("--ssd-mode", "sync", "--ssd-fan-out", "0", "--ssd-backup", "jit")
    assert same.verifier == pair("--ssd-mode", "sync").verifier


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--ssd-fan-out", "4"), ("--ssd-backup", "fast"), ("--speculative-num-steps", "auto")],
)
def test_what_contradicts_synchronous_mode_is_refused(flag: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag} {value}: .*sync"):
        pair("--ssd-mode", "sync", flag, value)


def test_push_is_a_setting_of_the_verifier() -> None:
    assert pair().verifier.push and not pair("--ssd-push", "off").verifier.push
    plan, _ = from_keywords({"ssd_push": False}, PRIVATE)
    assert not plan.verifier.push


def test_keys_are_for_a_draft_server_elsewhere(tmp_path: Path) -> None:
    make_keys(tmp_path, ["one"])
    keys, far = str(tmp_path / "one"), "tcp://10.0.0.1:5600"
    plan = parse(["--ssd-draft-endpoint", far, "--ssd-draft-keys", keys], PRIVATE)
    assert not plan.drafts and "--ssd-draft-keys" not in plan.sglang_argv
    assert plan.verifier.endpoints == [far] and plan.verifier.draft_keys == keys
    for argv in (
        ["--ssd-draft-keys", keys],
        ["--ssd-draft-endpoint", far],
        ["--ssd-draft-endpoint", far, "--ssd-draft-keys", str(tmp_path / "absent")],
    ):
        with pytest.raises(ConfigError, match="keys"):
            parse(argv, PRIVATE)


def test_a_misspelt_flag_of_ours_is_refused_at_once() -> None:
    for argv in (["--ssd-fan-ut", "3"], ["--ssd-fan-ut=3"]):
        with pytest.raises(ConfigError, match="--ssd-fan-ut: .* did you mean --ssd-fan-out"):
            pair(*argv)
    with pytest.raises(ConfigError, match="--ssd-fan: "):  # no abbreviations
        pair("--ssd-fan", "2")


@pytest.mark.parametrize("name", ["SSD", "ssd"])
def test_the_algorithm_may_be_named(name: str) -> None:
    argv = pair("--speculative-algorithm", name).sglang_argv
    assert argv.count("--speculative-algorithm") == 1


@pytest.mark.parametrize("name", ["EAGLE", "NGRAM", "STANDALONE", "SSDX"])
def test_another_algorithm_is_refused(name: str) -> None:
    message = refusal(*PAIR, "--speculative-algorithm", name)
    assert f"--speculative-algorithm {name}" in message and "sglang.launch_server" in message


# -- what reaches the draft server and the verifier ----------------------------------------------


def test_everything_reaches_the_draft_server() -> None:
    config = draft(
        "--speculative-num-steps", "2", "--ssd-fan-out", "3,2,1", "--ssd-backup", "fast",
        "--ssd-max-branch-rows", "8", "--ssd-draft-device", "cpu", "--ssd-draft-base-gpu-id", "5",
        "--ssd-draft-dtype", "float16", "--ssd-draft-attention-backend", "a",
        "--ssd-draft-mem-fraction-static", "0.3", "--ssd-draft-max-total-tokens", "99",
        "--ssd-draft-context-length", "77", "--max-running-requests", "9", "--trust-remote-code",
        "--log-level", "debug", "--ssd-draft-http-port", "8099",
    )  # fmt: skip
    assert config == DraftServerConfig(
        endpoint=PRIVATE, model_path="D", num_steps=2, fan_out=[3, 2, 1], backup="fast",
        max_branch_rows=8, device="cpu", base_gpu_id=5, dtype="float16", attention_backend="a",
        mem_fraction_static=0.3, max_total_tokens=99, context_length=77, max_sessions=9,
        trust_remote_code=True, log_level="debug", http_port=8099,
    )  # fmt: skip
    same = {"endpoint", "model_path", "prefill_chunk", "lease_s", "keys", "name"}
    default = draft()
    for f in fields(config):
        assert f.name in same or getattr(config, f.name) != getattr(default, f.name), f.name


def test_everything_reaches_the_verifier() -> None:
    v = pair(
        "--speculative-num-steps=3", "--ssd-fan-out", "3", "--ssd-backup", "none",
        "--ssd-drafting", "off", "--ssd-draft-timeout-ms", "2.5", "--ssd-draft-required",
        "--ssd-draft-start-timeout", "11", "--ssd-verification=rejection", "--ssd-saguaro-c=0.4",
        "--ssd-proposal-top-m", "7",
    ).verifier  # fmt: skip
    assert (v.verification, v.saguaro_c, v.proposal_top_m) == ("rejection", 0.4, 7)
    assert (v.num_steps, v.fan_out, v.backup, v.drafting) == (3, [3] * 4, "none", False)
    assert (v.draft_timeout_ms, v.draft_required, v.draft_start_timeout_s) == (2.5, True, 11.0)


@pytest.mark.parametrize(
    ("argv", "gpu"),
    [
        ([], 1), (["--tp-size", "2"], 2), (["--tensor-parallel-size=4"], 4), (["--tp", "2"], 2),
        (["--tp=8"], 8), (["--base-gpu-id", "2"], 3), (["--base-gpu-id=2", "--tp-size=2"], 4),
        (["--ssd-draft-base-gpu-id=0", "--tp-size=2", "--ssd-allow-shared-gpu"], 0),
        (["--gpu-id-step=2", "--tp-size=2"], 3), (["--gpu-id-step=2", "--dp=2", "--tp=2"], 7),
        (["--dp-size", "2"], 2), (["--dp=2", "--tp=2"], 4), (["--data-parallel-size", "3"], 3),
    ],
    ids=str,
)  # fmt: skip
def test_the_draft_sits_behind_the_gpus_of_the_target(argv: list[str], gpu: int) -> None:
    assert draft(*argv).base_gpu_id == gpu


def test_several_draft_servers_share_all_but_place_and_name() -> None:
    p = pair("--ssd-draft-replicas=3", "--dp-size=2", "--ssd-draft-http-port", "8099")
    assert [d.name for d in p.drafts] == ["0", "1", "2"]
    assert [d.base_gpu_id for d in p.drafts] == [2, 3, 4]
    assert [d.http_port for d in p.drafts] == [8099, 8100, 8101]
    assert p.verifier.endpoints == [d.endpoint for d in p.drafts]
    assert len(set(p.verifier.endpoints)) == 3
    assert {os.path.dirname(e) for e in p.verifier.endpoints} == {os.path.dirname(PRIVATE)}
    first = replace(p.drafts[0], name=None)
    assert first == draft("--dp-size=2", "--ssd-draft-http-port", "8099")
    for other in p.drafts[1:]:
        changes = {n: getattr(first, n) for n in ("name", "base_gpu_id", "http_port", "endpoint")}
        assert replace(other, **changes) == first


@pytest.mark.parametrize(
    ("argv", "gpus"),
    [
        (["--ssd-draft-gpu-ids", "4,7,5"], [4, 7, 5]),
        (["--ssd-draft-base-gpu-id=4"], [4, 5, 6]),
    ],
)
def test_the_gpu_of_each_draft_server(argv: list[str], gpus: list[int]) -> None:
    drafts = pair("--ssd-draft-replicas", "3", *argv).drafts
    assert [d.base_gpu_id for d in drafts] == gpus


@pytest.mark.parametrize(
    "argv",
    [
        ["--ssd-draft-endpoint", "ipc:///a,tcp://127.0.0.1:7000"],
        ["--ssd-draft-endpoint", "ipc:///a", "tcp://127.0.0.1:7000"],
        ["--ssd-draft-endpoint", "ipc:///a, ", "tcp://127.0.0.1:7000,"],
    ],
)
def test_several_draft_servers_that_run_elsewhere(argv: list[str]) -> None:
    p = plan("--model-path", "T", *argv, "--trust-remote-code")
    assert p.verifier.endpoints == ["ipc:///a", "tcp://127.0.0.1:7000"]
    assert not p.drafts and "--trust-remote-code" in p.sglang_argv


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--ssd-draft-replicas", "0"], ["--ssd-draft-replicas 0", "at least 1"]),
        (["--ssd-draft-replicas=2", "--ssd-draft-endpoint=ipc:///a"], ["leave one of the two"]),
        (["--ssd-draft-gpu-ids=2", "--ssd-draft-endpoint=ipc:///a"], ["leave one of the two"]),
        (["--ssd-draft-endpoint", "ipc:///a", "ipc:///a"], ["ipc:///a", "named twice"]),
        (["--ssd-draft-endpoint", ","], ["--ssd-draft-endpoint", "at least one"]),
        (["--ssd-draft-endpoint", "ipc:///a,a"], ["'a'", "tcp://HOST:PORT"]),
        (["--ssd-draft-replicas=2", "--ssd-draft-gpu-ids=4"], ["ids 4", "--ssd-draft-replicas 2"]),
        (["--ssd-draft-gpu-ids=4,5"], ["ids 4,5", "--ssd-draft-replicas 1"]),
        (["--ssd-draft-replicas=2", "--ssd-draft-gpu-ids=4,4"], ["ids 4,4", "different"]),
        (["--ssd-draft-gpu-ids=x"], ["--ssd-draft-gpu-ids 'x'", "separated by commas"]),
        (["--ssd-draft-gpu-ids=-1"], ["-1", "at least 0"]),
        (["--ssd-draft-gpu-ids=4", "--ssd-draft-base-gpu-id=3"], ["leave --ssd-draft-base-gpu-id"]),
        (["--ssd-draft-tp-size", "2"], ["--ssd-draft-tp-size 2", "--ssd-draft-replicas"]),
        (["--ssd-draft-replicas=2", "--ssd-draft-http-port=65535"], ["65536", "1..65535"]),
    ],
    ids=str,
)  # fmt: skip
def test_draft_servers_that_cannot_be(argv: list[str], parts: list[str]) -> None:
    message = refusal(*PAIR, *argv)
    assert "\n" not in message and all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("argv", "changes"),
    [
        (["--device", "cpu"], {"device": "cpu"}),
        (["--device", "cuda", "--ssd-draft-device", "cpu"], {"device": "cpu"}),
        (["--dtype", "float32"], {"dtype": "float32"}),
        (["--dtype", "float32", "--ssd-draft-dtype", "bfloat16"], {"dtype": "bfloat16"}),
        (["--ssd-backup", "jit"], {"backup": "jit"}),
        ([], {"device": "auto", "dtype": "auto", "backup": "auto", "max_sessions": 256}),
    ],
    ids=str,
)
def test_what_the_draft_takes_over_from_the_target(argv: list[str], changes: dict) -> None:
    config: Any = draft(*argv)
    assert {name: getattr(config, name) for name in changes} == changes


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--speculative-num-steps", "0"], ["--speculative-num-steps 0", "1..64"]),
        (["--speculative-num-steps", "-5"], ["--speculative-num-steps -5", "1..64"]),
        (["--speculative-num-steps", "1000000000000"], ["--speculative-num-steps 1", "1..64"]),
        (["--ssd-fan-out", "x"], ["--ssd-fan-out 'x'", "5 numbers"]),
        (["--ssd-fan-out", "1,2"], ["--ssd-fan-out", "2 entries", "needs 5"]),
        (["--ssd-fan-out", "99"], ["--ssd-fan-out", "99", "0..64"]),
        (["--ssd-draft-timeout-ms", "-1"], ["--ssd-draft-timeout-ms -1.0", "must be positive"]),
        (["--ssd-draft-timeout-ms", "inf"], ["--ssd-draft-timeout-ms inf", "must be positive"]),
        (["--ssd-draft-start-timeout", "0"], ["--ssd-draft-start-timeout 0.0", "positive"]),
        (["--ssd-max-branch-rows", "0"], ["--ssd-max-branch-rows 0", "positive"]),
        (["--ssd-draft-mem-fraction-static", "2"], ["-fraction-static 2.0", "between 0 and 1"]),
        (["--ssd-draft-http-port", "99999"], ["http-port 99999", "1..65535"]),
        (["--max-running-requests", "-1"], ["--max-running-requests", "-1", "positive"]),
    ],
    ids=str,
)
def test_bad_values_are_refused_by_flag_value_and_remedy(argv: list[str], parts: list[str]) -> None:
    message = refusal(*PAIR, *argv)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    "argv",
    [
        ["--speculative-num-steps", "four"], ["--ssd-backup", "slow"], ["--ssd-drafting", "maybe"],
        ["--ssd-draft-timeout-ms", "soon"], ["--model-path"], ["--ssd-max-branch-rows", "1.5"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_malformed_flags_end_with_status_2_and_their_name(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        plan(*PAIR, *argv)
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("sgl_ssd: ") and argv[0] in line


def test_help_can_be_printed() -> None:
    parser = argparse.ArgumentParser()
    add_ssd_args(parser)
    text = parser.format_help()
    assert "--ssd-fan-out" in text and "(default: 4)" in text


# -- keywords of an engine -----------------------------------------------------------------------


def test_keywords_say_the_same_as_flags() -> None:
    plan, rest = from_keywords(
        {
            "model_path": "T", "speculative_draft_model_path": "D", "speculative_num_steps": 3,
            "ssd_fan_out": [3, 2, 1, 1], "ssd_backup": "fast", "ssd_drafting": False,
            "ssd_draft_mem_fraction_static": 0.3, "tp_size": 2, "base_gpu_id": 1,
            "dtype": "float16",
            "max_running_requests": 9, "mem_fraction_static": 0.7,
        },
        PRIVATE,
    )  # fmt: skip
    by_flags = pair(
        "--speculative-num-steps", "3", "--ssd-fan-out", "3,2,1,1", "--ssd-backup", "fast",
        "--ssd-drafting", "off", "--ssd-draft-mem-fraction-static", "0.3", "--tp-size", "2",
        "--base-gpu-id", "1", "--dtype", "float16", "--max-running-requests", "9",
        "--mem-fraction-static", "0.7",
    )  # fmt: skip
    assert (plan.drafts, plan.verifier) == (by_flags.drafts, by_flags.verifier)
    assert rest == {
        "model_path": "T", "tp_size": 2, "base_gpu_id": 1, "dtype": "float16",
        "max_running_requests": 9, "mem_fraction_static": 0.7, "speculative_algorithm": "SSD",
        "speculative_num_steps": 3,
    }  # fmt: skip


def test_several_draft_servers_by_keyword() -> None:
    plan, _ = from_keywords({"ssd_draft_replicas": 2, "ssd_draft_gpu_ids": [3, 1]}, PRIVATE)
    assert [d.base_gpu_id for d in plan.drafts] == [3, 1]
    for endpoints in ("ipc:///a,ipc:///b", ["ipc:///a", "ipc:///b"]):
        plan, _ = from_keywords({"ssd_draft_endpoint": endpoints}, PRIVATE)
        assert plan.verifier.endpoints == ["ipc:///a", "ipc:///b"] and not plan.drafts


def test_an_engine_without_keywords_takes_the_bundled_pair() -> None:
    plan, rest = from_keywords({"ssd_fan_out": 2}, PRIVATE)
    assert (plan.target_path, plan.draft_path) == (str(TARGET_PATH), str(DRAFT_PATH))
    assert plan.verifier.fan_out == [2] * 5 and plan.verifier.drafting
    assert rest["model_path"] == str(TARGET_PATH)


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"ssd_fan_uot": 3}, "ssd_fan_uot"),
        ({"speculative_algorithm": "EAGLE"}, "EAGLE"),
        ({"ssd_backup": "maybe"}, "--ssd-backup 'maybe': choose one of auto, jit, fast, none"),
        ({"ssd_drafting": "maybe"}, "--ssd-drafting 'maybe': choose one of on, off"),
        ({"ssd_mode": "async"}, "--ssd-mode 'async': choose one of ssd, sync"),
        ({"model_path": "T"}, "--speculative-draft-model-path is missing"),
    ],
)
def test_keywords_that_cannot_work_are_refused(kwargs: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        from_keywords(kwargs, PRIVATE)


def test_a_configuration_file_needs_the_model_on_the_command_line() -> None:
    with pytest.raises(ConfigError, match=r"--config serve\.yaml"):
        parse(["--config", "serve.yaml"], "ipc:///tmp/x/draft")
