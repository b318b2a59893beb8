"""The loop against a pretended engine, over a channel in memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from channels import FakeClock, MemoryClient, MemoryServer
from sgl_ssd.draft_server import server
from sgl_ssd.draft_server.proposals import SamplingParams
from sgl_ssd.draft_server.server import (
    ERRORS_PER_S,
    IDLE_POLL_S,
    STUCK_S,
    DraftServer,
)
from sgl_ssd.protocol import (
    Close,
    Configure,
    Entries,
    Error,
    Flush,
    Hello,
    Message,
    Open,
    Ping,
    Pong,
    Ready,
    Record,
    SpanKind,
    Spans,
    Speculate,
    Speculations,
    Status,
    decode,
    encode,
)
from sgl_ssd.recorder import Recorder

K = 3
VOCAB = 100


@dataclass
class PretendedDraft:
    tokens: array
    params: SamplingParams
    extra_key: str
    num_steps: int
    fan_out: list[int]
    chain: list[int] = field(default_factory=list)
    ahead_s: float = 0.5
    closed: bool | None = None
    plans: int = 0
    name: Any = None

    @property
    def answered(self) -> int:
        return len(self.chain)

    def entries(self, num_steps: int) -> tuple[np.ndarray, np.ndarray]:
        """One entry for each accepted length: the bonus token is 50, more follow."""
        depths = np.arange(K + 1)
        keys = np.stack((depths, np.full(K + 1, 50), np.full(K + 1, num_steps)), axis=1)
        tokens = 51 + np.arange(num_steps) + 10 * depths[:, None]
        return keys.astype(np.int32), tokens.astype(np.int32)


@dataclass
class PretendedEngine:
    """Knows every outcome whose first new token is even; the speculation counts up from the last
    token. Prompts of one token are never ready."""

    context_len: int = 50
    busy: bool = False
    starved: bool = False
    drafts: list[PretendedDraft] = field(default_factory=list)
    backups: list[tuple[int, str]] = field(default_factory=list)
    recorders: list[Recorder] = field(default_factory=list)
    built: list[PretendedDraft] = field(default_factory=list)
    patience: list[bool] = field(default_factory=list)

    def open(
        self, tokens: Iterable[int], params: SamplingParams, extra_key: str, num_steps: int,
        fan_out: Sequence[int],
    ) -> PretendedDraft:  # fmt: skip
        draft = PretendedDraft(array("q", tokens), params, extra_key, num_steps, list(fan_out))
        self.drafts.append(draft)
        return draft

    def close(self, draft: PretendedDraft, keep: bool = True) -> None:
        assert draft.closed is None, "closed twice"
        draft.closed = keep

    def advance(
        self, draft: PretendedDraft, new: Sequence[int], patient: bool = True
    ) -> Status | None:
        assert draft.closed is None
        self.patience.append(patient)
        draft.tokens.extend(new)
        draft.chain = []
        if len(draft.tokens) < 2:
            return Status.PREFILLING
        if len(draft.tokens) > self.context_len:
            return Status.CONTEXT
        if new and new[0] % 2:
            return None
        self._draft(draft)
        return Status.HIT

    def _draft(self, draft: PretendedDraft) -> None:
        draft.chain = [(draft.tokens[-1] + i + 1) % VOCAB for i in range(draft.num_steps)]

    def backup(self, drafts: Sequence[PretendedDraft], kind: str) -> list[Status]:
        self.backups.append((len(drafts), kind))
        assert len({id(d) for d in drafts}) == len(drafts)
        if kind == "none":
            return [Status.EMPTY] * len(drafts)
        for draft in drafts:
            self._draft(draft)
        return [Status.BACKUP] * len(drafts)

    def plan(self, *drafts: PretendedDraft) -> None:
        for draft in drafts:
            draft.plans += 1

    def work(self) -> None:
        pass

    def take_built(self) -> list[PretendedDraft]:
        built, self.built = self.built, []
        return built

    def summary(self) -> dict[str, float]:
        return {"kv_total": 7.0}


READY = Ready(
    server="s", model_path="m", num_steps=K, context_len=50, vocab_size=VOCAB, vocab_hash="h",
    fan_out=[2] * (K + 1), backup="jit", max_branch_rows=16, device="cpu",
)  # fmt: skip


class Bench:
    """A server, an engine and a client that has said Hello."""

    def __init__(self, hello: bool = True, **ready: Any) -> None:
        self.clock = FakeClock()
        self.channel = MemoryServer(self.clock)
        self.engine = PretendedEngine()
        answer = Ready(**{**{f: getattr(READY, f) for f in READY.__struct_fields__}, **ready})
        self.server = DraftServer(
            self.channel, self.engine, answer, max_sessions=2, lease_s=30.0, clock=self.clock
        )
        self.channel.serve = self.server.turn
        self.client = self.channel.connect()
        if hello:
            assert isinstance(self.ask(self.hello()), Ready)

    def hello(self, **changes: Any) -> Hello:
        values = dict(
            verifier="v", num_steps=K, context_len=99, vocab_size=VOCAB, vocab_hash="h",
            max_running_requests=4,
        )  # fmt: skip
        return Hello(**{**values, **changes})

    def send(self, message: Message, client: MemoryClient | None = None) -> None:
        (client or self.client).send(encode(message))

    def receive(self, client: MemoryClient | None = None) -> Message | None:
        frames = (client or self.client).recv(0.0)
        return None if frames is None else decode(frames)

    def ask(self, message: Message, client: MemoryClient | None = None) -> Message | None:
        self.send(message, client)
        return self.receive(client)

    def open(self, sid: int = 1, epoch: int = 0, prompt: Sequence[int] = (1, 2), **changes: Any):
        values = dict(
            sid=sid, epoch=epoch, seed=5, temperature=0.0, top_k=1 << 30, top_p=1.0, min_p=0.0,
            num_prompt=len(prompt), prompt=np.array(prompt, np.int32),
            bias_ids=np.zeros(0, np.int32), bias_values=np.zeros(0, np.float32),
        )  # fmt: skip
        self.send(Open(**{**values, **changes}))

    def speculate(self, *rows: tuple[int, int, int, Sequence[int]], round_id: int = 1) -> Speculate:
        tokens = [t for row in rows for t in row[3]]
        return Speculate(
            round_id=round_id,
            num_rows=len(rows),
            num_tokens=len(tokens),
            rows=np.array([(*r[:3], len(r[3])) for r in rows], np.int64).reshape(-1, 4),
            tokens=np.array(tokens, np.int32),
        )

    def round(self, *rows: tuple[int, int, int, Sequence[int]], round_id: int = 1) -> Speculations:
        answer = self.ask(self.speculate(*rows, round_id=round_id))
        assert isinstance(answer, Speculations) and answer.round_id == round_id
        assert [tuple(r[:2]) for r in answer.rows.tolist()] == [r[:2] for r in rows]
        return answer


def status(answer: Speculations, row: int = 0) -> Status:
    return Status(int(answer.rows[row, 3]))


# -- hello ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [Ping(nonce=1), Flush(), Close(sid=1, epoch=1)],
    ids=["ping", "flush", "close"],
)
def test_nothing_goes_before_hello(message: Message) -> None:
    bench = Bench(hello=False)
    answer = bench.ask(message)
    assert isinstance(answer, Error) and answer.code == "hello_first"


def test_refusals_are_rate_limited() -> None:
    bench = Bench(hello=False)
    bench.receive()  # a first turn, with its housekeeping
    for _ in range(10 * ERRORS_PER_S):
        bench.send(Ping(nonce=1))
    bench.receive()
    assert len(bench.client.inbox) < ERRORS_PER_S
    bench.clock.sleep(2.0)
    bench.receive()
    bench.client.inbox.clear()
    assert isinstance(bench.ask(Ping(nonce=1)), Error)
    assert bench.server.stats.refused == 10 * ERRORS_PER_S + 1


@pytest.mark.parametrize(
    ("changes", "word"), [({"vocab_hash": "other"}, "vocabular"), ({"num_steps": K + 1}, "drafts")]
)
def test_a_pair_that_does_not_fit_is_refused(changes: dict, word: str) -> None:
    bench = Bench(hello=False)
    answer = bench.ask(bench.hello(**changes))
    assert isinstance(answer, Error) and answer.code == "pair_mismatch" and word in answer.text
    assert isinstance(bench.ask(Ping(nonce=1)), Error)


def test_an_unknown_vocabulary_is_no_mismatch() -> None:
    bench = Bench(hello=False)
    assert isinstance(bench.ask(bench.hello(vocab_hash="")), Ready)


def test_hello_again_keeps_sessions_unless_it_is_another_process() -> None:
    bench = Bench()
    bench.open()
    assert isinstance(bench.ask(bench.hello()), Ready)
    assert bench.engine.drafts[0].closed is None
    assert isinstance(bench.ask(bench.hello(verifier="restarted")), Ready)
    assert bench.engine.drafts[0].closed is True
    assert status(bench.round((1, 0, 2, [4]))) is Status.UNKNOWN


# -- sessions ------------------------------------------------------------------------------------


def test_open_hands_on_what_coupled_drafting_needs() -> None:
    bench = Bench()
    bench.open(
        temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, seed=-4, extra_key="lora", num_bias=2,
        bias_ids=np.array([1, 2], np.int32), bias_values=np.array([1.0, np.nan], np.float32),
    )  # fmt: skip
    bench.receive()
    draft = bench.engine.drafts[0]
    params = draft.params
    assert (params.temperature, params.top_k, params.min_p, params.seed) == (0.5, 3, 0.1, -4)
    assert params.top_p == pytest.approx(0.9)
    assert params.bias_values.tolist() == [1.0, 0.0] and params.vocab_limit == VOCAB
    assert draft.extra_key.endswith("/lora") and draft.num_steps == K


def test_only_a_higher_epoch_replaces_a_session() -> None:
    bench = Bench()
    for epoch in (3, 3, 2, 5):
        bench.open(epoch=epoch)
    bench.receive()
    assert [d.closed for d in bench.engine.drafts] == [True, None]
    assert status(bench.round((1, 3, 2, [4]))) is Status.UNKNOWN
    assert status(bench.round((1, 5, 2, [4]))) is Status.HIT


def test_close_ends_exactly_once_and_old_closes_are_ignored() -> None:
    bench = Bench()
    bench.open(epoch=4)
    bench.send(Close(sid=1, epoch=3))
    assert status(bench.round((1, 4, 2, [4]))) is Status.HIT
    for _ in range(2):
        bench.send(Close(sid=1, epoch=4))
    assert status(bench.round((1, 4, 2, [4]))) is Status.UNKNOWN
    assert bench.engine.drafts[0].closed is True


def test_prompts_with_impossible_ids_and_too_many_sessions_are_refused() -> None:
    bench = Bench()
    bench.open(prompt=[1, VOCAB])
    bench.open(prompt=[-1, 3])
    bench.receive()
    assert not bench.engine.drafts and bench.server.stats.malformed == 2
    for sid in range(40):
        bench.open(sid=sid)
    answer = bench.receive()
    assert isinstance(answer, Error) and answer.code == "too_many_sessions"
    assert len(bench.engine.drafts) == 32


def test_a_session_nobody_asks_about_ends_and_may_be_opened_again() -> None:
    bench = Bench()
    bench.open(sid=1)
    bench.open(sid=2)
    for i in range(1, 6):
        bench.clock.now += 10
        assert status(bench.round((2, 0, 2, [4]), round_id=i)) is not Status.UNKNOWN
    assert bench.server.stats.expired_sessions == 1
    assert status(bench.round((1, 0, 2, [4]), round_id=9)) is Status.UNKNOWN
    bench.open(sid=1, epoch=1)
    assert status(bench.round((1, 1, 2, [4]), round_id=10)) is Status.HIT


def test_flush_drops_a_verifiers_sessions_without_keeping_their_prefixes() -> None:
    bench = Bench()
    other = bench.channel.connect(b"other")
    assert isinstance(bench.ask(bench.hello(verifier="w"), other), Ready)
    bench.open()
    before = bench.server.peers.get(b"verifier", 0.0).namespace("")
    bench.send(Flush())
    assert status(bench.round((1, 0, 2, [4]))) is Status.UNKNOWN
    assert bench.engine.drafts[0].closed is False
    assert bench.server.peers.get(b"verifier", 0.0).namespace("") != before


def test_a_silent_verifier_loses_its_sessions_the_others_do_not() -> None:
    bench = Bench()
    other = bench.channel.connect(b"other")
    bench.ask(bench.hello(verifier="w"), other)
    bench.open()
    bench.receive()
    for _ in range(4):
        bench.clock.sleep(10)
        assert isinstance(bench.ask(Ping(nonce=1), other), Pong)
    assert bench.engine.drafts[0].closed is True
    assert bench.server.stats.expired_peers == 1
    assert bench.ask(Ping(nonce=1)).code == "hello_first"


# -- rounds --------------------------------------------------------------------------------------


def test_a_round_says_status_length_and_drafts_of_every_row() -> None:
    bench = Bench()
    bench.open(sid=1, prompt=[1, 2])
    bench.open(sid=2, prompt=[3, 4, 5])
    bench.open(sid=3, prompt=[9])
    answer = bench.round((1, 0, 2, [10]), (2, 0, 3, [11, 12]), (3, 0, 1, []), (4, 0, 0, []))
    assert answer.rows[:, 2:].tolist() == [
        [3, Status.HIT, K], [5, Status.BACKUP, K], [1, Status.PREFILLING, 0],
        [0, Status.UNKNOWN, 0],
    ]  # fmt: skip
    assert answer.tokens.tolist() == [[11, 12, 13], [13, 14, 15], [0] * K, [0] * K]
    assert answer.ahead_us == 500_000
    assert bench.engine.backups == [(1, "jit")]
    assert [d.plans for d in bench.engine.drafts] == [1, 1, 0]
    stats = bench.server.stats
    assert (stats.hits, stats.backups, stats.misses, stats.prefilling, stats.unknown) == (
        1, 1, 1, 1, 1,
    )  # fmt: skip


def test_rows_are_state_not_events() -> None:
    bench = Bench()
    bench.open(prompt=[1, 2])
    bench.round((1, 0, 2, [10]))
    # Known tokens are skipped, a repeated message changes nothing.
    for _ in range(2):
        answer = bench.round((1, 0, 1, [2, 10, 12]))
        assert answer.rows[0].tolist() == [1, 0, 4, Status.HIT, K]
    # A message from before the last one: nothing new in it.
    assert bench.round((1, 0, 2, [10])).rows[0, 2] == 4
    # Tokens are missing in between.
    answer = bench.round((1, 0, 6, [4]))
    assert answer.rows[0].tolist() == [1, 0, 4, Status.NEED, 0]
    # What it knows is contradicted.
    answer = bench.round((1, 0, 2, [11, 12, 14]))
    assert status(answer) is Status.UNKNOWN
    assert bench.engine.drafts[0].tokens.tolist() == [1, 2, 10, 12]


@pytest.mark.parametrize("token", [VOCAB, -1, 2**31 - 1])
def test_ids_out_of_range_never_reach_the_engine(token: int) -> None:
    bench = Bench()
    bench.open()
    assert status(bench.round((1, 0, 2, [4, token]))) is Status.UNKNOWN
    assert bench.engine.drafts[0].tokens.tolist() == [1, 2]


def test_a_session_twice_in_one_message_counts_once() -> None:
    bench = Bench()
    bench.open()
    answer = bench.round((1, 0, 2, [5]), (1, 0, 2, [5]))
    assert [status(answer, i) for i in (0, 1)] == [Status.BACKUP, Status.UNKNOWN]


def push(bench: Bench, *drafts: PretendedDraft) -> Message | None:
    """The caches of `drafts` are complete: what the verifier gets."""
    bench.engine.built += drafts
    bench.server.turn()
    return bench.receive()


def test_time_without_anything_to_do_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    waits: list[float] = []

    def recv(timeout_s: float) -> None:
        waits.append(timeout_s)
        bench.clock.sleep(timeout_s)

    monkeypatch.setattr(bench.channel, "recv", recv)
    before = bench.server.stats.idle_seconds
    bench.server.turn()
    bench.engine.busy = True
    bench.server.turn()
    assert waits == [IDLE_POLL_S, 0.0]
    assert bench.server.stats.idle_seconds - before == pytest.approx(IDLE_POLL_S)


def wants(on: bool, **changes: Any) -> Configure:
    return Configure(
        **{"num_steps": K, "fan_out": [1] * (K + 1), "backup": "jit", "push": on, **changes}
    )


def test_many_do_not_wait_for_the_first_draft_of_one() -> None:
    bench = Bench()
    for sid in range(3):
        bench.open(sid=sid, prompt=[1, 2])
    bench.round((0, 0, 2, [10]), (1, 0, 2, [10]))
    bench.round(*((sid, 0, 2 + (sid < 2), [12]) for sid in range(3)))
    assert bench.engine.patience == [True] * 2 + [False] * 3


def test_complete_caches_are_sent_to_those_that_want_them() -> None:
    bench = Bench()
    bench.open(sid=1, prompt=[1, 2])
    bench.open(sid=2, prompt=[3, 4, 5])
    bench.round((1, 0, 2, [10]), (2, 0, 3, [12]))
    first, second = bench.engine.drafts
    assert push(bench, first) is None, "nobody has asked for it"
    bench.send(wants(True))
    second.chain = second.chain[:1]
    message = push(bench, first, second)
    assert isinstance(message, Entries)
    assert message.rows.tolist() == [[1, 0, 3, K, K + 1], [2, 0, 4, 1, 2]]
    assert message.chains.tolist() == [[11, 12, 13], [13, 0, 0]]
    assert message.keys.tolist() == [
        [0, 50, K], [1, 50, K], [2, 50, K], [3, 50, K], [0, 50, K], [1, 50, K],
    ]  # fmt: skip
    assert message.tokens[[0, 5]].tolist() == [[51, 52, 53], [61, 62, 63]]
    assert (bench.server.stats.pushes, bench.server.stats.pushed_entries) == (1, K + 3)
    bench.send(wants(True, num_steps=2, fan_out=[1] * 3))
    message = push(bench, first)
    assert isinstance(message, Entries) and message.num_steps == 2
    assert message.rows.tolist() == [[1, 0, 3, 2, 3]] and message.chains.tolist() == [[11, 12]]
    bench.send(wants(False))
    assert push(bench, first) is None


def test_nothing_is_sent_ahead_for_a_session_that_is_no_more_or_samples() -> None:
    bench = Bench()
    bench.send(wants(True))
    bench.open(sid=1, prompt=[1, 2])
    bench.open(sid=2, prompt=[3, 4, 5])
    bench.open(sid=3, prompt=[3, 4], temperature=1.0, top_m=8)
    bench.server.turn()
    closed, replaced, sampled = bench.engine.drafts
    bench.send(Close(sid=1, epoch=0))
    bench.open(sid=2, epoch=1, prompt=[3, 4, 5])
    assert push(bench, closed, replaced, sampled) is None
    assert isinstance(push(bench, bench.engine.drafts[3]), Entries)


def test_what_did_not_get_out_was_not_sent_ahead() -> None:
    bench = Bench()
    bench.send(wants(True))
    bench.open()
    bench.server.turn()
    bench.client.closed = True
    bench.engine.built += bench.engine.drafts
    bench.server.turn()
    stats = bench.server.stats
    assert (stats.unsent, stats.pushes, stats.pushed_entries) == (1, 0, 0)


def test_many_complete_caches_go_in_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "PUSHED_AT_ONCE", 3)
    bench = Bench()
    bench.send(wants(True))
    for sid in range(8):
        bench.open(sid=sid, prompt=[1, 2])
    bench.server.turn()
    messages = [push(bench, *bench.engine.drafts), bench.receive(), bench.receive()]
    assert [m.num_rows for m in messages if isinstance(m, Entries)] == [3, 3, 2]
    assert [row[0] for m in messages for row in m.rows.tolist()] == list(range(8))


def test_only_the_newest_round_is_answered_but_all_are_taken_in() -> None:
    bench = Bench()
    bench.open()
    bench.send(bench.speculate((1, 0, 2, [10]), round_id=1))
    bench.send(bench.speculate((1, 0, 3, [12]), round_id=2))
    bench.send(bench.speculate((1, 0, 3, []), round_id=1))  # overtaken on its way
    answer = bench.receive()
    assert answer.round_id == 2 and answer.rows[0].tolist() == [1, 0, 4, Status.HIT, K]
    assert bench.receive() is None
    assert bench.server.stats.unanswered == 2 and bench.server.stats.rounds == 1


def test_an_open_between_two_rounds_is_seen_by_the_second() -> None:
    bench = Bench()
    bench.open(epoch=0)
    bench.send(bench.speculate((1, 0, 2, [10]), round_id=1))
    bench.open(epoch=1, prompt=[1, 2, 10, 11])
    answer = bench.round((1, 1, 4, [12]), round_id=2)
    assert answer.rows[0].tolist() == [1, 1, 5, Status.HIT, K]


@pytest.mark.parametrize(
    ("backup", "rows", "kind"),
    [("jit", 2, "jit"), ("fast", 1, "fast"), ("none", 1, "none"), ("auto", 1, "jit"),
     ("auto", 2, "fast")],
)  # fmt: skip
def test_backup_policy(backup: str, rows: int, kind: str) -> None:
    bench = Bench(backup=backup)
    for sid in range(rows):
        bench.open(sid=sid)
    answer = bench.round(*((sid, 0, 2, [5]) for sid in range(rows)))
    assert bench.engine.backups == [(rows, kind)]
    assert status(answer) is (Status.EMPTY if kind == "none" else Status.BACKUP)
    assert bench.engine.drafts[0].plans == 1


def test_configure_changes_open_and_coming_sessions_up_to_the_starts_k() -> None:
    bench = Bench()
    bench.open(sid=1)
    bench.send(Configure(num_steps=1, fan_out=[1000, 2], backup="none"))
    bench.open(sid=2)
    answer = bench.round((1, 0, 2, [4]), (2, 0, 2, [5]))
    assert answer.num_steps == 1 and answer.rows[:, 4].tolist() == [1, 0]
    assert [d.fan_out for d in bench.engine.drafts] == [[64, 2]] * 2
    answer = bench.ask(Configure(num_steps=K + 1, fan_out=[1] * (K + 2), backup="jit"))
    assert isinstance(answer, Error) and answer.code == "configure"


def test_fewer_steps_from_the_hello_on() -> None:
    bench = Bench(hello=False, fan_out=[5, 4, 3, 9])
    bench.ask(bench.hello(num_steps=1))
    bench.open()
    assert bench.round((1, 0, 2, [4])).num_steps == 1
    assert bench.engine.drafts[0].fan_out == [5, 9]


def test_pong_tells_all_numbers() -> None:
    bench = Bench()
    pong = bench.ask(Ping(nonce=77))
    assert isinstance(pong, Pong) and pong.nonce == 77
    assert {"sessions", "hits", "malformed", "kv_total"} <= pong.stats.keys()


# -- strangers -----------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.binary(max_size=60), max_size=4), max_size=5))
def test_garbage_is_dropped_and_counted(messages: list[list[bytes]]) -> None:
    bench = Bench()
    for frames in messages:
        bench.client.send(frames)
    assert isinstance(bench.ask(Ping(nonce=1)), Pong)
    assert bench.server.stats.malformed == len(messages)


def test_a_message_that_only_servers_send_is_malformed() -> None:
    bench = Bench()
    bench.send(Pong(nonce=1, stats={}))
    assert isinstance(bench.ask(Ping(nonce=1)), Pong)
    assert bench.server.stats.malformed == 1


def test_a_client_that_is_gone_costs_an_unsent_answer() -> None:
    bench = Bench()
    bench.send(Ping(nonce=1))
    bench.client.closed = True
    bench.server.turn()
    assert bench.server.stats.unsent == 1


def test_stop_ends_the_loop() -> None:
    bench = Bench()
    bench.server.stop()
    bench.server.run()


def test_a_loop_that_does_not_turn_is_not_alive() -> None:
    bench = Bench()
    assert bench.server.alive
    bench.clock.sleep(STUCK_S)
    assert not bench.server.alive
    bench.server.turn()
    assert bench.server.alive


# -- timelines -------------------------------------------------------------------------------------


def recorded(bench: Bench, client: MemoryClient | None = None) -> Spans:
    assert isinstance(bench.ask(Ping(nonce=1), client), Pong)
    spans = bench.receive(client)
    assert isinstance(spans, Spans)
    return spans


def test_spans_follow_the_pongs_while_a_verifier_records() -> None:
    bench = Bench()
    bench.open()
    bench.round((1, 0, 2, [4]))
    assert isinstance(bench.ask(Ping(nonce=1)), Pong) and bench.receive() is None
    bench.send(Record(on=True))
    bench.clock.sleep(5.0)
    bench.round((1, 0, 3, [6]), round_id=2)
    bench.round((1, 0, 4, [7]), round_id=3)
    spans = recorded(bench)
    assert spans.marks.tolist() == [
        [SpanKind.ADOPT, 0, 1], [SpanKind.ANSWER, 2, 1],
        [SpanKind.ADOPT, 0, 1], [SpanKind.BACKUP, 0, 1], [SpanKind.ANSWER, 3, 1],
    ]  # fmt: skip
    assert not spans.last and (spans.times >= 5.0).all()
    assert (spans.times[:, 1] >= spans.times[:, 0]).all()
    assert recorded(bench).num == 0
    bench.engine.recorders[0].add(SpanKind.BUILD_STEP, 1.0, 2.0, count=4)
    bench.send(Record(on=False))
    spans = bench.receive()
    assert isinstance(spans, Spans) and spans.last
    assert spans.marks.tolist() == [[SpanKind.BUILD_STEP, 0, 4]]
    assert bench.engine.recorders == []
    assert isinstance(bench.ask(Ping(nonce=1)), Pong) and bench.receive() is None


def test_each_verifier_gets_its_own_answers_and_everybody_the_steps() -> None:
    bench = Bench()
    other = bench.channel.connect(b"other")
    assert isinstance(bench.ask(bench.hello(verifier="w"), other), Ready)
    bench.send(Record(on=True))
    bench.send(Record(on=True), other)
    bench.open()
    bench.round((1, 0, 2, [4]))
    assert len(bench.engine.recorders) == 2
    for recorder in bench.engine.recorders:
        recorder.add(SpanKind.BUILD_STEP, 1.0, 2.0)
    kinds = [set(recorded(bench, client).marks[:, 0].tolist()) for client in (None, other)]
    assert kinds == [{SpanKind.ADOPT, SpanKind.ANSWER, SpanKind.BUILD_STEP}, {SpanKind.BUILD_STEP}]


def test_nobody_records_for_a_verifier_that_is_gone() -> None:
    bench = Bench()
    assert bench.ask(Record(on=False)) is None  # without a beginning
    bench.send(Record(on=True))
    bench.receive()
    assert bench.engine.recorders
    bench.clock.sleep(31.0)
    bench.server.turn()
    assert bench.engine.recorders == []
