"""The benchmark suite and the planner on the shared servers."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import pytest

from benchmarks import overhead, suite, workloads
from benchmarks.servers import Attached, Pair, ServerSpec
from parity.harness import configure, send_all, ssd_state
from servers import ServerProcess
from sgl_ssd import plan
from sgl_ssd.models import DRAFT_PATH, TARGET_PATH

pytestmark = pytest.mark.integration


def test_smoke(ssd_server: ServerProcess, plain_bundled: ServerProcess, tmp_path):
    attached = [f"--attach=bundled:ar={plain_bundled.url}"]
    attached.append(f"--attach=bundled:ssd@12={ssd_server.url}")
    try:
        status = suite.main(["--smoke", "--out", str(tmp_path), *attached])
    finally:
        configure(ssd_server, ssd_drafting=1, ssd_num_steps=4, ssd_fan_out=4, ssd_backup=2)
    data = json.loads((tmp_path / "results.json").read_text())
    assert status == 0 and "failed" not in data, data.get("failed")
    settings = len(suite.SMOKE.settings)
    expected = (1 + settings) * (len(workloads.WORKLOADS) + 1)  # one more for random arrivals
    assert len(data["results"]) == expected

    by_setting: dict[str, list] = {}
    for r in data["results"]:
        assert r["tokens_per_s"] > 0
        if r["system"] == "ssd":
            by_setting.setdefault(r["setting"], []).append(r["ssd"])
    assert all(s["drafted"] == 0 for s in by_setting.pop("off"))
    for setting, counts in by_setting.items():
        assert sum(s["accepted"] for s in counts) > 0, setting
        assert any(s["hit_rate"] for s in counts), setting
    assert "auto" in by_setting["auto"][0]

    greedy = {
        (r["system"], r["setting"], r["workload"]): r["outputs"]
        for r in data["results"]
        if not r["rate"]
    }
    for (system, setting, workload), outputs in greedy.items():
        assert outputs == greedy["ar", "", workload], (system, setting, workload)
    text = (tmp_path / "report.md").read_text()
    assert "Random arrivals" in text and "SSD, drafting off" in text


def test_planner_reads_a_running_server(ssd_server: ServerProcess, prompts, capsys):
    configure(ssd_server, ssd_drafting=1, ssd_num_steps=4, ssd_fan_out=4, ssd_backup=2)
    sampling = {"max_new_tokens": 96, "temperature": 0, "ignore_eos": True}
    bodies = [{"input_ids": ids, "sampling_params": sampling} for ids in prompts[:12]]
    send_all(ssd_server, bodies, 1)
    send_all(ssd_server, bodies, 6)
    time.sleep(2.5)  # the draft server's numbers come with the next sign of life
    assert plan.main(["--server", ssd_server.url, "--batch", "1,6", "--json"]) == 0
    for found in json.loads(capsys.readouterr().out):
        assert found["tokens_per_s"] > 0 and 0 < found["hit_rate"] <= 1
        assert found["step_ms"] > 0 and found["round_ms"] > found["verify_ms"] > 0


def test_overhead_is_measured_on_real_servers(ssd_server: ServerProcess):
    """One server plays all parts: what is the same costs nothing, within much noise."""
    spec = ServerSpec(Pair("bundled", str(TARGET_PATH), str(DRAFT_PATH)), "ssd-cpu", 4, 0, 0)
    server = Attached(spec, ssd_server.url)
    server._process = ssd_server.process
    args = argparse.Namespace(minutes=0.0, requests=2, tokens=24)
    try:
        (repetition,) = overhead.run(dict.fromkeys(overhead.VARIANTS, server), args)
    finally:
        Path(ssd_state(ssd_server)["trace_file"]).unlink(missing_ok=True)
    for variant in overhead.VARIANTS:
        for block in repetition[variant]:
            assert block.tokens_per_s > 0
            # About three tokens a verify; two processes compute at once.
            assert 48 / 5 < 1e3 / block.wall_ms_per_verify * 48 / block.tokens_per_s < 48
            assert block.cpu_ms_per_verify < 3 * block.wall_ms_per_verify
    assert overhead.table([repetition]).count("\n") == 8
