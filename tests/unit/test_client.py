"""The HTTP client of the terminal tools, and the chat, against a small server."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rich.console import Console

from live_looks import server_info
from sgl_ssd import chat
from sgl_ssd.chat import Answer, Chat
from sgl_ssd.client import Client, ServerError

PIECES = ["def ", "add", "(a, b):", "\n    [bold]return"]


class _Server(BaseHTTPRequestHandler):
    """Answers like SGLang; `paths` and `bodies` say what it was asked."""

    looks = 0
    bodies: list[dict[str, Any]] = []
    authorization: list[str | None] = []

    def do_GET(self) -> None:
        _Server.authorization.append(self.headers["Authorization"])
        if self.path == "/v1/models":
            self._say(200, {"data": [{"id": "tiny"}]})
        elif self.path == "/server_info":
            _Server.looks += 1
            self._say(200, server_info(_Server.looks))
        elif self.path == "/words":
            self._say(200, None, b"Cache flushed.")
        elif self.path == "/closed":
            self._say(401, {"error": "Unauthorized"})
        else:
            self._say(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        _Server.bodies.append(body)
        if body["messages"][-1]["content"] == "refuse":
            return self._say(400, {"error": {"message": "too long\nby far"}})
        events: list[Any] = [{"choices": [{"delta": {"content": p}}]} for p in PIECES]
        if body["messages"][-1]["content"] == "fail":
            events[2] = {"error": {"message": "out of memory"}}
        events.append({"choices": [], "usage": {"completion_tokens": 9}})
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        self._say(200, None, "".join([*lines, "data: [DONE]\n\n"]).encode())

    def _say(self, status: int, answer: Any, body: bytes | None = None) -> None:
        body = json.dumps(answer).encode() if body is None else body
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    _Server.looks, _Server.bodies, _Server.authorization = 0, [], []
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("spelling", ["{}", "{}/", "{}/v1", "{}/v1/"])
def test_urls_may_be_spelled_in_many_ways(url: str, spelling: str) -> None:
    assert Client(spelling.format(url)).url == url
    assert Client(spelling.format(url.removeprefix("http://"))).get("/v1/models")["data"]


def test_the_key_goes_along(url: str) -> None:
    Client(url, "secret").get("/v1/models")
    Client(url).get("/v1/models")
    assert _Server.authorization == ["Bearer secret", None]


@pytest.mark.parametrize(
    ("path", "words"),
    [("/closed", "--api-key KEY"), ("/nothing", "404"), ("/words", "Expecting value")],
)
def test_refusals_are_one_line(url: str, path: str, words: str) -> None:
    with pytest.raises(ServerError, match=words) as error:
        Client(url).get(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("bad", ["http://127.0.0.1:9", "127.0.0.1:70000", "http://[", "ftp:/x"])
def test_no_server_is_one_line(bad: str) -> None:
    with pytest.raises(ServerError) as error:
        Client(bad).get("/server_info")
    assert "\n" not in str(error.value) and "launch_server" in str(error.value)


def conversation(url: str) -> tuple[Chat, Console]:
    console = Console(file=io.StringIO(), width=100, soft_wrap=True)
    return Chat(Client(url), console, {"max_tokens": 64}), console


def printed(console: Console) -> str:
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_an_answer_streams_and_says_how_fast_it_was(url: str) -> None:
    chat, console = conversation(url)
    answer = chat.ask("write it")
    assert answer.text == "".join(PIECES) and answer.tokens == 9
    text = printed(console)
    assert text.startswith("".join(PIECES)), "markup in an answer is text"
    assert "9 tokens · " in text and "accept length 4.00" in text and "hit rate 80%" in text


def test_a_conversation_is_sent_as_a_whole_until_it_is_reset(url: str) -> None:
    chat, _ = conversation(url)
    chat.ask("one")
    chat.ask("two")
    assert [m["role"] for m in _Server.bodies[1]["messages"]] == ["user", "assistant", "user"]
    assert _Server.bodies[1]["stream"] and _Server.bodies[1]["max_tokens"] == 64
    chat.reset()
    chat.ask("three")
    assert [m["content"] for m in _Server.bodies[2]["messages"]] == ["three"]


@pytest.mark.parametrize(("text", "words"), [("refuse", "too long by far"), ("fail", "memory")])
def test_a_failed_question_leaves_the_conversation_as_it_was(
    url: str, text: str, words: str
) -> None:
    chat, _ = conversation(url)
    with pytest.raises(ServerError, match=words):
        chat.ask(text)
    chat.ask("again")
    assert [m["content"] for m in _Server.bodies[-1]["messages"]] == ["again"]


def test_the_rate_leaves_out_the_prefill() -> None:
    answer = Answer("x", tokens=11, first_s=2.0, seconds=3.0)
    assert answer.speed(None) == "11 tokens · 10.0 tokens/s · first after 2000 ms"
    assert Answer("x", 1, 0.5, 0.5).speed(None) == "1 tokens · first after 500 ms"


def test_one_question_from_the_command_line(url: str, capsys: pytest.CaptureFixture) -> None:
    assert chat.main([url, "--once", "write it", "--temperature", "0"]) == 0
    assert "def add(a, b):" in capsys.readouterr().out
    assert _Server.bodies[0]["temperature"] == 0


def test_chat_without_a_server_is_one_line(capsys: pytest.CaptureFixture) -> None:
    assert chat.main(["http://127.0.0.1:9"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("sgl_ssd.chat: no server at http://127.0.0.1:9")


def test_a_conversation_ends_with_the_input(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    lines = iter(["", "/help", "hello", "/reset", "refuse", "/quit", "never"])
    monkeypatch.setattr("builtins.input", lambda *_: next(lines))
    assert chat.main([url]) == 0
    assert [b["messages"][-1]["content"] for b in _Server.bodies] == ["hello", "refuse"]
    out = capsys.readouterr()
    assert "tiny at" in out.out and "too long" in out.err
    assert next(lines) == "never"
