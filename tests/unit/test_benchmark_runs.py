"""A whole run of the suite against servers that only pretend, in a second."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from benchmarks import open_loop, report, serve, suite, workloads
from sgl_ssd.protocol import Status
from sgl_ssd.scheduler.stats import SSDStats


class Pretender(ThreadingHTTPServer):
    """Answers what the benchmark asks; `ours` has a section `ssd`, and takes settings."""

    daemon_threads = True

    def __init__(self, ours: bool) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.ours = ours
        self.stats = SSDStats(8)
        self.settings: list[dict[str, int]] = []
        self.bodies: list[dict[str, Any]] = []
        self.broken = False
        self.busy = 2  # refusals to flush, as SGLang while a request ends
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def generate(self, body: dict[str, Any]) -> Any:
        count = body["sampling_params"]["max_new_tokens"]
        drafting = self.ours and self.settings and self.settings[-1].get("ssd_drafting") == 1
        with self.lock:
            self.bodies.append(body)
            for _ in range(count // 2 if drafting else count):
                self.stats.observe_round(*((1, 1) if drafting else (0, 0)))
                self.stats.round_trip.add(0.001)
                if drafting:
                    self.stats.observe_answer(Status.HIT)
        answer = {
            "output_ids": list(range(count)),
            "meta_info": {"completion_tokens": count, "spec_verify_ct": count // 2},
        }
        n = body["sampling_params"].get("n", 1)
        return [answer] * n if n > 1 else answer

    def state(self) -> dict[str, Any]:
        ssd = {"ssd": {**self.stats.as_dict(), "draft_stats": {}}} if self.ours else {}
        return {"internal_states": [ssd]}


class Handler(BaseHTTPRequestHandler):
    server: Pretender

    def log_message(self, *args: Any) -> None:
        pass

    def _answer(self, body: Any, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(500 if self.server.broken else status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self._answer(self.server.state() if self.path == "/server_info" else "ok")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/generate":
            self._answer(self.server.generate(body))
        elif self.path == "/set_internal_state":
            self.server.settings.append(body["server_args"])
            self._answer({"updated": [True]})
        elif self.server.busy:
            self.server.busy -= 1
            self._answer("busy", 400)
        else:
            self._answer("flushed")


@pytest.fixture
def pretenders() -> Iterator[tuple[Pretender, Pretender]]:
    servers = Pretender(ours=False), Pretender(ours=True)
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield servers
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def arrivals(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's benchmark takes long to import; what it does is its own business."""
    numbers = dict.fromkeys(open_loop.KEPT, 5.0)
    monkeypatch.setattr(open_loop, "load", lambda: None)
    monkeypatch.setattr(open_loop, "run", lambda *args, **kwargs: numbers)


def _attach(plain: Pretender, ours: Pretender) -> list[str]:
    return [f"--attach=bundled:ar={plain.url}", f"--attach=bundled:ssd@8={ours.url}"]


def test_smoke_goes_through(pretenders, tmp_path: Path, capsys):
    plain, ours = pretenders
    assert suite.main(["--smoke", "--out", str(tmp_path), *_attach(plain, ours)]) == 0
    data = json.loads((tmp_path / "results.json").read_text())
    kinds = len(workloads.WORKLOADS) + 1
    assert len(data["results"]) == (1 + len(suite.SMOKE.settings)) * kinds
    assert "failed" not in data and data["environment"]["packages"]["sglang"]
    one = next(r for r in data["results"] if r["setting"] == "K=4 F=4" and not r["rate"])
    assert one["accept_length"] == 2.0 and one["ssd"]["hit_rate"] == 1.0
    assert one["ssd"]["round_trip_ms"] == pytest.approx(1.0)
    text = (tmp_path / "report.md").read_text()
    assert "| SSD K=4 F=4 |" in text and "Random arrivals" in text
    assert "The planner" not in text  # of so few rounds
    assert {"ssd_drafting": 0} in ours.settings and not plain.settings


def test_requests_are_the_same_for_all_and_seeded_for_ours(pretenders, tmp_path: Path):
    plain, ours = pretenders
    argv = ["--pair", f"bundled={suite.TARGET_PATH},x", *_attach(plain, ours), "--ssd", "off"]
    argv += ["--workloads", "code,samples,turns", "--requests", "2:3", "--tokens", "8"]
    assert serve.main([*argv, "--out", str(tmp_path / "r.json")]) == 0
    prompts = [sorted(map(str, (b["input_ids"] for b in s.bodies))) for s in pretenders]
    assert prompts[0] == prompts[1]
    assert not any("sampling_seed" in b["sampling_params"] for b in plain.bodies)
    seeded = [b["sampling_params"] for b in ours.bodies]
    assert all(("sampling_seed" in s) != (s.get("n", 1) > 1) for s in seeded)


def test_what_fails_is_reported_and_the_rest_goes_on(pretenders, tmp_path: Path):
    plain, ours = pretenders
    generate = ours.generate

    def failing(body: Any) -> Any:
        if ours.settings[-1:] == [{"ssd_drafting": 0}]:
            raise ConnectionError
        return generate(body)

    ours.generate = failing  # type: ignore[method-assign]
    ours.handle_error = lambda *args: None  # type: ignore[method-assign]
    status = suite.main(["--smoke", "--out", str(tmp_path), *_attach(plain, ours)])
    data = json.loads((tmp_path / "results.json").read_text())
    assert status == 1 and len(data["failed"]) == len(workloads.WORKLOADS) + 1
    assert all("off" in line for line in data["failed"])
    assert {r["setting"] for r in data["results"] if r["system"] == "ssd"} >= {"auto", "K=4 F=4"}
    assert "failed: bundled-ssd-k8 off" in report.render([data])


def test_time_is_kept(pretenders, tmp_path: Path):
    argv = ["--pair", f"bundled={suite.TARGET_PATH},x", *_attach(*pretenders), "--budget-s", "0"]
    began = time.monotonic()
    assert serve.main([*argv, "--out", str(tmp_path / "r.json")]) == 0
    data = json.loads((tmp_path / "r.json").read_text())
    assert data["cut_short"] and not data["results"] and time.monotonic() - began < 30
