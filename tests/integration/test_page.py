"""The page `/ssd` of a real server, in a headless browser where there is one."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from parity.harness import configure
from servers import ServerProcess
from sgl_ssd.top import main as top

pytestmark = pytest.mark.integration

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)


@pytest.fixture(scope="module")
def busy(ssd_server: ServerProcess) -> Iterator[ServerProcess]:
    """The server, with a request running all the time."""
    configure(ssd_server, ssd_drafting=1, ssd_num_steps=4, ssd_fan_out=4)
    end = threading.Event()

    def load() -> None:
        while not end.is_set():
            ssd_server.generate("class Reader:\n", max_new_tokens=200, ignore_eos=True)

    thread = threading.Thread(target=load)
    thread.start()
    yield ssd_server
    end.set()
    thread.join()


def test_the_page_and_its_numbers(busy: ServerProcess) -> None:
    with urllib.request.urlopen(busy.url + "/ssd", timeout=30) as answer:
        assert answer.headers["Content-Type"].startswith("text/html")
        assert b"/ssd/state" not in answer.read().split(b"<script>")[0]
    first = busy.get("/ssd/state")
    threading.Event().wait(2.0)
    frame = busy.get("/ssd/state")
    assert first["draft"] == frame["draft"] == "up" and frame["num_steps"] == 4
    assert frame["rounds"] > 0 and frame["tokens_per_s"] > 0 and 0 < frame["seconds"] < 6
    assert 1 <= frame["accept_length"] <= 5 and 0 <= frame["hit_rate"] <= 1
    assert 0 < len(frame["accepted_per_position"]) <= 4
    assert 0 < len(frame["hit_rate_per_length"]) <= 5
    assert sum(frame["round_parts"].values()) == pytest.approx(frame["round_ms"], rel=0.2)
    assert frame["verify_ms"] > 0 and 0 < frame["verifier_idle"] < 1
    (request,) = frame["requests"]
    assert request["prompt_tokens"] > 0 and request["tokens"] > 0


def test_polls_stay_out_of_the_log(busy: ServerProcess) -> None:
    busy.get("/ssd/state")
    assert "/ssd/state" not in busy.log.read_text(errors="replace").split("fired up")[1]


def test_top_shows_the_same_server(busy: ServerProcess, capsys: pytest.CaptureFixture) -> None:
    assert top([busy.url, "--once", "--interval", "1"]) == 0
    text = capsys.readouterr().out
    assert "target ← draft (up)" in text and "K=4 F=4" in text
    assert re.search(r"round [\d.]+ ms   verify [\d.]+ ms   build [\d.]+ ms", text)


@pytest.mark.skipif(BROWSER is None, reason=f"no browser here: {', '.join(BROWSERS)}")
def test_the_page_in_a_browser(busy: ServerProcess, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu",
            f"--user-data-dir={tmp_path}", "--enable-logging=stderr", "--v=0",
            "--virtual-time-budget=6000", "--dump-dom", busy.url + "/ssd",
        ],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr, done.stderr[-2000:]
    shown = dict(re.findall(r'id="([a-z-]+)"[^>]*>([^<]*)<', done.stdout))
    assert shown["models"] == "target ← draft" and shown["draft"] == "draft up"
    assert float(shown["speed"]) > 0 and 1 <= float(shown["accept"]) <= 5
    assert re.fullmatch(r"\d+ %", shown["hits"]) and shown["verify"].endswith(" ms")
    assert re.search(
        r'<div class="bar"[^>]*aria-label="[^"]*waits for drafts [\d.]+ ms', done.stdout
    )
    assert re.search(r'<tbody id="requests"><tr><td>\w+</td>', done.stdout)
    assert '<main id="main">' in done.stdout, "hidden until there are numbers"
