"""SGLang's metrics reporter, which also reports SSD: metrics, and figures in the log line."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.scheduler_components.metrics_reporter import SchedulerMetricsReporter

if TYPE_CHECKING:
    from sgl_ssd.scheduler.metrics import SSDMetrics
    from sgl_ssd.scheduler.stats import SSDStats
    from sgl_ssd.scheduler.worker import SSDWorker

PUBLISH_S = 1.0


class SSDMetricsReporter(SchedulerMetricsReporter):
    """Stock reporter unless the SSD algorithm runs. Called under the next verify."""

    _graph_backend_label: str
    _ssd_metrics: SSDMetrics | None = None
    _ssd_publish_at = 0.0
    _ssd_verifies = 0
    _ssd_line: LogLine | None = None

    def report_decode_stats(self, *args: Any, **kwargs: Any) -> None:
        """Upstream's line says what fills a batch and how fast; ours adds how drafting goes."""
        worker = self.scheduler._ssd_worker
        if worker is None or self.forward_ct_decode % self.decode_log_interval != 0:
            super().report_decode_stats(*args, **kwargs)
        else:
            self._ssd_line = self._ssd_line or LogLine()
            label = self._graph_backend_label
            pings_ms = worker.client.pings_ms() if worker.client is not None else []
            self._graph_backend_label = f"{self._ssd_line.text(worker.stats, pings_ms)}, {label}"
            super().report_decode_stats(*args, **kwargs)
            self._graph_backend_label = label
        if worker is not None and time.monotonic() >= self._ssd_publish_at:
            self._ssd_publish(worker)

    def _maybe_log_idle_metrics(self) -> None:
        super()._maybe_log_idle_metrics()
        worker = self.scheduler._ssd_worker
        if worker is not None and (
            worker.stats.verifies != self._ssd_verifies or time.monotonic() >= self._ssd_publish_at
        ):
            self._ssd_publish(worker)

    def _ssd_publish(self, worker: SSDWorker) -> None:
        self._ssd_publish_at = time.monotonic() + PUBLISH_S
        self._ssd_verifies = worker.stats.verifies
        if not self.current_scheduler_metrics_enabled or worker.client is None:
            return
        if self._ssd_metrics is None:
            from sgl_ssd.scheduler.metrics import SSDMetrics

            self._ssd_metrics = SSDMetrics(self.metrics_collector.labels)
        self._ssd_metrics.publish(worker.stats, worker.client, worker.exchange.drafting)


class LogLine:
    """How drafting went since the last line."""

    def __init__(self) -> None:
        self._before = (0, 0, 0, 0)

    def text(self, stats: SSDStats, pings_ms: Sequence[float] = ()) -> str:
        """Share of outcomes that were predicted, and drafts a round; `-` without any. Of draft
        servers on a network also the way there and back."""
        hits, partials, misses = (sum(counts) for counts in stats.predictions.values())
        now = (hits, hits + partials + misses, stats.drafted, stats.rounds)
        hits, asked, drafted, rounds = (a - b for a, b in zip(now, self._before, strict=True))
        self._before = now
        text = f"hit rate: {_ratio(hits, asked)}, draft len: {_ratio(drafted, rounds)}"
        if pings_ms:
            text += f", draft ping (ms): {'/'.join(f'{ms:.2f}' for ms in pings_ms)}"
        return text


def _ratio(part: int, whole: int) -> str:
    return f"{part / whole:.2f}" if whole else "-"
