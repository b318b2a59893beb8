"""`python -m tests.parity.long --requests N`: the long profile of the parity harness.

Draws N requests over every sampling field, answers them once without drafts, and compares that
with plain SGLang (greedy requests) and with every draft variant:

* BUNDLED, TWIN: real draft servers, with the bundled draft and with the target itself;
* SAME, HALF, RAND: a double that knows the answers and is right always, half the time, never;
* SLOW: right, after up to 50 ms; EVIL: wrong rounds, lengths and ids, and frames of noise.

Prints one JSON object a variant and a summary; exit status 1 when anything differs.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from draft_double import DraftDouble  # noqa: E402
from parity.harness import Report, compare, configure, send_all, ssd_state  # noqa: E402
from parity.mixes import RequestMix, plain_agrees  # noqa: E402
from servers import ServerProcess  # noqa: E402
from sgl_ssd import protocol  # noqa: E402
from sgl_ssd.models import DRAFT_PATH, TARGET_PATH  # noqa: E402

HELD_OUT = TESTS.parent / "benchmarks" / "pairs" / "held_out.jsonl"
LENGTHS = [1, 2, 3, 5, 9, 16, 17, 40, 64, 65, 100, 150, 250, 400]
NUM_STEPS = 8
READY_S = 1800.0  # such a run may share its machine
Body = dict[str, Any]


class KnownAnswers:
    """Drafts what the answers without drafts are known to be."""

    def __init__(self, sequences: list[list[int]]) -> None:
        self._by_first: dict[int, list[list[int]]] = {}
        for sequence in sequences:
            self._by_first.setdefault(sequence[0], []).append(sequence)

    def draft(self, tokens: list[int], count: int) -> list[int]:
        length = len(tokens)
        for sequence in self._by_first.get(tokens[0], []):
            same_end = len(sequence) > length and sequence[length - 1] == tokens[-1]
            if same_end and sequence[:length] == tokens:
                return sequence[length : length + count]
        return []


def evil(vocab_size: int, seed: int = 0) -> Callable[[protocol.Speculations], object]:
    """A tamper for `DraftDouble`: about half of the answers are damaged in some way."""
    r = random.Random(seed)

    def tamper(answer: protocol.Speculations) -> object:
        kind = r.randrange(12)
        if kind == 0:
            answer.round_id += r.choice([-1, 1, 1000])
        elif kind == 1 and answer.tokens.size:
            answer.tokens[:, r.randrange(answer.tokens.shape[1])] = r.choice(
                [-1, vocab_size, 2**31 - 1]
            )
        elif kind == 2:
            answer.rows[:, 4] = r.randrange(answer.num_steps + 1)
        elif kind == 3:
            answer.rows[:, 1] += 1
        elif kind == 4:
            answer.rows[:, 2] += r.choice([-1, 1])
        elif kind == 5:
            return [r.randbytes(r.randrange(64)) for _ in range(r.randrange(1, 4))]
        elif kind == 6:
            return None
        return answer

    return tamper


def bodies(count: int, new_tokens: int, seed: int) -> list[Body]:
    """`count` requests of many lengths on texts that the models have not seen."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TARGET_PATH)
    flat: list[int] = []
    for line in HELD_OUT.read_text().splitlines():
        row = json.loads(line)
        if "text" in row:
            flat += tokenizer(row["text"])["input_ids"]
    r = random.Random(seed)
    prompts = []
    for i in range(max(64, count // 4)):
        length = LENGTHS[i % len(LENGTHS)]
        start = r.randrange(len(flat) - length)
        prompts.append(flat[start : start + length])
    return RequestMix(prompts, len(tokenizer), seed).draw_many(count, new_tokens)


class Profile:
    """The servers, the requests, and their answers without drafts."""

    def __init__(self, server: ServerProcess, endpoint: str, requests: list[Body]) -> None:
        self.server, self.endpoint, self.requests = server, endpoint, requests
        self.expected: list[Any] = []
        self.total = Report()

    def answer_without_drafts(self, concurrency: int) -> None:
        configure(self.server, ssd_drafting=0)
        self.expected = send_all(self.server, self.requests, concurrency)

    def against_plain(self, plain: ServerProcess) -> None:
        """Those requests for which plain SGLang must say the same."""
        pairs = [
            (body, answer)
            for body, answer in zip(self.requests, self.expected, strict=True)
            if plain_agrees(body)
        ]
        requests = [body for body, _ in pairs]
        # One at a time: plain SGLang ends when `token_ids_logprob` stands beside other requests.
        want = send_all(plain, requests, 1)
        report = compare(self.server, requests, want, [answer for _, answer in pairs], "PLAIN")
        self._note("PLAIN", report, {})

    def run(self, name: str, concurrency: int) -> None:
        """All requests with the drafts that come from the endpoint now."""
        self._wait_for_draft("up")
        configure(self.server, ssd_drafting=1)
        before = ssd_state(self.server)
        started = time.monotonic()
        answers = send_all(self.server, self.requests, concurrency)
        seconds = time.monotonic() - started
        after = ssd_state(self.server)
        configure(self.server, ssd_drafting=0)
        report = compare(self.server, self.requests, self.expected, answers, name)
        names = ("rounds", "drafted", "accepted", "hits", "invalid_messages", "stale_answers")
        moved = {key: after[key] - before[key] for key in names}
        self._note(name, report, {**moved, "seconds": round(seconds)})
        if not moved["drafted"] or not (moved["accepted"] or name == "RAND"):
            self.total.differences.append(f"{name}: inconclusive, nothing was drafted")

    def wait_until_alone(self) -> None:
        """The server has noticed that the last variant's draft server is gone."""
        self._wait_for_draft("down")

    def _wait_for_draft(self, state: str) -> None:
        deadline = time.monotonic() + READY_S
        while ssd_state(self.server)["draft"] != state:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the draft server is not {state}")
            time.sleep(0.5)

    def _note(self, name: str, report: Report, extra: dict[str, Any]) -> None:
        self.total.merge(report)
        print(json.dumps({"variant": name, **_numbers(report), **extra}), flush=True)
        for difference in report.differences[:5]:
            print(difference, flush=True)


def _numbers(report: Report) -> dict[str, Any]:
    return {
        "compared": report.compared, "tokens": report.tokens, "near_ties": report.ties,
        "differences": len(report.differences),
    }  # fmt: skip


@contextmanager
def real_draft(endpoint: str, model: Path, log: Path) -> Iterator[None]:
    """A draft server on `endpoint`."""
    command = [sys.executable, "-m", "sgl_ssd.draft_server", "--endpoint", endpoint]
    command += ["--model-path", str(model), "--num-steps", str(NUM_STEPS), "--device", "cpu"]
    with log.open("ab") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT)
        try:
            yield
        finally:
            process.terminate()
            process.wait(30)


def double(name: str, profile: Profile, vocab_size: int) -> DraftDouble:
    """The scripted variant `name` on the profile's endpoint."""
    known = KnownAnswers(
        [
            [*body["input_ids"], *answer["output_ids"]]
            for body, answer in zip(profile.requests, profile.expected, strict=True)
        ]
    )
    return DraftDouble(
        profile.endpoint,
        known.draft,
        vocab_size=vocab_size,
        num_steps=NUM_STEPS,
        wrong={"HALF": 0.5, "RAND": 1.0, "EVIL": 0.2}.get(name, 0.0),
        delay_s=0.05 if name == "SLOW" else 0.0,
        tamper=evil(vocab_size) if name == "EVIL" else None,
    )


def _server(module: str, flags: list[str], log: Path) -> ServerProcess:
    return ServerProcess(module, flags, log=log, ready_seconds=READY_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=800)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--variants", default="SAME,HALF,RAND,SLOW,EVIL,BUNDLED,TWIN")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="parity_"))
    endpoint = f"ipc://{folder}/draft"
    requests = bodies(args.requests, args.new_tokens, args.seed)
    common = ["--device", "cpu", "--dtype", "float32"]
    flags = [*common, "--model-path", str(TARGET_PATH), "--ssd-draft-endpoint", endpoint]
    flags += ["--speculative-num-steps", str(NUM_STEPS), "--ssd-drafting", "off"]
    log = folder / "server.log"
    with _server("sgl_ssd.launch_server", flags, log) as server:
        profile = Profile(server, endpoint, requests)
        profile.answer_without_drafts(args.concurrency)
        plain_flags = [*common, "--model-path", str(TARGET_PATH), "--disable-overlap-schedule"]
        plain_log = folder / "plain.log"
        with _server("sglang.launch_server", plain_flags, plain_log) as plain:
            profile.against_plain(plain)
        for name in args.variants.split(","):
            profile.wait_until_alone()
            if name in ("BUNDLED", "TWIN"):
                model = DRAFT_PATH if name == "BUNDLED" else TARGET_PATH
                with real_draft(endpoint, model, folder / "draft.log"):
                    profile.run(name, args.concurrency)
                continue
            draft = double(name, profile, 4096)
            try:
                profile.run(name, args.concurrency)
            finally:
                draft.stop()
    print(json.dumps({"variant": "ALL", **_numbers(profile.total)}))
    try:
        profile.total.check()
    except AssertionError as e:
        print(e)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
