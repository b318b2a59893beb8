"""Settings that follow the load: fan-out, backup, K, and whether to draft at all. Pure Python.

Two things are decided, both for each size of batch on its own:

* `PayOff`: drafting rests where plain decoding makes more tokens a second. Both are measured, by a
  few plain rounds from time to time, and while it rests by a trial of drafting from time to time.
* `Tuner`: of the settings that `sgl_ssd.planner` expects most of, given what was measured lately,
  one replaces the present one if it promises clearly more.

All of it happens right after a verify was launched, at most one prediction a verify, so the host
does it while the target computes. The text depends on none of it.
"""

from __future__ import annotations

import enum
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol

from sgl_ssd import planner
from sgl_ssd.errors import ConfigError
from sgl_ssd.fan_out import AUTO_MAX_FAN_OUT
from sgl_ssd.measurements import from_server
from sgl_ssd.planner import Deployment, Measurements, Prediction, Setting
from sgl_ssd.scheduler.round_times import RoundTimes, size_class
from sgl_ssd.scheduler.stats import SSDStats

logger = logging.getLogger(__name__)

# Whether drafting pays. Counts are rounds of one size of batch.
FIRST_PROBE = 64
PROBE_ROUNDS = 8
PROBE_S, DOUBT_S = 60.0, 3.0
TRIAL_ROUNDS = 32
SETTLE_ROUNDS = 4  # after a switch
# After a rest the draft server reads what it has missed. Rounds in which more of the rows than this
# wait for that say nothing of drafting, for so many rounds at most.
CATCHING_UP, PATIENCE_ROUNDS = 0.1, 8 * TRIAL_ROUNDS
REST_S, LONGEST_REST_S = 10.0, 300.0
MARGIN = 0.03
# Settings.
SEARCH_S = 2.0
SEARCH_ROUNDS = 100
STABLE_ROUNDS = 8
GAIN = 0.03
MORE_ROWS = 2.0  # than were seen: beyond that nobody knows what a step takes


class Rate:
    """Tokens a second."""

    def __init__(self) -> None:
        self.tokens = self.seconds = 0.0
        self.rounds = 0

    def add(self, tokens: float, seconds: float) -> None:
        """A round; the last `FIRST_PROBE` or so count."""
        if self.rounds >= 2 * FIRST_PROBE:
            self.tokens, self.seconds, self.rounds = self.tokens / 2, self.seconds / 2, FIRST_PROBE
        self.tokens += tokens
        self.seconds += seconds
        self.rounds += 1

    @property
    def per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


class Phase(enum.Enum):
    """What `PayOff` does."""

    DRAFT = "drafting"
    PROBE = "measuring plain rounds"
    REST = "resting"
    TRIAL = "trying again"


class PayOff:
    """Whether drafting makes more tokens a second than decoding without drafts."""

    def __init__(self) -> None:
        self.drafted, self.plain = Rate(), Rate()
        self.phase = Phase.DRAFT
        self._left, self._settle = FIRST_PROBE, SETTLE_ROUNDS
        self._doubted = False
        self._patience = 0
        self._due, self._rest_s = 0.0, REST_S

    @property
    def drafting(self) -> bool:
        """Whether the next round shall have drafts."""
        return self.phase in (Phase.DRAFT, Phase.TRIAL)

    def observe(
        self, tokens: float, rows: int, seconds: float, now: float, prefilling: int = 0
    ) -> None:
        """A round of `rows` requests is over; `tokens` were committed meanwhile.

        `prefilling` of the rows had no drafts because the draft server had not read their text yet.
        """
        if self._patience > 0 and prefilling > CATCHING_UP * rows:
            self._patience -= 1
            return
        if self._settle > 0:
            self._settle -= 1
            return
        if self.drafting:
            self.drafted.add(tokens, seconds)
        else:
            self.plain.add(rows, seconds)
        self._left -= 1
        if self._left > 0:
            return
        if self.phase is Phase.DRAFT and now >= self._due:
            self.plain = Rate()
            self._enter(Phase.PROBE, PROBE_ROUNDS)
        elif self.phase is Phase.PROBE:
            if self.drafted.per_s >= (1 - MARGIN) * self.plain.per_s:
                self._draft(now)
            elif self._doubted:
                self._rest(now, REST_S)
            else:  # a few rounds can mislead: the next probe decides
                self._draft(now, DOUBT_S)
                self._doubted = True
        elif self.phase is Phase.REST and now >= self._due:
            self.drafted = Rate()
            self._enter(Phase.TRIAL, TRIAL_ROUNDS)
        elif self.phase is Phase.TRIAL:
            if self.drafted.per_s > (1 + MARGIN) * self.plain.per_s:
                self._draft(now)
            else:
                self._rest(now, min(2 * self._rest_s, LONGEST_REST_S))

    def _enter(self, phase: Phase, rounds: int) -> None:
        self.phase, self._left, self._settle = phase, rounds, SETTLE_ROUNDS
        self._patience = PATIENCE_ROUNDS if phase is Phase.TRIAL else 0

    def _draft(self, now: float, seconds: float = PROBE_S) -> None:
        """Draft on, and measure plain rounds again after `seconds`."""
        self._due, self._doubted = now + seconds, False
        self._enter(Phase.DRAFT, FIRST_PROBE)

    def _rest(self, now: float, rest_s: float) -> None:
        self._due, self._rest_s = now + rest_s, rest_s
        self._enter(Phase.REST, PROBE_ROUNDS)

    def as_dict(self) -> dict[str, Any]:
        """For `/server_info`."""
        return {
            "phase": self.phase.value,
            "tokens_per_s": round(self.drafted.per_s, 1),
            "plain_tokens_per_s": round(self.plain.per_s, 1),
        }


class Client(Protocol):
    """What the tuner needs of the draft servers; see `draft_fleet.DraftFleet`."""

    num_steps: int
    fan_out: list[int]
    backup: str

    @property
    def server(self) -> Any: ...

    @property
    def server_stats(self) -> dict[str, float]: ...

    @property
    def servers_up(self) -> int: ...

    def configure(self, num_steps: int, fan_out: list[int], backup: str) -> None: ...


class Tuner:
    """Observes every verify; while `fan_out_auto` or `steps_auto` is set, it also decides.

    Attributes:
        backup: the backup that was asked for; `auto` leaves it to the tuner.
        paused: no drafts are to be asked for now.
        width: tokens a row of a verify where that does not depend on K (CUDA graphs).
    """

    def __init__(
        self,
        stats: SSDStats,
        client: Client | None,
        max_steps: int,
        *,
        fan_out_auto: bool = False,
        steps_auto: bool = False,
        backup: str = "auto",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._stats, self._client, self._clock = stats, client, clock
        self._max_steps = max_steps
        self.fan_out_auto, self.steps_auto, self.backup = fan_out_auto, steps_auto, backup
        self.width: int | None = None
        self.paused = False
        self.times = RoundTimes()
        self.pay_offs: dict[int, PayOff] = {}
        self.changes = 0
        self.expected: Prediction | None = None
        self._committed = self._prefilling = 0
        self._size = 0
        self._rounds_of_size = 0
        self._start: Setting | None = None
        self._chosen: dict[int, Setting] = {}
        self._looks: deque[dict[str, Any]] = deque(maxlen=2)
        self._search: Iterator[Prediction] | None = None
        self._found: list[Prediction] = []
        self._search_at = 0.0

    @property
    def active(self) -> bool:
        """Whether anything is left to the tuner."""
        return self._client is not None and (self.fan_out_auto or self.steps_auto)

    def configure(self, *, fan_out_auto: bool, steps_auto: bool, backup: str) -> None:
        """What is left to the tuner from now on; if that is new, it begins anew."""
        wanted = fan_out_auto, steps_auto, backup
        if self.active and wanted == (self.fan_out_auto, self.steps_auto, self.backup):
            return
        self.fan_out_auto, self.steps_auto, self.backup = fan_out_auto, steps_auto, backup
        self.paused = False
        self.pay_offs.clear()
        self._start = None
        self._chosen.clear()
        self._looks.clear()
        self._search, self.expected = None, None

    def interrupted(self) -> None:
        """A prefill runs: the time until the next verify is not a round's."""
        self.times.interrupted()

    def verified(self, rows: int, width: int, drafting: bool) -> None:
        """A verify was launched; `drafting`: the user has not switched drafts off."""
        now = self._clock()
        seconds = self.times.launched(now, rows, width, self._stats.wait.total)
        committed = self._stats.rounds + self._stats.accepted
        tokens, self._committed = committed - self._committed, committed
        late = self._stats.reasons["prefilling"]
        prefilling, self._prefilling = late - self._prefilling, late
        if not self.active or not drafting or self._client.server is None:  # type: ignore[union-attr]
            self.paused = False
            return
        size = size_class(rows)
        self._rounds_of_size = self._rounds_of_size + 1 if size == self._size else 0
        self._size = size
        pay_off = self.pay_offs.setdefault(size, PayOff())
        if seconds is not None:
            before = pay_off.phase
            pay_off.observe(tokens, rows, seconds, now, prefilling)
            if Phase.REST in (before, pay_off.phase) and before is not pay_off.phase:
                logger.info("drafting at %d requests: %s", size, pay_off.phase.value)
        self.paused = not pay_off.drafting
        if self._start is None:
            self._start = self._present()
        if self._rounds_of_size == STABLE_ROUNDS:
            self._apply(self._chosen.get(size, self._start))
        if not self.paused and self._rounds_of_size >= STABLE_ROUNDS:
            self._tune(rows, now)

    # -- settings ------------------------------------------------------------------------------

    def _tune(self, rows: int, now: float) -> None:
        """One step of a search: begin it, one prediction, or its end."""
        if self._search is None:
            if now >= self._search_at:
                self._search_at = now + SEARCH_S
                self._begin(rows)
            return
        prediction = next(self._search, None)
        if prediction is not None:
            self._found.append(prediction)
            return
        self._search = None
        present, *others = self._found
        self.expected = present
        if size_class(present.batch) != self._size or not others:
            return
        better = planner.choose(others)
        if better.tokens_per_s > (1 + GAIN) * present.tokens_per_s:
            self._chosen[self._size] = better.setting
            self._apply(better.setting)
            self.expected = better

    def _begin(self, rows: int) -> None:
        client, look = self._client, self._look()
        assert client is not None
        if not self._looks:
            self._looks.append(look)
        oldest = self._looks[0]
        if look["rounds"] - self._looks[-1]["rounds"] < SEARCH_ROUNDS:
            return
        self._looks.append(look)
        try:
            m = from_server(_difference(oldest, look) | {"draft_stats": client.server_stats})
        except ConfigError:
            return
        self._found = []
        self._search = self._predictions(m, rows)

    def _predictions(self, m: Measurements, rows: int) -> Iterator[Prediction]:
        """That of the present setting first."""
        client = self._client
        assert client is not None
        most = client.server.max_branch_rows if client.server is not None else 1
        servers = max(1, client.servers_up)
        where = Deployment(batch=rows, max_rows=most, draft_gpus=servers, width=self.width)
        present = self._present()
        if present.backup == "auto":
            present = replace(present, backup="jit" if rows == 1 else "fast")
        yield planner.predict(m, present, where)
        steps = range(1, self._max_steps + 1) if self.steps_auto else [client.num_steps]
        backups = ("jit", "fast") if self.backup == "auto" else (self.backup,)
        seen = client.server_stats.get("step_rows", 0.0)
        if self.fan_out_auto:
            wanted = planner.settings(m, where, steps, backups, AUTO_MAX_FAN_OUT)
        else:
            last = client.fan_out[-1:] * self._max_steps
            lists = ((k, tuple([*client.fan_out, *last][: k + 1])) for k in steps)
            wanted = (Setting(k, fan_out, b) for k, fan_out in lists for b in backups)
        for setting in wanted:
            if rows * (1 + sum(setting.fan_out)) <= servers * max(64.0, MORE_ROWS * seen):
                yield planner.predict(m, setting, where)

    def _apply(self, setting: Setting) -> None:
        client = self._client
        assert client is not None
        if setting != self._present():
            self.changes += 1
            client.configure(setting.num_steps, list(setting.fan_out), setting.backup)

    def _present(self) -> Setting:
        client = self._client
        assert client is not None
        return Setting(client.num_steps, tuple(client.fan_out), client.backup)

    def _look(self) -> dict[str, Any]:
        stats = self._stats
        return {
            "rounds": stats.rounds,
            "drafted_per_position": list(stats.drafted_at),
            "accepted_per_position": list(stats.accepted_at),
            **self.times.as_dict(),
        }

    def as_dict(self) -> dict[str, Any]:
        """For `/server_info`: the times of rounds always, decisions while they are made."""
        state: dict[str, Any] = dict(self.times.as_dict())
        if self.active:
            state["auto"] = {
                "fan_out": self.fan_out_auto,
                "num_steps": self.steps_auto,
                "backup": self.backup == "auto",
                "paused": self.paused,
                "changes": self.changes,
                "expected_tokens_per_s": self.expected and round(self.expected.tokens_per_s, 1),
                "by_batch": {str(size): p.as_dict() for size, p in self.pay_offs.items()},
            }
        return state


def _difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What was counted between two looks; where that is nothing, all that was counted."""
    result: dict[str, Any] = {}
    for name in ("drafted_per_position", "accepted_per_position"):
        result[name] = [b - a for a, b in zip(before[name], after[name], strict=True)]
    forwards = {}
    for size, cell in after["forwards"].items():
        old = before["forwards"].get(size, [0] * len(cell))
        forwards[size] = [b - a for a, b in zip(old, cell, strict=True)]
    result["forwards"] = forwards
    result["plain_forwards"] = after["plain_forwards"]
    return result
