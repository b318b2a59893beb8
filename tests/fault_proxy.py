"""A proxy between a verifier and a draft server that loses, delays and mangles messages.

Runs in a thread of the test: the product has no test code in it. Each verifier that connects gets a
`FaultyChannel` to the draft server behind the proxy, under its own identity, so both ends see what
they would see without the proxy.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter

from channels import FAULTS, Fault, FaultyChannel, Schedule, random_schedule
from sgl_ssd.transport import ZmqClient, ZmqServer

POLL_S = 0.001


class RealClock:
    """Time as it is."""

    def __call__(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class FaultProxy(threading.Thread):
    """Listens on `front`; what arrives goes to `back` and returns, with the faults of the day."""

    def __init__(self, front: str, back: str, *, seed: int = 0, max_delay_s: float = 0.3) -> None:
        super().__init__(daemon=True, name="fault-proxy")
        self._front, self._back = front, back
        self._random = random.Random(seed)
        self._max_delay_s = max_delay_s
        self._schedule: Schedule = lambda kind: Fault.NONE
        self._channels: dict[bytes, FaultyChannel] = {}
        self._stop_event = threading.Event()
        self._again = threading.Event()
        self._listening = threading.Event()
        self.happened: Counter[tuple[str, str]] = Counter()
        self.passed = 0
        self.start()
        if not self._listening.wait(10):
            raise RuntimeError(f"the proxy does not listen on {front}")

    def faults(self, share: float, faults: tuple[Fault, ...] = FAULTS, only: str = "") -> None:
        """From now on, one of `faults` for `share` of all messages (of the type `only`)."""
        types = [only] if only else None
        self._schedule = random_schedule(self._random.randrange(1 << 30), share, faults, types)

    def heal(self) -> None:
        """No more faults."""
        self._schedule = lambda kind: Fault.NONE

    def behind(self, back: str) -> None:
        """Another draft server is behind the proxy from now on."""
        self._back = back
        self._again.set()

    def stop(self) -> None:
        """End the thread and close all sockets."""
        self._stop_event.set()
        self.join(10)

    def run(self) -> None:
        front = ZmqServer(self._front)
        self._listening.set()
        try:
            while not self._stop_event.is_set():
                if self._again.is_set():
                    self._again.clear()
                    self._close_all()
                self._turn(front)
        finally:
            self._close_all()
            front.close()

    def _turn(self, front: ZmqServer) -> None:
        received = front.recv(POLL_S)
        while received is not None:
            peer, frames = received
            self._channel(peer).send(frames)
            self.passed += 1
            received = front.recv(0)
        for peer, channel in self._channels.items():
            while (answer := channel.recv(0)) is not None:
                front.send(peer, answer)
                self.passed += 1
            for kind, fault in channel.happened:
                self.happened[kind, fault.value] += 1
            channel.happened.clear()

    def _channel(self, peer: bytes) -> FaultyChannel:
        channel = self._channels.get(peer)
        if channel is None:
            inner = ZmqClient(self._back, peer)
            channel = FaultyChannel(
                inner,
                lambda kind: self._schedule(kind),
                RealClock(),
                seed=self._random.randrange(1 << 30),
                max_delay_s=self._max_delay_s,
            )
            self._channels[peer] = channel
        return channel

    def _close_all(self) -> None:
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
