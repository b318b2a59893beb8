"""The benchmark's command line, its arithmetic and its report; no servers."""

from __future__ import annotations

import copy

import pytest

from benchmarks import report, serve
from benchmarks.servers import Pair, ServerSpec
from sgl_ssd.models import DRAFT_PATH, TARGET_PATH
from sgl_ssd.protocol import Status
from sgl_ssd.scheduler.stats import SSDStats

PAIRS = {"8b": Pair.parse("8b=t,d")}


def test_server_specs():
    spec = ServerSpec.parse("8b:ssd@7:0:1", PAIRS)
    assert (spec.steps, spec.gpu, spec.draft_gpu, spec.name) == (7, 0, 1, "8b-ssd-k7")
    module, *flags = spec.command(["--dtype", "bfloat16"], ["--ssd-backup", "fast"])
    assert module == "sgl_ssd.launch_server"
    assert flags[flags.index("--ssd-draft-base-gpu-id") + 1] == "1"
    plain = ServerSpec.parse("8b:ar", PAIRS)
    assert "--ssd-backup" not in plain.command([], ["--ssd-backup", "fast"])
    _, *flags = ServerSpec.parse("8b:standalone@3:1", PAIRS).command([], [])
    assert flags[flags.index("--speculative-num-draft-tokens") + 1] == "4"


@pytest.mark.parametrize("text", ["", "8b", "9b:ar", "8b:other", "8b:ar:x", "8b:ssd@:0"])
def test_wrong_server_specs(text: str):
    with pytest.raises(ValueError, match="PAIR:SYSTEM"):
        ServerSpec.parse(text, PAIRS)


def test_settings():
    assert serve.Setting.parse("off").name == "off"
    assert serve.Setting.parse("4,6,fast").name == "K=4 F=6 fast"
    with pytest.raises(ValueError):
        serve.Setting.parse("4,6,slow")


def test_arguments(tmp_path):
    argv = ["--pair", "8b=t,d", "--server", "8b:ar", "--requests", "1:2,8:16", "--temperatures"]
    argv += ["0,1", "--out", str(tmp_path / "r.json"), "--ssd-flag=--ssd-backup=fast"]
    args = serve.parse_args([*argv, "--", "--dtype", "bfloat16"])
    assert args.requests == {1: 2, 8: 16} and args.temperatures == [0.0, 1.0]
    assert args.common == ["--dtype", "bfloat16"] and args.ssd_flags == ["--ssd-backup", "fast"]


def test_prompts_are_short_and_begin_a_text():
    prompts = serve.load_prompts(str(TARGET_PATH), 8)
    assert len(prompts) == 8 and all(8 < len(p) <= serve.PROMPT_TOKENS for p in prompts)
    assert {p[0] for p in prompts} == {0} and str(DRAFT_PATH)


def _looks() -> tuple[dict, dict]:
    stats = SSDStats(4)
    stats.round_trip.add(1.0)
    stats.observe_round(4, 0)
    before = copy.deepcopy(stats.as_dict())
    for seconds in (0.002, 0.004):
        stats.round_trip.add(seconds)
    stats.observe_round(4, 3)
    stats.observe_round(2, 0)
    stats.observe_answer(Status.HIT)
    stats.observe_answer(Status.BACKUP)
    stats.observe_no_drafts("late")
    return before, stats.as_dict()


def test_difference_of_two_looks():
    before, after = _looks()
    before["draft_stats"] = {"build_steps": 10.0, "build_step_ms": 9.0}
    after["draft_stats"] = {"build_steps": 30.0, "build_step_ms": 5.0}
    found = serve.difference(before, after)
    assert found["rounds"] == 2 and found["accept_rate"] == 0.5 and found["hit_rate"] == 0.5
    assert found["round_trip_ms"] == pytest.approx(3.0) and found["draft_wait_ms"] is None
    assert found["without_drafts"] == {"late": 1}
    assert found["accepted_per_position"] == [1, 1, 1, 0]
    assert found["draft"]["build_step_ms"] == pytest.approx(3.0)


def _result(system: str, setting: str, concurrency: int, tokens_per_s: float, **more) -> dict:
    return {
        "pair": "8b", "system": system, "setting": setting, "concurrency": concurrency,
        "temperature": 0.0, "tokens_per_s": tokens_per_s, "outputs": ["a", "b"], **more,
    }  # fmt: skip


def test_report():
    ssd = {"hit_rate": 0.7, "round_ms": 6.0, "outcome_wait_ms": 4.0, "draft_wait_ms": 0.5}
    ssd |= {"launch_ms": 1.0, "draft": {"jit_ms": 8.0}}
    results = [
        _result("ar", "", 1, 200.0),
        _result("ar", "", 1, 220.0),
        _result("standalone", "K=3", 1, 300.0, accept_length=2.5),
        _result("ssd", "K=4 F=4", 1, 420.0, accept_length=3.0, ssd=ssd, outputs=["a", "c"]),
    ]
    environment = {"date": "2026-01-01 00:00", "gpus": ["X"], "cpu_cores": 1, "python": "3.12"}
    environment |= {"packages": {"sglang": "0.5.17"}, "revision": "abc"}
    text = report.render([{"environment": environment, "arguments": ["--x"], "results": results}])
    assert "| SGLang | 210 (200–220) ×1.00 |  |" in text
    assert "| SSD K=4 F=4 | 420 ×2.00 | 3.00 |" in text
    assert "| K=4 F=4 | 1 | 0.70 |  | 6.00 | 4.00 | 0.50 | 1.00 | 0.50 |" in text
    assert "SSD K=4 F=4: 1 of 2" in text
