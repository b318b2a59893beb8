"""Small differences are told from noise, and turns are taken fairly."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from benchmarks import overhead
from benchmarks.overhead import METRICS, PLAIN, TIMELINE, VARIANTS, Block, Repetition


def measured(costs: dict[str, float], noise: float, count: int = 12) -> list[Repetition]:
    """Blocks of servers that get slower all the time, and by `costs` (shares) in a variant."""
    draw, found, now = random.Random(1), [], 0.0

    def block(variant: str) -> Block:
        nonlocal now
        now += 1
        slower = (1 + costs.get(variant, 0.0)) * (1 + 0.002 * now) * draw.gauss(1, noise)
        return Block(100 / slower, 10 * slower, 5 * slower)

    for i in range(count):
        found.append(overhead.repeat(block, lambda on: None, i % 2 == 1))
    return found


@pytest.mark.parametrize("backwards", [False, True])
def test_turns_are_a_palindrome_and_the_timeline_is_on_in_its_own(backwards: bool) -> None:
    order: list[str] = []
    on: list[bool] = [False]
    switched: list[bool] = []

    def block(variant: str) -> Block:
        assert on[0] == (variant == TIMELINE)
        order.append(variant)
        return Block(float(len(order)), 1.0, 1.0)

    def timeline(now: bool) -> None:
        on[0] = now
        switched.append(now)

    found = overhead.repeat(block, timeline, backwards)
    assert order == order[::-1] and order.count(TIMELINE) == 2
    assert order[0] == (TIMELINE if backwards else PLAIN)
    assert not on[0] and switched in ([True, False], [True, False, True, False])
    assert [b.tokens_per_s for b in found[METRICS]] == ([2.0, 7.0] if backwards else [3.0, 6.0])


def test_a_cost_is_found_in_spite_of_drift_and_noise() -> None:
    found = overhead.summary(measured({METRICS: 0.005, TIMELINE: 0.035}, noise=0.001))
    figures = {name: of["cpu_ms_per_verify"] for name, of in found.items()}
    assert figures["metrics"].low < 0.5 < figures["metrics"].high
    assert figures["metrics"].low > 0, "told from nothing"
    assert figures["timeline"].median == pytest.approx(100 * (1.035 / 1.005 - 1), abs=0.2)
    assert figures["another server"].low < 0 < figures["another server"].high
    assert found["timeline"]["tokens_per_s"].median == pytest.approx(-2.9, abs=0.2)


def test_noise_widens_the_interval() -> None:
    widths = [
        (e := overhead.summary(measured({}, noise))["metrics"]["tokens_per_s"]).high - e.low
        for noise in (0.001, 0.01, 0.05)
    ]
    assert widths[0] < widths[1] < widths[2]


def test_intervals_hold_the_truth_as_often_as_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "DRAWS", 500)
    draw, held = random.Random(7), 0
    for _ in range(60):
        groups = [[draw.gauss(1.0, 2.0), draw.gauss(1.0, 2.0)] for _ in range(15)]
        estimate = overhead.bootstrap(groups)
        held += estimate.low <= 1.0 <= estimate.high
    assert held >= 51


def test_the_table_has_every_variant_and_difference() -> None:
    lines = overhead.table(measured({TIMELINE: 0.5}, noise=0.0, count=2)).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == [
        *VARIANTS, *overhead.DIFFERENCES
    ]  # fmt: skip
    assert len({line.count("|") for line in lines}) == 1
    assert lines[-1].startswith("| timeline | -33.")


def test_processor_time_counts_all_processes_finely() -> None:
    """A child and its child work for a while."""
    work = "t = time.process_time() + 0.05\nwhile time.process_time() < t: pass\n"
    child = f"import time\n{work}print(time.process_time(), flush=True)\ninput()"
    parent = (
        "import subprocess, sys, time\n"
        f"p = subprocess.Popen([sys.executable, '-c', {child!r}], stdin=subprocess.PIPE)\n"
        f"{work}print(time.process_time(), flush=True)\ninput()\np.communicate(b'\\n')"
    )
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        said = float(process.stdout.readline()) + float(process.stdout.readline())
        server = SimpleNamespace(_process=process)
        counted = overhead.cpu_seconds(server)  # type: ignore[arg-type]
        time.sleep(0.2)
        rested = overhead.cpu_seconds(server)  # type: ignore[arg-type]
        process.communicate("\n")
    assert said >= 0.1 and said <= counted <= rested < said + 0.1
    assert round(counted, 2) != counted, "in ticks"


def test_a_block_is_what_was_produced_and_how_long_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    class Server:
        _process = SimpleNamespace(pid=os.getpid())
        spec = SimpleNamespace(ours=True)
        url = "http://127.0.0.1:9"
        verifies = 10

        def state(self) -> dict:
            return {"ssd": {"verifies": self.verifies}}

        def post(self, path: str, body: dict) -> dict:
            self.verifies += 5
            time.sleep(0.05)
            return {"output_ids": [1] * body["sampling_params"]["max_new_tokens"]}

    scraped: list[str] = []
    monkeypatch.setattr(overhead, "SCRAPE_AFTER_S", 0.01)
    monkeypatch.setattr(overhead, "_scrape", lambda server: scraped.append(server.url))
    prompts = [[SimpleNamespace(input_ids=[1], n=1)]] * 4
    block = overhead.measure(Server(), prompts, 20, scrape=True)  # type: ignore[arg-type]
    assert 0.2 <= 80 / block.tokens_per_s < 10 and scraped == [Server.url]
    assert block.wall_ms_per_verify == pytest.approx(1e3 * 80 / block.tokens_per_s / 20)
    assert 0 < block.cpu_ms_per_verify < block.wall_ms_per_verify
    overhead.measure(Server(), prompts, 20, scrape=False)  # type: ignore[arg-type]
    assert len(scraped) == 1
