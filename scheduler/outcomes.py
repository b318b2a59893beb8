"""What a forward has produced, on its way from the device to the draft server."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from sgl_ssd.scheduler.sessions import Session


@dataclass
class PendingOutcome:
    """Tokens of one forward that the host has not looked at yet.

    Attributes:
        sessions: one per row; None for rows that nobody drafts for.
        drafted: how many real drafts each row had; None for a prefill.
        packed: int32 [bs, 1 + width] on the host: the number of committed tokens, then the
            tokens. Valid once `ready` has fired.
        ready: device event, or None when the host already has the values.
        begun: when the forward was launched; `done`: when its outcome was seen on the host
            (`time.perf_counter`, 0 before).
    """

    sessions: list[Session | None]
    drafted: list[int] | None
    packed: torch.Tensor
    ready: Any
    begun: float
    done: float = 0.0

    def is_ready(self) -> bool:
        """Whether `rows` would not wait."""
        if not self.done and (self.ready is None or self.ready.query()):
            self.done = time.perf_counter()
        return self.done > 0

    def rows(self) -> list[list[int]]:
        """The committed tokens of each row; waits for the device if it must."""
        if self.ready is not None:
            self.ready.synchronize()
        self.is_ready()
        return [row[1 : 1 + row[0]] for row in self.packed.tolist()]


class OutcomeCopier:
    """Copies outcomes to the host with one small asynchronous copy, into pinned memory."""

    def __init__(self, device: str) -> None:
        self._cuda = device.startswith("cuda")

    def __call__(
        self,
        sessions: list[Session | None],
        drafted: list[int] | None,
        lengths: torch.Tensor,
        tokens: torch.Tensor,
        begun: float,
    ) -> PendingOutcome:
        """`lengths` int32 [bs]; `tokens` int64 [bs, width]."""
        packed = torch.cat([lengths[:, None].to(torch.int32), tokens.to(torch.int32)], dim=1)
        if not self._cuda:
            return PendingOutcome(sessions, drafted, packed, None, begun, time.perf_counter())
        host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        host.copy_(packed, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return PendingOutcome(sessions, drafted, host, event, begun)
