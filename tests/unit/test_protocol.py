"""The wire's language: every message survives the trip, and nothing else gets in."""

from __future__ import annotations

import json
import pickle
import random
import time
import tracemalloc
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sgl_ssd import protocol
from sgl_ssd.errors import ProtocolError
from sgl_ssd.protocol import MESSAGES, VERSION, SpanKind, Status, decode, encode

INT64 = st.integers(-(2**63), 2**63 - 1)
NATURAL = st.integers(0, 2**63 - 1)
POSITIVE = st.integers(1, 2**63 - 1)
TOKEN = st.integers(-(2**31), 2**31 - 1)
STEPS = st.integers(1, protocol.MAX_STEPS)
TEXT = st.text(max_size=40)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
EXAMPLES = 200


def ints(dtype: str, count: int, low: int, high: int) -> st.SearchStrategy:
    return hnp.arrays(dtype, count, elements=st.integers(low, high))


def token_ids(count: int) -> st.SearchStrategy:
    return ints("<i4", count, -(2**31), 2**31 - 1)


@st.composite
def hellos(draw: Any) -> protocol.Hello:
    return protocol.Hello(
        verifier=draw(st.text(min_size=1, max_size=128)), num_steps=draw(STEPS),
        context_len=draw(POSITIVE), vocab_size=draw(POSITIVE), vocab_hash=draw(TEXT),
        max_running_requests=draw(NATURAL),
    )  # fmt: skip


@st.composite
def readies(draw: Any) -> protocol.Ready:
    return protocol.Ready(
        server=draw(TEXT), model_path=draw(TEXT), num_steps=draw(STEPS),
        context_len=draw(POSITIVE), vocab_size=draw(POSITIVE), vocab_hash=draw(TEXT),
        fan_out=draw(st.lists(st.integers(0, 64), max_size=65)), backup=draw(TEXT),
        max_branch_rows=draw(NATURAL), device=draw(TEXT),
    )  # fmt: skip


@st.composite
def configures(draw: Any) -> protocol.Configure:
    steps = draw(STEPS)
    fan_out = draw(st.lists(st.integers(0, 1024), min_size=steps + 1, max_size=steps + 1))
    backup = draw(st.sampled_from(("auto", "jit", "fast", "none")))
    return protocol.Configure(num_steps=steps, fan_out=fan_out, backup=backup)


@st.composite
def opens(draw: Any) -> protocol.Open:
    num_prompt, num_bias = draw(st.integers(1, 50)), draw(st.integers(0, 10))
    return protocol.Open(
        sid=draw(NATURAL), epoch=draw(NATURAL), seed=draw(INT64),
        temperature=draw(st.floats(0.0, 1e6)), top_k=draw(POSITIVE),
        top_p=draw(st.floats(0.0, 1.0, exclude_min=True)), min_p=draw(st.floats(0.0, 1.0)),
        top_m=draw(st.integers(0, protocol.MAX_TOP_M)),
        saguaro_c=draw(st.floats(0.0, 1.0, exclude_min=True)),
        extra_key=draw(st.text(max_size=100)), num_prompt=num_prompt, num_bias=num_bias,
        prompt=draw(token_ids(num_prompt)), bias_ids=draw(token_ids(num_bias)),
        bias_values=draw(hnp.arrays("<f4", num_bias, elements=st.floats(width=32))),
    )  # fmt: skip


@st.composite
def speculates(draw: Any) -> protocol.Speculate:
    counts = draw(st.lists(st.integers(0, 9), max_size=8))
    rows = draw(ints("<i8", 3 * len(counts), 0, 2**63 - 1)).reshape(-1, 3)
    rows = np.concatenate([rows, np.array(counts, dtype="<i8")[:, None]], axis=1)
    return protocol.Speculate(
        round_id=draw(INT64), num_rows=len(counts), num_tokens=sum(counts), rows=rows,
        tokens=draw(token_ids(sum(counts))),
    )  # fmt: skip


@st.composite
def speculations(draw: Any) -> protocol.Speculations:
    steps, num_rows = draw(STEPS), draw(st.integers(0, 8))
    rows = draw(ints("<i8", 3 * num_rows, -(2**63), 2**63 - 1)).reshape(-1, 3)
    status = draw(ints("<i8", num_rows, 0, max(Status)))
    num = draw(ints("<i8", num_rows, 0, steps))
    top_m = draw(st.sampled_from((0, 0, 3)))
    size = (num_rows, steps, top_m)
    return protocol.Speculations(
        round_id=draw(INT64), num_rows=num_rows, num_steps=steps, ahead_us=draw(INT64),
        top_m=top_m, proposal_ids=draw(token_ids(int(np.prod(size)))).reshape(size),
        proposal_probs=draw(hnp.arrays("<f4", size, elements=st.floats(width=32))),
        rows=np.concatenate([rows, status[:, None], num[:, None]], axis=1),
        tokens=draw(token_ids(num_rows * steps)).reshape(num_rows, steps),
    )  # fmt: skip


@st.composite
def entries(draw: Any) -> protocol.Entries:
    steps, counts = draw(STEPS), draw(st.lists(st.integers(0, 4), max_size=6))
    chain_len = draw(ints("<i8", len(counts), 0, steps))
    names = draw(ints("<i8", 3 * len(counts), 0, 2**63 - 1)).reshape(-1, 3)
    rows = np.concatenate([names, chain_len[:, None], np.array(counts, "<i8")[:, None]], axis=1)
    reach = np.repeat(chain_len, counts)
    depth = np.array([draw(st.integers(0, int(n))) for n in reach], "<i4")
    num = draw(ints("<i4", len(reach), 1, steps))
    keys = np.stack([depth, draw(token_ids(len(reach))), num], axis=1)
    return protocol.Entries(
        num_rows=len(counts), num_entries=len(reach), num_steps=steps, rows=rows, keys=keys,
        chains=draw(token_ids(len(counts) * steps)).reshape(-1, steps),
        tokens=draw(token_ids(len(reach) * steps)).reshape(-1, steps),
    )  # fmt: skip


@st.composite
def spans(draw: Any) -> protocol.Spans:
    num = draw(st.integers(0, 8))
    kinds = draw(ints("<i8", num, 0, max(SpanKind)))
    others = draw(ints("<i8", 2 * num, -(2**63), 2**63 - 1)).reshape(-1, 2)
    times = draw(hnp.arrays("<f8", (num, 2), elements=st.floats(0.0, 1e9)))
    return protocol.Spans(
        num=num, last=draw(st.booleans()), times=times,
        marks=np.concatenate([kinds[:, None], others], axis=1),
    )  # fmt: skip


VALID: dict[str, st.SearchStrategy] = {
    "Hello": hellos(),
    "Ready": readies(),
    "Configure": configures(),
    "Open": opens(),
    "Close": st.builds(protocol.Close, sid=INT64, epoch=INT64),
    "Flush": st.builds(protocol.Flush),
    "Ping": st.builds(protocol.Ping, nonce=INT64),
    "Pong": st.builds(protocol.Pong, nonce=INT64, stats=st.dictionaries(TEXT, FINITE, max_size=9)),
    "Speculate": speculates(),
    "Speculations": speculations(),
    "Entries": entries(),
    "Record": st.builds(protocol.Record, on=st.booleans()),
    "Spans": spans(),
    "Error": st.builds(protocol.Error, code=TEXT, text=TEXT),
}


def sample_open(**changes: Any) -> protocol.Open:
    fields: dict[str, Any] = {
        "sid": 3, "epoch": 0, "seed": -5, "temperature": 0.7, "top_k": 40, "top_p": 0.9,
        "min_p": 0.1, "extra_key": "k", "num_prompt": 3, "num_bias": 1,
        "prompt": np.array([1, 2, 3], np.int32), "bias_ids": np.array([7], np.int32),
        "bias_values": np.array([-1.5], np.float32),
    }  # fmt: skip
    return protocol.Open(**{**fields, **changes})


def sample_speculate() -> protocol.Speculate:
    rows = np.array([[1, 0, 10, 2], [2, 0, 5, 1]], np.int64)
    tokens = np.array([7, 8, 9], np.int32)
    return protocol.Speculate(round_id=4, num_rows=2, num_tokens=3, rows=rows, tokens=tokens)


def sample_entries(**changes: Any) -> protocol.Entries:
    fields: dict[str, Any] = {
        "num_rows": 2, "num_entries": 3, "num_steps": 2,
        "rows": np.array([[1, 0, 10, 1, 2], [2, 0, 5, 0, 1]], np.int64),
        "chains": np.array([[4, 0], [0, 0]], np.int32),
        "keys": np.array([[0, 7, 1], [1, 8, 2], [0, 9, 2]], np.int32),
        "tokens": np.array([[5, 0], [6, 7], [8, 9]], np.int32),
    }  # fmt: skip
    return protocol.Entries(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rows": np.array([[1, 0, 10, 1, 3], [2, 0, 5, 0, 1]], np.int64)}, "counts disagree"),
        ({"rows": np.array([[1, 0, 10, 1, -1], [2, 0, 5, 0, 4]], np.int64)}, "negative row"),
        ({"rows": np.array([[1, 0, 10, 3, 2], [2, 0, 5, 0, 1]], np.int64)}, "chain length"),
        ({"rows": np.array([[1, 0, 10, 0, 2], [2, 0, 5, 0, 1]], np.int64)}, "accepted length"),
        ({"rows": np.array([[1, 0, 10, 1, 2**62], [2, 0, 5, 0, 2**62]], np.int64)}, "disagree"),
        ({"keys": np.array([[-1, 7, 1], [1, 8, 2], [0, 9, 2]], np.int32)}, "accepted length"),
        ({"keys": np.array([[0, 7, 0], [1, 8, 2], [0, 9, 2]], np.int32)}, "bad length"),
        ({"keys": np.array([[0, 7, 1], [1, 8, 3], [0, 9, 2]], np.int32)}, "bad length"),
    ],
)
def test_entries_that_contradict_themselves_are_refused(changes: dict, text: str) -> None:
    encode(sample_entries())
    with pytest.raises(ProtocolError, match=text):
        encode(sample_entries(**changes))


def sample_speculations() -> protocol.Speculations:
    rows = np.array([[1, 0, 12, Status.HIT, 2], [2, 0, 6, Status.EMPTY, 0]], np.int64)
    tokens = np.array([[7, 8], [0, 0]], np.int32)
    ids, probs = np.array([7, 8, 0, 0], np.int32), np.array([1, 1, 0, 0], np.float32)
    return protocol.Speculations(
        round_id=4, num_rows=2, num_steps=2, top_m=1, rows=rows, tokens=tokens,
        proposal_ids=ids.reshape(2, 2, 1), proposal_probs=probs.reshape(2, 2, 1),
    )  # fmt: skip


def sample_spans() -> protocol.Spans:
    marks = np.array([[SpanKind.ANSWER, 4, 2], [SpanKind.BUILD_STEP, 0, 9]], np.int64)
    return protocol.Spans(num=2, last=True, marks=marks, times=np.array([[1.0, 2.0], [2.0, 2.5]]))


def test_without_proposals_their_frames_are_empty() -> None:
    message = sample_speculations()
    message.top_m, message.proposal_ids, message.proposal_probs = 0, None, None
    frames = encode(message)
    assert frames[3:] == [b"", b""]
    assert decode(frames).proposal_ids.shape == (2, 2, 0)
    message.top_m = 1
    with pytest.raises(ProtocolError, match="proposal_ids"):
        encode(message)


SAMPLES = (
    protocol.Hello(verifier="v", num_steps=4, context_len=100, vocab_size=50, vocab_hash="h",
                   max_running_requests=8),
    protocol.Ready(server="s", model_path="m", num_steps=4, context_len=100, vocab_size=50,
                   vocab_hash="h", fan_out=[1] * 5, backup="jit", max_branch_rows=9, device="cpu"),
    protocol.Configure(num_steps=2, fan_out=[1, 2, 3], backup="fast"),
    sample_open(),
    protocol.Close(sid=1, epoch=2),
    protocol.Flush(),
    protocol.Ping(nonce=5),
    protocol.Pong(nonce=5, stats={"sessions": 2.0}),
    sample_speculate(),
    sample_speculations(),
    sample_entries(),
    protocol.Record(on=True),
    sample_spans(),
    protocol.Error(code="c", text="t"),
)  # fmt: skip


def assert_same(a: protocol.Message, b: protocol.Message) -> None:
    assert type(a) is type(b)
    arrays = {name: dtype for name, dtype, _ in a.ARRAYS}
    for name in a.__struct_fields__:
        x, y = getattr(a, name), getattr(b, name)
        if name in arrays:
            assert y.dtype == np.dtype(arrays[name]) and x.shape == y.shape
            assert x.tobytes() == y.tobytes()  # NaN equals itself here
        else:
            assert x == y and type(x) is type(y)


def header(**fields: Any) -> bytes:
    return orjson.dumps({"v": VERSION, **fields})


def frames_with(message: protocol.Message, **changes: Any) -> list[bytes]:
    """The frames of `message` with other header fields; None removes one."""
    frames = encode(message)
    fields = {**orjson.loads(frames[0]), **changes}
    return [orjson.dumps({k: v for k, v in fields.items() if v is not None}), *frames[1:]]


def refused(frames: list[bytes]) -> str:
    with pytest.raises(ProtocolError) as error:
        decode(frames)
    return str(error.value)


def decode_or_refuse(frames: list[bytes]) -> protocol.Message | None:
    """The message, or None for a `ProtocolError`: nothing else may happen."""
    try:
        return decode(frames)
    except ProtocolError:
        return None


# -- what is valid survives -------------------------------------------------------------------


def test_every_message_has_a_strategy_and_a_sample() -> None:
    assert set(VALID) == set(MESSAGES) == {type(m).__name__ for m in SAMPLES}


@pytest.mark.parametrize("name", sorted(VALID))
def test_round_trip(name: str) -> None:
    @settings(max_examples=EXAMPLES, deadline=None, database=None)
    @given(message=VALID[name])
    def round_trip(message: protocol.Message) -> None:
        frames = encode(message)
        assert all(type(frame) is bytes for frame in frames)
        assert_same(message, decode(frames))

    round_trip()


def test_arrays_are_little_endian_views_of_the_frames() -> None:
    frames = encode(sample_open(prompt=np.array([1, 2, 3], ">i4")))
    assert frames[1] == b"\1\0\0\0\2\0\0\0\3\0\0\0"
    message = decode(frames)
    assert isinstance(message, protocol.Open)
    assert not message.prompt.flags.writeable and not message.prompt.flags.owndata


def test_fields_with_a_default_may_be_missing() -> None:
    message = decode(frames_with(sample_open(), extra_key=None))
    assert isinstance(message, protocol.Open) and message.extra_key == ""


@pytest.mark.parametrize("status", Status)
def test_every_status_travels(status: Status) -> None:
    rows = np.array([[1, 0, 12, status, 0]], np.int64)
    tokens = np.zeros((1, 2), np.int32)
    frames = encode(
        protocol.Speculations(round_id=0, num_rows=1, num_steps=2, rows=rows, tokens=tokens)
    )
    message = decode(frames)
    assert isinstance(message, protocol.Speculations) and message.rows[0, 3] == status


# -- what is not is refused -------------------------------------------------------------------


@settings(max_examples=1000, deadline=None, database=None)
@given(frames=st.lists(st.binary(max_size=200), max_size=5))
@example(frames=[])
@example(frames=[b""])
@example(frames=[b"null"])
@example(frames=[b"[]"])
@example(frames=[b'"Ping"'])
@example(frames=[b"\xff\xfe"])
@example(frames=[b"[" * 50_000])
@example(frames=[b'{"a":' * 5_000])
def test_random_frames_are_refused(frames: list[bytes]) -> None:
    assert decode_or_refuse(frames) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@settings(max_examples=500, deadline=None, database=None)
@given(data=st.data())
def test_any_header_value_is_accepted_or_refused(data: Any) -> None:
    """Other values, of any type, in the headers of valid messages."""
    frames = encode(data.draw(st.sampled_from(SAMPLES)))
    fields = orjson.loads(frames[0])
    for name in data.draw(st.sets(st.sampled_from(sorted(fields)), min_size=1, max_size=3)):
        fields[name] = data.draw(JSON | INT64 | st.sampled_from([10**9, -1, 2**31, 2**62]))
    frames[0] = json.dumps(fields).encode()  # unlike orjson it also says NaN and large integers
    message = decode_or_refuse(frames)
    if message is not None:
        assert_same(message, decode(encode(message)))


@pytest.mark.parametrize("message", SAMPLES, ids=lambda m: type(m).__name__)
def test_mutated_frames_raise_nothing_else(message: protocol.Message) -> None:
    rng = random.Random(type(message).__name__)
    valid = encode(message)
    for _ in range(400):
        frames = [bytearray(frame) for frame in valid]
        for _ in range(rng.randint(1, 3)):
            frame = rng.choice(frames)
            if frame:
                frame[rng.randrange(len(frame))] = rng.randrange(256)
        mutated = decode_or_refuse([bytes(frame) for frame in frames])
        if mutated is not None:
            assert_same(mutated, decode(encode(mutated)))


@pytest.mark.parametrize("message", SAMPLES, ids=lambda m: type(m).__name__)
def test_truncated_and_extended_frames_are_refused(message: protocol.Message) -> None:
    valid = encode(message)
    for i, frame in enumerate(valid):
        for cut in {0, 1, len(frame) // 2, len(frame) - 1} - {len(frame), -1}:
            refused([*valid[:i], frame[:cut], *valid[i + 1 :]])
        refused([*valid[:i], frame + b"\0", *valid[i + 1 :]])
        refused(valid[:i] + valid[i + 1 :])
        refused([*valid[:i], b"", *valid[i:]] if i else [b"", *valid])
    refused([*valid, b""])


def test_every_cut_of_an_array_is_refused() -> None:
    valid = encode(sample_open())
    for length in range(len(valid[1])):
        assert "bytes instead of" in refused([valid[0], valid[1][:length], *valid[2:]])


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (sample_speculate(), "num_rows"),
        (sample_speculate(), "num_tokens"),
        (sample_speculations(), "num_rows"),
        (sample_speculations(), "num_steps"),
        (sample_open(), "num_prompt"),
        (sample_open(), "num_bias"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
@pytest.mark.parametrize("claim", [4096, 10**6, 10**9, 2**31, 2**62, 2**63 - 1, 2**64 - 1, -1])
def test_huge_claims_are_refused_before_anything_is_allocated(
    message: protocol.Message, field: str, claim: int
) -> None:
    frames = frames_with(message, **{field: claim})
    tracemalloc.start()
    started = time.perf_counter()
    try:
        refused(frames)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert time.perf_counter() - started < 0.5
    assert peak < 1 << 20


def test_a_long_header_is_refused_unread() -> None:
    text = "x" * protocol.MAX_HEADER_BYTES
    assert "too long" in refused([header(type="Error", code="c", text=text)])
    assert "too long" in refused([b"{" * (1 << 24)])


@pytest.mark.parametrize(
    "version",
    [0, protocol.VERSION - 1, protocol.VERSION + 1, -1, "2", 2.0, 1.5, True, [2], {}, None, 10**30],
)
def test_wrong_version_is_refused(version: Any) -> None:
    value = b"1e30" if version == 10**30 else orjson.dumps(version)
    assert "version" in refused([b'{"type":"Ping","nonce":1,"v":' + value + b"}"])
    assert "version" in refused([b'{"type":"Ping","nonce":1}'])


@pytest.mark.parametrize("kind", ["", "ping", "Message", "__class__", 1, None, ["Ping"], {}])
def test_unknown_types_are_refused(kind: Any) -> None:
    assert "unknown message type" in refused([header(type=kind, nonce=1)])


class Bomb:
    went_off = False

    def __reduce__(self) -> tuple:
        return setattr, (Bomb, "went_off", True)


def test_a_pickle_bomb_is_refused_and_does_not_go_off() -> None:
    bomb = pickle.dumps(Bomb())
    refused([bomb])
    refused([bomb, *encode(sample_open())[1:]])
    refused([encode(sample_open())[0], bomb, bomb, bomb])
    assert not Bomb.went_off
    pickle.loads(bomb)
    assert Bomb.went_off, "the bomb must be one"


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p"])
def test_numbers_that_are_not_finite_are_refused(field: str, number: bytes) -> None:
    frames = frames_with(sample_open(), **{field: "HERE"})
    frames[0] = frames[0].replace(b'"HERE"', number)
    refused(frames)


@pytest.mark.parametrize(
    "changes",
    [
        {"sid": "1"}, {"sid": 1.0}, {"sid": True}, {"sid": [1]}, {"seed": "x"}, {"top_k": 1.5},
        {"temperature": "0"}, {"temperature": True}, {"extra_key": 5}, {"num_prompt": 3.0},
        {"num_prompt": "3"}, {"sid": None},
    ],
    ids=str,
)  # fmt: skip
def test_wrong_types_and_missing_fields_are_refused(changes: dict[str, Any]) -> None:
    assert refused(frames_with(sample_open(), **changes)).startswith("Open")


@pytest.mark.parametrize("field", ["prompt", "bias_ids", "ARRAYS", "__class__", "check", "nonce"])
def test_unknown_header_fields_are_refused(field: str) -> None:
    assert "unknown header fields" in refused(frames_with(sample_open(), **{field: 1}))


@pytest.mark.parametrize(
    "changes",
    [
        {"sid": -1}, {"epoch": -1}, {"temperature": -0.1}, {"temperature": 1e7}, {"top_p": 0.0},
        {"top_p": 1.1}, {"min_p": -0.1}, {"min_p": 1.1}, {"top_k": 0}, {"top_k": -1},
        {"seed": 2**63}, {"extra_key": "x" * 1025}, {"num_prompt": 0}, {"num_bias": -1},
    ],
    ids=str,
)  # fmt: skip
def test_values_out_of_range_are_refused_on_both_sides(changes: dict[str, Any]) -> None:
    assert refused(frames_with(sample_open(), **changes)).startswith("Open")
    with pytest.raises(ProtocolError):
        encode(sample_open(**changes))


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (SAMPLES[0], {"verifier": ""}), (SAMPLES[0], {"verifier": "x" * 129}),
        (SAMPLES[0], {"num_steps": 0}), (SAMPLES[0], {"num_steps": 65}),
        (SAMPLES[0], {"context_len": 0}), (SAMPLES[0], {"vocab_size": -1}),
        (SAMPLES[1], {"num_steps": 65}), (SAMPLES[1], {"vocab_size": 0}),
        (SAMPLES[2], {"num_steps": 3}), (SAMPLES[2], {"fan_out": [1, 2, -1]}),
        (SAMPLES[2], {"fan_out": [1, 2, 1025]}), (SAMPLES[2], {"backup": "slow"}),
        (SAMPLES[2], {"fan_out": []}), (SAMPLES[2], {"num_steps": 0}),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else type(value).__name__,
)  # fmt: skip
def test_control_messages_out_of_range_are_refused(
    message: protocol.Message, changes: dict[str, Any]
) -> None:
    assert type(message).__name__ in refused(frames_with(message, **changes))


def speculate_frames(rows: list[list[int]], num_tokens: int) -> list[bytes]:
    head = header(type="Speculate", round_id=1, num_rows=len(rows), num_tokens=num_tokens)
    return [head, np.array(rows, "<i8").tobytes(), b"\0" * 4 * num_tokens]


@pytest.mark.parametrize(
    ("rows", "num_tokens"),
    [
        ([[1, 0, 0, 2]], 1), ([[1, 0, 0, 0]], 1), ([[-1, 0, 0, 1]], 1), ([[1, -1, 0, 1]], 1),
        ([[1, 0, -1, 1]], 1), ([[1, 0, 0, -1], [2, 0, 0, 2]], 1), ([[1, 0, 0, 8193]], 8193),
        ([[1, 0, 0, 2**63 - 1], [1, 0, 0, 3]], 2), ([[1, 0, 0, 2**62]] * 4, 0), ([], 1),
    ],
    ids=str,
)  # fmt: skip
def test_speculate_rows_must_add_up(rows: list[list[int]], num_tokens: int) -> None:
    assert refused(speculate_frames(rows, num_tokens)).startswith("Speculate")


def test_the_longest_speculate_row_is_accepted() -> None:
    message = decode(speculate_frames([[1, 0, 0, protocol.MAX_ROW_TOKENS]], 8192))
    assert isinstance(message, protocol.Speculate) and len(message.tokens) == 8192


@pytest.mark.parametrize(("status", "num"), [(-1, 0), (9, 0), (2**40, 0), (0, -1), (0, 3)])
def test_speculations_rows_out_of_range_are_refused(status: int, num: int) -> None:
    frames = encode(sample_speculations())
    rows = np.frombuffer(frames[1], "<i8").reshape(2, 5).copy()
    rows[1, 3:] = status, num
    assert refused([frames[0], rows.tobytes(), frames[2]]).startswith("Speculations")


# -- a bug on this side shows on this side ----------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"num_prompt": 2}, {"num_prompt": 4}, {"prompt": np.zeros((3, 1), np.int32)},
        {"prompt": None}, {"prompt": "abc"}, {"num_bias": 2}, {"bias_ids": np.zeros(2, np.int32)},
        {"extra_key": "\ud800"}, {"top_k": 2**70}, {"sid": np.int64(3)},
    ],
    ids=str,
)  # fmt: skip
def test_encode_refuses_what_the_other_side_would(changes: dict[str, Any]) -> None:
    """`extra_key` comes from a client's JSON, where a lone surrogate is legal."""
    with pytest.raises(ProtocolError):
        encode(sample_open(**changes))


@pytest.mark.parametrize("rows", [np.zeros(8, np.int64), np.zeros((2, 3), np.int64), None])
def test_encode_refuses_rows_of_another_shape(rows: Any) -> None:
    message = sample_speculate()
    message.rows = rows
    with pytest.raises(ProtocolError):
        encode(message)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_encode_refuses_numbers_that_json_cannot_say(value: float) -> None:
    with pytest.raises(ProtocolError):
        encode(protocol.Pong(nonce=1, stats={"x": value}))
    with pytest.raises(ProtocolError):
        encode(sample_open(temperature=value))
