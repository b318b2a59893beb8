"""The benchmark's command line, its arithmetic and its report; no servers."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from benchmarks import open_loop, plots, predictions, report, serve, suite, workloads
from benchmarks.results_table import group, roofline
from benchmarks.servers import Attached, Pair, ServerSpec
from sgl_ssd.models import TARGET_PATH
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


def test_flags_of_every_system():
    def flags(text: str) -> str:
        return " ".join(ServerSpec.parse(text, PAIRS).command([], ["--ssd-x"]))

    assert flags("8b:ar:1") == "sglang.launch_server --model-path t --base-gpu-id 1"
    assert flags("8b:tp2").endswith("--tp-size 2")
    assert flags("8b:replicas").endswith("--dp-size 2")
    assert "NGRAM --speculative-num-draft-tokens 9" in flags("8b:ngram@8")
    assert "draft-model-path" not in flags("8b:ngram@8")
    assert "--ssd-draft-device cpu --ssd-x" in flags("8b:ssd-cpu@4")
    assert flags("8b:ssd-cpu@4").startswith("sgl_ssd.launch_server")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("off", "off"),
        ("4,6,fast", "K=4 F=6 fast"),
        ("4,4,auto,rejection", "K=4 F=4 auto rejection"),
        ("4,auto", "K=4 F=auto"),
        ("auto", "auto"),
    ],
)
def test_settings(text: str, name: str):
    assert serve.Setting.parse(text).name == name


@pytest.mark.parametrize("text", ["4,6,slow", "4", "4,4,jit,other", "a,b"])
def test_wrong_settings(text: str):
    with pytest.raises(ValueError):
        serve.Setting.parse(text)


def test_settings_reach_the_server(monkeypatch):
    sent = []
    server = Attached(ServerSpec.parse("8b:ssd@4", PAIRS), "http://x/")
    monkeypatch.setattr(server, "configure", lambda **values: sent.append(values))
    for text in ("off", "auto", "4,2,jit,rejection"):
        serve.Setting.parse(text).apply(server)
    assert sent[0] == {"ssd_drafting": 0}
    assert sent[1]["ssd_num_steps"] == sent[1]["ssd_fan_out"] == -1 and sent[1]["ssd_backup"] == 3
    assert sent[2]["ssd_verification"] == 1 and sent[2]["ssd_fan_out"] == 2
    assert server.url == "http://x" and not server.dead


def test_arguments(tmp_path):
    argv = ["--pair", "8b=t,d", "--server", "8b:ar", "--requests", "1:2,8:16", "--temperatures"]
    argv += ["0,1", "--out", str(tmp_path / "r.json"), "--ssd-flag=--ssd-backup=fast"]
    args = serve.parse_args([*argv, "--", "--dtype", "bfloat16"])
    assert args.requests == {1: 2, 8: 16} and args.temperatures == [0.0, 1.0]
    assert args.common == ["--dtype", "bfloat16"] and args.ssd_flags == ["--ssd-backup", "fast"]


@pytest.mark.parametrize(
    "more",
    [["--workloads", "other"], ["--ssd", "x"], ["--attach", "9b:ar=http://x"], ["--rates", "a:1"]],
)
def test_wrong_arguments(more: list[str], tmp_path: Path, capsys):
    argv = ["--pair", "8b=t,d", "--server", "8b:ar", "--out", str(tmp_path / "r.json"), *more]
    assert serve.main(argv) == 2


# -- workloads -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TARGET_PATH)


@pytest.mark.parametrize("name", workloads.WORKLOADS)
@pytest.mark.parametrize("limit", [200, 3900])
def test_workloads_are_fixed_and_fit(name: str, limit: int, tokenizer):
    made = workloads.make(name, tokenizer, 12, limit)
    assert made == workloads.make(name, tokenizer, 12, limit) and len(made) == 12
    prompts = [request.input_ids for conversation in made for request in conversation]
    assert all(0 < len(ids) <= limit for ids in prompts)
    assert len({tuple(c[-1].input_ids) for c in made}) > 8  # not all the same
    assert open_loop.fits(made) == (name not in ("samples", "turns"))


def test_what_workloads_are_about(tokenizer):
    turns = workloads.make("turns", tokenizer, 2, 3900)
    first, other = turns
    assert [r.input_ids[: len(first[0].input_ids)] for r in first] == [first[0].input_ids] * 3
    assert first[0].input_ids[:512] == other[0].input_ids[:512]
    assert all(r.n == 4 for c in workloads.make("samples", tokenizer, 3, 3900) for r in c)
    (edit,) = workloads.make("edit", tokenizer, 1, 3900)[0]
    begun = edit.input_ids[-workloads.EDIT_BEGUN :]
    assert edit.input_ids[1 : 1 + len(begun)] == begun
    assert len(workloads.make("long4k", tokenizer, 1, 3900)[0][0].input_ids) == 3900
    with pytest.raises(ValueError, match="workload"):
        workloads.make("other", tokenizer, 1, 100)


# -- the suite -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gpus", "systems"), [(0, 2), (1, 6), (2, 9)])
def test_suite_fits_the_hardware(gpus: int, systems: int, tmp_path: Path):
    argv = suite.arguments(["a=t,d"], suite.FULL, gpus, tmp_path, [], ["--dtype", "half"])
    args = serve.parse_args(argv)
    assert len(args.specs) == systems and args.alternate and args.common == ["--dtype", "half"]
    assert any(spec.ours for spec in args.specs) and args.specs[0].system == "ar"
    assert {s.backup for s in args.settings} >= {"none", "fast", "jit", "auto"}
    assert "rejection" in {s.verification for s in args.settings}
    assert max(args.requests) == 128 and args.rates and args.repeats == 3


def test_plan_repeats_everything_but_arrivals(tmp_path: Path):
    argv = suite.arguments(["a=t,d"], suite.SMOKE, 0, tmp_path, ["a:ar=http://x"], [])
    args = serve.parse_args(argv)
    servers = [Attached(spec, url) for spec, url in args.attached]
    runs = list(serve.plan(servers, args, 0))
    assert [r.workload for r in runs if not r.rate] == list(workloads.WORKLOADS)
    assert [r.workload for r in runs if r.rate] == ["code"]
    assert "4/s" in next(r for r in runs if r.rate).name


# -- results ---------------------------------------------------------------------------------------


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
    before["draft_stats"] = {
        "build_steps": 10.0,
        "build_step_ms": 9.0,
        "rounds": 2,
        "idle_seconds": 1.0,
    }
    after["draft_stats"] = {
        "build_steps": 30.0,
        "build_step_ms": 5.0,
        "rounds": 6,
        "idle_seconds": 1.1,
    }
    found = serve.difference(before, after)
    assert found["rounds"] == 2 and found["accept_rate"] == 0.5 and found["hit_rate"] == 0.5
    assert found["round_trip_ms"] == pytest.approx(3.0) and found["draft_wait_ms"] is None
    assert found["without_drafts"] == {"late": 1}
    assert found["accepted_per_position"] == [1, 1, 1, 0]
    assert found["draft"]["build_step_ms"] == pytest.approx(3.0)
    assert found["draft"]["idle_ms"] == pytest.approx(25)


def _result(system: str, setting: str, concurrency: int, tokens_per_s: float, **more) -> dict:
    return {
        "pair": "8b", "system": system, "setting": setting, "concurrency": concurrency,
        "temperature": 0.0, "tokens_per_s": tokens_per_s, "outputs": ["a", "b"], **more,
    }  # fmt: skip


def test_report():
    ssd = {"hit_rate": 0.7, "round_ms": 6.0, "outcome_wait_ms": 4.0, "draft_wait_ms": 0.5}
    ssd |= {"launch_ms": 1.0, "rounds": 10, "draft": {"jit_ms": 8.0}}
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
    assert "| K=4 F=4 | 1 | 0.70 | 6.00 | 4.00 | 0.50 | 1.00 | 0.50 | 8.00 |" in text
    assert "SSD K=4 F=4: 1 of 2" in text


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200x2-2026-11-29.json"


def test_report_of_arrivals():
    numbers = {"median_ttft_ms": 5.0, "p99_ttft_ms": 9.0}
    numbers |= {"median_tpot_ms": 2.0, "p99_tpot_ms": 3.0}
    result = _result("ar", "", 0, 100.0, rate=2.0, open_loop=numbers)
    assert "| 8b | 0 | SGLang | 2 | 100 | 5.0 | 9.0 | 2.0 | 3.0 |" in report.open_loop_table(
        [result]
    )
    assert not group([result])


def test_committed_results_make_a_report():
    data = json.loads(RESULTS.read_text())
    text = report.render([data])
    for part in ("### 32b, code, T=0, tokens per second", "| SSD K=7 F=4 | 253 ×4.67 |",
                 "### The planner: 32b, T=0"):  # fmt: skip
        assert part in text
    groups = group(data["results"])
    roof = roofline(groups, ("32b", 0.0, "code"))
    assert roof is not None and 253 < roof < 1000


def test_predictions_do_not_see_what_they_predict():
    data = json.loads(RESULTS.read_text())
    for r in data["results"]:
        if (r["pair"], r["setting"], r["temperature"]) == ("32b", "K=7 F=4", 0.0):
            r["tokens_per_s"] *= 10
            r["accept_length"] *= 10
    changed = predictions.of(data, "32b", 0.0)
    as_it_was = predictions.of(json.loads(RESULTS.read_text()), "32b", 0.0)
    pick = lambda rows: [c.predicted for c in rows if c.setting == "K=7 F=4"]  # noqa: E731
    assert pick(changed) == pick(as_it_was) and len(pick(changed)) == 2


def test_plots(tmp_path: Path):
    pytest.importorskip("matplotlib")
    made = report.plots([json.loads(RESULTS.read_text())], tmp_path)
    names = {path.name for path in made}
    assert {"32b-t0.png", "32b-t0-rounds.png", "32b-hits.png", "32b-t0-planner.png"} <= names
    assert all(path.stat().st_size > 5000 for path in made)
    assert plots.DPI > 90
