"""How fast speculation will be, and which settings make it fastest. Pure Python.

Times are milliseconds. A *chain* is written as the probabilities that its tokens are accepted,
each given that all before it were: `(.8, .7)`; `()` is a verify without drafts.

One round of SSD, over a batch of B requests:

    round  = verify(tokens) + answer            the draft server answers at once, from what is
                                                ready; a longer wire adds to it, with push only
                                                where drafts of a row were not sent ahead
    steps  = round / step(rows)                 decode steps of the draft in that time; rows =
                                                B (1 + F_0 + .. + F_K), shared out over draft GPUs
    hit    -> the next chain has min(K, steps) tokens, after full acceptance min(K, steps - 1): its
              branches start a step later
    miss   -> jit: K tokens, and the batch waits for K steps more; fast: what the n-grams give; none

so chains follow chains as a Markov process; its stationary distribution gives tokens a round, hit
rate and time. A fraction of a step counts as the probability of that step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from sgl_ssd.errors import ConfigError
from sgl_ssd.fan_out import MAX_FAN_OUT, fit_budget

Chain = tuple[float, ...]
BUDGET_PER_DEPTH = (1, 2, 3, 4, 6, 8, 12, 16)
NEGLIGIBLE = 0.005


# -- what is measured --------------------------------------------------------------------------


class Curve:
    """Milliseconds by size: never falling, straight between the points measured.

    Beyond the last point it goes on as steeply as the last two were apart, below the first it is
    flat. Points of the same size are averaged, and a point below its predecessor is raised to it.
    Raises `ConfigError` without points, or for numbers that are not finite and positive.
    """

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        by_size: dict[float, list[float]] = {}
        for size, ms in points:
            if not (math.isfinite(size) and math.isfinite(ms) and size >= 0 and ms > 0):
                raise ConfigError(f"({size}, {ms}): a size and positive milliseconds are needed")
            by_size.setdefault(float(size), []).append(ms)
        if not by_size:
            raise ConfigError("no time was measured")
        self.points: list[tuple[float, float]] = []
        highest = 0.0
        for size in sorted(by_size):
            highest = max(highest, sum(by_size[size]) / len(by_size[size]))
            self.points.append((size, highest))

    def __call__(self, size: float) -> float:
        points = self.points
        if size <= points[0][0] or len(points) == 1:
            return points[0][1]
        above = next((i for i, (x, _) in enumerate(points) if x >= size), len(points) - 1)
        (x0, y0), (x1, y1) = points[above - 1], points[above]
        return y0 + (y1 - y0) * (size - x0) / (x1 - x0)

    def scaled(self, factor: float) -> Curve:
        """All times multiplied by `factor`."""
        return Curve([(size, ms * factor) for size, ms in self.points])


@dataclass(frozen=True)
class MissLaw:
    """Of rejected drafts, the share whose bonus token is not among F guesses: c / F^r."""

    c: float = 0.57
    r: float = 0.55

    def hit(self, guesses: float) -> float:
        """Probability that the token is among `guesses` that leave out the rejected draft."""
        return 1.0 - min(1.0, self.c * guesses**-self.r) if guesses >= 1 else 0.0

    def hit_after_full(self, guesses: float, acceptance: float) -> float:
        """The same after full acceptance, where the first guess is the draft's own next token."""
        if guesses < 1:
            return 0.0
        return acceptance + (1 - acceptance) * self.hit(guesses - 1)


@dataclass(frozen=True)
class Measurements:
    """What a pair does on its hardware.

    Attributes:
        verify: a forward of the target with drafts, by its number of tokens, B (K+1); the host's
            work between the arrival of drafts and the launch is part of it.
        plain: a step of decoding without drafts, by batch.
        step: a step of the draft server, by rows.
        answer_ms: from an outcome to the drafts of a hit, wire included.
        acceptance: by position; the last one holds for all further positions.
        miss: how often the bonus token is not among the guesses.
        fast: the chain that a fast backup gives on average.
        jit: a token of a jit backup, by rows; None: as `step`.
        sync_step: a step of the draft beside the target (plain SD), by batch; None: as `step`.
        push: complete caches are sent ahead of the question.
        wire_ms: the network's share of a round trip; `answer_ms` has what rounds wait for it now.
        longer_ms: round trips take so much longer than they did when this was measured.
        short_after_full: tokens that chains after full acceptance are short of, however much time
            there is (a draft server that does not begin branches late).
    """

    verify: Curve
    plain: Curve
    step: Curve
    answer_ms: float
    acceptance: Chain
    miss: MissLaw = MissLaw()
    fast: Chain = ()
    jit: Curve | None = None
    sync_step: Curve | None = None
    push: bool = False
    wire_ms: float = 0.0
    longer_ms: float = 0.0
    short_after_full: int = 0

    def __post_init__(self) -> None:
        if not self.acceptance or any(not 0 <= a <= 1 for a in (*self.acceptance, *self.fast)):
            raise ConfigError(f"acceptance {self.acceptance}: give probabilities in 0..1")
        if not (math.isfinite(self.answer_ms) and self.answer_ms >= 0):
            raise ConfigError(f"answer_ms {self.answer_ms}: must be at least 0")

    def accepts(self, position: int) -> float:
        """Probability that the draft at `position` (from 0) is accepted if all before it are."""
        return self.acceptance[min(position, len(self.acceptance) - 1)]

    def chain(self, length: float) -> Chain:
        """`length` drafts; the last one is there with the probability of the fraction."""
        if length <= 0:
            return ()
        whole = int(length)
        full = tuple(self.accepts(i) for i in range(whole))
        return (*full, self.accepts(whole) * (length - whole)) if length > whole else full

    def what_if(
        self, *, draft_speed: float = 1.0, target_speed: float = 1.0, wire_ms: float = 0.0
    ) -> Measurements:
        """The same with a draft and a target so many times as fast, and a longer way."""
        draft, target = 1 / draft_speed, 1 / target_speed
        return replace(
            self,
            verify=self.verify.scaled(target),
            plain=self.plain.scaled(target),
            step=self.step.scaled(draft),
            longer_ms=self.longer_ms + wire_ms,
            jit=self.jit and self.jit.scaled(draft),
            sync_step=self.sync_step and self.sync_step.scaled(draft),
        )


# -- the paper's theorems ------------------------------------------------------------------------


def outcome_probabilities(chain: Chain) -> list[float]:
    """P(k drafts of `chain` are accepted), k = 0..K."""
    probabilities, reached = [], 1.0
    for acceptance in chain:
        probabilities.append(reached * (1 - acceptance))
        reached *= acceptance
    return [*probabilities, reached]


def expected_tokens(chain: Chain) -> float:
    """Tokens a round, bonus token included; (1 - a^(K+1)) / (1 - a) for K equal a."""
    return sum((k + 1) * p for k, p in enumerate(outcome_probabilities(chain)))


def geometric_fan_out(a: float, r: float, num_steps: int, budget: float) -> list[float]:
    """F_0..F_K of sum `budget` with the fewest misses, real-valued (paper, theorem 12).

    For acceptance `a` at every position and a share of misses F^-r at every depth:
    F_k = F_0 a^(k / (1+r)) for k < K, and F_K = F_0 a^(K / (1+r)) (1-a)^(-1 / (1+r)).
    """
    if not 0 < a < 1 or r <= 0:
        raise ConfigError(f"a {a}, r {r}: 0 < a < 1 and r > 0 are needed")
    shape = [a ** (k / (1 + r)) for k in range(num_steps)]
    shape.append(a ** (num_steps / (1 + r)) * (1 - a) ** (-1 / (1 + r)))
    return [budget * s / sum(shape) for s in shape]


def speedup_of_sd(tokens: float, draft_time: float) -> float:
    """Synchronous speculation over plain decoding.

    `tokens` a round; `draft_time` of a whole chain in units of a verify, which costs a plain step.
    """
    return tokens / (1 + draft_time)


def speedup_of_ssd(
    hit: float, tokens_hit: float, tokens_miss: float, draft_time: float, backup_time: float
) -> float:
    """SSD over plain decoding, in the units of `speedup_of_sd`.

    Drafting is hidden behind the verify as far as it is shorter; a miss (probability 1 - `hit`)
    adds the time of its backup and makes `tokens_miss` tokens.
    """
    tokens = hit * tokens_hit + (1 - hit) * tokens_miss
    return tokens / (max(1.0, draft_time) + (1 - hit) * backup_time)


def crossover_batch(hit: float, tokens_jit: float, tokens_fast: float, backup_time: float) -> float:
    """The batch from which a free backup beats a slow one; infinite if none does.

    With a slow backup one miss makes the whole batch wait: a round takes
    1 + (1 - hit^B) `backup_time` verifies and makes `tokens_jit` tokens a request, against
    `tokens_fast` (averages over hits and misses) in one verify.
    """
    lost = (tokens_jit / tokens_fast - 1) / backup_time if backup_time > 0 else math.inf
    if lost <= 0 or hit <= 0:
        return 1.0
    if lost >= 1 or hit >= 1:
        return math.inf
    return max(1.0, math.log(1 - lost) / math.log(hit))


def best_fan_out(chain: Chain, law: MissLaw, next_acceptance: float, budget: int) -> list[int]:
    """F_0..F_K of sum at most `budget` with the most hits, in whole numbers.

    Guesses go where each gains most. From the second on a depth's guesses gain less and less; the
    first may gain less than the next ones, so up to three are looked at together. Hits are at least
    those of the best list of sum `budget` - 2.
    """
    weights = outcome_probabilities(chain)
    last = len(chain)

    def hit(depth: int, guesses: int) -> float:
        if depth == last:
            return weights[depth] * law.hit_after_full(guesses, next_acceptance)
        return weights[depth] * law.hit(guesses)

    def best_step(depth: int, have: int) -> tuple[float, int]:
        """Most hits gained for each guess, and with how many guesses."""
        sizes = range(1, min(3, MAX_FAN_OUT - have) + 1)
        gains = [((hit(depth, have + n) - hit(depth, have)) / n, n) for n in sizes]
        return max(gains, default=(0.0, 1))

    fan_out = [0] * (last + 1)
    steps = [best_step(depth, 0) for depth in range(last + 1)]
    left = budget
    while left > 0:
        depth = max(range(last + 1), key=steps.__getitem__)
        gain, guesses = steps[depth]
        if gain <= 0:
            break
        guesses = min(guesses, left)
        fan_out[depth] += guesses
        left -= guesses
        steps[depth] = best_step(depth, fan_out[depth])
    return fan_out


# -- predictions ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """K, F_0..F_K and the backup (jit, fast or none)."""

    num_steps: int
    fan_out: tuple[int, ...]
    backup: str


@dataclass(frozen=True)
class Prediction:
    """What a setting is expected to do; `tokens_per_s` over the whole batch."""

    setting: Setting
    batch: int
    tokens_per_s: float
    tokens_per_round: float
    hit_rate: float
    round_ms: float
    verify_ms: float
    step_ms: float
    rows: int
    steps_in_time: float

    @property
    def waits_for_draft(self) -> bool:
        """Whether chains end early because the draft is too slow for them."""
        return self.steps_in_time < self.setting.num_steps


@dataclass(frozen=True)
class Deployment:
    """What a prediction is for: requests at a time, rows of a draft step, draft GPUs.

    `width`: tokens a row in a verify where that is fixed at the start; None: K+1.
    """

    batch: int = 1
    max_rows: int = 256
    draft_gpus: int = 1
    width: int | None = None

    def __post_init__(self) -> None:
        if min(self.batch, self.max_rows, self.draft_gpus) < 1:
            raise ConfigError("batch, rows and draft GPUs must be at least 1")

    @property
    def budget(self) -> int:
        """Most branches a session can have."""
        return max(0, self.max_rows * self.draft_gpus // self.batch - 1)


def predict(m: Measurements, setting: Setting, where: Deployment) -> Prediction:
    """The stationary speed of SSD; see the module for the model."""
    batch, num_steps = where.batch, setting.num_steps
    fan_out = fit_budget(list(setting.fan_out), where.budget)
    rows = math.ceil(batch * (1 + sum(fan_out)) / where.draft_gpus)
    step_ms = m.step(rows)
    verify_ms = m.verify(batch * (where.width or num_steps + 1))
    round_ms = verify_ms + m.answer_ms
    # What was sent ahead is there in time if it was complete a round trip before the next question.
    pushed = 0.0
    if m.push:
        pushed = (round_ms - m.wire_ms - m.longer_ms) / step_ms - num_steps
        pushed = min(1.0, max(0.0, pushed))
    else:
        round_ms += m.longer_ms
    steps = round_ms / step_ms
    primary = m.chain(min(num_steps, steps))
    after_full = m.chain(min(num_steps - m.short_after_full, steps - 1))
    backup = {"jit": m.chain(num_steps), "fast": m.fast[:num_steps], "none": ()}[setting.backup]

    def follow(chain: Chain) -> tuple[float, dict[Chain, float]]:
        """Hit rate after `chain`, and which chains come next."""
        last, hit = len(chain), 0.0
        probabilities = outcome_probabilities(chain)
        for depth in range(last):
            hit += probabilities[depth] * m.miss.hit(fan_out[depth])
        deepest = max(fan_out[last:], default=0)
        full = probabilities[last] * m.miss.hit_after_full(deepest, m.accepts(last))
        following: dict[Chain, float] = {}
        for chain_next, p in ((primary, hit), (after_full, full), (backup, 1 - hit - full)):
            following[chain_next] = following.get(chain_next, 0.0) + p
        return hit + full, following

    kinds = {chain: follow(chain) for chain in (primary, after_full, backup)}
    share = _stationary(kinds)
    hit_rate = sum(p * kinds[chain][0] for chain, p in share.items())
    tokens = sum(p * expected_tokens(chain) for chain, p in share.items())
    if m.push:
        round_ms += (1 - pushed * hit_rate**batch) * m.longer_ms
    if setting.backup == "jit":
        missing = max(1.0, batch * (1 - hit_rate))
        jit_ms = num_steps * (m.jit or m.step)(missing)
        round_ms += (1 - hit_rate**batch) * jit_ms
    return Prediction(
        setting=setting,
        batch=batch,
        tokens_per_s=1e3 * batch * tokens / round_ms,
        tokens_per_round=tokens,
        hit_rate=hit_rate,
        round_ms=round_ms,
        verify_ms=verify_ms,
        step_ms=step_ms,
        rows=rows,
        steps_in_time=steps,
    )


def _stationary(kinds: dict[Chain, tuple[float, dict[Chain, float]]]) -> dict[Chain, float]:
    """How often each of at most three chains is verified, from how often each follows each.

    A state's weight is the determinant of what is left of I - P without it.
    """
    names = list(kinds)
    stays = [[kinds[a][1].get(b, 0.0) for b in names] for a in names]
    weights = []
    for i in range(len(names)):
        rest = [j for j in range(len(names)) if j != i]
        weight = math.prod(1 - stays[j][j] for j in rest)
        if len(rest) == 2:
            weight -= stays[rest[0]][rest[1]] * stays[rest[1]][rest[0]]
        weights.append(max(0.0, weight))
    total = sum(weights)
    if total <= 0:  # nothing ever leads away from any of two chains: the first one is where we are
        return {name: float(i == 0) for i, name in enumerate(names)}
    return {name: weight / total for name, weight in zip(names, weights, strict=True)}


def plain_tokens_per_s(m: Measurements, batch: int) -> float:
    """Decoding without drafts."""
    return 1e3 * batch / m.plain(batch)


def sd_tokens_per_s(m: Measurements, num_steps: int, batch: int) -> float:
    """Synchronous speculation: the draft takes its steps, then the target verifies.

    Its verify is a plain step and what more tokens in the forward cost.
    """
    verify = m.plain(batch) + m.verify(batch * (num_steps + 1)) - m.verify(batch)
    round_ms = verify + num_steps * (m.sync_step or m.step)(batch)
    return 1e3 * batch * expected_tokens(m.chain(num_steps)) / round_ms


def settings(
    m: Measurements,
    where: Deployment,
    steps: Sequence[int],
    backups: Sequence[str] = ("jit", "none"),
    max_fan_out: int = MAX_FAN_OUT,
    uniform: bool = False,
) -> Iterator[Setting]:
    """Settings worth a prediction: for every K and backup, budgets from one guess a depth on."""
    for num_steps in steps:
        seen: set[tuple[int, ...]] = set()
        for per_depth in BUDGET_PER_DEPTH:
            budget = min(per_depth * (num_steps + 1), where.budget)
            if uniform:
                fan_out = [min(per_depth, budget // (num_steps + 1))] * (num_steps + 1)
            else:
                fan_out = best_fan_out(m.chain(num_steps), m.miss, m.accepts(num_steps), budget)
            key = tuple(min(f, max_fan_out) for f in fan_out)
            if key in seen:
                continue
            seen.add(key)
            for backup in backups:
                yield Setting(num_steps, key, backup)


def best(
    m: Measurements,
    where: Deployment,
    steps: Sequence[int] = range(1, 13),
    backups: Sequence[str] = ("jit", "none"),
    uniform: bool = False,
) -> Prediction:
    """The best of `settings`; see `choose`."""
    wanted = settings(m, where, steps, backups, uniform=uniform)
    return choose([predict(m, setting, where) for setting in wanted])


def choose(predictions: Sequence[Prediction]) -> Prediction:
    """The fastest; of those within `NEGLIGIBLE` of it the one with the fewest rows."""
    enough = (1 - NEGLIGIBLE) * max(p.tokens_per_s for p in predictions)
    good = (p for p in predictions if p.tokens_per_s >= enough)
    return min(good, key=lambda p: (p.rows, -p.tokens_per_s))


def best_sd(m: Measurements, batch: int, steps: Sequence[int] = range(1, 13)) -> tuple[int, float]:
    """K and tokens per second of the fastest synchronous speculation."""
    return max(((k, sd_tokens_per_s(m, k, batch)) for k in steps), key=lambda found: found[1])


def pays_up_to(m: Measurements, where: Deployment, limit: int = 1024) -> int:
    """The largest power of two of requests at a time at which SSD beats plain decoding; 0: none."""
    last, batch = 0, 1
    while batch <= limit:
        found = best(m, replace(where, batch=batch), steps=(1, 2, 3, 4, 6, 8))
        if found.tokens_per_s > plain_tokens_per_s(m, batch):
            last = batch
        batch *= 2
    return last
