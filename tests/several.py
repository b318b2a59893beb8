"""`python -m tests.several`: many servers on one host, and two targets on one draft server.

First three launchers start at once, serve at once and end at once: same answers, drafts in each,
nothing left. Then two targets share one draft server under the same load: drafts, hits and waits
of each, every answer compared with drafting off; one of them is killed in the middle, and what the
draft server held for it must be free after the lease, while the other goes on.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import psutil

from cycles import FLAGS, MARK, family
from parity.harness import compare, configure, send_all, ssd_state
from rig import DRAFT_READY_SECONDS, Rig, eventually
from servers import ServerProcess
from soak import make_bodies

LEASE_S = 10.0


class Load:
    """`clients` that send the bodies in turn until stopped or refused."""

    def __init__(self, server: ServerProcess, bodies: list[dict[str, Any]], clients: int) -> None:
        self._server, self._bodies = server, bodies
        self._stop = threading.Event()
        self.answers: list[tuple[int, Any]] = []
        self._threads = [
            threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(clients)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, first: int) -> None:
        at = first
        with suppress(OSError, RuntimeError):
            while not self._stop.is_set():
                index = at % len(self._bodies)
                answer = self._server.post("/generate", self._bodies[index], timeout=600)
                self.answers.append((index, answer))
                at += len(self._threads)

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)


def differences(oracle: ServerProcess, bodies: Any, expected: Any, loads: list[Load]) -> str:
    """Compare all answers with those without drafts; drafting is off afterwards."""
    configure(oracle, ssd_drafting=0)
    answers = [a for load in loads for a in load.answers]
    report = compare(
        oracle, [bodies[i] for i, _ in answers], [expected[i] for i, _ in answers],
        [answer for _, answer in answers],
    )  # fmt: skip
    for line in report.differences[:5]:
        print(line)
    return (
        f"{report.compared} answers, {report.tokens} tokens: "
        f"{len(report.differences)} differences, {report.ties} near ties"
    )


def idle_cpu(processes: set[psutil.Process], seconds: float) -> str:
    """The share of a core that each kind of process uses, at most."""
    before = {p: sum(p.cpu_times()[:2]) for p in processes}
    time.sleep(seconds)
    most: dict[str, float] = {}
    for process, used in before.items():
        name = process.name()
        share = (sum(process.cpu_times()[:2]) - used) / seconds
        most[name] = max(most.get(name, 0.0), share)
    return ", ".join(f"{name} {100 * share:.1f} %" for name, share in sorted(most.items()))


def three_servers(folder: Path, bodies: list[dict[str, Any]], seconds: float) -> bool:
    """Three launchers side by side; whether all was well."""
    mark = uuid.uuid4().hex
    servers = []
    for name in "abc":
        (folder / name).mkdir(parents=True)
        env = {MARK: mark, "TMPDIR": str(folder / name)}
        args = [*FLAGS, "--dtype", "float32"]
        log = folder / f"{name}.log"
        servers.append(
            ServerProcess("sgl_ssd.launch_server", args, log=log, env=env, ready_seconds=560)
        )
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(ServerProcess.start, servers))
    time.sleep(5)
    print(f"idle: {idle_cpu(family(mark), 30.0)}", flush=True)
    configure(servers[0], ssd_drafting=0)
    expected = send_all(servers[0], bodies, 2)
    configure(servers[0], ssd_drafting=1)
    loads = [Load(server, bodies, 2) for server in servers]
    time.sleep(seconds)
    for load in loads:
        load.stop()
    states = [ssd_state(server) for server in servers]
    verdict = differences(servers[0], bodies, expected, loads)
    processes = family(mark)
    firsts = [server.process for server in servers if server.process is not None]
    for first in firsts:
        first.send_signal(signal.SIGTERM)
    codes = [first.wait(60) for first in firsts]
    _, alive = psutil.wait_procs(processes, timeout=20)
    files = [f for name in "abc" for f in (folder / name).rglob("*")]
    left = [str(f) for f in files if "torchinductor" not in str(f)]
    print(
        f"three servers: {verdict}; hits {[s['hits'] for s in states]}, "
        f"exit codes {codes}, left: {len(alive)} of {len(processes)} processes, {left or 'no file'}"
    )
    return "0 differences" in verdict and not alive and not left and all(s["hits"] for s in states)


def two_targets(folder: Path, bodies: list[dict[str, Any]], clients: int, seconds: float) -> bool:
    """Two targets on one draft server; whether all was well."""
    draft = ("--max-total-tokens", "6000", "--lease-s", str(LEASE_S))
    with Rig(folder, draft=draft) as rig, rig.another_target("second") as second:
        servers = (rig.server, second)
        eventually(lambda: ssd_state(second)["draft"] == "up", DRAFT_READY_SECONDS)
        configure(rig.server, ssd_drafting=0)
        expected = send_all(rig.server, bodies, 2)
        configure(rig.server, ssd_drafting=1)
        before = [ssd_state(server) for server in servers]
        loads = [Load(server, bodies, clients) for server in servers]
        time.sleep(seconds)
        after = [ssd_state(server) for server in servers]
        for name, b, a in zip(("first", "second"), before, after, strict=True):
            count, total = (
                a["times"]["draft_wait"][i] - b["times"]["draft_wait"][i] for i in (0, 1)
            )
            print(
                f"{name}: {a['rounds'] - b['rounds']} rounds, "
                f"{a['drafted'] - b['drafted']} drafted, {a['accepted'] - b['accepted']} accepted, "
                f"{a['hits'] - b['hits']} hits, {1e3 * total / max(1, count):.1f} ms wait a round"
            )
        held = after[0]["draft_stats"]
        second.process.send_signal(signal.SIGKILL)  # type: ignore[union-attr]
        killed = time.monotonic()
        alone = ssd_state(rig.server)
        gone = eventually(lambda: ssd_state(rig.server)["draft_stats"]["peers"] == 1, 60)
        freed_s = time.monotonic() - killed
        on = ssd_state(rig.server)
        for load in loads:
            load.stop()
        whole = eventually(rig.pools_whole, 30)
        verdict = differences(rig.server, bodies, expected, loads)
    print(
        f"killed one with {held['sessions']:.0f} sessions open in all: its peer gone {gone} after "
        f"{freed_s:.1f} s (lease {LEASE_S:.0f} s), meanwhile {on['rounds'] - alone['rounds']} "
        f"rounds and {on['hits'] - alone['hits']} hits of the other; pools whole {whole}\n"
        f"both: {verdict}"
    )
    return gone and whole and "0 differences" in verdict


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=4, help="of each target")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="several_"))
    print(f"logs: {folder}", flush=True)
    bodies = make_bodies(1)[:20]
    well = two_targets(folder / "two", bodies, args.clients, args.seconds)
    well &= three_servers(folder / "three", bodies, args.seconds / 2)
    return int(not well)


if __name__ == "__main__":
    sys.exit(main())
