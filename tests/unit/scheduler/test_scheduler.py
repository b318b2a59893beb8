"""What SSD adds to SGLang's scheduler, where it can be told without a server."""

from __future__ import annotations

from typing import Any

import pytest
from sglang.srt.managers.scheduler import Scheduler

from sgl_ssd.scheduler.scheduler import SSDScheduler

pytestmark = pytest.mark.slow  # importing SGLang takes longer than all of this


@pytest.mark.parametrize(("paused", "seen"), [(True, 0), (False, 1)])
def test_requests_that_wait_do_not_keep_a_paused_scheduler_from_flushing(
    monkeypatch: pytest.MonkeyPatch, paused: bool, seen: int
) -> None:
    waited: list[int] = []

    def flush(self: Any, empty_cache: bool) -> bool:
        waited.append(len(self.waiting_queue))
        return not self.waiting_queue

    monkeypatch.setattr(Scheduler, "flush_cache", flush)
    scheduler = object.__new__(SSDScheduler)
    scheduler._engine_paused, scheduler.waiting_queue = paused, ["a request"]
    assert scheduler.flush_cache() is (seen == 0)
    assert waited == [seen] and scheduler.waiting_queue == ["a request"]
