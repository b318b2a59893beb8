"""What a forward has produced, on its way from the device to the draft server."""

from __future__ import annotations

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
        round_based: whether this was a verify (rounds are counted) or a prefill.
    """

    sessions: list[Session | None]
    drafted: list[int] | None
    packed: torch.Tensor
    ready: Any

    def is_ready(self) -> bool:
        """Whether `rows` would not wait."""
        return self.ready is None or bool(self.ready.query())

    def rows(self) -> list[list[int]]:
        """The committed tokens of each row; waits for the device if it must."""
        if self.ready is not None:
            self.ready.synchronize()
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
    ) -> PendingOutcome:
        """`lengths` int32 [bs]; `tokens` int64 [bs, width]."""
        packed = torch.cat([lengths[:, None].to(torch.int32), tokens.to(torch.int32)], dim=1)
        if not self._cuda:
            return PendingOutcome(sessions, drafted, packed, None)
        host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        host.copy_(packed, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return PendingOutcome(sessions, drafted, host, event)
