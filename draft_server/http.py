"""A small HTTP side on loopback: /health, /stats (JSON), /metrics (Prometheus)."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate

import orjson
import uvloop
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from sgl_ssd.errors import ConfigError
from sgl_ssd.metrics import TIME_BUCKETS, TimeHistogram

logger = logging.getLogger(__name__)

GAUGES = {
    "peers": "Verifiers that are connected.",
    "sessions": "Open sessions.",
    "ready_sessions": "Sessions that have their prompt in and are drafted for.",
    "prefill_queue": "Prompts that wait, or are being read.",
    "kv_total": "KV slots.",
    "kv_available": "Free KV slots.",
    "kv_evictable": "KV slots of cached prefixes.",
    "build_step_ms": "Mean time of a build step since the start.",
    "jit_ms": "Mean time of a just-in-time draft since the start.",
    "launch_ms": "Mean host time to issue a build step since the start.",
    "branch_rows": "Mean rows of a build step since the start.",
}
COUNTERS = {
    "build_steps": "Build steps.",
    "jits": "Just-in-time drafts.",
    "prefill_tokens": "Prompt tokens computed.",
    "prefill_cached_tokens": "Prompt tokens that were in the cache.",
    "branches": "Branches that were planned.",
    "branches_short_of_rows": "Branches left out, all rows of a step being taken.",
    "branches_short_of_memory": "Branches left out for want of KV slots.",
    "starved": "How often a prompt had to wait for KV slots.",
    "rounds": "Questions answered.",
    "rows": "Rows of questions answered.",
    "hits": "Rows whose outcome was predicted.",
    "partials": "Rows whose outcome was predicted in part.",
    "misses": "Rows whose outcome was not predicted.",
    "backups": "Rows answered with a backup.",
    "empty": "Rows without a prediction and without a backup.",
    "prefilling": "Rows whose prompt was not in yet.",
    "need": "Rows whose news left a gap.",
    "unknown": "Rows of unknown sessions.",
    "context": "Rows beyond the draft's context.",
    "no_memory": "Rows for which there was no KV.",
    "malformed": "Messages dropped.",
    "refused": "Messages refused with an error.",
    "expired_peers": "Verifiers that were silent for the lease.",
    "expired_sessions": "Sessions whose end got lost.",
    "unanswered": "Questions that a newer one replaced.",
    "unsent": "Messages that did not get out.",
    "pushes": "Messages with complete caches, ahead of the question.",
    "pushed_entries": "Predicted outcomes in them.",
    "idle_seconds": "Time in which there was nothing to do, requests or not.",
}
PREFIX = "ssd_draft_"
MAX_REQUEST_BYTES = 8 << 10
REQUEST_TIMEOUT_S = 5.0
START_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Source:
    """Where the figures come from; read in the thread that serves.

    `info` are labels, `numbers` all counts by name, `times` have a text and what was counted.
    """

    numbers: Callable[[], dict[str, float]]
    info: dict[str, str] = field(default_factory=dict)
    times: dict[str, tuple[str, TimeHistogram]] = field(default_factory=dict)


class _Collector:
    """Turns numbers and times into metrics `ssd_draft_*`; `docs/metrics.md` lists them."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def collect(self) -> Iterable[Metric]:
        """All of them, as they are now."""
        info = GaugeMetricFamily(
            f"{PREFIX}info", "This draft server.", labels=list(self._source.info)
        )
        info.add_metric(list(self._source.info.values()), 1)
        yield info
        numbers = self._source.numbers()
        for names, family in ((GAUGES, GaugeMetricFamily), (COUNTERS, CounterMetricFamily)):
            for name, text in names.items():
                if name in numbers:
                    yield family(PREFIX + name, text, value=numbers[name])
        for name, (text, times) in self._source.times.items():
            yield _histogram(f"{PREFIX}{name}_seconds", text, times)


def _histogram(name: str, text: str, times: TimeHistogram) -> HistogramMetricFamily:
    counts = list(accumulate(list(times.buckets)))
    bounds = [str(bound) for bound in TIME_BUCKETS] + ["+Inf"]
    buckets = list(zip(bounds, counts, strict=True))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=times.total)


class HttpSide:
    """Serves in a thread of its own. Raises `ConfigError` when the port is taken.

    `/health` answers 503 while `alive` is false.
    """

    def __init__(self, port: int, source: Source, alive: Callable[[], bool]) -> None:
        self._source, self._alive = source, alive
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Collector(source))
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
            return "200 OK", "application/json", orjson.dumps(self._source.numbers())
        if path == b"/metrics":
            return "200 OK", "text/plain; version=0.0.4", generate_latest(self._registry)
        return "404 Not Found", "text/plain", b"not found\n"
