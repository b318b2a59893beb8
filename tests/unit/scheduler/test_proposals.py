"""Proposals on the verifier's side: what is refused, and what a verify gets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from channels import FakeClock, MemoryServer
from sgl_ssd import protocol, rejection
from sgl_ssd.config import VerifierConfig
from sgl_ssd.protocol import Status
from sgl_ssd.scheduler.draft_client import make_hello
from sgl_ssd.scheduler.draft_fleet import DraftFleet
from sgl_ssd.scheduler.logits import TargetSampler, count_accepted
from sgl_ssd.scheduler.proposals import Drafts, valid_proposals
from sgl_ssd.scheduler.sessions import Session, SessionSampling, StopRule
from sgl_ssd.scheduler.stats import SSDStats

VOCAB, K, M = 50, 3, 4


def row() -> dict[str, Any]:
    """One sound row of two drafts: 7 and 9."""
    ids = np.array([[7, 3, 5, 0], [1, 9, 0, 0], [0, 0, 0, 0]], np.int32)
    probs = np.array([[0.5, 0.3, 0.2, 0], [0.4, 0.6, 0, 0], [0] * 4], np.float32)
    return {"tokens": np.array([7, 9, 0]), "count": 2, "ids": ids, "probs": probs}


def valid(**changes: Any) -> bool:
    r = {**row(), **changes}
    return bool(
        valid_proposals(
            r["tokens"][None], np.array([r["count"]]), r["ids"][None], r["probs"][None], VOCAB
        )[0]
    )


def changed(name: str, at: tuple[int, int], value: float) -> dict[str, Any]:
    array = row()[name].copy()
    array[at] = value
    return {name: array}


def test_sound_rows_pass() -> None:
    assert valid()
    assert valid(count=0, probs=np.full((K, M), np.nan, np.float32))  # nothing of it is used
    assert valid(**changed("probs", (0, 0), 0.5005))
    assert valid(**changed("ids", (0, 3), -5))  # an id without mass says nothing
    assert valid(**changed("ids", (0, 3), 3))


@pytest.mark.parametrize(
    "change",
    [
        changed("probs", (0, 0), 0.52), changed("probs", (1, 0), 0.2),
        changed("probs", (0, 1), np.nan), changed("probs", (0, 1), np.inf),
        changed("probs", (0, 3), -0.1), changed("probs", (1, 2), -np.inf),
        changed("ids", (0, 1), VOCAB), changed("ids", (0, 1), -1), changed("ids", (0, 1), 7),
        changed("ids", (1, 1), 8), {"tokens": np.array([7, 0, 0])}, {"count": 3},
        {"tokens": np.array([4, 9, 0])},
    ],
)  # fmt: skip
def test_unsound_rows_do_not(change: dict[str, Any]) -> None:
    assert not valid(**change)


def test_every_row_is_judged_alone() -> None:
    good, bad = row(), {**row(), **changed("probs", (0, 0), 0.9)}
    rows = [good, bad, good]
    got = valid_proposals(
        np.stack([r["tokens"] for r in rows]), np.array([2, 2, 1]),
        np.stack([r["ids"] for r in rows]), np.stack([r["probs"] for r in rows]), VOCAB,
    )  # fmt: skip
    assert got.tolist() == [True, False, True]


# -- from the wire to the session ----------------------------------------------------------------


class Play:
    """A client whose server the test plays."""

    def __init__(self) -> None:
        clock = FakeClock()
        self.wire = MemoryServer(clock)
        self.wire.serve = None
        config = VerifierConfig(
            endpoints=["ipc:///tmp/unused/draft"], num_steps=K, fan_out=[2] * (K + 1),
            proposal_top_m=M, draft_timeout_ms=50.0,
        )  # fmt: skip
        self.stats = SSDStats(K)
        hello = make_hello(K, 1000, VOCAB, "h", 8)
        self.client = DraftFleet(config, hello, self.stats, [self.wire.connect(b"me")], clock)
        self.client.tick()
        self.say(
            protocol.Ready(
                server="s", model_path="m", num_steps=K, context_len=1000, vocab_size=VOCAB,
                vocab_hash="h", fan_out=[2] * (K + 1), backup="jit", max_branch_rows=9,
                device="cpu",
            )
        )  # fmt: skip
        self.client.tick()

    def say(self, message: protocol.Message) -> None:
        assert self.wire.send(b"me", protocol.encode(message))

    def heard(self) -> list[protocol.Message]:
        messages = [protocol.decode(frames) for _, frames in self.wire.inbox]
        self.wire.inbox.clear()
        return messages

    def ask(self, top_m: int) -> tuple[Session, protocol.Open, int]:
        self.heard()
        sampling = SessionSampling(1, 1.0, 50, 0.9, 0.0, top_m=top_m, saguaro_c=0.5)
        session = self.client.open_session("r", [1, 2], sampling, StopRule(frozenset(), 500))
        self.client.ask([session])
        opened, question = self.heard()
        assert isinstance(opened, protocol.Open) and isinstance(question, protocol.Speculate)
        return session, opened, question.round_id

    def answer(self, session: Session, opened: protocol.Open, number: int, **arrays: Any) -> None:
        r = row()
        self.say(
            protocol.Speculations(
                round_id=number, num_rows=1, num_steps=K,
                rows=np.array([[session.sid, opened.epoch, 2, Status.HIT, r["count"]]]),
                tokens=r["tokens"][None], **arrays,
            )
        )  # fmt: skip
        self.client.collect([session])


def test_a_session_says_how_it_is_verified_and_gets_its_proposals() -> None:
    play = Play()
    session, opened, number = play.ask(top_m=M)
    assert (opened.top_m, opened.saguaro_c) == (M, 0.5)
    r = row()
    play.answer(
        session, opened, number, top_m=M, proposal_ids=r["ids"][None],
        proposal_probs=r["probs"][None],
    )  # fmt: skip
    assert session.speculation() == [7, 9] and session.proposals is not None
    assert session.proposals[1].tobytes() == r["probs"].tobytes()
    assert play.stats.invalid_messages == 0


@pytest.mark.parametrize("fault", ["none", "unsound", "too many"])
def test_drafts_without_sound_proposals_are_dropped_and_counted(fault: str) -> None:
    play = Play()
    session, opened, number = play.ask(top_m=M)
    r = row()
    arrays: dict[str, Any] = {}
    if fault == "unsound":
        probs = r["probs"].copy()
        probs[1, 0] = 0.9
        arrays = {"top_m": M, "proposal_ids": r["ids"][None], "proposal_probs": probs[None]}
    elif fault == "too many":
        wide = ((0, 0), (0, 1))
        arrays = {
            "top_m": M + 1, "proposal_ids": np.pad(r["ids"], wide)[None],
            "proposal_probs": np.pad(r["probs"], wide)[None],
        }  # fmt: skip
    play.answer(session, opened, number, **arrays)
    assert session.speculation() == [] and session.proposals is None
    assert session.answered == session.committed  # it was an answer all the same
    assert play.stats.invalid_messages == 1


def test_coupled_sessions_have_no_proposals() -> None:
    play = Play()
    session, opened, number = play.ask(top_m=0)
    assert opened.top_m == 0
    play.answer(session, opened, number)
    assert session.speculation() == [7, 9] and session.proposals is None
    assert play.stats.invalid_messages == 0


# -- to the verify -------------------------------------------------------------------------------


def put_all(drafts: Drafts) -> None:
    r = row()
    drafts.put(0, [4, 5], None)
    drafts.put(1, [7, 9], (r["ids"], r["probs"]))
    drafts.put(2, [], (r["ids"], r["probs"]))


def test_a_batch_of_coupled_rows_has_no_proposals() -> None:
    drafts = Drafts.none(3, K, M)
    drafts.put(0, [4, 5], None)
    assert drafts.proposals(3, lambda t: t) is None
    assert drafts.lens.tolist() == [2, 0, 0] and drafts.tokens[0].tolist() == [4, 5, 0]


def test_only_rows_with_sampled_drafts_are_verified_by_rejection() -> None:
    drafts = Drafts.none(3, K, M)
    put_all(drafts)
    told = drafts.proposals(3, lambda t: t)
    assert told is not None and told.rows.tolist() == [1]
    assert told.ids.shape == told.probs.shape == (1, 2, M)
    assert told.probs.numpy().tobytes() == row()["probs"][:2].tobytes()


def test_all_ranks_verify_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[torch.Tensor] = []
    source = Drafts.none(3, K, M)
    put_all(source)
    group = SimpleNamespace(ranks=[0, 1], cpu_group=None)
    monkeypatch.setattr(dist, "broadcast", lambda t, src, group: sent.append(t.clone()))
    source.broadcast(group)
    queue = list(sent)
    monkeypatch.setattr(dist, "broadcast", lambda t, src, group: t.copy_(queue.pop(0)))
    other = Drafts.none(3, K, M)
    other.broadcast(group)
    assert not queue
    for name in ("tokens", "lens", "sampled", "ids", "probs"):
        assert np.array_equal(getattr(source, name), getattr(other, name)), name


def test_a_mixed_batch_verifies_each_row_its_own_way() -> None:
    sampler = TargetSampler(4, VOCAB, "cpu")
    reqs = [
        SimpleNamespace(
            ssd_seed=s,
            sampling_params=SimpleNamespace(
                temperature=1.0, top_k=-1, top_p=1.0, min_p=0.0, frequency_penalty=0.0,
                presence_penalty=0.0, repetition_penalty=1.0, min_new_tokens=0,
            ),
        )
        for s in range(3)
    ]  # fmt: skip
    drafts = Drafts.none(3, K, M)
    put_all(drafts)
    width = 3
    chain = torch.cat((torch.zeros(3, 1, dtype=torch.int64), torch.tensor(drafts.tokens[:, :2])), 1)
    logits = torch.randn(3 * width, VOCAB, generator=torch.Generator().manual_seed(0))
    first = torch.tensor([10, 20, 30])
    info = SimpleNamespace(logit_bias=None, has_custom_logit_processor=False)
    own = sampler.sample(logits, reqs, info, chain, first, None)
    lens = torch.from_numpy(drafts.lens)
    told = drafts.proposals(width, lambda t: t)
    assert told is not None
    tokens, count = sampler.reject(logits, reqs, chain, first, lens, own, told)
    coupled = count_accepted(own, chain, lens)
    for i in (0, 2):
        assert torch.equal(tokens[i], own[i]) and count[i] == coupled[i]
    want = rejection.verify(logits, sampler.rows(reqs), first, chain, lens, own, told)
    assert torch.equal(tokens[1:2], want[0]) and count[1] == want[1][0]
