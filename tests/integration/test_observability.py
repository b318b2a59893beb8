"""Metrics, the rounds of one request, and a timeline, from a server that serves."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from parity.harness import configure, send_all, ssd_state
from servers import ServerProcess
from sgl_ssd.recorder import DRAFT, VERIFIER
from sgl_ssd.timeline import main, read, summarise

pytestmark = pytest.mark.integration
K = 4


@pytest.fixture(scope="module", autouse=True)
def settings(ssd_server: ServerProcess) -> Iterator[None]:
    before = ssd_state(ssd_server)
    configure(ssd_server, ssd_drafting=1, ssd_num_steps=K, ssd_fan_out=4, ssd_backup=3)
    yield
    configure(ssd_server, ssd_num_steps=before["num_steps_max"], ssd_fan_out=4)


def body(prompt: list[int], tokens: int = 48, **more: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": sampling, **more}


def metrics(server: ServerProcess) -> dict[str, float]:
    """Our samples: `name{labels of ours}`."""
    with urllib.request.urlopen(server.url + "/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        if family.name.startswith("sglang:ssd_"):
            for name, labels, value, *_ in family.samples:
                assert {"model_name", "tp_rank"} <= labels.keys()
                ours = [labels[k] for k in ("accepted", "position", "reason", "result", "status")
                        if k in labels]  # fmt: skip
                key = name.removeprefix("sglang:ssd_")
                found[key + (f"{{{','.join(ours)}}}" if ours else "")] = value
    return found


def expected(state: dict[str, Any]) -> dict[str, float]:
    """The same figures from `/server_info`."""
    numbers = {
        "rounds_total": state["rounds"],
        "drafted_tokens_total": state["drafted"],
        "accepted_tokens_total": state["accepted"],
        "verifies_total": state["verifies"],
        "verifies_without_drafts_total": state["verifies_without_drafts"],
        "timeouts_total": state["timeouts"],
    }
    for i, (drafted, accepted) in enumerate(
        zip(state["drafted_per_position"], state["accepted_per_position"], strict=True), 1
    ):
        numbers[f"drafted_at_position_total{{{i}}}"] = drafted
        numbers[f"accepted_at_position_total{{{i}}}"] = accepted
    for status, count in state["outcomes"].items():
        numbers[f"answers_total{{{status}}}"] = count
    for reason, count in state["without_drafts"].items():
        numbers[f"rounds_without_drafts_total{{{reason}}}"] = count
    for length, hits in enumerate(state["hits_per_length"]):
        numbers[f"predictions_total{{{length},hit}}"] = hits
    for name, (count, seconds) in state["times"].items():
        numbers[f"{name}_seconds_count"] = count
        numbers[f"{name}_seconds_sum"] = seconds
    return {name: count for name, count in numbers.items() if count}


def settled(server: ServerProcess) -> tuple[dict[str, float], dict[str, Any]]:
    """Metrics and state of an idle server once they agree."""
    deadline = time.monotonic() + 20
    while True:
        state, shown = ssd_state(server), metrics(server)
        wanted = expected(state)
        wrong = {k: (shown.get(k), v) for k, v in wanted.items() if shown.get(k) != approx(v)}
        if not wrong:
            return shown, state
        if time.monotonic() > deadline:
            raise AssertionError(f"/metrics, /server_info: {wrong}")
        time.sleep(0.5)


def approx(value: float) -> Any:
    return pytest.approx(value, rel=1e-6)


def test_metrics_move_and_equal_the_counters(ssd_server: ServerProcess, prompts: Any) -> None:
    before, _ = settled(ssd_server)
    send_all(ssd_server, [body(p) for p in prompts[4:10]], concurrency=3)
    after, state = settled(ssd_server)
    for name in ("rounds_total", "drafted_tokens_total", "verify_seconds_count"):
        assert after[name] > before.get(name, 0), name
    assert after["draft_up"] == after["drafting"] == 1
    assert after["num_steps"] == K and after["fan_out"] == 4 * (K + 1)
    assert after["draft_step_seconds"] > 0 and after["draft_build_seconds"] > 0
    assert after["draft_kv_total_tokens"] == state["draft_stats"]["kv_total"]
    assert after["verifier_idle_seconds_count"] > 0


def test_the_log_line_has_the_hit_rate(ssd_server: ServerProcess, prompts: Any) -> None:
    ssd_server.post("/generate", body(prompts[6], tokens=300))
    lines = [line for line in ssd_server.log.read_text().splitlines() if "Decode batch" in line]
    assert lines and "hit rate: " in lines[-1] and "draft len: " in lines[-1]
    assert "accept len: " in lines[-1]


def check_rounds(rounds: list[dict[str, Any]], ids: list[int]) -> None:
    """The rounds of an answer add up to its tokens."""
    at = 0  # the first token is the prefill's
    for number, entry in enumerate(rounds, 1):
        assert entry["round"] == number
        assert 0 <= entry["k"] <= entry["drafted"] <= K
        at += entry["k"] + 1
        if at < len(ids):  # the last round may reach past the end
            assert entry["bonus"] == ids[at], entry
        assert entry["verify_ms"] > 0 and entry["wait_ms"] >= 0 and entry["answer_ms"] >= 0
        assert isinstance(entry["drafts"], str) and entry["drafts"]
    assert at >= len(ids) - 1


def test_the_rounds_of_one_request(ssd_server: ServerProcess, prompts: Any) -> None:
    asking, other = body(prompts[6], return_ssd_trace=True), body(prompts[7])
    answers = send_all(ssd_server, [asking, other, asking], concurrency=3)
    for answer in (answers[0], answers[2]):
        rounds = answer["meta_info"]["ssd_trace"]
        check_rounds(rounds, answer["output_ids"])
        assert {"hit", "partial"} & {entry["drafts"] for entry in rounds}
    assert "ssd_trace" not in answers[1]["meta_info"]
    [first, second] = ssd_server.post(
        "/generate",
        {**asking, "input_ids": [prompts[6], prompts[8]]},
    )
    for answer in (first, second):
        check_rounds(answer["meta_info"]["ssd_trace"], answer["output_ids"])


def test_the_rounds_come_with_the_end_of_a_stream(ssd_server: ServerProcess, prompts: Any) -> None:
    request = urllib.request.Request(
        ssd_server.url + "/generate",
        json.dumps(body(prompts[6], return_ssd_trace=True, stream=True)).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        chunks = [line[6:] for line in answer.read().decode().split("\n") if "data: {" in line]
    last = json.loads(chunks[-1])
    check_rounds(last["meta_info"]["ssd_trace"], last["output_ids"])
    assert all("ssd_trace" not in json.loads(chunk)["meta_info"] for chunk in chunks[:-1])


@pytest.mark.parametrize(
    "wish", [{"return_ssd_trace": True}, {"custom_params": {"return_ssd_trace": True}}], ids=str
)
def test_chat_answers_have_them_in_their_meta_info(
    ssd_server: ServerProcess, wish: dict[str, Any]
) -> None:
    chat = {
        "model": "m", "messages": [{"role": "user", "content": "def add(a, b):"}],
        "max_tokens": 24, "temperature": 0, "return_meta_info": True,
    }  # fmt: skip
    answer = ssd_server.post("/v1/chat/completions", {**chat, **wish})
    rounds = answer["choices"][0]["meta_info"]["ssd_trace"]
    assert rounds and rounds[0]["round"] == 1 and "k" in rounds[0]
    plain = ssd_server.post("/v1/chat/completions", chat)
    assert "ssd_trace" not in plain["choices"][0]["meta_info"]


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_bad_wishes_are_refused(ssd_server: ServerProcess, prompts: Any, value: Any) -> None:
    with pytest.raises(RuntimeError, match=" 400 .*return_ssd_trace must be true or false"):
        ssd_server.post("/generate", body(prompts[1], return_ssd_trace=value))
    with pytest.raises(RuntimeError, match=" 400 .*return_ssd_trace must be true or false"):
        ssd_server.post(
            "/v1/completions",
            {"model": "m", "prompt": "x", "custom_params": {"return_ssd_trace": value}},
        )


def test_a_timeline_of_both_processes(
    ssd_server: ServerProcess, prompts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(ssd_server, ssd_trace=1)
    state = ssd_state(ssd_server)
    path = Path(state["trace_file"])
    assert state["trace"] == "on" and path.is_absolute()
    try:
        ssd_server.post("/generate", body(prompts[6], tokens=200))
        configure(ssd_server, ssd_trace=0)
        deadline = time.monotonic() + 15
        while ssd_state(ssd_server)["trace"] != "off":
            assert time.monotonic() < deadline
            time.sleep(0.2)
        json.loads(path.read_text())  # as Perfetto wants it
        events = read(path)
    finally:
        path.rename(copy := tmp_path / "trace.json")
    names = {(e.track[0], e.name) for e in events}
    assert {
        "verify",
        "prefill",
        "launch",
        "host work",
        "wait for drafts",
        "question",
        "answer",
    } <= {name for process, name in names if process == VERIFIER}
    assert {"answer", "adopt", "build step", "build", "prefill"} <= {
        name for process, name in names if process == DRAFT
    }
    summary = summarise(events)
    assert summary.rounds >= 30 and summary.tokens >= 1
    assert summary.overlap > 0.1, "the draft works under the verifies"
    # On one clock: an answer's work lies between its question's and its answer's way.
    trips = {e.args["round"]: e for e in events if e.name == "round trip"}
    works = [e for e in events if e.track[0] == DRAFT and e.name == "answer"]
    inside = [
        trips[e.args["round"]].begin - 0.1 <= e.begin and e.end <= trips[e.args["round"]].end + 0.1
        for e in works
        if e.args["round"] in trips
    ]
    assert len(inside) >= 30 and all(inside)
    pytest.importorskip("matplotlib")
    assert main([str(copy)]) == 0
    assert "overlap" in capsys.readouterr().out and copy.with_suffix(".png").stat().st_size > 10_000
