"""`python -m tests.fuzz --count N`: mangled messages through the decoder.

Each input is decoded or refused with `ProtocolError`; anything else, or an allocation out of
proportion to the frames, is a failure.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import tracemalloc

import numpy as np
import orjson

from sgl_ssd import protocol
from sgl_ssd.errors import ProtocolError

ALLOCATION_CHECK_EVERY = 1000
NUMBERS = (0, 1, -1, 2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63), 2**64, 1e308, 0.5, None, True)


def valid_messages(r: random.Random) -> list[list[bytes]]:
    """One of each kind."""
    n, rows, k = r.randint(1, 50), r.randint(0, 6), r.randint(1, 8)
    counts = [r.randint(0, 3) for _ in range(rows)]
    news = np.array([(i, 0, 5, c) for i, c in enumerate(counts)], np.int64).reshape(rows, 4)
    answers = np.array([(i, 0, 5, 0, k) for i in range(rows)], np.int64).reshape(rows, 5)
    pair = {"num_steps": 4, "context_len": 100, "vocab_size": 50, "vocab_hash": "x"}
    messages: list[protocol.Message] = [
        protocol.Hello(verifier="v", max_running_requests=1, **pair),
        protocol.Ready(
            server="s", model_path="m", fan_out=[1] * 5, backup="jit", max_branch_rows=4,
            device="cpu", **pair,
        ),
        protocol.Configure(num_steps=2, fan_out=[1, 2, 3], backup="fast"),
        protocol.Open(
            sid=1, epoch=0, seed=5, temperature=1.0, top_k=4, top_p=0.9, min_p=0.0, num_prompt=n,
            num_bias=2, prompt=np.arange(n), bias_ids=np.arange(2), bias_values=np.ones(2),
        ),
        protocol.Close(sid=1, epoch=0),
        protocol.Flush(),
        protocol.Ping(nonce=1),
        protocol.Pong(nonce=1, stats={"a": 1.0}),
        protocol.Speculate(
            round_id=3, num_rows=rows, num_tokens=sum(counts), rows=news,
            tokens=np.zeros(sum(counts)),
        ),
        protocol.Speculations(
            round_id=3, num_rows=rows, num_steps=k, rows=answers, tokens=np.zeros((rows, k))
        ),
        protocol.Error(code="c", text="t"),
    ]  # fmt: skip
    return [protocol.encode(message) for message in messages]


def mangle(frames: list[bytes], r: random.Random) -> list[bytes]:
    """The message with one or more faults."""
    frames = list(frames)
    for _ in range(r.choice((1, 1, 1, 2, 4))):
        if not frames:
            break
        kind, i = r.randrange(8), r.randrange(len(frames))
        data = bytearray(frames[i])
        if kind == 0 and data:
            data[r.randrange(len(data))] = r.randrange(256)
        elif kind == 1:
            del data[r.randrange(len(data) + 1) :]
        elif kind == 2:
            data += r.randbytes(r.randint(1, 64))
        elif kind == 3:
            frames.insert(i, r.randbytes(r.randint(0, 64)))
            continue
        elif kind == 4:
            del frames[i]
            continue
        elif kind == 5:
            data = bytearray(r.randbytes(r.randint(0, 200)))
        else:
            frames[0] = _other_header(frames[0], r)
            continue
        frames[i] = bytes(data)
    return frames


def _other_header(header: bytes, r: random.Random) -> bytes:
    """The same JSON object with another value, one field more or one less."""
    try:
        fields = orjson.loads(header)
    except orjson.JSONDecodeError:
        return header
    if not isinstance(fields, dict) or not fields:
        return header
    name = r.choice(list(fields))
    kind = r.randrange(5)
    if kind == 0:
        del fields[name]
    elif kind == 1:
        fields["x" * r.randint(1, 9)] = 1
    elif kind == 2:
        fields[name] = r.choice(("", "Open", [], [[]], {}, "9" * 50, [2**63] * 3))
    else:
        value = r.choice(NUMBERS)
        if isinstance(value, int) and not -(2**63) <= value < 2**64:
            value = 0
        fields[name] = value
    return orjson.dumps(fields)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    r = random.Random(args.seed)
    decoded = refused = 0
    largest = 0.0
    began = time.monotonic()
    messages = valid_messages(r)
    for i in range(args.count):
        if i % 1000 == 0:
            messages = valid_messages(r)
        frames = mangle(r.choice(messages), r)
        watch = i % ALLOCATION_CHECK_EVERY == 0
        if watch:
            tracemalloc.start()
        try:
            protocol.decode(frames)
            decoded += 1
        except ProtocolError:
            refused += 1
        if watch:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            largest = max(largest, peak / (1 + sum(map(len, frames))))
            if peak > 64 * sum(map(len, frames)) + 65536:
                print(f"{peak} bytes allocated for {frames!r}")
                return 1
    seconds = time.monotonic() - began
    print(
        f"{args.count} inputs in {seconds:.0f} s: {decoded} decoded, {refused} refused, no other "
        f"exception; at most {largest:.0f} bytes allocated per byte of input"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
