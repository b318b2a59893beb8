"""A small HTTP client of our own server, for the tools in the terminal."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from argparse import ArgumentParser
from collections.abc import Iterator
from http.client import HTTPException, HTTPResponse
from typing import Any

from sgl_ssd.errors import SSDError

DEFAULT_URL = "http://127.0.0.1:30000"
TIMEOUT_S = 10.0


class ServerError(SSDError):
    """No server, or one that refuses; one line for the terminal."""


def add_server_args(parser: ArgumentParser) -> None:
    """The arguments of every tool that talks to a server."""
    parser.add_argument(
        "url",
        nargs="?",
        default=DEFAULT_URL,
        metavar="URL",
        help="the server (default: %(default)s)",
    )
    parser.add_argument("--api-key", metavar="KEY", help="what the server was given as --api-key")


class Client:
    """Talks to one server. Every method raises `ServerError`."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        if "://" not in url:
            url = "http://" + url
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def get(self, path: str) -> Any:
        """The JSON that is there."""
        with self._open(path, None, TIMEOUT_S) as answer:
            try:
                return json.load(answer)
            except (OSError, ValueError) as e:
                raise ServerError(f"{self.url}{path}: {e}") from None

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """POST; the answer's server-sent events as they come."""
        with self._open(path, {**body, "stream": True}, None) as answer:
            try:
                for line in answer:
                    data = line.removeprefix(b"data:").strip()
                    if not line.startswith(b"data:") or data == b"[DONE]":
                        continue
                    event = json.loads(data)
                    if "error" in event:
                        raise ServerError(str(event["error"].get("message", event["error"])))
                    yield event
            except (OSError, HTTPException, ValueError) as e:
                raise ServerError(f"the answer broke off: {e}") from None

    def _open(self, path: str, body: dict[str, Any] | None, timeout: float | None) -> HTTPResponse:
        try:
            request = urllib.request.Request(
                self.url + path,
                None if body is None else json.dumps(body).encode(),
                {"Content-Type": "application/json", **self._headers},
            )
            answer: HTTPResponse = urllib.request.urlopen(request, timeout=timeout)
            return answer
        except urllib.error.HTTPError as e:
            raise ServerError(f"{self.url}{path}: {_reason(e)}") from None
        except (OSError, HTTPException, ValueError) as e:
            reason = getattr(e, "reason", e)
            raise ServerError(
                f"no server at {self.url} ({reason}); start one with "
                "`python -m sgl_ssd.launch_server`"
            ) from None


def _reason(error: urllib.error.HTTPError) -> str:
    """What the server said, in one line."""
    if error.code == 401:
        return "the server wants its key: --api-key KEY"
    text = error.read(10_000).decode(errors="replace")
    try:
        said = json.loads(text)
        said = said.get("error", said)
        text = str(said.get("message", said) if isinstance(said, dict) else said)
    except (ValueError, AttributeError):
        pass
    return " ".join(f"{error.code} {text or error.reason}".split())[:300]
