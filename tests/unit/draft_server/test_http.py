"""Health, numbers and metrics over HTTP."""

from __future__ import annotations

import contextlib
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from servers import free_port
from sgl_ssd.draft_server.http import HttpSide, Source
from sgl_ssd.errors import ConfigError
from sgl_ssd.metrics import TimeHistogram


@pytest.fixture
def port() -> Iterator[int]:
    times = TimeHistogram()
    for seconds in (0.0004, 0.004, 100.0):
        times.add(seconds)
    source = Source(
        lambda: {"sessions": 2.0, "hits": 5.0, "step_row_ms": 1.0},
        {"model_path": "a/b", "device": "cpu"},
        {"step": ("Time of a build step.", times)},
    )
    side = HttpSide(port := free_port(), source, lambda: True)
    yield port
    side.close()
    side.close()


def get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
        return answer.read().decode()


def test_health_stats_and_metrics(port: int) -> None:
    assert get(port, "/health") == "ok\n"
    assert json.loads(get(port, "/stats?x=1")) == {"sessions": 2, "hits": 5, "step_row_ms": 1}
    metrics = get(port, "/metrics")
    assert "# TYPE ssd_draft_sessions gauge\nssd_draft_sessions 2.0" in metrics
    assert "# TYPE ssd_draft_hits_total counter\nssd_draft_hits_total 5.0" in metrics
    assert 'ssd_draft_info{device="cpu",model_path="a/b"} 1.0' in metrics
    assert "step_row_ms" not in metrics  # what no page names is for people who look at /stats


def test_times_are_cumulative_histograms(port: int) -> None:
    lines = get(port, "/metrics").splitlines()
    assert "# TYPE ssd_draft_step_seconds histogram" in lines
    for bound, count in (("0.0002", 0), ("0.0005", 1), ("0.005", 2), ("1.0", 2), ("+Inf", 3)):
        assert f'ssd_draft_step_seconds_bucket{{le="{bound}"}} {count}.0' in lines
    assert "ssd_draft_step_seconds_count 3.0" in lines
    assert "ssd_draft_step_seconds_sum 100.0044" in lines


def test_everything_else_is_refused(port: int) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(port, "/secret")
    with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
        client.sendall(b"POST /stats HTTP/1.1\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 405")
    with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
        client.sendall(b"\xff" * 200_000)
        client.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(100) == b""
    assert get(port, "/health") == "ok\n"


def test_a_port_that_is_taken_stops_the_start(port: int) -> None:
    with pytest.raises(ConfigError, match="--http-port"):
        HttpSide(port, Source(dict), lambda: True)


def test_health_of_a_loop_that_is_stuck() -> None:
    side = HttpSide(port := free_port(), Source(dict), lambda: False)
    try:
        with pytest.raises(urllib.error.HTTPError, match="503"):
            get(port, "/health")
        assert json.loads(get(port, "/stats")) == {}
    finally:
        side.close()
