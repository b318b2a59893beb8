"""Every message between a verifier and a draft server, and the version of that language.

A message on the wire is a list of frames: one small JSON header, then raw little-endian arrays
whose dtypes and shapes follow from the header. Nothing is executed or unpickled, and every length
is checked against the bytes that really arrived before an array is looked at.

Lengths are in tokens. A *committed* token is one the target has produced or the client has sent.
"""

from __future__ import annotations

import enum
import math
from typing import Any, ClassVar

import msgspec
import numpy as np
import orjson

from sgl_ssd.errors import ProtocolError

VERSION = 4

MAX_HEADER_BYTES = 64 << 10
MAX_PROMPT_TOKENS = 4 << 20
MAX_ROWS = 4096
MAX_ROW_TOKENS = 8192
MAX_STEPS = 64
MAX_BIAS = 1 << 16
MAX_TOP_M = 1024
MAX_SPANS = 1 << 14
MAX_ENTRIES = 1 << 18
BACKUPS = ("auto", "jit", "fast", "none")


class Status(enum.IntEnum):
    """What an answer to one row of a `Speculate` is worth."""

    HIT = 0  # the outcome was predicted: the whole speculation was there
    PARTIAL = 1  # the walk ended on the trunk or inside a branch: what lies below it serves
    BACKUP = 2  # not predicted: drafted now (jit) or found in the session's own text (fast)
    EMPTY = 3  # not predicted and no backup: verify without drafts
    PREFILLING = 4  # the session's prompt is not in yet
    NEED = 5  # the server lacks tokens: send again from `have_len` on
    UNKNOWN = 6  # no such session or epoch: open it (again)
    CONTEXT = 7  # the draft's context is full: no drafts for this session any more
    NO_MEMORY = 8  # the draft's KV pool is full: no drafts now


class SpanKind(enum.IntEnum):
    """What a span of a timeline is: the verifier's, then the draft server's."""

    VERIFY = 0  # from its launch to its outcome on the host
    PREFILL = 1
    OUTCOME_WAIT = 2  # the host waits for the target
    DRAFT_WAIT = 3  # the host waits for drafts
    LAUNCH = 4
    HOST = 5  # what SGLang does between two forwards: results, scheduling
    ROUND_TRIP = 6  # from a question to its answer
    ANSWER = 7  # from the arrival of a question to the sending of its answer
    ADOPT = 8  # news walked down the caches
    BACKUP = 9
    BUILD_STEP = 10
    DRAFT_PREFILL = 11
    BUILD = 12  # a session's cache, from the answer to its completion
    PUSH = 13  # complete caches, sent ahead


class Message(msgspec.Struct, kw_only=True):
    """Header fields are the struct's own; `ARRAYS` are the frames after it.

    Each entry of `ARRAYS` is (field, dtype, shape), where a shape item is a number or the name of
    a header field.
    """

    ARRAYS: ClassVar[tuple[tuple[str, str, tuple[int | str, ...]], ...]] = ()

    def check(self) -> None:
        """Raise `ProtocolError` if a value is out of range. Called on both sides."""


def _require(ok: bool, text: str) -> None:
    if not ok:
        raise ProtocolError(text)


class Hello(Message, kw_only=True):
    """Verifier -> draft server: who I am and what my target looks like. Answered by `Ready`."""

    verifier: str
    num_steps: int
    context_len: int
    vocab_size: int
    vocab_hash: str
    max_running_requests: int

    def check(self) -> None:
        _require(0 < len(self.verifier) <= 128, "Hello: bad verifier name")
        _require(1 <= self.num_steps <= MAX_STEPS, "Hello: num_steps out of range")
        _require(self.context_len > 0 and self.vocab_size > 0, "Hello: bad sizes")


class Ready(Message, kw_only=True):
    """Draft server -> verifier: the answer to `Hello`; drafting may begin."""

    server: str
    model_path: str
    num_steps: int
    context_len: int
    vocab_size: int
    vocab_hash: str
    fan_out: list[int]
    backup: str
    max_branch_rows: int
    device: str

    def check(self) -> None:
        _require(1 <= self.num_steps <= MAX_STEPS, "Ready: num_steps out of range")
        _require(self.context_len > 0 and self.vocab_size > 0, "Ready: bad sizes")


class Configure(Message, kw_only=True):
    """Verifier -> draft server: change K (up to the start's), fan-out and backup at run time.

    `push`: complete speculation caches shall be sent ahead, as `Entries`.
    """

    num_steps: int
    fan_out: list[int]
    backup: str
    push: bool = False

    def check(self) -> None:
        _require(1 <= self.num_steps <= MAX_STEPS, "Configure: num_steps out of range")
        _require(len(self.fan_out) == self.num_steps + 1, "Configure: fan_out needs K+1 entries")
        _require(all(0 <= f <= 1024 for f in self.fan_out), "Configure: fan_out out of range")
        _require(self.backup in BACKUPS, "Configure: unknown backup")


class Open(Message, kw_only=True):
    """Verifier -> draft server: a request begins (or begins anew, with a higher epoch).

    `prompt` holds every token committed so far. The sampling fields are what coupled drafting
    needs: the draft's own token is drawn with the request's noise (see `sampling`). With `top_m`
    above 0 and a temperature the request is verified by rejection instead (see `rejection`): drafts
    are sampled, and their proposals of at most `top_m` tokens come along. So it stays this epoch.
    """

    sid: int
    epoch: int
    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    top_m: int = 0
    saguaro_c: float = 1.0
    extra_key: str = ""
    num_prompt: int = 0
    num_bias: int = 0
    prompt: Any = None  # int32 [num_prompt]
    bias_ids: Any = None  # int32 [num_bias]
    bias_values: Any = None  # float32 [num_bias]

    ARRAYS: ClassVar = (
        ("prompt", "<i4", ("num_prompt",)),
        ("bias_ids", "<i4", ("num_bias",)),
        ("bias_values", "<f4", ("num_bias",)),
    )

    def check(self) -> None:
        _require(self.sid >= 0 and self.epoch >= 0, "Open: bad session")
        _require(1 <= self.num_prompt <= MAX_PROMPT_TOKENS, "Open: bad prompt length")
        _require(0 <= self.num_bias <= MAX_BIAS, "Open: bad logit_bias length")
        _require(-(2**63) <= self.seed < 2**63, "Open: seed out of range")
        # "not a < b" also refuses NaN
        _require(0.0 <= self.temperature <= 1e6, "Open: temperature out of range")
        _require(0.0 < self.top_p <= 1.0, "Open: top_p out of range")
        _require(0.0 <= self.min_p <= 1.0, "Open: min_p out of range")
        _require(self.top_k >= 1, "Open: top_k out of range")
        _require(0 <= self.top_m <= MAX_TOP_M, "Open: top_m out of range")
        _require(0.0 < self.saguaro_c <= 1.0, "Open: saguaro_c out of range")
        _require(len(self.extra_key) <= 1024, "Open: extra_key too long")


class Close(Message, kw_only=True):
    """Verifier -> draft server: a request is over. Closing an unknown session is no error."""

    sid: int
    epoch: int


class Flush(Message, kw_only=True):
    """Verifier -> draft server: forget this verifier's sessions and cached prefixes."""


class Ping(Message, kw_only=True):
    """Verifier -> draft server: I am alive. Keeps the lease; answered by `Pong`."""

    nonce: int


class Pong(Message, kw_only=True):
    """Draft server -> verifier: I am alive, and these are my numbers (see `draft_server`)."""

    nonce: int
    stats: dict[str, float]

    def check(self) -> None:
        # JSON would say null
        _require(all(map(math.isfinite, self.stats.values())), "Pong: a number is not finite")


class Speculate(Message, kw_only=True):
    """Verifier -> draft server, one for a whole batch: what is committed; drafts please.

    Row i of `rows` is (sid, epoch, base_len, num): the session's committed tokens from index
    `base_len` on are the next `num` entries of `tokens`. It is state, not an event: the server
    skips what it knows already, so lost, late, repeated or reordered messages heal themselves.
    """

    round_id: int
    num_rows: int
    num_tokens: int
    rows: Any = None  # int64 [num_rows, 4]
    tokens: Any = None  # int32 [num_tokens]

    ARRAYS: ClassVar = (
        ("rows", "<i8", ("num_rows", 4)),
        ("tokens", "<i4", ("num_tokens",)),
    )

    def check(self) -> None:
        _require(0 <= self.num_rows <= MAX_ROWS, "Speculate: too many rows")
        _require(0 <= self.num_tokens <= MAX_ROWS * MAX_ROW_TOKENS, "Speculate: too many tokens")
        if self.rows is not None:
            _require(bool((self.rows >= 0).all()), "Speculate: negative row field")
            counts = self.rows[:, 3]
            _require(int(counts.max(initial=0)) <= MAX_ROW_TOKENS, "Speculate: row too long")
            _require(int(counts.sum()) == self.num_tokens, "Speculate: token counts disagree")


class Speculations(Message, kw_only=True):
    """Draft server -> verifier: the answer to the newest `Speculate`, row by row.

    Row i of `rows` is (sid, epoch, have_len, status, num): the server knows the session's tokens
    up to `have_len` (an acknowledgement, also when the answer comes late), and the first `num`
    entries of `tokens[i]` are drafts for the positions after the last committed token.

    `tokens[i, j]` of a request that is verified by rejection was drawn from `proposal_ids[i, j]`
    with the probabilities `proposal_probs[i, j]`. Entries without probability say nothing. With
    `top_m` = 0 nobody is, and both arrays are empty.
    """

    round_id: int
    num_rows: int
    num_steps: int
    top_m: int = 0
    ahead_us: int = 0  # how long before the question this round's build was complete; < 0: behind
    rows: Any = None  # int64 [num_rows, 5]
    tokens: Any = None  # int32 [num_rows, num_steps]
    proposal_ids: Any = None  # int32 [num_rows, num_steps, top_m]
    proposal_probs: Any = None  # float32 [num_rows, num_steps, top_m]

    ARRAYS: ClassVar = (
        ("rows", "<i8", ("num_rows", 5)),
        ("tokens", "<i4", ("num_rows", "num_steps")),
        ("proposal_ids", "<i4", ("num_rows", "num_steps", "top_m")),
        ("proposal_probs", "<f4", ("num_rows", "num_steps", "top_m")),
    )

    def check(self) -> None:
        _require(0 <= self.num_rows <= MAX_ROWS, "Speculations: too many rows")
        _require(1 <= self.num_steps <= MAX_STEPS, "Speculations: num_steps out of range")
        _require(0 <= self.top_m <= MAX_TOP_M, "Speculations: top_m out of range")
        if self.rows is not None and self.num_rows:
            status, num = self.rows[:, 3], self.rows[:, 4]
            _require(
                bool(((status >= 0) & (status <= max(Status))).all()),
                "Speculations: unknown status",
            )
            _require(bool(((num >= 0) & (num <= self.num_steps)).all()), "Speculations: bad length")


class Entries(Message, kw_only=True):
    """Draft server -> verifier: complete speculation caches, ahead of the question.

    Row i of `rows` is (sid, epoch, have_len, chain_len, count): to the session's first `have_len`
    tokens the drafts `chains[i, :chain_len]` were answered, and the next `count` entries are its
    cache. Entry j is `keys[j]` = (drafts accepted, bonus token, num): after that outcome come
    the first `num` of `tokens[j]`. Nothing is expected back: the outcome is reported by
    `Speculate` as ever, and a lost message costs a wait.
    """

    num_rows: int
    num_entries: int
    num_steps: int
    rows: Any = None  # int64 [num_rows, 5]
    chains: Any = None  # int32 [num_rows, num_steps]
    keys: Any = None  # int32 [num_entries, 3]
    tokens: Any = None  # int32 [num_entries, num_steps]

    ARRAYS: ClassVar = (
        ("rows", "<i8", ("num_rows", 5)),
        ("chains", "<i4", ("num_rows", "num_steps")),
        ("keys", "<i4", ("num_entries", 3)),
        ("tokens", "<i4", ("num_entries", "num_steps")),
    )

    def check(self) -> None:
        _require(0 <= self.num_rows <= MAX_ROWS, "Entries: too many rows")
        _require(0 <= self.num_entries <= MAX_ENTRIES, "Entries: too many entries")
        _require(1 <= self.num_steps <= MAX_STEPS, "Entries: num_steps out of range")
        if self.rows is None or self.keys is None:
            return
        chain_len, count = self.rows[:, 3], self.rows[:, 4]
        _require(bool((self.rows >= 0).all()), "Entries: negative row field")
        _require(bool((chain_len <= self.num_steps).all()), "Entries: bad chain length")
        # One by one as well: a sum of huge numbers may come out right.
        _require(bool((count <= self.num_entries).all()), "Entries: counts disagree")
        _require(int(count.sum()) == self.num_entries, "Entries: counts disagree")
        depth, num = self.keys[:, 0], self.keys[:, 2]
        reach = np.repeat(chain_len, count)
        _require(bool(((depth >= 0) & (depth <= reach)).all()), "Entries: bad accepted length")
        _require(bool(((num >= 1) & (num <= self.num_steps)).all()), "Entries: bad length")


class Record(Message, kw_only=True):
    """Verifier -> draft server: begin or end to record spans for a timeline.

    What was recorded follows each `Pong`, as `Spans`; after the end once more, as the `last`.
    """

    on: bool


class Spans(Message, kw_only=True):
    """Draft server -> verifier: spans since the last message. Times are of the sender's clock.

    Row i of `marks` is (`SpanKind`, round_id or 0, a count: rows, tokens or branches); row i of
    `times` is (begin, end) in seconds.
    """

    num: int
    last: bool = False
    marks: Any = None  # int64 [num, 3]
    times: Any = None  # float64 [num, 2]

    ARRAYS: ClassVar = (
        ("marks", "<i8", ("num", 3)),
        ("times", "<f8", ("num", 2)),
    )

    def check(self) -> None:
        _require(0 <= self.num <= MAX_SPANS, "Spans: too many")
        if self.marks is not None and self.num:
            kinds, times = self.marks[:, 0], self.times
            _require(bool(((kinds >= 0) & (kinds <= max(SpanKind))).all()), "Spans: unknown kind")
            _require(
                times is None or bool(np.isfinite(times).all() and (times >= 0).all()),
                "Spans: a time is not a time",
            )


class Error(Message, kw_only=True):
    """Either way: the peer's message was refused. `code` is stable, `text` is for people."""

    code: str
    text: str


MESSAGES: dict[str, type[Message]] = {
    cls.__name__: cls
    for cls in (
        Hello, Ready, Configure, Open, Close, Flush, Ping, Pong, Speculate, Speculations, Entries,
        Record, Spans, Error,
    )
}  # fmt: skip
_ARRAY_FIELDS = {name: {a[0] for a in cls.ARRAYS} for name, cls in MESSAGES.items()}
_HEADER_FIELDS = {
    name: tuple(f for f in cls.__struct_fields__ if f not in _ARRAY_FIELDS[name])
    for name, cls in MESSAGES.items()
}


def _shape(message: Message, shape: tuple[int | str, ...]) -> tuple[int, ...]:
    return tuple(getattr(message, s) if isinstance(s, str) else s for s in shape)


def encode(message: Message) -> list[bytes]:
    """Frames of `message`, ready to send.

    Raises `ProtocolError` when a field is out of range or cannot be said in JSON, or an array has
    another shape than the header says: a bug on this side must not become a riddle on the other.
    """
    name = type(message).__name__
    header = {f: getattr(message, f) for f in _HEADER_FIELDS[name]}
    header["type"] = name
    header["v"] = VERSION
    try:
        frames = [orjson.dumps(header)]
    except orjson.JSONEncodeError as e:
        raise ProtocolError(f"{name}: {e}") from None
    for field, dtype, shape in message.ARRAYS:
        value, dims = getattr(message, field), _shape(message, shape)
        if value is None and 0 in dims:
            frames.append(b"")
            continue
        if not isinstance(value, np.ndarray) or value.shape != dims:
            raise ProtocolError(f"{name}.{field}: not an array of the shape in the header")
        frames.append(value.astype(dtype, copy=False).tobytes())
    message.check()
    return frames


def decode(frames: list[bytes]) -> Message:
    """The message in `frames`. Arrays are read-only views of the frames.

    Raises `ProtocolError` for anything that is not exactly a message of this version.
    """
    if not frames or len(frames[0]) > MAX_HEADER_BYTES:
        raise ProtocolError("no header, or one that is too long")
    try:
        header = orjson.loads(frames[0])
    except orjson.JSONDecodeError as e:
        raise ProtocolError(f"header is not JSON: {e}") from None
    if not isinstance(header, dict):
        raise ProtocolError("header is not an object")
    version = header.pop("v", None)
    if type(version) is not int or version != VERSION:
        raise ProtocolError(f"protocol version {version!r}, this side speaks {VERSION}")
    name = header.pop("type", None)
    cls = MESSAGES.get(name) if isinstance(name, str) else None
    if cls is None:
        raise ProtocolError(f"unknown message type {name!r}")
    if not header.keys() <= set(_HEADER_FIELDS[name]):
        raise ProtocolError(f"{name}: unknown header fields")
    try:
        message = msgspec.convert(header, cls)
    except msgspec.ValidationError as e:
        raise ProtocolError(f"{name}: {e}") from None
    message.check()
    if len(frames) != 1 + len(cls.ARRAYS):
        raise ProtocolError(f"{name}: {len(frames)} frames instead of {1 + len(cls.ARRAYS)}")
    for (field, dtype, shape), frame in zip(cls.ARRAYS, frames[1:], strict=True):
        dims = _shape(message, shape)
        expected = int(np.prod(dims, dtype=np.int64)) * np.dtype(dtype).itemsize
        if len(frame) != expected:
            raise ProtocolError(f"{name}.{field}: {len(frame)} bytes instead of {expected}")
        setattr(message, field, np.frombuffer(frame, dtype=dtype).reshape(dims))
    if cls.ARRAYS:
        message.check()  # again, now with the arrays
    return message
