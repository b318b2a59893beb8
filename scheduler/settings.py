"""Settings that can change while the server runs, through SGLang's `/set_internal_state`.

That endpoint carries numbers only, so backup and drafting are said as numbers:

* `ssd_num_steps`: K, from 1 to the start's; -1 auto;
* `ssd_fan_out`: F for every accepted length, or `ssd_fan_out_0` .. `ssd_fan_out_K` one by one;
  -1 auto;
* `ssd_backup`: 0 none, 1 fast, 2 jit, 3 auto;
* `ssd_drafting`: 1 on, 0 off;
* `ssd_push`: 1: complete caches are sent ahead, 0: every round waits for its answer;
* `ssd_verification`: 0 coupled, 1 rejection, for requests that begin afterwards;
* `ssd_saguaro_c`, `ssd_proposal_top_m`: C, and M up to the start's, likewise;
* `ssd_trace`: 1 begins to write a timeline, 0 ends it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sgl_ssd.config import VERIFICATIONS
from sgl_ssd.errors import ConfigError
from sgl_ssd.fan_out import check_fan_out

if TYPE_CHECKING:
    from sgl_ssd.scheduler.draft_fleet import DraftFleet
    from sgl_ssd.scheduler.worker import SSDWorker

logger = logging.getLogger(__name__)

BACKUPS = ("none", "fast", "jit", "auto")
AUTO = -1
_FAN_OUT_AT = "ssd_fan_out_"
_NOT_TUNED = {
    "ssd_drafting", "ssd_push", "ssd_verification", "ssd_proposal_top_m", "ssd_trace",
}  # fmt: skip


def apply(worker: SSDWorker, changes: dict[str, Any]) -> None:
    """Validate all of `changes`, then apply them.

    Raises `ConfigError`, in which case nothing has changed.
    """
    changes = dict(changes)
    exchange = worker.exchange
    saguaro_c = _saguaro_c(changes.pop("ssd_saguaro_c", exchange.saguaro_c))
    for name, value in changes.items():
        if isinstance(value, bool) or value != int(value):
            raise ConfigError(f"{name} {value!r}: must be an integer")
    values = {name: int(value) for name, value in changes.items()}
    drafting = values.pop("ssd_drafting", int(exchange.drafting))
    if drafting not in (0, 1):
        raise ConfigError(f"ssd_drafting {drafting}: 1 is on, 0 is off")
    verification = values.pop("ssd_verification", VERIFICATIONS.index(exchange.verification))
    if not 0 <= verification < len(VERIFICATIONS):
        raise ConfigError(f"ssd_verification {verification}: 0 is coupled, 1 is rejection")
    top_m = values.pop("ssd_proposal_top_m", exchange.proposal_top_m)
    if not 1 <= top_m <= worker.config.proposal_top_m:
        raise ConfigError(
            f"ssd_proposal_top_m {top_m}: must lie in 1..{worker.config.proposal_top_m}"
        )
    trace = values.pop("ssd_trace", None)
    if trace not in (None, 0, 1):
        raise ConfigError(f"ssd_trace {trace}: 1 begins, 0 ends")
    client = worker.client
    if client is not None:
        tuner = worker.tuner
        num_steps = values.pop("ssd_num_steps", AUTO if tuner.steps_auto else client.num_steps)
        steps_auto = num_steps == AUTO
        if steps_auto:
            num_steps = client.num_steps
        if not 1 <= num_steps <= worker.num_steps:
            raise ConfigError(f"ssd_num_steps {num_steps}: must lie in 1..{worker.num_steps}")
        backup = values.pop("ssd_backup", BACKUPS.index(tuner.backup))
        if not 0 <= backup < len(BACKUPS):
            raise ConfigError(f"ssd_backup {backup}: 0 is none, 1 is fast, 2 is jit, 3 is auto")
        push = values.pop("ssd_push", int(client.push))
        if push not in (0, 1):
            raise ConfigError(f"ssd_push {push}: 1 is on, 0 is off")
        fan_out_auto = tuner.fan_out_auto and not any(n.startswith("ssd_fan_out") for n in values)
        if values.get("ssd_fan_out") == AUTO:
            del values["ssd_fan_out"]
            fan_out_auto = True
        fan_out = _fan_out(values, client.fan_out, num_steps)
        if values:
            raise ConfigError(f"unknown settings: {', '.join(values)}")
        if trace is not None:
            _record(worker, bool(trace))
        before = _settings(client)
        client.push = bool(push)
        client.configure(num_steps, fan_out, BACKUPS[backup])
        if set(changes) - _NOT_TUNED:
            tuner.configure(
                fan_out_auto=fan_out_auto, steps_auto=steps_auto, backup=BACKUPS[backup]
            )
        if _settings(client) != before:
            logger.info("settings: K=%d, fan-out %s, backup %s", *_settings(client))
    if exchange.drafting != bool(drafting):
        logger.info("drafting %s", "on" if drafting else "off")
    exchange.drafting = bool(drafting)
    exchange.verification = VERIFICATIONS[verification]
    exchange.saguaro_c, exchange.proposal_top_m = saguaro_c, top_m


def _saguaro_c(value: Any) -> float:
    if isinstance(value, bool) or not 0 < value <= 1:
        raise ConfigError(f"ssd_saguaro_c {value!r}: must lie in 0 < C <= 1")
    return float(value)


def _settings(client: DraftFleet) -> tuple[int, list[int], str]:
    return client.num_steps, client.fan_out, client.backup


def _record(worker: SSDWorker, on: bool) -> None:
    if on and worker.trace_state == "closing":
        raise ConfigError("ssd_trace: the last timeline is still being written")
    try:
        worker.record(on)
    except OSError as e:
        raise ConfigError(f"ssd_trace: {e}") from None


def _fan_out(values: dict[str, int], current: list[int], num_steps: int) -> list[int]:
    """Takes the fan-out settings out of `values`; K+1 numbers."""
    uniform = values.pop("ssd_fan_out", None)
    if uniform is not None:
        fan_out = [uniform] * (num_steps + 1)
    else:
        # A larger K extends the list with its last entry, a smaller one cuts it.
        fan_out = (current + current[-1:] * num_steps)[: num_steps + 1]
    for name in [n for n in values if n.startswith(_FAN_OUT_AT)]:
        suffix = name.removeprefix(_FAN_OUT_AT)
        if not suffix.isdigit() or int(suffix) > num_steps:
            raise ConfigError(f"{name}: accepted lengths are 0..{num_steps}")
        fan_out[int(suffix)] = values.pop(name)
    return check_fan_out(fan_out, num_steps)
