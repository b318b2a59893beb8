"""Spans end in a file that can be read, on one clock."""

from __future__ import annotations

import errno
import io
import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_ssd import recorder
from sgl_ssd.protocol import MAX_SPANS, SpanKind
from sgl_ssd.recorder import DRAFT, TRACKS, VERIFIER, ClockOffset, Recorder, Span, TraceFile


def written(path: Path, *batches: list[Span]) -> list[dict]:
    file = TraceFile(str(path))
    for spans in batches:
        file.add(spans)
    file.close()
    deadline = time.monotonic() + 10
    while not file.closed:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    events = json.loads(path.read_text())
    return [e for e in events if e["ph"] == "X"]


def test_a_recorder_keeps_the_newest_and_drains_once() -> None:
    spans = Recorder()
    for i in range(MAX_SPANS + 5):
        spans.add(SpanKind.VERIFY, i, i + 0.5, count=3)
    drained = spans.drain()
    assert len(drained) == MAX_SPANS and drained[0] == (SpanKind.VERIFY, 5, 5.5, 0, 3)
    assert spans.drain() == []


def test_every_kind_has_a_place_on_a_track_that_is_there() -> None:
    assert set(recorder._PLACES) == set(SpanKind)
    assert {place[:2] for place in recorder._PLACES.values()} == set(TRACKS)


def exchange(number: int, at: float, there: float, back: float, work: float, shift: float):
    """A question at `at` and its answer, as both ends record them; the draft's clock is off by
    `shift`."""
    t1 = at + there
    asked = (SpanKind.ROUND_TRIP, at, t1 + work + back, number, 1)
    return asked, (SpanKind.ANSWER, t1 + shift, t1 + work + shift, number, 1)


@settings(max_examples=100, deadline=None, database=None)
@given(
    shift=st.floats(-1e5, 1e5),
    wires=st.lists(st.tuples(st.floats(1e-4, 0.02), st.floats(1e-4, 0.02)), min_size=1),
)
def test_the_offset_is_wrong_by_half_the_quickest_wire_at_most(
    shift: float, wires: list[tuple[float, float]]
) -> None:
    offset = ClockOffset()
    for i, (there, back) in enumerate(wires, 1):
        asked, answered = exchange(i, 10.0 * i, there, back, 0.001, shift)
        assert offset.add([asked]) == []
        found = offset.add([answered])
        assert [f[0] for f in found] == [i]
    allowed = min(a + b for a, b in wires) * 1.001 ** len(wires) / 2 + 1e-6
    # On a clock that could be the same one, it is.
    assert abs(offset.seconds + shift) <= max(allowed, 0.02 + recorder.SAME_CLOCK_S)


def test_on_one_clock_nothing_is_shifted() -> None:
    offset = ClockOffset()
    for i in range(1, 50):  # the way there is longer: an estimate would be off
        offset.add(exchange(i, i, 0.005, 0.0001, 0.001, 0.0))
    assert offset.seconds == 0.0


def test_exchanges_without_an_end_are_forgotten() -> None:
    offset = ClockOffset()
    for i in range(1, 2000):
        offset.add([exchange(i, i, 0.1, 0.1, 0.1, 0.0)[0]])
    assert len(offset._asked) <= recorder._PAIRS


def test_a_file_has_both_processes_on_the_verifiers_clock(tmp_path: Path) -> None:
    asked, answered = exchange(7, 100.001, 0.0002, 0.0004, 0.001, shift=5000.0)
    verify = (SpanKind.VERIFY, 100.0, 100.01, 0, 3)
    step = (SpanKind.BUILD_STEP, 5100.002, 5100.004, 0, 9)
    events = {e["name"]: e for e in written(tmp_path / "t.json", [verify, asked], [answered, step])}
    assert events["verify"]["ts"] == 0.0 and events["verify"]["dur"] == pytest.approx(10_000)
    assert events["verify"]["args"] == {"tokens": 3} and events["verify"]["pid"] == VERIFIER
    assert events["build step"]["pid"] == DRAFT
    assert events["build step"]["ts"] == pytest.approx(2000, abs=300)  # the wire is 600 us
    assert events["round trip"]["args"] == {"rows": 1, "round": 7}
    assert events["question"]["ts"] == pytest.approx(1000, abs=1)
    assert events["question"]["dur"] == pytest.approx(300, abs=1)  # half of the wire each
    assert events["answer"]["dur"] == pytest.approx(300, abs=1)


def test_each_of_several_draft_servers_has_a_clock_and_a_process_of_its_own(
    tmp_path: Path,
) -> None:
    file = TraceFile(str(tmp_path / "t.json"), draft_servers=2)
    shifts = (5000.0, -50.0)
    pairs = [exchange(7 + i, 100.001, 0.0002, 0.0004, 0.001, shift=s) for i, s in enumerate(shifts)]
    file.add([asked for asked, _ in pairs])
    for i, (_, answered) in enumerate(pairs):
        step = (SpanKind.BUILD_STEP, 100.002 + shifts[i], 100.004 + shifts[i], 0, i)
        file.add([answered, step], i)
    file.close()
    file._thread.join(10)
    events = json.loads((tmp_path / "t.json").read_text())
    steps = [e for e in events if e["name"] == "build step"]
    assert [(e["pid"], e["args"]["rows"]) for e in steps] == [(DRAFT, 0), (DRAFT + 1, 1)]
    assert [e["ts"] for e in steps] == pytest.approx([1000, 1000], abs=300)
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {VERIFIER: "verifier", DRAFT: "draft server", DRAFT + 1: "draft server 1"}
    tracks = {e["tid"] for e in events if e["name"] == "thread_name" and e["pid"] == DRAFT + 1}
    assert tracks == {tid for pid, tid in TRACKS if pid == DRAFT}


def test_tracks_and_processes_are_named(tmp_path: Path) -> None:
    written(path := tmp_path / "t.json")
    named = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in json.loads(path.read_text())
        if e["name"] == "thread_name"
    }
    assert named == TRACKS


def test_a_full_file_takes_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MAX_EVENTS", 10)
    file = TraceFile(str(tmp_path / "t.json"))
    span = (SpanKind.HOST, 0.0, 1.0, 0, 0)
    while not file.full:
        file.add([span] * 4)
        time.sleep(0.005)
    before = file.events
    file.add([span])
    file.close()
    file._thread.join(10)
    assert file.events == before == 12 and file.closed


def test_a_path_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        TraceFile(str(tmp_path / "no" / "t.json"))


class Disk(io.RawIOBase):
    """Takes `room` bytes, and then no more."""

    def __init__(self, room: int) -> None:
        self.room = room

    def writable(self) -> bool:
        return True

    def write(self, data: memoryview, /) -> int:
        taken = min(self.room, len(data))
        self.room -= taken
        if not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return taken


@pytest.mark.parametrize("room", [0, 5, 2_000, None], ids=["header", "part", "spans", "/dev/full"])
@pytest.mark.parametrize("buffer", [1, 100_000], ids=["unbuffered", "buffered"])
@pytest.mark.parametrize("batches", [0, 1, 50])
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_disk_that_is_full_ends_the_file_with_one_line(
    room: int | None,
    buffer: int,
    batches: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if room is not None:
        disk = io.BufferedWriter(Disk(room), buffer)
        monkeypatch.setattr(recorder, "open", lambda *_: disk, raising=False)
    file = TraceFile("/dev/full")
    for _ in range(batches):
        file.add([(SpanKind.HOST, 0.0, 1.0, 0, 0)])
    file.close()
    file._thread.join(10)
    fits = room == 2_000 and batches < 50
    assert file.closed and file._file.closed
    assert ("ends early" in caplog.text) == (not fits)
    assert len(caplog.records) == (not fits)
    waiting = file._spans.qsize()
    file.add([(SpanKind.HOST, 0.0, 1.0, 0, 0)])
    assert file._spans.qsize() == waiting, "nobody takes them out"
