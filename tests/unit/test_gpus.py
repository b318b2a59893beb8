"""Which GPU serves what, and how one is shared."""

from __future__ import annotations

import itertools

import pytest

from sgl_ssd import gpus, launch_server
from sgl_ssd.args import from_keywords, parse
from sgl_ssd.config import VerifierConfig
from sgl_ssd.errors import ConfigError
from sgl_ssd.gpus import Memory, placement, share

SHARED = ["--ssd-draft-base-gpu-id", "0"]
ALLOWED = [*SHARED, "--ssd-allow-shared-gpu"]


def fractions(*argv: str) -> tuple[float | None, float | None]:
    """Of the target, as SGLang reads it, and of the draft."""
    plan = parse(["--model-path", "t", "--speculative-draft-model-path", "d", *argv], "ipc:///p")
    words = " ".join(plan.sglang_argv).replace("=", " ").split()
    given = [v for flag, v in itertools.pairwise(words) if flag == "--mem-fraction-static"]
    return float(given[-1]) if given else None, plan.drafts[0].mem_fraction_static


@pytest.mark.parametrize(
    ("argv", "which"),
    [
        (SHARED, "GPU 0,"),
        (["--tp-size", "4", "--ssd-draft-base-gpu-id", "2"], "GPU 2,"),
        (["--base-gpu-id=2", "--ssd-draft-base-gpu-id=2"], "GPU 2,"),
        (["--tp=2", "--gpu-id-step=2", "--ssd-draft-base-gpu-id=2"], "GPU 2,"),
        (["--dp=4", "--ssd-draft-replicas=2", "--ssd-draft-gpu-ids=3,0"], "GPU 0, 3,"),
        (["--dp=4", "--ssd-draft-replicas=3", "--ssd-draft-base-gpu-id=2"], "GPU 2, 3,"),
    ],
    ids=str,
)
def test_a_gpu_is_not_shared_unawares(argv: list[str], which: str):
    with pytest.raises(ConfigError, match="--ssd-allow-shared-gpu") as refused:
        fractions(*argv)
    assert f"would share {which}" in str(refused.value) and "\n" not in str(refused.value)
    assert None not in fractions(*argv, "--ssd-allow-shared-gpu")


@pytest.mark.parametrize(
    "argv",
    [
        [], ["--tp=2", "--gpu-id-step=2", "--ssd-draft-base-gpu-id=1"], ["--ssd-allow-shared-gpu"],
        [*SHARED, "--ssd-draft-device=cpu"], [*SHARED, "--device=cpu"],
    ],
    ids=str,
)  # fmt: skip
def test_memory_is_left_alone_where_nothing_is_shared(argv: list[str]):
    assert fractions(*argv) == (None, None)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        # The target's is one of what the draft leaves: .65 of the whole is .8125 of .8.
        ([], (0.812, 0.2)),
        (["--mem-fraction-static=0.6"], (0.75, 0.2)),
        (["--mem-fraction-static=0.72"], (0.828, 0.13)),
        (["--ssd-draft-mem-fraction-static=0.4"], (0.75, 0.4)),
        (["--mem-fraction-static=0.3", "--ssd-draft-mem-fraction-static=0.4"], (0.5, 0.4)),
        (
            ["--mem-fraction-static=.9", "--ssd-draft-mem-fraction-static=.9",
             "--max-total-tokens=99", "--ssd-draft-max-total-tokens=99"],
            (0.9, 0.9),  # bounds only: the pools have sizes
        ),
    ],
    ids=str,
)  # fmt: skip
def test_a_shared_gpus_memory_is_shared_out(argv: list[str], expected: tuple[float, float]):
    assert fractions(*ALLOWED, *argv) == expected


@pytest.mark.parametrize(
    "argv",
    [
        ["--mem-fraction-static=0.8", "--ssd-draft-mem-fraction-static=0.3"],
        ["--mem-fraction-static=0.97"],
        ["--ssd-draft-mem-fraction-static=0.9"],
    ],
    ids=str,
)
def test_more_than_the_whole_is_refused(argv: list[str]):
    with pytest.raises(ConfigError, match="of the same GPU 0: together at most 1"):
        fractions(*ALLOWED, *argv)


def test_an_engine_shares_as_the_server_does():
    kwargs = {
        "model_path": "t", "speculative_draft_model_path": "d", "ssd_draft_base_gpu_id": 0,
        "ssd_allow_shared_gpu": True,
    }  # fmt: skip
    plan, rest = from_keywords(kwargs, "ipc:///p")
    assert (rest["mem_fraction_static"], plan.drafts[0].mem_fraction_static) == (0.812, 0.2)
    plan, rest = from_keywords({"model_path": "t", "speculative_draft_model_path": "d"}, "ipc:///p")
    assert "mem_fraction_static" not in rest


def test_the_share_of_one_side_that_is_given_stays():
    assert share([0, 1], [1], True, Memory(0.4, None)) == Memory(0.5, 0.2, in_turn=True)


@pytest.mark.parametrize(("argv", "in_turn"), [(ALLOWED, True), ([], False)], ids=str)
def test_who_shares_starts_in_turn(argv: list[str], in_turn: bool):
    plan = parse(["--model-path", "t", "--speculative-draft-model-path", "d", *argv], "ipc:///p")
    assert (plan.mem_fraction_static is not None) is in_turn


def test_only_the_ranks_of_this_host_count():
    argv = ["--nnodes=2", "--tp-size=8", "--ssd-draft-base-gpu-id=4"]
    assert fractions(*argv) == (None, None)
    plan = parse(["--model-path=t", "--speculative-draft-model=d", *argv[:2]], "ipc:///p")
    assert plan.target_gpus == [0, 1, 2, 3] and plan.drafts[0].base_gpu_id == 4


@pytest.mark.parametrize(
    ("target", "drafts", "remote", "text"),
    [
        ([0], [1], False, "target on GPU 0; draft on GPU 1"),
        ([0, 1, 2, 3], [4, 5], False, "target on GPUs 0, 1, 2, 3; draft on GPUs 4, 5"),
        ([0], [0], False, "target on GPU 0; draft on GPU 0 (shared)"),
        ([2], None, False, "target on GPU 2; draft on the host's CPU"),
        ([2], None, True, "target on GPU 2; draft servers run elsewhere"),
    ],
)
def test_a_line_says_which_gpu_does_what(target, drafts, remote, text):
    assert placement(target, drafts, remote) == text


def test_a_host_that_serves_on_the_cpu_has_no_gpus(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SGLANG_SSD_DEVICE", "cpu")
    assert not gpus.on_this_host()


@pytest.mark.parametrize(
    ("argv", "order"),
    [([], ["draft", "target", "ready"]), (ALLOWED, ["draft", "ready", "target"])],
    ids=["apart", "shared"],
)
def test_a_target_on_the_drafts_gpu_starts_when_the_draft_is_ready(
    argv: list[str], order: list[str], monkeypatch: pytest.MonkeyPatch
):
    """SGLang sizes its pools by what is free when it starts."""
    seen: list[str] = []

    class Drafts:
        def __init__(self, configs: object, on_lost: object) -> None:
            seen.append("draft")

        def wait_ready(self, timeout_s: float, progress: object) -> None:
            seen.append("ready")

        def watch(self) -> None: ...

        def stop(self) -> None: ...

    class Target:
        STOP_S = 0.0

        def __init__(self, argv: list[str], folder: str) -> None:
            seen.append("target")

        def poll(self) -> int:
            return 3

        def stop(self, seconds: float) -> None: ...

    monkeypatch.setattr(launch_server, "DraftServers", Drafts)
    monkeypatch.setattr(launch_server, "TargetProcess", Target)
    monkeypatch.setattr(VerifierConfig, "to_environment", lambda self: None)
    plan = parse(["--model-path", "t", "--speculative-draft-model-path", "d", *argv], "ipc:///p")
    assert launch_server._serve(plan, "/nowhere") == 3
    assert seen == order
