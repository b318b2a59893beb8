"""The draft servers of one verifier, and every open session on them; mostly there is just one.

A session is placed at one server and stays there while that is up; when it is lost, the session
is opened at another one with its next question. Replicas of the target (`--dp-size`) have home
servers, and use those of others only while none of their own is up.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sgl_ssd import protocol
from sgl_ssd.config import VerifierConfig
from sgl_ssd.keys import load_client_keys
from sgl_ssd.protocol import SpanKind
from sgl_ssd.replicas import merged_draft_stats
from sgl_ssd.scheduler.draft_client import DEADLINE_CAP_S, DraftClient
from sgl_ssd.scheduler.draft_link import MAX_MESSAGES_AT_ONCE
from sgl_ssd.scheduler.placement import Placement, home_servers
from sgl_ssd.scheduler.sessions import Session, SessionSampling, SessionTable, StopRule
from sgl_ssd.scheduler.stats import SSDStats
from sgl_ssd.transport import ClientChannel, ZmqClient, wait_for_any


class DraftFleet:
    """Asks draft servers for speculations and keeps them informed of what is committed.

    Never blocks except in `collect`, which has a deadline, and `wait_until_up`.

    Attributes:
        clients: one for each of the endpoints.
        sessions: the open ones.
        waited_s: in the last `collect`.
        num_steps, fan_out, backup, push: what is asked for now; change them with `configure`.
    """

    def __init__(
        self,
        config: VerifierConfig,
        hello: protocol.Hello,
        stats: SSDStats,
        channels: Sequence[ClientChannel] | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        replica: int = 0,
        replicas: int = 1,
        wait: Callable[[Sequence[ClientChannel], float], None] = wait_for_any,
    ) -> None:
        """`hello.verifier` must be unique; `channels` default to ZeroMQ on `config.endpoints`."""
        if channels is None:
            keys = load_client_keys(config.draft_keys) if config.draft_keys is not None else None
            name = hello.verifier.encode()
            channels = [ZmqClient(endpoint, name, keys) for endpoint in config.endpoints]
        self.num_steps = config.num_steps
        self.fan_out = list(config.fan_out)
        self.backup = config.backup
        self.push = config.push
        self.sessions = SessionTable()
        self.waited_s = 0.0
        self._stats = stats
        self._clock = clock
        self._wait_for_any = wait
        self._asked_at = 0.0
        self._placement = Placement()
        timeout_ms, round_ids = config.draft_timeout_ms, itertools.count(1)
        self.clients = [
            DraftClient(
                endpoint, hello, self._settings(), stats, channel, round_ids,
                top_m=config.proposal_top_m,
                deadline_s=timeout_ms / 1e3 if timeout_ms is not None else None,
                index=index, alone=len(channels) == 1, clock=clock,
            )
            for index, (endpoint, channel) in enumerate(
                zip(config.endpoints, channels, strict=True)
            )
        ]  # fmt: skip
        self.home = [self.clients[i] for i in home_servers(len(channels), replica, replicas)]

    # -- the servers -------------------------------------------------------------------------

    @property
    def up(self) -> bool:
        """Whether a draft server is up."""
        return self.server is not None

    @property
    def servers_up(self) -> int:
        """How many draft servers new sessions are placed at."""
        return len(self._candidates())

    @property
    def server(self) -> protocol.Ready | None:
        """What the first draft server that is up has said of itself."""
        for client in self.clients:
            if client.server is not None:
                return client.server
        return None

    @property
    def server_stats(self) -> dict[str, float]:
        """The numbers of all draft servers together."""
        return merged_draft_stats([c.server_stats for c in self.clients if c.server_stats])

    def states(self) -> list[dict[str, Any]]:
        """Each draft server, for `/server_info`; times are milliseconds."""
        return [
            {
                "endpoint": client.endpoint,
                "home": client in self.home,
                "draft": "up" if client.up else "down",
                "draft_model": client.server.model_path if client.server else "",
                "open_sessions": len(client.sessions),
                "round_trip_ms": 1e3 * client.round_trip.mean,
                "ping_ms": client.ping_ms[0],
                "ping_mean_ms": client.ping_ms[1],
                "timeouts": client.timeouts,
                "restarts": client.restarts,
                "draft_stats": client.server_stats,
            }
            for client in self.clients
        ]

    def pings_ms(self) -> list[float]:
        """Shortest round trip of the last pings to each server that is up and reached by tcp."""
        return [c.ping_ms[0] for c in self.clients if c.up and c.pings_s and c.remote]

    def _candidates(self) -> list[DraftClient]:
        """Where sessions may be placed: home servers that are up, or else others that are."""
        home = [client for client in self.home if client.server is not None]
        return home or [client for client in self.clients if client.server is not None]

    def tick(self) -> None:
        """Keep the connections alive; call it often (every loop of the scheduler)."""
        for client in self.clients:
            client.tick()

    def wait_until_up(self, timeout_s: float, every: bool = False) -> bool:
        """Wait until a server is up, or `every` home server, at most `timeout_s` seconds; whether
        that came true. Then a moment more, to measure how far away they are."""

        def enough() -> bool:
            return all(client.up for client in self.home) if every else self.up

        deadline = self._clock() + timeout_s
        while not enough() and self._clock() < deadline:
            self.tick()
            waiting = [client for client in self.clients if not client.up]
            for client in waiting:
                message = client.receive(min(0.1, timeout_s) / len(waiting))
                if message is not None:
                    client.handle(message)
        for client in self.clients:
            client.measure()
        return enough()

    def configure(self, num_steps: int, fan_out: list[int], backup: str) -> None:
        """Change K (at most the start's), fan-out and backup at run time."""
        self.num_steps, self.fan_out, self.backup = num_steps, list(fan_out), backup
        for client in self.clients:
            client.configure(self._settings())

    def _settings(self) -> protocol.Configure:
        return protocol.Configure(
            num_steps=self.num_steps, fan_out=self.fan_out, backup=self.backup, push=self.push
        )

    def record(self, on_spans: Callable[[protocol.Spans, int], None] | None) -> None:
        """Let all draft servers record spans for a timeline; `on_spans` gets them with the index
        of the server, about once a second. None: those that still come are dropped."""
        for client in self.clients:
            client.record(on_spans)

    def stop_recording(self) -> int:
        """Ask for the last spans; from how many servers they can be expected."""
        return sum(client.stop_recording() for client in self.clients)

    def close(self) -> None:
        """Close all sessions and the connections."""
        for session in self.sessions:
            self.close_session(session.rid)
        for client in self.clients:
            client.close()

    # -- sessions ----------------------------------------------------------------------------

    def open_session(
        self,
        rid: str,
        tokens: list[int],
        sampling: SessionSampling,
        stop: StopRule,
        extra_key: str = "",
    ) -> Session:
        """Begin drafting for a request; one that is open under this id ends first."""
        self.close_session(rid)
        session = self.sessions.add(rid, tokens, sampling, stop, extra_key)
        client = self._client_of(session)
        if client is not None:
            client.open_on_wire(session)
        return session

    def close_session(self, rid: str) -> None:
        """End drafting for a request; does nothing if it is not open."""
        session = self.sessions.remove(rid)
        if session is None:
            return
        if session.server >= 0:
            if len(self.clients) > 1:
                self._placement.remember(session.server, session.tokens, session.extra_key)
            self.clients[session.server].release(session)

    def flush(self) -> None:
        """Forget everything on the draft servers."""
        for session in self.sessions:
            self.sessions.remove(session.rid)
        for client in self.clients:
            client.flush()

    def resting(self, session: Session) -> bool:
        """Whether its server has been late so often that nobody waits for it at the moment."""
        return session.server >= 0 and self.clients[session.server].resting

    def _client_of(self, session: Session) -> DraftClient | None:
        """Where a session is; it is placed (anew) if that is nowhere, down, or not at home though
        a home server is up. None: no server is up."""
        present = self.clients[session.server] if session.server >= 0 else None
        if present is not None and present.server is not None and present in self.home:
            return present
        candidates = self._candidates()
        if not candidates or present in candidates:
            return present if candidates else None
        if len(candidates) == 1:
            chosen = candidates[0]
        else:
            chosen = self.clients[
                self._placement.choose(
                    [c.index for c in candidates], [len(c.sessions) for c in candidates],
                    session.tokens, session.extra_key,
                )
            ]  # fmt: skip
        if present is not None:
            present.release(session)
        chosen.take_over(session)
        if len(self.clients) > 1:
            self._placement.remember(chosen.index, session.tokens, session.extra_key)
        return chosen

    # -- one round ---------------------------------------------------------------------------

    def ask(self, sessions: Iterable[Session]) -> None:
        """Report what is committed in `sessions` and ask for speculations; returns at once.

        One message for each server concerned.
        """
        for client in self.clients:
            client.drain()  # entries sent ahead, and answers that nobody waited for
        concerned: dict[int, list[Session]] = {}
        for session in sessions:
            where = None if session.closed or session.done else self._client_of(session)
            if where is not None:
                concerned.setdefault(where.index, []).append(session)
        now = self._clock()
        if any([self.clients[index].ask(part) for index, part in concerned.items()]):
            if now - self._asked_at < DEADLINE_CAP_S:
                self._stats.period.add(now - self._asked_at)
            self._asked_at = now

    def collect(self, sessions: Iterable[Session]) -> bool:
        """Wait for the answers to what was asked of `sessions`, of each server at most until its
        deadline; what the others say meanwhile is taken in.

        Returns whether all answers that were due are here. Use `Session.speculation` afterwards.
        """
        started = self._clock()
        due: dict[int, list[Session]] = {}
        for session in sessions:
            if session.server >= 0 and self.clients[session.server].due(session):
                due.setdefault(session.server, []).append(session)
        late = self._wait(due) if due else due
        now = self._clock()
        self.waited_s = now - started
        self._stats.wait.add(self.waited_s)
        if self._stats.recorder is not None:
            count = sum(map(len, late.values()))
            self._stats.recorder.add(SpanKind.DRAFT_WAIT, started, now, count=count)
        silent = [self.clients[index] for index in late if not self.clients[index].resting]
        for client in silent:
            client.timed_out()
        self._stats.timeouts += bool(silent)
        for index in late:
            if self.servers_up > 1:  # the last one has nobody to leave its requests to
                self.clients[index].give_up()
        return not late

    def _wait(self, due: dict[int, list[Session]]) -> dict[int, list[Session]]:
        """Sessions of `due`, by server, whose answers have not come in time."""
        late: dict[int, list[Session]] = {}
        for _ in range(MAX_MESSAGES_AT_ONCE):
            if not due:
                break
            alone, idle = len(due) == 1, True
            for index, part in list(due.items()):
                client = self.clients[index]
                left_s = max(0.0, client.deadline - self._clock())
                message = client.receive(left_s if alone else 0.0)
                if message is not None:
                    idle = False
                    client.handle(message)
                    due[index] = part = [s for s in part if client.due(s)]
                    if not part:
                        del due[index]
                elif alone or not left_s:
                    late[index] = due.pop(index)
            if len(due) > 1 and idle:
                until = max(self.clients[index].deadline for index in due)
                channels = [self.clients[index].channel for index in due]
                self._wait_for_any(channels, max(0.0, until - self._clock()))
        return late | due
