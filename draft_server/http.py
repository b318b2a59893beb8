"""A small HTTP side on loopback: /health, /stats (JSON), /metrics (Prometheus)."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable

import orjson
import uvloop
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from sgl_ssd.errors import ConfigError

logger = logging.getLogger(__name__)

GAUGES = {
    "peers",
    "sessions",
    "ready_sessions",
    "prefill_queue",
    "kv_total",
    "kv_available",
    "kv_evictable",
    "build_step_ms",
    "jit_ms",
    "branch_rows",
}
MAX_REQUEST_BYTES = 8 << 10
REQUEST_TIMEOUT_S = 5.0
START_TIMEOUT_S = 10.0


class _Collector:
    """Turns the flat summary into metrics `ssd_draft_*`."""

    def __init__(self, summary: Callable[[], dict[str, float]]) -> None:
        self._summary = summary

    def collect(self) -> Iterable[Metric]:
        for name, value in self._summary().items():
            text = name.replace("_", " ")
            family = GaugeMetricFamily if name in GAUGES else CounterMetricFamily
            yield family(f"ssd_draft_{name}", f"Draft server: {text}", value=value)


class HttpSide:
    """Serves in a thread of its own. Raises `ConfigError` when the port is taken.

    `/health` answers 503 while `alive` is false.
    """

    def __init__(
        self, port: int, summary: Callable[[], dict[str, float]], alive: Callable[[], bool]
    ) -> None:
        self._summary, self._alive = summary, alive
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Collector(summary))
        self._loop = uvloop.new_event_loop()
        self._started = threading.Event()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, args=(port,), daemon=True, name="http")
        self._thread.start()
        self._started.wait(START_TIMEOUT_S)
        if self._error is not None:
            raise ConfigError(f"--http-port {port}: {self._error}")

    def close(self) -> None:
        """Stop serving. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(REQUEST_TIMEOUT_S)

    def _run(self, port: int) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", port))
        except OSError as e:
            self._error = e
            return
        finally:
            self._started.set()
        self._loop.run_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), REQUEST_TIMEOUT_S)
            status, kind, body = self._respond(head)
            writer.write(
                f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
                "Connection: close\r\n\r\n".encode()
                + body
            )
            await asyncio.wait_for(writer.drain(), REQUEST_TIMEOUT_S)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError):
            pass
        except asyncio.TimeoutError:  # noqa: UP041 - its own class on Python 3.10
            pass
        finally:
            writer.close()

    def _respond(self, head: bytes) -> tuple[str, str, bytes]:
        words = head[:MAX_REQUEST_BYTES].split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or words[0] != b"GET":
            return "405 Method Not Allowed", "text/plain", b"only GET\n"
        path = words[1].split(b"?", 1)[0]
        if path == b"/health" and not self._alive():
            return "503 Service Unavailable", "text/plain", b"the server's loop is stuck\n"
        if path == b"/health":
            return "200 OK", "text/plain", b"ok\n"
        if path == b"/stats":
            return "200 OK", "application/json", orjson.dumps(self._summary())
        if path == b"/metrics":
            return "200 OK", "text/plain; version=0.0.4", generate_latest(self._registry)
        return "404 Not Found", "text/plain", b"not found\n"
