"""Who asks for the rounds of a request gets them, and nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import unwrap_from_pickle, wrap_as_pickle

from sgl_ssd import explain
from sgl_ssd.explain import FIELD, KEY, LAST_ROUNDS, MAX_REQUESTS


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    explain._rounds.clear()
    yield
    explain._rounds.clear()


def http(**body: Any) -> Any:
    return SimpleNamespace(_json=body)


def generate(params: Any = None) -> Any:
    return SimpleNamespace(sampling_params=params)


def output(rids: list[str], **info: Any) -> Any:
    return SimpleNamespace(rids=rids, customized_info=wrap_as_pickle(info) if info else None)


def serve(obj: Any, request: Any, parts: list[Any]) -> list[Any]:
    """The answers that a client sees when SGLang's manager gives `parts`."""

    async def manager(self: Any, obj: Any, request: Any) -> AsyncIterator[Any]:
        for part in parts:
            yield part

    async def collect() -> list[Any]:
        answers = explain._generate_request(manager, None, obj, request)
        return [answer async for answer in answers]

    return asyncio.run(collect())


def deliver(message: Any) -> Any:
    async def orig(manager: Any, output: Any) -> str:
        return "done"

    assert asyncio.run(explain._handle_batch_output(orig, None, message)) == "done"
    return unwrap_from_pickle(message.customized_info)


@pytest.mark.parametrize(
    ("params", "body"),
    [
        (None, {FIELD: True}),
        ({"top_p": 1.0}, {FIELD: True}),
        ({"custom_params": {"a": 1}}, {FIELD: True}),
        ([{"top_p": 1.0}, {}], {FIELD: True}),
        ({"custom_params": {FIELD: True}}, {}),
        ([{}, {"custom_params": {FIELD: True}}], {}),
    ],
)
def test_every_way_to_ask(params: Any, body: dict[str, Any]) -> None:
    obj = generate(params)
    assert explain._ask(obj, http(**body))
    rows = obj.sampling_params if isinstance(params, list) else [obj.sampling_params]
    asked = [explain.wanted(row.get("custom_params")) for row in rows]
    assert all(asked) if body else any(asked)
    if params == {"custom_params": {"a": 1}}:
        assert rows[0]["custom_params"]["a"] == 1


@pytest.mark.parametrize("request_", [None, http(), http(**{FIELD: False}), SimpleNamespace()])
def test_who_does_not_ask_passes_untouched(request_: Any) -> None:
    obj = generate({"top_p": 0.5})
    assert not explain._ask(obj, request_)
    assert obj.sampling_params == {"top_p": 0.5}
    answers = object()
    assert explain._generate_request(lambda *a: answers, None, obj, request_) is answers


def test_an_embedding_has_no_rounds() -> None:
    assert not explain._ask(SimpleNamespace(), http(**{FIELD: True}))


@pytest.mark.parametrize("value", [1, 0, "yes", "true", None, [], {}])
def test_anything_but_true_and_false_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=FIELD):
        explain._ask(generate(), http(**{FIELD: value}))
    with pytest.raises(ValueError, match=FIELD):
        explain._ask(generate({"custom_params": {FIELD: value}}), None)


def answer(rid: str, finished: bool) -> dict[str, Any]:
    return {"meta_info": {"id": rid, "finish_reason": {"type": "stop"} if finished else None}}


def test_the_last_answer_has_the_rounds() -> None:
    deliver(output(["r", "s"], ssd_trace=[[{"round": 1}], [None, None]]))
    deliver(output(["s", "r"], ssd_trace=[[None], [{"round": 2}, {"round": 3}]]))
    asked = generate({"custom_params": {FIELD: True}})
    first, last = serve(asked, None, [answer("r", False), answer("r", True)])
    assert KEY not in first["meta_info"]
    assert [e["round"] for e in last["meta_info"][KEY]] == [1, 2, 3]
    assert not explain._rounds


def test_several_requests_at_once() -> None:
    deliver(output(["a", "b"], ssd_trace=[[{"round": 1}], [{"round": 7}]]))
    [[a, b, c]] = serve(
        generate(), http(**{FIELD: True}), [[answer(rid, True) for rid in ("a", "b", "c")]]
    )
    assert [x["meta_info"][KEY] for x in (a, b, c)] == [[{"round": 1}], [{"round": 7}], []]


def test_others_in_the_batch_see_nothing_and_other_information_stays() -> None:
    assert deliver(output(["r"], ssd_trace=[[{"round": 1}]])) is None
    assert deliver(output(["r"], ssd_trace=[[]], mine=[[1]])) == {"mine": [[1]]}
    assert deliver(output(["r"])) is None
    embedding = SimpleNamespace(rids=["r"])
    asyncio.run(explain._handle_batch_output(_nothing, None, embedding))


async def _nothing(*args: Any) -> None:
    pass


def test_what_is_kept_is_bounded() -> None:
    for i in range(3):
        deliver(output(["r"], ssd_trace=[[{"round": n} for n in range(LAST_ROUNDS - i)]]))
    assert len(explain._rounds["r"]) == LAST_ROUNDS
    for i in range(MAX_REQUESTS + 5):
        deliver(output([f"gone {i}"], ssd_trace=[[{"round": 1}]]))
    assert len(explain._rounds) == MAX_REQUESTS and "r" not in explain._rounds
