"""`GET /ssd`: the live view in a browser, served by SGLang's own HTTP server.

The page is one static file without outside resources. It polls `/ssd/state`, which needs the
server's `--api-key` like every other answer; the page itself holds nothing and needs none, so that
a browser can show it and ask for the key.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI, Response

from sgl_ssd.errors import SSDError
from sgl_ssd.live import Frame, History, Look

PATH = "/ssd"
STATE_PATH = "/ssd/state"
FILE = Path(__file__).with_name("page.html")
MIN_INTERVAL_S = 0.5  # viewers share what the scheduler was asked for meanwhile
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; img-src data:; frame-ancestors 'self'",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
}


def mount(app: FastAPI, server_info: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
    """Add the page and its numbers to `app`; `server_info` is what `/server_info` answers."""
    page = FILE.read_bytes()
    frames = _Frames(server_info)

    async def show() -> Response:
        return Response(page, media_type="text/html; charset=utf-8", headers=HEADERS)

    async def state() -> Response:
        try:
            body, status = msgspec.json.encode(await frames.newest()), 200
        except SSDError as e:
            body, status = msgspec.json.encode({"error": str(e)}), 503
        return Response(body, status, HEADERS, "application/json")

    app.add_api_route(PATH, show, methods=["GET"], include_in_schema=False)
    app.add_api_route(STATE_PATH, state, methods=["GET"], include_in_schema=False)


class _Frames:
    """One frame for all viewers."""

    def __init__(self, server_info: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
        self._server_info = server_info
        self._history = History()
        self._lock = asyncio.Lock()
        self._frame: Frame | None = None
        self._read_at = 0.0

    async def newest(self) -> Frame:
        """At most `MIN_INTERVAL_S` old. Raises `SSDError` on a server without SSD."""
        async with self._lock:
            now = time.monotonic()
            if self._frame is None or now - self._read_at >= MIN_INTERVAL_S:
                self._frame = self._history.frame(Look.of(await self._server_info(), now))
                self._read_at = now
            return self._frame


def install(server_args: Any) -> None:
    """Mount the page on the HTTP server of this process, and let it pass without a key.

    Polls stay out of the access log.
    """
    from sglang.srt.entrypoints import http_server
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    mount(http_server.app, http_server.server_info)
    HookRegistry.register(
        "sglang.srt.utils.auth.decide_request_auth", _decide_request_auth, HookType.AROUND
    )
    HookRegistry.apply_hooks()
    server_args.uvicorn_access_log_exclude_prefixes.append(STATE_PATH)


def _decide_request_auth(orig: Any, *, method: str, path: str, **others: Any) -> Any:
    if method in ("GET", "HEAD") and path == PATH:
        from sglang.srt.utils.auth import AuthDecision

        return AuthDecision(allowed=True)
    return orig(method=method, path=path, **others)
