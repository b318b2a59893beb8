"""A timeline while it is written: who records, and when the file is complete."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from channels import FakeClock
from sgl_ssd.protocol import SpanKind, Spans
from sgl_ssd.scheduler import recording
from sgl_ssd.scheduler.recording import FLUSH_S, LAST_S, Recording
from sgl_ssd.scheduler.stats import SSDStats


class Client:
    """A draft client that is told to record."""

    def __init__(self, servers: int = 1, up: int | None = None) -> None:
        self.clients = [object()] * servers
        self.up = servers if up is None else up
        self.on_spans: Callable[[Spans, int], None] | None = None

    def record(self, on_spans: Callable[[Spans, int], None] | None) -> None:
        self.on_spans = on_spans

    def stop_recording(self) -> int:
        return self.up


def spans(*rows: tuple[int, float, float, int, int], last: bool = False) -> Spans:
    return Spans(
        num=len(rows), last=last,
        marks=np.array([(k, r, c) for k, _, _, r, c in rows], np.int64).reshape(-1, 3),
        times=np.array([(b, e) for _, b, e, _, _ in rows], np.float64).reshape(-1, 2),
    )  # fmt: skip


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Any]:
    def make(**kwargs: Any) -> tuple[Recording, SSDStats, Client, FakeClock]:
        stats, client, clock = SSDStats(4), Client(**kwargs), FakeClock()
        record = Recording(str(tmp_path / "t.json"), stats, client, clock)  # type: ignore[arg-type]
        return record, stats, client, clock

    return make


def finished(record: Recording) -> list[str]:
    """Names of the spans in the file once it is complete."""
    deadline = time.monotonic() + 10
    while record.state != "off":
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return [e["name"] for e in json.loads(Path(record.file.path).read_text()) if e["ph"] == "X"]


def test_both_ends_are_in_the_file_and_it_closes_with_the_last_spans(make: Any) -> None:
    record, stats, client, clock = make()
    assert record.state == "on" and stats.recorder is not None
    stats.recorder.add(SpanKind.VERIFY, 1.0, 2.0)
    clock.sleep(FLUSH_S)
    record.tick()
    client.on_spans(spans((SpanKind.BUILD_STEP, 1.0, 1.5, 0, 4)), 0)
    stats.recorder.add(SpanKind.HOST, 2.0, 3.0)
    record.stop()
    record.stop()
    assert stats.recorder is None and record.state == "closing"
    on_spans = client.on_spans
    on_spans(spans((SpanKind.BUILD, 1.0, 1.6, 0, 4)), 0)
    assert record.state == "closing"
    on_spans(spans(last=True), 0)
    assert client.on_spans is None
    assert finished(record) == ["verify", "build step", "host work", "build"]


def test_the_last_spans_of_all_draft_servers_are_waited_for(make: Any) -> None:
    record, _, client, _ = make(servers=3, up=2)
    on_spans = client.on_spans
    record.stop()
    on_spans(spans(last=True), 2)
    assert record.state == "closing"
    on_spans(spans((SpanKind.BUILD, 1.0, 1.6, 0, 4), last=True), 0)
    assert finished(record) == ["build"]


def test_a_draft_server_that_is_silent_is_waited_for_only_so_long(make: Any) -> None:
    record, _, _, clock = make()
    record.stop()
    record.tick()
    assert record.state == "closing"
    clock.sleep(LAST_S + 0.1)
    record.tick()
    record.tick()
    assert finished(record) == []


def test_without_a_draft_server_it_closes_at_once(make: Any) -> None:
    record, stats, _, _ = make(up=0)
    stats.recorder.add(SpanKind.PREFILL, 0.0, 1.0)
    record.stop()
    assert finished(record) == ["prefill"]


def test_a_full_file_ends_the_recording(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    record, stats, _, clock = make(up=0)
    monkeypatch.setattr("sgl_ssd.recorder.MAX_EVENTS", 3)
    for _ in range(5):
        stats.recorder.add(SpanKind.HOST, 0.0, 1.0)
    record.tick()
    deadline = time.monotonic() + 10
    while not record.file.full:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    clock.sleep(FLUSH_S)
    record.tick()
    assert stats.recorder is None and len(finished(record)) == 5


def test_a_full_disk_ends_the_recording(caplog: pytest.LogCaptureFixture) -> None:
    stats, client, clock = SSDStats(4), Client(up=0), FakeClock()
    record = Recording("/dev/full", stats, client, clock)  # type: ignore[arg-type]
    stats.recorder.add(SpanKind.HOST, 0.0, 1.0)
    record.tick()
    record.file._thread.join(10)
    assert record.state == "on"
    clock.sleep(FLUSH_S)
    record.tick()
    assert record.state == "off" and stats.recorder is None
    assert [line.levelname for line in caplog.records] == ["WARNING"]


def test_spans_of_the_wire_are_those_of_a_recorder() -> None:
    rows = [(SpanKind.ANSWER, 1.0, 2.0, 7, 3), (SpanKind.ADOPT, 3.0, 2.0, 0, 1)]
    assert recording.spans_of(spans(*rows)) == [
        (SpanKind.ANSWER, 1.0, 2.0, 7, 3),
        (SpanKind.ADOPT, 3.0, 3.0, 0, 1),  # no span ends before it begins
    ]
