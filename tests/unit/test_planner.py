"""The planner's formulas against brute force and against simulated rounds."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_ssd import planner
from sgl_ssd.errors import ConfigError
from sgl_ssd.planner import Curve, Deployment, Measurements, MissLaw, Setting

SPEED = Measurements(
    verify=Curve([(8, 20.0), (64, 24.0), (256, 60.0)]),
    plain=Curve([(1, 18.0), (64, 22.0)]),
    step=Curve([(1, 2.0), (64, 3.0), (256, 6.0)]),
    answer_ms=1.0,
    acceptance=(0.8,),
    miss=MissLaw(0.5, 0.8),
)
probabilities = st.floats(0.05, 0.95)
chains = st.lists(probabilities, max_size=5).map(tuple)


# -- parts -----------------------------------------------------------------------------------------


def test_curves_never_fall_and_go_on_as_they_end():
    curve = Curve([(64, 3.0), (1, 2.0), (1, 4.0), (8, 1.0), (128, 5.0)])
    assert curve.points == [(1, 3.0), (8, 3.0), (64, 3.0), (128, 5.0)]
    assert [curve(x) for x in (0, 8, 96, 192)] == [3.0, 3.0, 4.0, 7.0]
    assert Curve([(4, 2.0)])(1000) == 2.0


@pytest.mark.parametrize("points", [[], [(1, 0.0)], [(1, float("nan"))], [(-1, 1.0)]])
def test_curves_refuse_what_is_no_time(points):
    with pytest.raises(ConfigError):
        Curve(points)


def test_measurements_refuse_wrong_probabilities():
    with pytest.raises(ConfigError, match="acceptance"):
        replace(SPEED, acceptance=(1.2,))
    with pytest.raises(ConfigError, match="acceptance"):
        replace(SPEED, acceptance=())


@given(probabilities, st.integers(0, 12))
def test_expected_tokens_of_equal_acceptance(a: float, steps: int):
    expected = (1 - a ** (steps + 1)) / (1 - a)
    assert planner.expected_tokens((a,) * steps) == pytest.approx(expected)


@given(chains)
def test_outcomes_are_a_distribution(chain):
    outcomes = planner.outcome_probabilities(chain)
    assert len(outcomes) == len(chain) + 1 and sum(outcomes) == pytest.approx(1)


def test_fractions_of_a_step_count_as_its_probability():
    assert SPEED.chain(2.25) == (0.8, 0.8, pytest.approx(0.2))
    assert SPEED.chain(0) == SPEED.chain(-3) == ()


# -- theorems --------------------------------------------------------------------------------------


def _misses(fan_out, a: float, r: float) -> float:
    weights = planner.outcome_probabilities((a,) * (len(fan_out) - 1))
    return sum(w * f**-r for w, f in zip(weights, fan_out, strict=True))


@given(probabilities, st.floats(0.2, 3), st.integers(1, 6), st.integers(0, 10**6))
def test_no_shift_improves_the_geometric_fan_out(a: float, r: float, steps: int, seed: int):
    fan_out = planner.geometric_fan_out(a, r, steps, 100.0)
    assert sum(fan_out) == pytest.approx(100.0)
    rng = random.Random(seed)
    one, other = rng.sample(range(steps + 1), 2)
    shifted = list(fan_out)
    moved = 0.1 * fan_out[one]
    shifted[one] -= moved
    shifted[other] += moved
    assert _misses(shifted, a, r) >= _misses(fan_out, a, r)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(probabilities, min_size=1, max_size=3).map(tuple),
    probabilities,
    st.floats(0.3, 1.0),
    st.floats(0.2, 2.0),
    st.integers(0, 9),
)
def test_whole_fan_out_is_nearly_the_best_of_all(chain, after, c, r, budget):
    law = MissLaw(c, r)

    def hits(fan_out) -> float:
        weights = planner.outcome_probabilities(chain)
        deepest = weights[-1] * law.hit_after_full(fan_out[-1], after)
        return deepest + sum(
            w * law.hit(f) for w, f in zip(weights[:-1], fan_out[:-1], strict=True)
        )

    found = planner.best_fan_out(chain, law, after, budget)
    assert sum(found) <= budget
    every = itertools.product(range(budget + 1), repeat=len(chain) + 1)
    assert hits(found) >= max(hits(f) for f in every if sum(f) <= max(0, budget - 2)) - 1e-9


def test_whole_fan_out_has_the_shape_of_the_theorem():
    """Where every depth misses F^-r, the theorem's list is the greedy one but for rounding."""
    a, r = 0.6, 1.2
    greedy = planner.best_fan_out((a,) * 3, MissLaw(1.0, r), 0.0, 120)
    exact = planner.geometric_fan_out(a, r, 3, 120)
    assert all(abs(g - e) <= 3 for g, e in zip(greedy, exact, strict=True))


@given(probabilities, st.floats(1, 8), st.floats(0.1, 2))
def test_ssd_equals_sd_where_nothing_hits(hit: float, tokens: float, draft: float):
    """A miss answered by drafting now is synchronous speculation; a hit saves its drafting."""
    sd = planner.speedup_of_sd(tokens, draft)
    assert planner.speedup_of_ssd(0.0, tokens, tokens, 0.5, draft) == pytest.approx(sd)
    assert planner.speedup_of_ssd(hit, tokens, tokens, 0.5, draft) > sd
    assert planner.speedup_of_ssd(1.0, tokens, tokens, 1.0, draft) == pytest.approx(tokens)


@given(st.floats(0.3, 0.99), st.floats(2, 6), st.floats(0.2, 3))
def test_crossover_is_where_both_backups_are_equal(hit: float, jit: float, backup: float):
    fast = hit * jit + (1 - hit)
    batch = planner.crossover_batch(hit, jit, fast, backup)
    slow_wins = lambda b: jit / (1 + (1 - hit**b) * backup) > fast  # noqa: E731
    if batch == float("inf"):
        assert slow_wins(10_000)
    else:
        assert not slow_wins(batch * 1.01)
        assert batch == 1 or slow_wins(batch * 0.99)


# -- rounds, simulated -----------------------------------------------------------------------------


def simulate(m: Measurements, setting: Setting, where: Deployment, rounds: int, seed: int):
    """Tokens per second, hit rate and tokens a round of `batch` requests, token by token."""
    rng = random.Random(seed)
    batch, steps, fan_out = where.batch, setting.num_steps, setting.fan_out
    verify = m.verify(batch * (where.width or steps + 1))
    period = verify + m.answer_ms + (0.0 if m.push else m.longer_ms)
    in_time = period / m.step(batch * (1 + sum(fan_out)))

    def length_of(limit: float) -> int:
        limit = max(0.0, limit)
        return int(limit) + (rng.random() < limit - int(limit))

    chains = [[m.accepts(i) for i in range(steps)] for _ in range(batch)]
    clock = tokens = hits = 0.0
    for _ in range(rounds):
        waits, ahead = 0, 0
        # All rows are built together, and sent when they are complete.
        complete = (
            length_of((period - m.wire_ms - m.longer_ms) / m.step(batch * (1 + sum(fan_out))))
            > steps
        )
        for i, chain in enumerate(chains):
            k = 0
            while k < len(chain) and rng.random() < chain[k]:
                k += 1
            tokens += k + 1
            guesses, limit = fan_out[k], in_time
            if k == len(chain):
                guesses, limit = max(fan_out[k:]), in_time - 1
            found = k == len(chain) and guesses > 0 and rng.random() < m.accepts(k)
            if not found:
                # The rank of the token among guesses without the draft's own, by inversion.
                rank = (m.miss.c / max(1e-12, rng.random())) ** (1 / m.miss.r)
                found = guesses - (k == len(chain)) >= max(1.0, rank)
            hits += found
            ahead += found and complete
            if found:
                chains[i] = [m.accepts(j) for j in range(length_of(min(steps, limit)))]
            elif setting.backup == "jit":
                chains[i] = [m.accepts(j) for j in range(steps)]
                waits += 1
            else:
                chains[i] = list(m.fast[:steps]) if setting.backup == "fast" else []
        clock += period + (steps * (m.jit or m.step)(waits) if waits else 0.0)
        clock += m.longer_ms if m.push and ahead < batch else 0.0
    return 1e3 * tokens / clock, hits / (rounds * batch), tokens / (rounds * batch)


@pytest.mark.parametrize(
    ("batch", "setting", "change"),
    [
        (1, Setting(4, (3, 2, 2, 1, 3), "jit"), {}),
        (1, Setting(12, (2,) * 13, "jit"), {}),  # more drafts than there is time for
        (8, Setting(5, (3, 2, 1, 1, 0, 2), "none"), {"acceptance": (0.9, 0.7, 0.5)}),
        (8, Setting(4, (1,) * 5, "fast"), {"fast": (0.4, 0.4)}),
        (4, Setting(4, (0, 0, 0, 0, 0), "jit"), {}),  # never a hit
        (16, Setting(3, (2, 1, 1, 2), "jit"), {"acceptance": (0.5,)}),
        (1, Setting(4, (3, 2, 2, 1, 3), "jit"), {"push": True, "longer_ms": 6.0}),
        (4, Setting(4, (3, 2, 2, 1, 3), "none"), {"push": True, "longer_ms": 6.0}),
        (1, Setting(4, (3,) * 5, "none"), {"push": True, "longer_ms": 9.0, "wire_ms": 2.0}),
        (1, Setting(8, (3,) * 9, "none"), {"push": True, "longer_ms": 15.0}),  # never in time
        (1, Setting(4, (3,) * 5, "none"), {"longer_ms": 6.0}),
    ],
)
def test_predictions_agree_with_simulated_rounds(batch, setting, change):
    m = replace(SPEED, **change)
    where = Deployment(batch)
    speed, hit_rate, tokens = simulate(m, setting, where, 40_000 // batch, seed=1)
    found = planner.predict(m, setting, where)
    assert found.tokens_per_round == pytest.approx(tokens, rel=0.03)
    assert found.hit_rate == pytest.approx(hit_rate, abs=0.02)
    # Rows that miss together wait together; the formula takes their mean number.
    assert found.tokens_per_s == pytest.approx(speed, rel=0.04)


@settings(deadline=None, max_examples=12)
@given(
    st.floats(0.3, 0.95), st.floats(0.2, 1.0), st.floats(0.3, 2.0), st.integers(1, 8),
    st.integers(1, 4), st.sampled_from(["jit", "none"]), st.sampled_from([1, 4]),
)  # fmt: skip
def test_predictions_agree_with_any_simulation(a, c, r, steps, guesses, backup, batch):
    m = replace(SPEED, acceptance=(a,), miss=MissLaw(c, r))
    setting, where = Setting(steps, (guesses,) * (steps + 1), backup), Deployment(batch)
    speed, _, tokens = simulate(m, setting, where, 12_000 // batch, seed=2)
    found = planner.predict(m, setting, where)
    assert found.tokens_per_round == pytest.approx(tokens, rel=0.06)
    assert found.tokens_per_s == pytest.approx(speed, rel=0.06)


def test_synchronous_speculation():
    round_ms = 18.0 + SPEED.verify(5) - SPEED.verify(1) + 4 * 2.0
    expected = 1e3 * planner.expected_tokens((0.8,) * 4) / round_ms
    assert planner.sd_tokens_per_s(SPEED, 4, 1) == pytest.approx(expected)
    steps, speed = planner.best_sd(SPEED, 1)
    assert speed == max(planner.sd_tokens_per_s(SPEED, k, 1) for k in range(1, 13)) and steps > 1


# -- recommendations -------------------------------------------------------------------------------


def test_best_is_no_worse_than_any_uniform_setting():
    for batch in (1, 8):
        where = Deployment(batch)
        found = planner.best(SPEED, where)
        for steps, guesses in itertools.product((2, 4, 6, 8), (1, 4)):
            setting = Setting(steps, (guesses,) * (steps + 1), "jit")
            other = planner.predict(SPEED, setting, where).tokens_per_s
            assert found.tokens_per_s >= (1 - planner.NEGLIGIBLE) * other


def test_fan_out_fits_the_rows_of_a_step():
    for batch, gpus in ((1, 1), (16, 1), (16, 2), (300, 1)):
        where = Deployment(batch, max_rows=256, draft_gpus=gpus)
        found = planner.best(SPEED, where)
        assert sum(found.setting.fan_out) <= where.budget
    setting = Setting(4, (64,) * 5, "none")
    assert planner.predict(SPEED, setting, Deployment(16)).rows <= 256


def test_what_if():
    base = planner.best(SPEED, Deployment(1)).tokens_per_s
    slower = replace(SPEED, step=SPEED.step.scaled(3))
    assert planner.best(slower, Deployment(1)).tokens_per_s < base
    quick = slower.what_if(draft_speed=3)
    assert planner.best(quick, Deployment(1)).tokens_per_s == pytest.approx(base, rel=0.01)
    far = SPEED.what_if(wire_ms=20)
    assert planner.best(far, Deployment(1)).tokens_per_s < 0.7 * base
    # What is sent ahead does not wait for the wire, as long as there is time to send it.
    setting, pushing = Setting(4, (4,) * 5, "none"), replace(SPEED, push=True)
    near, asked, sent = (
        planner.predict(m, setting, Deployment(1)).round_ms
        for m in (SPEED, SPEED.what_if(wire_ms=4), pushing.what_if(wire_ms=4))
    )
    assert near < sent < asked == near + 4
    slow = pushing.what_if(wire_ms=30)
    assert planner.predict(slow, setting, Deployment(1)).round_ms == pytest.approx(near + 30)
    crowd = replace(SPEED, step=Curve([(1, 2.0), (256, 9.0)]))
    one, two = (planner.best(crowd, Deployment(16, draft_gpus=g)).tokens_per_s for g in (1, 2))
    assert two > one


def test_tokens_lost_after_full_acceptance_cost_speed():
    setting = Setting(2, (4, 4, 4), "jit")
    short = planner.predict(replace(SPEED, short_after_full=1), setting, Deployment(1))
    assert short.tokens_per_round < planner.predict(SPEED, setting, Deployment(1)).tokens_per_round


def test_where_drafting_stops_to_pay():
    assert planner.pays_up_to(SPEED, Deployment()) >= 64
    compute_bound = replace(SPEED, verify=Curve([(1, 20.0), (512, 200.0)]), acceptance=(0.3,))
    limit = planner.pays_up_to(compute_bound, Deployment())
    assert 0 < limit < 64
    assert planner.pays_up_to(replace(SPEED, acceptance=(0.0,)), Deployment()) == 0
