"""The tuner against simulated servers, in fake time."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_ssd import planner
from sgl_ssd.errors import ConfigError
from sgl_ssd.planner import Curve, Deployment, Measurements, MissLaw, Setting
from sgl_ssd.scheduler import settings
from sgl_ssd.scheduler.round_times import RoundTimes, size_class
from sgl_ssd.scheduler.stats import SSDStats
from sgl_ssd.scheduler.tuner import (
    PROBE_S,
    REST_S,
    SETTLE_ROUNDS,
    TRIAL_ROUNDS,
    PayOff,
    Phase,
    Tuner,
)

K = 8
TRUTH = Measurements(
    verify=Curve([(8, 20.0), (64, 24.0), (256, 60.0)]),
    plain=Curve([(1, 18.0), (16, 19.0), (64, 22.0)]),
    step=Curve([(1, 2.0), (64, 3.0), (256, 6.0)]),
    answer_ms=1.0,
    acceptance=(0.8,),
    miss=MissLaw(0.6, 0.8),
)


class Client:
    """Takes settings; its server says what the truth is."""

    def __init__(self, truth: Measurements) -> None:
        self.num_steps, self.fan_out, self.backup = 4, [4] * 5, "auto"
        self.server: Any = SimpleNamespace(max_branch_rows=256)
        self.servers_up = 1
        self.server_stats: dict[str, float] = {}
        self.truth = truth
        self.configured = 0
        self.push = True
        self.observe(1)

    def configure(self, num_steps: int, fan_out: list[int], backup: str) -> None:
        self.num_steps, self.fan_out, self.backup = num_steps, fan_out, backup
        self.configured += 1

    @property
    def setting(self) -> Setting:
        backup = "none" if self.backup in ("fast", "auto") else self.backup
        return Setting(self.num_steps, tuple(self.fan_out), backup)

    def observe(self, batch: int) -> None:
        rows = batch * (1 + sum(self.fan_out))
        step = self.truth.step
        self.server_stats = {"step_rows": rows, "step_ms": step(rows)}
        self.server_stats["step_row_ms"] = (step(rows + 8) - step(rows)) / 8
        self.server_stats |= {f"missed_of_{f}": 1 - self.truth.miss.hit(f) for f in (1, 2, 4)}


class Machine:
    """A server whose rounds take and yield what the planner's model says, with some noise."""

    def __init__(self, truth: Measurements = TRUTH, seed: int = 0, **auto: Any) -> None:
        self.truth, self.now, self.rng = truth, 0.0, random.Random(seed)
        self.stats, self.client = SSDStats(K), Client(truth)
        auto = auto or {"fan_out_auto": True}
        self.tuner = Tuner(self.stats, self.client, K, clock=lambda: self.now, **auto)
        self.tokens = 0
        self.paused_rounds = self.rounds = 0

    def run(self, batch: int, rounds: int) -> float:
        """Tokens per second."""
        before, started = self.tokens, self.now
        for _ in range(rounds):
            self.rounds += 1
            width = 1
            if self.tuner.paused:
                self.paused_rounds += 1
                seconds = self.truth.plain(batch) / 1e3
                for _ in range(batch):
                    self.stats.observe_round(0, 0)
                self.tokens += batch
            else:
                width = self.client.num_steps + 1
                p = planner.predict(self.truth, self.client.setting, Deployment(batch))
                seconds = p.round_ms / 1e3
                self.stats.wait.add(self.truth.answer_ms / 1e3)
                for _ in range(batch):
                    drafted = min(self.client.num_steps, K)
                    accepted = 0
                    while accepted < drafted and self.rng.random() < self.truth.accepts(accepted):
                        accepted += 1
                    keep = self.rng.random() < p.hit_rate or self.client.setting.backup == "jit"
                    drafted, accepted = (drafted, accepted) if keep else (0, 0)
                    self.stats.observe_round(drafted, accepted)
                    self.tokens += accepted + 1
            self.client.observe(batch)
            self.now += seconds * self.rng.uniform(0.97, 1.03)
            self.tuner.verified(batch, width, True)
        return (self.tokens - before) / (self.now - started)


# -- times of rounds -------------------------------------------------------------------------------


def test_only_undisturbed_rounds_are_timed():
    times = RoundTimes()
    assert times.launched(0.0, 3, 5, 0.0) is None
    assert times.launched(0.02, 3, 1, 0.004) == pytest.approx(0.02)  # that of width 5
    assert times.launched(0.05, 3, 5, 0.004) == pytest.approx(0.03)
    assert times.launched(0.08, 4, 5, 0.004) is None  # another batch
    times.interrupted()
    assert times.launched(0.20, 4, 5, 0.004) is None
    found = times.as_dict()
    assert found["forwards"] == {"2": [1, 15, pytest.approx(0.02), pytest.approx(0.004)]}
    assert found["plain_forwards"] == {"2": [1, 3, pytest.approx(0.03)]}


def test_size_classes():
    assert [size_class(n) for n in (1, 2, 3, 4, 7, 8, 100)] == [1, 2, 2, 4, 4, 8, 64]


# -- whether drafting pays -------------------------------------------------------------------------


def test_goes_on_drafting_where_it_pays_and_rarely_looks_at_plain_rounds():
    machine = Machine()
    machine.run(4, 4000)
    assert not machine.tuner.paused
    assert 0 < machine.paused_rounds < 0.02 * machine.rounds
    assert machine.tuner.as_dict()["auto"]["by_batch"]["4"]["phase"] == "drafting"


def test_rests_beyond_the_crossover_and_tries_again_ever_more_rarely():
    weak = replace(TRUTH, acceptance=(0.3,), verify=Curve([(1, 20.0), (64, 24.0), (512, 160.0)]))
    machine = Machine(weak)
    assert planner.pays_up_to(weak, Deployment()) < 32
    speed = machine.run(64, 6000)
    assert machine.paused_rounds > 0.85 * machine.rounds
    assert speed > 0.85 * planner.plain_tokens_per_s(weak, 64)
    first = machine.paused_rounds / machine.rounds
    machine.run(64, 6000)
    assert machine.paused_rounds / machine.rounds > first


def test_begins_again_when_drafting_pays_again():
    weak = replace(TRUTH, acceptance=(0.1,))
    machine = Machine(weak)
    machine.run(4, 1000)
    assert machine.tuner.paused
    machine.truth = TRUTH
    rounds_for = int(4 * REST_S / 0.018)
    machine.run(4, rounds_for)
    assert not machine.tuner.paused
    fraction = machine.paused_rounds / machine.rounds
    machine.run(4, rounds_for)
    assert machine.paused_rounds / machine.rounds < fraction


def test_a_trial_waits_until_the_draft_server_has_caught_up():
    pay_off, now = PayOff(), 0.0

    def rounds(count: int, tokens: int, prefilling: int = 0) -> None:
        nonlocal now
        for _ in range(count):
            now += 0.02
            pay_off.observe(tokens, 8, 0.02, now, prefilling)

    while pay_off.phase is not Phase.REST:  # drafting yields less than a token a request
        rounds(1, 6)
    while pay_off.phase is not Phase.TRIAL:
        rounds(1, 8)
    rounds(200, 8, prefilling=8)
    assert pay_off.phase is Phase.TRIAL
    rounds(SETTLE_ROUNDS + TRIAL_ROUNDS, 16)
    assert pay_off.phase is Phase.DRAFT


def test_one_misleading_probe_does_not_end_drafting():
    pay_off, now, probes = PayOff(), 0.0, 0
    for _ in range(6000):
        now += 0.02
        before = pay_off.phase
        disturbed = before is Phase.PROBE and probes % 2 == 0  # the machine idles elsewhere
        pay_off.observe(12, 8, 0.005 if disturbed else 0.02, now)
        probes += before is Phase.PROBE and pay_off.phase is not Phase.PROBE
        assert pay_off.phase is not Phase.REST
    assert probes >= 4


def test_a_draft_server_that_never_catches_up_is_left_to_rest():
    pay_off, now = PayOff(), 0.0
    for _ in range(3000):
        now += 0.02
        pay_off.observe(8, 8, 0.03 if pay_off.drafting else 0.02, now, prefilling=8)
    assert pay_off.phase is Phase.REST


def test_each_size_of_batch_is_judged_alone():
    weak = replace(TRUTH, acceptance=(0.6,), verify=Curve([(5, 20.0), (64, 60.0), (320, 300.0)]))
    machine = Machine(weak)
    for _ in range(6):
        machine.run(1, 300)
        machine.run(64, 300)
    by_batch = machine.tuner.as_dict()["auto"]["by_batch"]
    assert by_batch["1"]["phase"] == "drafting" and by_batch["64"]["phase"] == "resting"


def test_even_speeds_do_not_flap():
    """Drafting that is as fast as plain decoding, but for noise, is not switched back and forth."""
    even = replace(TRUTH, acceptance=(0.5,))
    machine = Machine(even)
    machine.client.num_steps, machine.client.fan_out = 1, [1, 1]
    p = planner.predict(even, machine.client.setting, Deployment(4))
    machine.truth = replace(even, plain=Curve([(4, 4e3 / p.tokens_per_s)]))
    switches, paused = 0, False
    for _ in range(int(20 * PROBE_S)):
        machine.run(4, 2)
        switches += machine.tuner.paused is not paused
        paused = machine.tuner.paused
    assert switches < 14


def test_does_nothing_unless_asked_to():
    machine = Machine(fan_out_auto=False)
    machine.run(4, 500)
    assert machine.client.configured == machine.paused_rounds == 0
    assert "auto" not in machine.tuner.as_dict() and machine.tuner.as_dict()["forwards"]


def test_stands_aside_while_the_draft_server_is_away_or_drafting_is_off():
    machine = Machine(replace(TRUTH, acceptance=(0.1,)))
    machine.run(4, 1000)
    assert machine.tuner.paused
    machine.tuner.verified(4, 1, False)
    assert not machine.tuner.paused
    machine.client.server = None
    machine.run(4, 10)
    assert not machine.tuner.paused


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 16])
def test_fan_out_becomes_nearly_the_best(batch: int):
    machine = Machine()
    before = planner.predict(TRUTH, machine.client.setting, Deployment(batch)).tokens_per_s
    machine.run(batch, 3000)
    found = planner.predict(TRUTH, machine.client.setting, Deployment(batch)).tokens_per_s
    best = planner.best(TRUTH, Deployment(batch), steps=[4]).tokens_per_s
    assert machine.client.num_steps == 4  # K was not left to it
    assert found >= before and found > 0.94 * best
    settled = machine.client.configured
    machine.run(batch, 3000)
    assert machine.client.configured <= settled + 2


def test_steps_become_nearly_the_best():
    slow = replace(TRUTH, step=TRUTH.step.scaled(2))
    for truth in (TRUTH, slow):
        machine = Machine(truth, fan_out_auto=True, steps_auto=True)
        machine.run(1, 4000)
        found = planner.predict(truth, machine.client.setting, Deployment(1)).tokens_per_s
        best = planner.best(truth, Deployment(1), steps=range(1, K + 1)).tokens_per_s
        assert found > 0.92 * best


def test_a_backup_that_was_asked_for_stays():
    machine = Machine(fan_out_auto=True, backup="none")
    machine.client.backup = "none"
    machine.run(1, 2000)
    assert machine.client.backup == "none"


def test_goes_back_to_what_suited_a_batch():
    machine = Machine(replace(TRUTH, step=Curve([(1, 2.0), (256, 20.0)])))
    machine.run(1, 2000)
    alone = machine.client.setting
    machine.run(32, 2000)
    crowd = machine.client.setting
    assert alone != crowd and sum(crowd.fan_out) < sum(alone.fan_out)
    machine.run(1, 40)
    assert machine.client.setting == alone


def test_saying_the_same_again_forgets_nothing():
    machine = Machine()
    machine.run(1, 1000)
    known = dict(machine.tuner.pay_offs)
    machine.tuner.configure(fan_out_auto=True, steps_auto=False, backup="auto")
    assert machine.tuner.pay_offs == known and known
    machine.tuner.configure(fan_out_auto=True, steps_auto=True, backup="auto")
    assert not machine.tuner.pay_offs and machine.tuner.expected is None


def test_at_most_one_prediction_a_verify(monkeypatch):
    calls = 0
    predict = planner.predict

    def counting(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return predict(*args)

    machine = Machine()
    monkeypatch.setattr(planner, "predict", counting)
    verified = machine.tuner.verified

    def check(*args: Any) -> None:
        nonlocal calls
        calls = 0
        verified(*args)
        assert calls <= 1

    monkeypatch.setattr(machine.tuner, "verified", check)
    machine.run(4, 500)


# -- the settings endpoint -------------------------------------------------------------------------


def _worker() -> Any:
    machine = Machine(fan_out_auto=False)
    exchange = SimpleNamespace(
        drafting=True, verification="coupled", saguaro_c=1.0, proposal_top_m=64
    )
    return SimpleNamespace(
        exchange=exchange, client=machine.client, tuner=machine.tuner, num_steps=K,
        config=SimpleNamespace(proposal_top_m=64),
    )  # fmt: skip


def test_auto_by_number():
    worker = _worker()
    settings.apply(worker, {"ssd_fan_out": -1, "ssd_num_steps": -1, "ssd_backup": 3})
    assert worker.tuner.fan_out_auto and worker.tuner.steps_auto and worker.tuner.active
    settings.apply(worker, {"ssd_drafting": 0})
    assert worker.tuner.fan_out_auto and worker.tuner.steps_auto
    settings.apply(worker, {"ssd_num_steps": 3})
    assert worker.tuner.fan_out_auto and not worker.tuner.steps_auto
    worker.client.backup = "jit"  # as the tuner may have chosen
    settings.apply(worker, {"ssd_fan_out": 2})
    assert not worker.tuner.active and worker.client.fan_out == [2] * 4
    assert worker.client.backup == "auto"


def test_saguaro_and_the_size_of_proposals():
    worker = _worker()
    settings.apply(worker, {"ssd_saguaro_c": 0.25, "ssd_proposal_top_m": 3})
    assert (worker.exchange.saguaro_c, worker.exchange.proposal_top_m) == (0.25, 3)
    settings.apply(worker, {"ssd_drafting": 0})
    assert (worker.exchange.saguaro_c, worker.exchange.proposal_top_m) == (0.25, 3)
    for bad in (
        {"ssd_saguaro_c": 0}, {"ssd_saguaro_c": 1.5}, {"ssd_saguaro_c": True},
        {"ssd_proposal_top_m": 0}, {"ssd_proposal_top_m": 65}, {"ssd_proposal_top_m": 2.5},
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            settings.apply(worker, bad)
        assert (worker.exchange.saguaro_c, worker.exchange.proposal_top_m) == (0.25, 3)


@pytest.mark.parametrize("values", [{"ssd_fan_out": -2}, {"ssd_num_steps": -2}])
def test_other_negative_numbers_are_refused(values: dict[str, int]):
    worker = _worker()
    with pytest.raises(ConfigError):
        settings.apply(worker, values)
    assert not worker.tuner.active
