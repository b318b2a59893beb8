"""Several verifiers on one draft server: none waits for another's crowd."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from types import SimpleNamespace

import pytest

from channels import FakeClock, MemoryServer
from sgl_ssd.draft_server.drafts import Draft
from sgl_ssd.draft_server.engine import DraftEngine
from sgl_ssd.draft_server.prefill import PrefillQueue
from sgl_ssd.draft_server.proposals import SamplingParams
from sgl_ssd.draft_server.server import DraftServer
from sgl_ssd.draft_server.speculation_cache import SpeculationCache
from sgl_ssd.draft_server.stats import EngineStats
from sgl_ssd.protocol import Hello, Open, Ready, Speculate, encode


def draft(owner: str, name: int = 0) -> Draft:
    cache = SpeculationCache(4, 8)
    return Draft(array("q", [name]), SamplingParams(), f"{owner}/0/", 4, [4] * 5, cache)


def queue_of(owners: str) -> str:
    """Who is served in which order, when prompts of these owners arrive in this order."""
    stepper = SimpleNamespace(kv=None, synchronous=True)
    queue = PrefillQueue(stepper, EngineStats(), 16, lambda *a: None, lambda *a: None)  # type: ignore[arg-type]
    drafts = [draft(owner, i) for i, owner in enumerate(owners)]
    for one in drafts:
        queue.add(one)
    order = list(queue._waiting)
    for owner in set(owners):
        mine = [one.tokens[0] for one in order if one.owner == owner]
        assert mine == sorted(mine), "each owner's own prompts keep their order"
    return "".join(one.owner for one in order)


@pytest.mark.parametrize(
    ("arrivals", "served"),
    [
        ("", ""),
        ("aaaa", "aaaa"),
        ("aaaab", "abaaa"),
        ("aaaabb", "ababaa"),
        ("aaaabbc", "abcabaa"),
        ("abcabc", "abcabc"),
        ("aaabbbbcc", "abcabcabb"),
    ],
)
def test_verifiers_take_turns_with_their_prompts(arrivals: str, served: str) -> None:
    assert queue_of(arrivals) == served


def rows(cap: int, ready: dict[str, int], owner: str) -> int:
    engine = SimpleNamespace(cap=cap, _ready=Counter(ready))
    return DraftEngine._rows_for(engine, draft(owner))  # type: ignore[arg-type]


def test_rows_of_a_step_are_shared_between_verifiers_first() -> None:
    assert rows(256, {"a": 4}, "a") == 64
    assert rows(256, {"a": 4, "b": 4}, "a") == 32
    # A crowd gets what one session has no use for: 21 rows are all that ΣF = 20 asks for.
    assert rows(256, {"a": 1, "crowd": 200}, "a") == 128
    assert rows(256, {"a": 1, "crowd": 200}, "crowd") == (256 - 21) // 200
    assert rows(256, {"a": 2, "b": 3, "crowd": 1000}, "b") >= 21
    assert rows(16, {"a": 1, "b": 1, "c": 1, "d": 1}, "d") == 4


class Engine:
    """Counts what it is asked; every session is ready and knows nothing."""

    context_len, busy, starved = 50, True, False

    def __init__(self) -> None:
        self.opened = 0

    def open(self, tokens: Iterable[int], params: SamplingParams, *rest: object) -> object:
        self.opened += 1
        return SimpleNamespace(tokens=array("q", tokens), chain=[], ahead_s=0.0)

    def advance(self, one: SimpleNamespace, new: list[int], patient: bool = True) -> None:
        one.tokens.extend(new)

    def backup(self, drafts: list, kind: str) -> list:
        from sgl_ssd.protocol import Status

        return [Status.EMPTY for _ in drafts]

    def close(self, one: object, keep: bool = True) -> None: ...

    def plan(self, *drafts: object) -> None: ...

    def work(self) -> None: ...

    def take_built(self) -> list[object]:
        return []

    def summary(self) -> dict[str, float]:
        return {}


def serve(max_sessions: int = 100) -> tuple[DraftServer, MemoryServer, FakeClock, Engine]:
    clock = FakeClock()
    channel = MemoryServer(clock)
    ready = Ready(
        server="s", model_path="m", num_steps=4, context_len=50, vocab_size=100, vocab_hash="",
        fan_out=[1] * 5, backup="none", max_branch_rows=8, device="cpu",
    )  # fmt: skip
    engine = Engine()
    server = DraftServer(
        channel, engine, ready, max_sessions=max_sessions, lease_s=60.0, clock=clock
    )
    return server, channel, clock, engine


def hello(name: str) -> list[bytes]:
    return encode(
        Hello(
            verifier=name,
            num_steps=4,
            context_len=50,
            vocab_size=100,
            vocab_hash="",
            max_running_requests=8,
        )  # fmt: skip
    )


def opening(sid: int) -> list[bytes]:
    import numpy as np

    none = np.empty(0)
    return encode(
        Open(
            sid=sid,
            epoch=0,
            seed=0,
            temperature=0.0,
            top_k=1,
            top_p=1.0,
            min_p=0.0,
            num_prompt=2,
            num_bias=0,
            prompt=np.array([1, 2]),
            bias_ids=none,
            bias_values=none,
        )  # fmt: skip
    )


def question(round_id: int) -> list[bytes]:
    import numpy as np

    return encode(
        Speculate(
            round_id=round_id,
            num_rows=1,
            num_tokens=0,
            rows=np.array([[0, 0, 2, 0]]),
            tokens=np.empty(0),
        )  # fmt: skip
    )


def test_a_flood_of_one_does_not_keep_the_question_of_another_waiting() -> None:
    server, channel, clock, _ = serve()
    good, bad = channel.connect(b"good"), channel.connect(b"bad", capacity=1 << 20)
    for client in (good, bad):
        client.send(hello(client._identity.decode()))
    good.send(opening(0))
    server.turn()
    real_recv = channel.recv

    def slow_recv(timeout_s: float) -> tuple[bytes, list[bytes]] | None:
        clock.sleep(1e-4)  # each message takes its time
        return real_recv(timeout_s)

    channel.recv = slow_recv  # type: ignore[method-assign]
    good.send(question(1))
    for i in range(5000):
        bad.send(question(i))
    began = clock()
    server.turn()
    frames = []
    while (got := good.inbox.get(clock())) is not None:
        frames.append(got)
    assert any(b"Speculations" in f[0] for f in frames), "answered in the same turn"
    assert clock() - began < 0.005


def test_sessions_are_a_quota_of_each_verifier() -> None:
    server, channel, clock, engine = serve(max_sessions=1)  # 16 sessions in all
    bad = channel.connect(b"bad")
    bad.send(hello("bad"))
    for sid in range(100):
        bad.send(opening(sid))
    server.turn()
    assert engine.opened == 16
    good = channel.connect(b"good")
    good.send(hello("good"))
    for sid in range(8):
        good.send(opening(sid))
    server.turn()
    assert engine.opened == 24, "the crowd that was there first takes nothing away"
