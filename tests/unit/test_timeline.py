"""The numbers and the picture of a timeline."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_ssd import recorder, timeline
from sgl_ssd.protocol import SpanKind
from sgl_ssd.recorder import Span, TraceFile
from sgl_ssd.timeline import TimelineError, common, main, merge, read, summarise, window

ROUND_S = 0.012


def rounds(count: int, start: float = 0.0) -> list[Span]:
    """Verifies of 10 ms every 12 ms; the draft steps twice for 4 ms, the second one half late."""
    spans: list[Span] = []
    for i in range(count):
        t = start + i * ROUND_S
        spans += [
            (SpanKind.VERIFY, t, t + 0.010, 0, 4),
            (SpanKind.DRAFT_WAIT, t + 0.010, t + 0.011, 0, 1),
            (SpanKind.HOST, t + 0.001, t + 0.004, 0, 0),
            (SpanKind.ROUND_TRIP, t + 0.010, t + 0.011, i + 1, 1),
            (SpanKind.ANSWER, t + 0.0102, t + 0.0108, i + 1, 1),
            (SpanKind.ADOPT, t + 0.0103, t + 0.0105, 0, 1),
            (SpanKind.BUILD_STEP, t, t + 0.004, 0, 9),
            (SpanKind.BUILD_STEP, t + 0.008, t + 0.012, 0, 9),
            (SpanKind.BUILD, t, t + 0.012, 0, 9),
        ]
    return spans


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "t.json", rounds(20))


def write(path: Path, spans: list[Span]) -> Path:
    file = TraceFile(str(path))
    file.add(spans)
    file.close()
    file._thread.join(10)
    return path


def test_summary(path: Path) -> None:
    s = summarise(read(path))
    assert (s.rounds, s.tokens, s.steps) == (20, 4.0, 2.0)
    assert s.verify_ms == pytest.approx(10.0, abs=1e-3)
    assert s.idle_ms == pytest.approx(2.0, abs=1e-3)
    assert (s.wait_ms, s.host_ms) == (pytest.approx(1.0, abs=1e-3), pytest.approx(3.0, abs=1e-3))
    assert s.round_trip_ms == pytest.approx(1.0, abs=1e-3)
    assert s.step_ms == pytest.approx(4.0, abs=1e-3)
    assert s.active_ms == pytest.approx(19 * 12 + 0, abs=11)
    assert s.target_busy == pytest.approx(10 / 12, abs=0.02)
    assert s.draft_busy == pytest.approx(8 / 12, abs=0.02)
    # Of each second step the last 2 ms of 4 lie under no verify.
    assert s.overlap == pytest.approx(6 / 8, abs=0.01)
    text = str(s)
    assert "20 verifies" in text and "4.00 tokens each" in text and "75% of the draft's" in text


def test_a_pause_is_no_part_of_a_round(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", rounds(10) + rounds(10, start=60.0))
    s = summarise(read(path))
    assert s.idle_ms == pytest.approx(2.0, abs=1e-3) and s.active_ms < 300


def test_a_file_that_was_cut_off_is_read_to_its_last_whole_line(path: Path) -> None:
    whole = read(path)
    path.write_bytes(path.read_bytes()[:-40])
    cut = read(path)
    assert len(whole) - 3 <= len(cut) < len(whole)


@pytest.mark.parametrize("text", ["", "{}", "[\n{\n{}\n]", "[\n1,\n2\n]"])
def test_what_is_no_timeline_is_said_in_a_line(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (path := tmp_path / "t.json").write_text(text)
    assert main([str(path)]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_no_file_and_no_rounds(tmp_path: Path) -> None:
    with pytest.raises(TimelineError, match="No such file"):
        read(tmp_path / "none.json")
    path = write(tmp_path / "t.json", rounds(1))
    with pytest.raises(TimelineError, match="fewer than two"):
        summarise(read(path))


INTERVALS = st.lists(
    st.tuples(st.integers(0, 50), st.integers(1, 10)).map(lambda i: (float(i[0]), float(sum(i))))
)


@settings(max_examples=200, deadline=None, database=None)
@given(a=INTERVALS, b=INTERVALS)
def test_overlap_against_counting(a: list, b: list) -> None:
    def cover(intervals: list) -> set[int]:
        return {t for begin, end in intervals for t in range(int(begin), int(end))}

    merged = merge(a), merge(b)
    assert sum(end - begin for begin, end in merged[0]) == len(cover(a))
    assert common(*merged) == len(cover(a) & cover(b))


def test_the_window_of_a_picture(path: Path) -> None:
    events = read(path)
    begin, end = window(events, 3)
    assert end - begin == pytest.approx(36 * 1.06, abs=0.1)
    assert window(events, 2, at_s=0.1)[0] == pytest.approx(108 - 0.03 * 24, abs=0.1)
    with pytest.raises(TimelineError, match="--rounds"):
        window(events, 50)


def test_a_picture(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main([str(path), "--rounds", "3"]) == 0
    picture = path.with_suffix(".png")
    assert picture.read_bytes().startswith(b"\x89PNG") and str(picture) in capsys.readouterr().out


def test_whatever_is_drawn_has_a_colour_of_its_own() -> None:
    names = {name for _, _, name, _ in recorder._PLACES.values()}
    assert names - {"round trip", "answer"} <= timeline.COLOURS.keys()
    assert len(set(timeline.COLOURS.values())) == len(timeline.COLOURS)


def test_without_matplotlib_there_are_numbers_and_one_clear_line(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_matplotlib(*args: object) -> None:
        raise ImportError("matplotlib")

    monkeypatch.setattr(timeline, "draw", no_matplotlib)
    assert main([str(path)]) == 0
    told = capsys.readouterr()
    assert "20 verifies" in told.out and "sgl-ssd[timeline]" in told.err
    assert main([str(path), "--png", "x.png"]) == 1
