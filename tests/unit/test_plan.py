"""Measurements from files, benchmarks and servers, and the planner's command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sgl_ssd import measurements, plan, planner
from sgl_ssd.errors import ConfigError

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200x2-2026-11-29.json"
NUMBERS = {
    "verify_ms": [[5, 20.0], [80, 25.0]], "plain_ms": [[1, 18.0], [16, 20.0]],
    "step_ms": [[1, 2.0], [256, 5.0]], "answer_ms": 1.0, "acceptance": 0.8,
    "miss": {"c": 0.5, "r": 0.7}, "fast": [0.3],
}  # fmt: skip
# A verify of 10 tokens takes 21 ms without the wait of 1 ms; a draft step 2 + .01 rows ms.
SERVER = {
    "drafted_per_position": [1000, 1000, 500, 2], "accepted_per_position": [800, 640, 256, 0],
    "forwards": {"1": [100, 500, 2.0, 0.1], "2": [100, 1000, 2.2, 0.1]},
    "plain_forwards": {"1": [50, 50, 0.9]},
    "draft_stats": {
        "step_ms": 2.4, "step_rows": 40.0, "step_row_ms": 0.01, "jit_ms": 6.0, "jit_tokens": 4.0,
        "missed_of_1": 0.5, "missed_of_2": 0.25, "missed_of_4": 0.125,
    },
}  # fmt: skip


def test_measurements_as_numbers():
    m = measurements.read(NUMBERS)
    assert m.acceptance == (0.8,) and m.fast == (0.3,) and m.miss.r == 0.7 and m.jit is None
    with pytest.raises(ConfigError, match="answer_ms"):
        measurements.read({k: v for k, v in NUMBERS.items() if k != "answer_ms"})
    with pytest.raises(ConfigError, match="object"):
        measurements.read([1])


def test_measurements_of_a_server():
    m = measurements.read({"internal_states": [{"ssd": SERVER}]})
    assert m.verify(5) == pytest.approx(19) and m.verify(10) == pytest.approx(21)
    assert m.plain(1) == pytest.approx(18) and m.answer_ms == pytest.approx(1.0)
    assert m.step(40) == pytest.approx(2.4) and m.step(80) == pytest.approx(2.8)
    assert m.acceptance == pytest.approx((0.8, 0.8, 0.8), abs=0.001)
    assert (m.miss.c, m.miss.r) == (pytest.approx(0.5), pytest.approx(1.0))
    assert m.jit is not None and m.jit(1) == 1.5
    with pytest.raises(ConfigError, match="enough"):
        measurements.read({**SERVER, "draft_stats": {}})
    with pytest.raises(ConfigError, match="predicts no outcomes"):
        measurements.read({**SERVER, "fan_out": [0, 0, 0]})


def test_few_drafts_at_a_position_count_little():
    chain = measurements.acceptance_by_position([10_000, 8_000, 30], [8_000, 5_120, 0])
    assert chain[:2] == pytest.approx((0.8, 0.8), abs=0.01) and 0.5 < chain[2] < 0.8
    assert measurements.acceptance_by_position([5], [5]) == ()


def test_scatter_does_not_decide_what_lies_beyond():
    close = [(70.0, 2.0), (76.0, 2.1), (80.0, 2.5), (20.0, 1.5)]
    line = measurements.straight(close)
    assert 1.5 < line(50) < 2.1 and 3.0 < line(160) < 4.0  # 18 through the last two points
    assert line(1) < line(20)
    falling = measurements.straight([(10.0, 3.0), (20.0, 1.0)])
    assert falling(1) == falling(500) == pytest.approx(2.0)
    assert measurements.straight([(8.0, 2.0), (8.0, 3.0)])(100) == pytest.approx(2.5)
    with pytest.raises(ConfigError):
        measurements.straight([])


def test_misses_of_one_fan_out_keep_the_usual_slope():
    law = measurements.fit_miss_law([(4, 0.2, 10)])
    assert law.hit(4) == pytest.approx(0.8) and law.r == planner.MissLaw.r
    assert measurements.fit_miss_law([]) == planner.MissLaw()


def test_committed_benchmark_is_predicted():
    """The model on the run it was measured in: rounds and tokens a round of the sound rows."""
    data = json.loads(RESULTS.read_text())
    m = measurements.read(data, "32b", 0.0)
    rows = [r for r in data["results"] if r["pair"] == "32b" and measurements.usable(r)]
    assert len(rows) > 8
    for r in rows:
        setting = measurements.setting_of(r)
        where = planner.Deployment(r["concurrency"], width=measurements.width_of(data, r))
        found = planner.predict(m, setting, where)
        assert found.round_ms == pytest.approx(r["ssd"]["round_ms"], rel=0.1)
        assert found.hit_rate == pytest.approx(r["ssd"]["hit_rate"], abs=0.1)
    with pytest.raises(ConfigError, match="8b, 32b|32b, 8b"):
        measurements.read(data)


def test_table_and_recommendation(tmp_path, capsys):
    path = tmp_path / "m.json"
    path.write_text(json.dumps(NUMBERS))
    assert plan.main([str(path), "--batch", "1,16"]) == 0
    printed = capsys.readouterr().out
    assert "For 1 at a time: --speculative-num-steps" in printed and "--ssd-fan-out" in printed


def test_json_and_what_if(tmp_path, capsys):
    path = tmp_path / "m.json"
    path.write_text(json.dumps(NUMBERS))

    def speed(*flags: str) -> float:
        assert plan.main([str(path), "--batch", "8", "--json", *flags]) == 0
        return json.loads(capsys.readouterr().out)[0]["tokens_per_s"]

    base = speed()
    assert speed("--draft-speed", "0.3") < base < speed("--target-speed", "2")
    assert speed("--wire-ms", "30") < base
    assert speed("--draft-speed", "0.3", "--draft-gpus", "4") > speed("--draft-speed", "0.3")
    assert speed("--uniform") <= base * 1.001


def test_the_network_is_measured_and_what_if_adds_to_it(tmp_path, capsys):
    def far(ping_ms: float, endpoint: str) -> dict:
        return {"endpoint": endpoint, "ping_ms": ping_ms, "draft": "up", "home": True,
                "open_sessions": 0, "timeouts": 0}  # fmt: skip

    servers = [far(0.4, "tcp://10.0.0.1:1"), far(0.7, "tcp://10.0.0.2:1"), far(9.0, "ipc:///a")]
    info = {"internal_states": [{"ssd": SERVER | {"push": "on", "draft_servers": servers}}]}
    m = measurements.read(info)
    assert m.push and m.wire_ms == 0.7 and m.longer_ms == 0.0
    assert not measurements.read({"internal_states": [{"ssd": SERVER}]}).wire_ms
    path = tmp_path / "info.json"
    path.write_text(json.dumps(info))
    assert plan.main([str(path), "--batch", "1"]) == 0
    printed = capsys.readouterr().out
    assert "Network round trip to the draft server: 0.70 ms measured; hits" in printed
    assert plan.main([str(path), "--batch", "1", "--wire-ms", "2"]) == 0
    assert "0.70 ms measured, 2.70 ms assumed; hits" in capsys.readouterr().out
    assert plan.main([str(path), "--batch", "1", "--wire-ms", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["wire_ms"] == pytest.approx(2.7)
    info["internal_states"][0]["ssd"]["draft_servers"] = servers[2:]
    path.write_text(json.dumps(info))
    assert plan.main([str(path), "--batch", "1"]) == 0
    assert "Network" not in capsys.readouterr().out


def test_says_where_drafting_does_not_pay(tmp_path, capsys):
    path = tmp_path / "m.json"
    path.write_text(json.dumps({**NUMBERS, "acceptance": 0.01}))
    assert plan.main([str(path), "--batch", "4"]) == 0
    assert "--ssd-drafting off" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv",
    [[], ["nowhere.json"], ["nowhere.json", "--server", "http://x"], ["--server", "http://[::"]],
)
def test_refuses_what_it_cannot_read(argv, capsys):
    assert plan.main(argv) == 2
    assert "sgl_ssd.plan:" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--max-steps", "0"], ["--draft-speed", "0"], ["--batch", "a"]])
def test_refuses_wrong_numbers(flags, tmp_path, capsys):
    path = tmp_path / "m.json"
    path.write_text(json.dumps(NUMBERS))
    assert plan.main([str(path), *flags]) == 2
