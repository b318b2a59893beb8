"""In-memory channels for tests, a clock that stands still, and a channel that loses and mangles.

Nothing here waits: time is a `FakeClock`, which a client moves on while it waits for a message.
One thread runs both ends: whenever the client looks for messages, the server gets its turn first.
"""

from __future__ import annotations

import enum
import heapq
import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import orjson

from sgl_ssd.transport import SEND_HWM, ClientChannel


class Clock(Protocol):
    """Seconds; `sleep` returns after that many of them."""

    def __call__(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class FakeClock:
    """A clock that moves only when told to, or when somebody waits."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(0.0, seconds)


class Queue:
    """Messages in the order of their arrival times, then in the order they were put in."""

    def __init__(self, capacity: int = SEND_HWM) -> None:
        self._heap: list[tuple[float, int, list[bytes]]] = []
        self._count = itertools.count()
        self._capacity = capacity

    def __len__(self) -> int:
        return len(self._heap)

    def put(self, frames: list[bytes], arrives: float) -> bool:
        """False when the queue is full."""
        if len(self._heap) >= self._capacity:
            return False
        heapq.heappush(self._heap, (arrives, next(self._count), list(frames)))
        return True

    def get(self, now: float) -> list[bytes] | None:
        """The next message that has arrived."""
        if self._heap and self._heap[0][0] <= now:
            return heapq.heappop(self._heap)[2]
        return None

    @property
    def next_arrival(self) -> float:
        """When the next message arrives; infinity if there is none."""
        return self._heap[0][0] if self._heap else float("inf")

    def clear(self) -> None:
        """Lose everything."""
        self._heap.clear()


class MemoryServer:
    """A `ServerChannel` for any number of `MemoryClient`s.

    `serve`, if set, is called before a client looks for messages: the server's turn to receive and
    answer. `latency_s` is the time that each answer takes to arrive.
    """

    def __init__(self, clock: Clock, latency_s: float = 0.0) -> None:
        self.clock = clock
        self.latency_s = latency_s
        self.serve: Callable[[], object] | None = None
        self.closed = False
        self.inbox: list[tuple[bytes, list[bytes]]] = []
        self._clients: dict[bytes, MemoryClient] = {}
        self._serving = False

    def connect(self, identity: bytes = b"verifier", capacity: int = SEND_HWM) -> MemoryClient:
        """A client; one with the same identity takes the place of an earlier one."""
        client = MemoryClient(self, identity, capacity)
        self._clients[identity] = client
        return client

    def take_turn(self) -> None:
        """Let the server work, unless it is at it already."""
        if self.serve is not None and not self._serving and not self.closed:
            self._serving = True
            try:
                self.serve()
            finally:
                self._serving = False

    def send(self, peer: bytes, frames: list[bytes]) -> bool:
        client = self._clients.get(peer)
        if client is None or client.closed:
            return False
        return client.inbox.put(frames, self.clock() + self.latency_s)

    def recv(self, timeout_s: float) -> tuple[bytes, list[bytes]] | None:
        return self.inbox.pop(0) if self.inbox else None

    def close(self) -> None:
        self.closed = True


class MemoryClient:
    """A `ClientChannel` to a `MemoryServer`. While it waits, the clock moves on."""

    def __init__(self, server: MemoryServer, identity: bytes, capacity: int) -> None:
        self._server = server
        self._identity = identity
        self._capacity = capacity
        self.inbox = Queue()
        self.closed = False
        self.closings = 0

    @property
    def clock(self) -> Clock:
        return self._server.clock

    def let_server_work(self) -> None:
        self._server.take_turn()

    def send(self, frames: list[bytes]) -> bool:
        if self.closed or len(self._server.inbox) >= self._capacity:
            return False
        self._server.inbox.append((self._identity, list(frames)))
        return True

    def recv(self, timeout_s: float) -> list[bytes] | None:
        if self.closed:
            raise ValueError("recv on a closed channel")
        clock = self._server.clock
        deadline = clock() + max(0.0, timeout_s)
        self._server.take_turn()
        frames = self.inbox.get(clock())
        if frames is None and timeout_s > 0:
            clock.sleep(min(deadline, self.inbox.next_arrival) - clock())
            frames = self.inbox.get(clock())
        return frames

    def close(self) -> None:
        self.closings += 1
        self.closed = True


def wait_for_any(clients: Sequence[MemoryClient], timeout_s: float) -> None:
    """Move the clock on until a message has arrived for one of `clients`."""
    clock = clients[0].clock
    for client in clients:
        client.let_server_work()
    until = min(clock() + timeout_s, *(client.inbox.next_arrival for client in clients))
    clock.sleep(until - clock())


class Fault(enum.Enum):
    """What may happen to one message on its way."""

    NONE = "none"
    DROP = "drop"
    DELAY = "delay"  # it comes later, and all behind it too: the order stays
    DUPLICATE = "duplicate"
    REORDER = "reorder"  # it comes later, others overtake it
    TRUNCATE = "truncate"
    CORRUPT = "corrupt"


FAULTS = tuple(Fault)[1:]
Schedule = Callable[[str], Fault]


def random_schedule(
    seed: int, share: float, faults: Iterable[Fault] = FAULTS, only: Iterable[str] | None = None
) -> Schedule:
    """A fault for `share` of all messages, or of those whose type is in `only`."""
    rng, choices = random.Random(seed), list(faults)
    types = None if only is None else frozenset(only)

    def schedule(message_type: str) -> Fault:
        if (types is None or message_type in types) and rng.random() < share:
            return rng.choice(choices)
        return Fault.NONE

    return schedule


def listed_schedule(faults: Iterable[Fault]) -> Schedule:
    """One fault for each message in turn; none once the list is used up."""
    rest = iter(faults)
    return lambda message_type: next(rest, Fault.NONE)


def message_type(frames: list[bytes]) -> str:
    """The type in a message's header; empty if it cannot be read."""
    try:
        return str(orjson.loads(frames[0])["type"])
    except (orjson.JSONDecodeError, IndexError, KeyError, TypeError):
        return ""


class FaultyChannel:
    """A `ClientChannel` around another one, with faults in both directions.

    Works with real sockets and a real clock too (`clock.sleep` is then time.sleep). `happened`
    lists (type, fault) of everything that was tampered with.
    """

    def __init__(
        self,
        inner: ClientChannel,
        schedule: Schedule,
        clock: Clock,
        *,
        seed: int = 0,
        max_delay_s: float = 1.0,
    ) -> None:
        self._inner = inner
        self._schedule = schedule
        self._clock = clock
        self._rng = random.Random(seed)
        self._max_delay_s = max_delay_s
        self._out, self._in = Queue(1 << 30), Queue(1 << 30)
        self._not_before = {id(self._out): 0.0, id(self._in): 0.0}
        self.happened: list[tuple[str, Fault]] = []

    def heal(self) -> None:
        """No more faults for messages from now on; what is delayed still comes."""
        self._schedule = lambda message_type: Fault.NONE

    def send(self, frames: list[bytes]) -> bool:
        fault = self._tamper(frames, self._out)
        if fault is Fault.NONE and not len(self._out):
            return self._inner.send(frames)
        self._flush()
        return True

    def recv(self, timeout_s: float) -> list[bytes] | None:
        deadline = self._clock() + max(0.0, timeout_s)
        while True:
            self._flush()
            while (frames := self._inner.recv(0.0)) is not None:
                self._tamper(frames, self._in)
            frames = self._in.get(self._clock())
            if frames is not None:
                return frames
            now = self._clock()
            if now >= deadline:
                return None
            until = min(deadline, self._in.next_arrival, self._out.next_arrival)
            frames = self._inner.recv(max(1e-6, until - now))
            if frames is not None:
                self._tamper(frames, self._in)

    def close(self) -> None:
        self._inner.close()

    def _flush(self) -> None:
        while (frames := self._out.get(self._clock())) is not None:
            if frames:  # a message that lost all its frames is lost
                self._inner.send(frames)

    def _tamper(self, frames: list[bytes], queue: Queue) -> Fault:
        """Put what becomes of a message into `queue`, unless it may go its way untouched."""
        kind = message_type(frames)
        fault = self._schedule(kind)
        now = self._clock()
        in_order = max(now, self._not_before[id(queue)])
        if fault is not Fault.NONE:
            self.happened.append((kind, fault))
        if fault is Fault.DROP:
            return fault
        if fault is Fault.NONE and queue is self._out and not len(queue):
            return fault
        later = now + self._rng.uniform(0.0, self._max_delay_s)
        if fault is Fault.REORDER:
            queue.put(frames, later)
            return fault
        if fault is Fault.DELAY:
            in_order = max(in_order, later)
        self._not_before[id(queue)] = in_order
        if fault is Fault.TRUNCATE:
            frames = self._truncated(frames)
        elif fault is Fault.CORRUPT:
            frames = self._corrupted(frames)
        queue.put(frames, in_order)
        if fault is Fault.DUPLICATE:
            queue.put(frames, later)
        return fault

    def _truncated(self, frames: list[bytes]) -> list[bytes]:
        """Some bytes less at the end of one frame, or some frames less."""
        long = [i for i, frame in enumerate(frames) if frame]
        i = self._rng.choice(long)
        if self._rng.random() < 0.5:
            return frames[:i]
        cut = self._rng.randrange(len(frames[i]))
        return [*frames[:i], frames[i][:cut], *frames[i + 1 :]]

    def _corrupted(self, frames: list[bytes]) -> list[bytes]:
        """One to four bytes of one frame are others."""
        long = [i for i, frame in enumerate(frames) if frame]
        i = self._rng.choice(long)
        data = bytearray(frames[i])
        for _ in range(self._rng.randint(1, 4)):
            data[self._rng.randrange(len(data))] ^= self._rng.randint(1, 255)
        return [*frames[:i], bytes(data), *frames[i + 1 :]]
