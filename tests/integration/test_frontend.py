"""SGLang's frontend language against our server: every program says what it says on plain SGLang.

The programs are the kinds of `sglang/test/test_programs.py`, which asks a large model and compares
with its knowledge; here the same calls are compared with plain SGLang instead.
"""

from __future__ import annotations

import re

import pytest
import sglang as sgl
from sglang.test import test_programs as programs

from parity.harness import configure, ssd_state

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def backends(ssd_server, plain_bundled):
    """Plain SGLang, ours."""
    return [sgl.RuntimeEndpoint(plain_bundled.url), sgl.RuntimeEndpoint(ssd_server.url)]


@pytest.fixture
def both(backends, ssd_server):
    """Runs a function under both backends, drafting on; returns both results."""
    configure(ssd_server, ssd_drafting=1, ssd_num_steps=4, ssd_fan_out=3, ssd_backup=2)
    before = ssd_state(ssd_server)

    def run(function):
        results = []
        for backend in backends:
            sgl.set_default_backend(backend)
            results.append(function())
        return results

    yield run
    after = ssd_state(ssd_server)
    configure(ssd_server, ssd_drafting=0)
    assert after["drafted"] > before["drafted"]


def test_gen_fork_and_select(both):
    @sgl.function
    def program(s, name):
        s += f"def {name}(path):\n    with open(path) as f:\n"
        s += sgl.gen("body", max_tokens=32, temperature=0, stop="return")
        forks = s.fork(3)
        for i, fork in enumerate(forks):
            fork += f"\n# variant {i}\n" + sgl.gen("more", max_tokens=16, temperature=0)
        s += "".join(fork["more"] for fork in forks)
        s += "\nreturn " + sgl.select("kind", ["lines", "f", "None"])
        s += sgl.gen("number", max_tokens=6, dtype=int)

    def run():
        states = program.run_batch(
            [{"name": name} for name in ("read_lines", "load", "count_words")],
            temperature=0, num_threads=2, progress_bar=False,
        )  # fmt: skip
        return [(s.text(), s["kind"], s["number"]) for s in states]

    plain, ours = both(run)
    assert ours == plain
    assert {kind for _, kind, _ in ours} <= {"lines", "f", "None"}
    assert all(re.fullmatch(r"[+-]?\d+", number.strip()) for _, _, number in ours)


def test_regex(both):
    pattern = r"\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}"

    @sgl.function
    def program(s, name):
        s += f"{name} = '" + sgl.gen("ip", max_tokens=24, regex=pattern, temperature=0) + "'\n"
        s += sgl.gen("rest", max_tokens=24, temperature=0)

    def run():
        states = [program.run(name=name) for name in ("HOST", "address")]
        return [(state["ip"], state["rest"]) for state in states]

    plain, ours = both(run)
    assert ours == plain
    assert all(re.fullmatch(pattern, ip) for ip, _ in ours)


def test_streamed_program(both):
    @sgl.function
    def program(s):
        s += sgl.system("You write Python.") + sgl.user("Add two numbers.")
        s += sgl.assistant(sgl.gen("answer", max_tokens=40, temperature=0))

    def run():
        state = program.run(stream=True)
        text = "".join(state.text_iter("answer"))
        return text, state["answer"]

    plain, ours = both(run)
    assert ours == plain
    assert ours[0] == ours[1]


@pytest.mark.parametrize(
    "name", ["test_mt_bench", "test_regex", "test_stream", "test_parallel_decoding"]
)
def test_sglangs_own_program(both, backends, name):
    """Those of SGLang's programs whose assertions do not ask for knowledge."""
    sgl.set_default_backend(backends[1])
    getattr(programs, name)()
