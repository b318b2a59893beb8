"""`GET /ssd`: the page, its numbers, and who may see them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from html.parser import HTMLParser
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sglang.srt.utils import auth

from live_looks import server_info
from sgl_ssd import page, top
from sgl_ssd.live import Frame

HTML = page.FILE.read_text()


class _Info:
    """A server's counters, which move with every look."""

    def __init__(self) -> None:
        self.looks = 0
        self.with_ssd = True

    async def __call__(self) -> dict[str, Any]:
        self.looks += 1
        return server_info(self.looks) if self.with_ssd else {"internal_states": [{}]}


@pytest.fixture
def info() -> _Info:
    return _Info()


@pytest.fixture
def client(info: _Info) -> TestClient:
    app = FastAPI()
    page.mount(app, info)
    return TestClient(app)


def test_the_page_is_there(client: TestClient) -> None:
    answer = client.get("/ssd")
    assert answer.status_code == 200 and answer.text == HTML
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_the_numbers_are_a_frame(client: TestClient) -> None:
    answer = client.get("/ssd/state")
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.json()) == {field.name for field in fields(Frame)}


def test_viewers_share_a_look_for_a_moment(
    client: TestClient, info: _Info, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = client.get("/ssd/state").json()
    assert client.get("/ssd/state").json() == first and info.looks == 1
    monkeypatch.setattr(page, "MIN_INTERVAL_S", 0.0)
    later = client.get("/ssd/state").json()
    assert info.looks == 2 and later["rounds"] == 40 and later["tokens_per_s"] > 0


def test_a_server_without_ssd_says_so(client: TestClient, info: _Info) -> None:
    info.with_ssd = False
    answer = client.get("/ssd/state")
    assert answer.status_code == 503 and "without SSD" in answer.json()["error"]


@pytest.mark.parametrize("key", [None, "secret", "wrong"])
def test_a_key_guards_the_numbers_but_not_the_page(
    info: _Info, key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    original: Callable[..., Any] = auth.decide_request_auth
    monkeypatch.setattr(
        auth, "decide_request_auth", lambda **kw: page._decide_request_auth(original, **kw)
    )
    app = FastAPI()
    page.mount(app, info)
    auth.add_api_key_middleware(app, api_key="secret", admin_api_key=None)
    client = TestClient(app, headers={"Authorization": f"Bearer {key}"} if key else {})
    assert client.get("/ssd").status_code == 200
    assert client.get("/ssd/state").status_code == (200 if key == "secret" else 401)
    assert client.get("/ssd/other").status_code == (404 if key == "secret" else 401)
    assert client.post("/ssd").status_code == (405 if key == "secret" else 401)


class _Parts(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.resources: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "action", "srcset"):
                self.resources.append(value or "")


def test_the_page_needs_nothing_from_outside() -> None:
    parts = _Parts()
    parts.feed(HTML)
    assert parts.resources == ["data:,"]
    found = set(re.findall(r"https?://[^\"' ]+", HTML))
    assert found == {"http://www.w3.org/2000/svg"}, "the name of SVG, which nobody fetches"
    assert "@import" not in HTML and "url(" not in HTML
    assert "prefers-color-scheme: dark" in HTML


def test_the_script_finds_its_elements_and_fields() -> None:
    parts = _Parts()
    parts.feed(HTML)
    script = HTML.split("<script>")[1]
    assert len(parts.ids) == len(set(parts.ids))
    used = set(re.findall(r'(?:at|say|shares)\("([a-z-]+)"', script))
    used |= {f"{name}-chart" for name in re.findall(r'chart\("([a-z]+)"', script)}
    assert used == set(parts.ids)
    read = set(re.findall(r"\bf\.([a-z_]+)", script))
    assert read <= {field.name for field in fields(Frame)}
    assert {"tokens_per_s", "accept_length", "hit_rate", "round_parts", "alerts"} <= read


def test_the_page_calls_the_parts_of_a_round_as_the_terminal_does() -> None:
    script = HTML.split("<script>")[1]
    for name, (label, _colour) in top.PARTS.items():
        assert f'{name}: ["{label}"' in script


def test_data_never_becomes_markup() -> None:
    for word in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval("):
        assert word not in HTML
