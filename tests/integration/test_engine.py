"""Offline use: `sgl_ssd.Engine` in a script of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from adapters import make_adapter
from parity.harness import send_all
from sgl_ssd.models import TARGET_PATH

pytestmark = pytest.mark.integration

PROBE = Path(__file__).with_name("engine_probe.py")


@pytest.fixture(scope="module")
def prompts_of_engine(prompts) -> list[list[int]]:
    return prompts[8:14]


@pytest.fixture(scope="module")
def report(prompts_of_engine, tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    (folder / "prompts.json").write_text(json.dumps(prompts_of_engine))
    make_adapter(folder / "adapter", TARGET_PATH, seed=5, rank=8)
    run = subprocess.run(
        [sys.executable, str(PROBE), "prompts.json", "adapter"],
        cwd=folder, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    line = next((x for x in run.stdout.splitlines() if x.startswith("REPORT ")), None)
    assert run.returncode == 0 and line is not None, run.stdout[-2000:] + run.stderr[-4000:]
    return json.loads(line.removeprefix("REPORT "))


def test_engine_drafts_and_equals_plain_sglang(report, prompts_of_engine, plain_bundled):
    sampling = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
    bodies = [{"input_ids": ids, "sampling_params": sampling} for ids in prompts_of_engine]
    plain = send_all(plain_bundled, bodies, 1)
    assert report["output_ids"] == [answer["output_ids"] for answer in plain]
    assert report["ssd"]["num_steps"] == 5 and report["ssd"]["backup"] == "jit"
    assert report["ssd"]["hits"] > 0 and report["ssd"]["accepted"] > 0


def test_engine_serves_adapters_and_takes_new_weights(report):
    texts = report["texts"]
    for with_drafts, without in texts.values():
        assert with_drafts == without
    adapter, other, same = (texts[name][0] for name in ("adapter", "other", "same"))
    assert same == report["output_ids"]
    assert same != adapter != other != same


def test_engine_streams_the_whole_text(report):
    assert report["streamed"] == report["whole"]
    assert report["chunks"] > 1


def test_engine_leaves_nothing_behind(report):
    assert report["running"] >= 3  # scheduler, detokenizer, draft server
    assert report["left"] == []
    assert not report["folder_left"]
