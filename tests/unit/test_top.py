"""The live view in the terminal."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from live_looks import server_info
from sgl_ssd import top
from sgl_ssd.live import Look, compare


def frame(**changes: Any) -> Any:
    def look(at: float) -> Look:
        return Look.of(server_info(at), at)

    return replace(compare(look(1), look(2)), **changes)


def shown(width: int = 100, speeds: list[float] | None = None, **changes: Any) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(top.render(frame(**changes), speeds or [], width))
    return console.export_text()


def test_everything_is_there() -> None:
    text = shown()
    for part in (
        "target ← some/draft (up)", "K=4 F=4 auto coupled", "160.0", "4.00", "80%", "25.0 ms",
        "waits\u00a0for\u00a0drafts\u00a02.0\u00a0ms", "host\u00a0work\u00a04.5\u00a0ms",
        "1: 100%   2: 100%   3: 60%   4: 40%", "hit 80%   backup 20%", "draft 25%", "abc",
        "no alerts",
    ):  # fmt: skip
        assert part in text, part


def test_the_numbers_fit_into_80_columns() -> None:
    names = ("tokens/s", "accept length", "hit rate", "verifier idle", "draft idle", "sessions")
    (line,) = [line for line in shown(80).splitlines() if "tokens/s" in line]
    assert all(name in line for name in names)


def test_several_draft_servers_have_a_line_each() -> None:
    one = {"endpoint": "tcp://10.0.0.1:7000", "draft": "up", "open_sessions": 3,
           "round_trip_ms": 0.9, "ping_ms": 0.42}  # fmt: skip
    two = {"endpoint": "ipc:///d1", "draft": "down", "open_sessions": 0, "round_trip_ms": 0.0,
           "ping_ms": 0.0}  # fmt: skip
    text = shown(draft_servers=[one, two])
    (first,) = [line for line in text.splitlines() if "0 tcp://10.0.0.1:7000" in line]
    assert "up" in first and "0.9 ms" in first and "0.42 ms" in first
    (second,) = [line for line in text.splitlines() if "1 ipc:///d1" in line]
    assert "down" in second and "–" in second
    assert "draft server" not in shown(draft_servers=[one])


def test_alerts_are_shown() -> None:
    text = shown(alerts=["the draft server is down: serving goes on without drafts"])
    assert "! the draft server is down" in text and "no alerts" not in text


def test_an_idle_server_is_shown_with_dashes() -> None:
    text = shown(
        round_ms=None, round_parts={}, accept_length=None, hit_rate=None, requests=[],
        accepted_per_position=[], outcomes={},
    )  # fmt: skip
    assert "–" in text and "waits for the target" not in text and "request" not in text


def test_markup_in_names_is_text() -> None:
    row = {"rid": "[red]x", "prompt_tokens": 1, "tokens": 1, "rounds": 0, "accept_length": None}
    assert "[red]x" in shown(requests=[row], model="[bold]m")


def test_many_requests_are_cut() -> None:
    row = {"rid": "r", "prompt_tokens": 1, "tokens": 1, "rounds": 1, "accept_length": 1.0}
    assert "and 8 more" in shown(requests=[row] * 20)


@pytest.mark.parametrize("width", [60, 77, 100])
def test_a_bar_is_as_long_as_its_line(width: int) -> None:
    parts = {"target": 16.0, "drafts": 0.001, "launch": 2.5, "host": 4.5}
    assert top._bar(parts, width).plain == "█" * width
    assert top._bar(dict.fromkeys(parts, 0.0), width).plain == ""


def test_a_chart_has_a_column_for_every_frame() -> None:
    assert top._chart([0, 5, 10]) == " ▄█"
    assert top._chart([]) == top._chart([0.0, 0.0]) == ""


def test_no_server_is_one_line(capsys: pytest.CaptureFixture) -> None:
    assert top.main(["http://127.0.0.1:9", "--once"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("sgl_ssd.top: no server at http://127.0.0.1:9")
    assert "python -m sgl_ssd.launch_server" in line


def test_a_picture_needs_nothing_from_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter([server_info(1), server_info(2)])
    monkeypatch.setattr(top.Client, "get", lambda *_: next(looks))
    file = tmp_path / "top.svg"
    assert top.main(["--once", "--interval", "0", "--svg", str(file)]) == 0
    picture = file.read_text()
    assert "accept" in picture and "font-face" not in picture
    assert set(re.findall(r"https?://[^ \"]+", picture)) <= {
        "http://www.w3.org/2000/svg", "https://www.textualize.io",
    }  # fmt: skip
