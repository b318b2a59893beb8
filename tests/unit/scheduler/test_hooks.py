"""Hooks into SGLang: a run of accepted tokens ends where single tokens would have ended it."""

from __future__ import annotations

import importlib
import inspect
from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import (
    FINISH_ABORT,
    FINISH_LENGTH,
    FINISH_MATCHED_STR,
    FINISH_MATCHED_TOKEN,
    Req,
)
from sglang.srt.mem_cache import allocation_sizing
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.session.session_controller import Session
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sgl_ssd.scheduler import hooks
from sgl_ssd.scheduler.algorithm import NAME
from tiny_model import VOCAB_SIZE, write_tokenizer

EOS, STOP, OTHER_STOP, MODEL_EOS = 1, 300, 301, 302
LONG = 10_000
_stock_finish = inspect.unwrap(Req.update_finish_state)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return get_tokenizer(str(folder))


class Grammar:
    """Terminated once told so."""

    def __init__(self, terminated: bool) -> None:
        self.terminated = terminated

    def is_terminated(self) -> bool:
        return self.terminated


def make_req(tokenizer: Any, output: list[int], **params: Any) -> Req:
    params.setdefault("max_new_tokens", LONG)
    sampling = SamplingParams(**params)
    sampling.normalize(tokenizer)
    req = Req(
        "r", "", array("q", [5, 6]), sampling, eos_token_ids={MODEL_EOS}, vocab_size=VOCAB_SIZE
    )
    req.tokenizer = tokenizer
    req.output_ids.extend(output)
    return req


def ending(req: Req) -> tuple:
    """How a request has ended: kind, what was matched, and after how many output tokens."""
    reason = req.finished_reason
    if reason is None:
        return ("not", None, None)
    length = len(req.output_ids) if req.finished_len is None else req.finished_len
    return type(reason).__name__, getattr(reason, "matched", None), length


def in_one_run(req: Req, run: list[int]) -> Req:
    """What SGLang does after a verify, with our hook."""
    req.output_ids.extend(run)
    hooks._update_finish_state(_stock_finish, req, len(run))
    return req


def one_by_one(req: Req, run: list[int]) -> Req:
    """What SGLang does in plain decoding; the rest of the run never comes to be."""
    for token in run:
        if req.finished():
            break
        req.output_ids.append(token)
        _stock_finish(req, 1)
    return req


def assert_same_end(tokenizer: Any, before: list[int], run: list[int], **params: Any) -> tuple:
    drafted = in_one_run(make_req(tokenizer, before, **params), run)
    plain = one_by_one(make_req(tokenizer, before, **params), run)
    assert ending(drafted) == ending(plain)
    assert drafted.output_ids.tolist() == before + run, "every token with KV stays accounted for"
    shown = ending(drafted)[2]
    assert drafted.output_ids[:shown] == plain.output_ids[:shown]
    return ending(drafted)


RUNS = range(1, 10)
BEFORE = [40, 41, 42]


@pytest.mark.parametrize("length", RUNS)
@pytest.mark.parametrize("at", RUNS)
@pytest.mark.parametrize("stop", [EOS, STOP, MODEL_EOS])
def test_stop_tokens_against_the_length_cap(
    tokenizer: Any, length: int, at: int, stop: int
) -> None:
    """Every stop position x cap x run length; the first in text order wins."""
    run = [50 + i for i in range(length)]
    if at <= length:
        run[at - 1] = stop
    for cap in range(1, 12):
        end = assert_same_end(
            tokenizer, BEFORE, run, stop_token_ids=[STOP, OTHER_STOP], max_new_tokens=3 + cap
        )
        # At equal lengths SGLang calls it a matter of length.
        if at <= length and at < cap:
            assert end == ("FINISH_MATCHED_TOKEN", stop, 3 + at)
        elif cap <= length:
            assert end == ("FINISH_LENGTH", None, 3 + cap)
        else:
            assert end == ("not", None, None)


@pytest.mark.parametrize("length", RUNS)
@pytest.mark.parametrize("at", RUNS)
def test_stop_strings_against_the_length_cap(tokenizer: Any, length: int, at: int) -> None:
    """A stop string that ends with the token at each position of the run."""
    letters = "ZYXWVUSRQPON"
    spell = [tokenizer.convert_tokens_to_ids(c) for c in letters]
    assert tokenizer.encode(letters, add_special_tokens=False) == spell, "one token a letter"
    run, stop = spell[3 : 3 + length], letters[1 : 3 + at]  # begins before the run
    for cap in range(1, 12):
        end = assert_same_end(tokenizer, spell[:3], run, stop=["zz", stop], max_new_tokens=3 + cap)
        if at <= length and at < cap:
            assert end == ("FINISH_MATCHED_STR", stop, 3 + at)
        elif cap <= length:
            assert end == ("FINISH_LENGTH", None, 3 + cap)
        else:
            assert end == ("not", None, None)


@pytest.mark.parametrize("at", RUNS)
@pytest.mark.parametrize("cap", [3 + 4, 3 + 9, 3 + 20])
def test_ignore_eos(tokenizer: Any, at: int, cap: int) -> None:
    run = [50 + i for i in range(9)]
    run[at - 1] = EOS
    end = assert_same_end(
        tokenizer, BEFORE, run, ignore_eos=True, stop_token_ids=[50], max_new_tokens=cap
    )
    assert end == (("FINISH_LENGTH", None, cap) if cap <= 12 else ("not", None, None))


@pytest.mark.parametrize("first", range(1, 7))
@pytest.mark.parametrize("second", range(1, 7))
def test_a_stop_string_and_a_stop_token_in_one_run(tokenizer: Any, first: int, second: int) -> None:
    """Whichever is complete first; SGLang prefers the string on the same token."""
    letters = [tokenizer.convert_tokens_to_ids(c) for c in "abcdef"]
    run = list(letters)
    stop = "abcdef"[first - 1]
    end = assert_same_end(tokenizer, BEFORE, run, stop=[stop], stop_token_ids=[letters[second - 1]])
    if first <= second:
        assert end == ("FINISH_MATCHED_STR", stop, 3 + first)
    else:
        assert end == ("FINISH_MATCHED_TOKEN", letters[second - 1], 3 + second)


@pytest.mark.parametrize("stop", ["世", "🎉", "a世", "é"])
@pytest.mark.parametrize("split", range(1, 6))
def test_stop_strings_of_several_bytes(tokenizer: Any, stop: str, split: int) -> None:
    ids = tokenizer.encode("xa世y🎉z and é!", add_special_tokens=False)
    for start in range(0, len(ids) - 1, split):
        assert_same_end(tokenizer, ids[:start], ids[start : start + split + 3], stop=[stop])


@pytest.mark.parametrize("pattern", ["[0-9]+x", "b.d", "(cat|dog)"])
def test_stop_patterns(tokenizer: Any, pattern: str) -> None:
    ids = tokenizer.encode("ab cd 12x and a dog, abcd", add_special_tokens=False)
    seen = set()
    for start in range(len(ids)):
        for length in (1, 3, 8):
            end = assert_same_end(
                tokenizer, ids[:start], ids[start : start + length], stop_regex=[pattern]
            )
            seen.add(end[0])
    assert len(seen) == 2, "some runs match and some do not"


@pytest.mark.parametrize("length", RUNS)
@pytest.mark.parametrize("cap", [3 + 2, 3 + 5, LONG])
def test_a_grammar_ends_with_the_run_that_ends_it(tokenizer: Any, length: int, cap: int) -> None:
    """It has been advanced over the whole run, so it can only end with its last token."""
    run = [50 + i for i in range(length)]
    req = make_req(tokenizer, BEFORE, max_new_tokens=cap)
    grammar = req.grammar = Grammar(terminated=True)
    in_one_run(req, run)
    if cap <= 3 + length:
        assert ending(req) == ("FINISH_LENGTH", None, cap)
    else:
        assert ending(req) == ("FINISH_MATCHED_TOKEN", run[-1], 3 + length)
    assert req.grammar is grammar


@pytest.mark.parametrize("at", range(1, 5))
def test_a_stop_before_the_end_of_a_grammar_wins(tokenizer: Any, at: int) -> None:
    run = [50, 51, 52, 53, 54]
    run[at - 1] = STOP
    req = make_req(tokenizer, BEFORE, stop_token_ids=[STOP])
    req.grammar = Grammar(terminated=True)
    assert ending(in_one_run(req, run)) == ("FINISH_MATCHED_TOKEN", STOP, 3 + at)


def test_a_grammar_that_goes_on_ends_nothing(tokenizer: Any) -> None:
    req = make_req(tokenizer, BEFORE)
    grammar = req.grammar = Grammar(terminated=False)
    assert ending(in_one_run(req, [50, 51, 52])) == ("not", None, None)
    assert req.grammar is grammar


@pytest.mark.parametrize("length", [1, 4])
def test_an_abort_ends_at_once(tokenizer: Any, length: int) -> None:
    req = make_req(tokenizer, BEFORE, max_new_tokens=4)
    req.to_finish = FINISH_ABORT("gone")
    in_one_run(req, [50] * length)
    assert isinstance(req.finished_reason, FINISH_ABORT) and req.to_finish is None
    assert req.output_ids.tolist() == BEFORE + [50] * length
    assert ending(req) == ("FINISH_ABORT", None, 4), "with the first token that came after it"


def test_a_stop_string_that_was_there_before_the_run_ends_at_once(tokenizer: Any) -> None:
    req = make_req(tokenizer, BEFORE, stop=["stop"])
    req.decoded_text = "please stop"
    assert ending(in_one_run(req, [50, 51, 52])) == ("FINISH_MATCHED_STR", "stop", 4)


@pytest.mark.parametrize("bad", [VOCAB_SIZE, -1])
@pytest.mark.parametrize("at", [0, 2])
def test_ids_out_of_range_end_where_they_stand(tokenizer: Any, bad: int, at: int) -> None:
    run = [50, 51, 52]
    run[at] = bad
    req = in_one_run(make_req(tokenizer, BEFORE), run)
    assert ending(req) == ("FINISH_MATCHED_STR", "NaN happened", 3 + at + 1)
    assert all(0 <= t < VOCAB_SIZE for t in req.output_ids), "and are replaced"


def test_a_finished_request_is_left_alone(tokenizer: Any) -> None:
    req = in_one_run(make_req(tokenizer, BEFORE, max_new_tokens=5), [50, 51, 52])
    before = ending(req)
    in_one_run(req, [EOS, 60, 61])
    assert ending(req) == before == ("FINISH_LENGTH", None, 5)


def test_sglang_itself_needs_the_hook(tokenizer: Any) -> None:
    """If this fails, SGLang has changed and the hook may go (sglang#31599)."""
    req = make_req(tokenizer, BEFORE, max_new_tokens=5)
    req.output_ids.extend([EOS, 50, 51])
    _stock_finish(req, 3)
    assert isinstance(req.finished_reason, FINISH_LENGTH)
    right = in_one_run(make_req(tokenizer, BEFORE, max_new_tokens=5), [EOS, 50, 51])
    assert isinstance(right.finished_reason, FINISH_MATCHED_TOKEN)
    assert not isinstance(right.finished_reason, FINISH_MATCHED_STR)


# -- room in the request pool --------------------------------------------------------------------


@pytest.fixture
def known_algorithm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    stub = SimpleNamespace(has_draft_kv=lambda: False, name=NAME)
    monkeypatch.setattr(SpeculativeAlgorithm, "from_string", staticmethod(lambda name: stub))
    yield


def sizing_args(num_steps: int, page_size: int, algorithm: str | None = NAME) -> Any:
    return SimpleNamespace(
        speculative_algorithm=algorithm,
        speculative_num_steps=num_steps,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=num_steps + 1,
        max_speculative_num_draft_tokens=num_steps + 1,
        page_size=page_size,
    )


_stock_extra = inspect.unwrap(allocation_sizing.get_req_to_token_extra_context_len)


@pytest.mark.usefixtures("known_algorithm")
@pytest.mark.parametrize("num_steps", range(1, 17))
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_a_row_has_room_for_the_reserve(num_steps: int, page_size: int) -> None:
    args = sizing_args(num_steps, page_size)
    reserve = allocation_sizing.get_alloc_reserve_per_decode(args)
    assert reserve == 2 * (num_steps + 1)
    extra = hooks._extra_context_len(_stock_extra, args)
    # A request of full length reserves that much behind its last token, up to the page's end.
    for context_len in (100, 128, 1000):
        furthest = -(-(context_len + reserve) // page_size) * page_size
        assert furthest <= context_len + extra
    assert extra >= _stock_extra(args), "never less than SGLang leaves"


@pytest.mark.usefixtures("known_algorithm")
def test_sglang_itself_leaves_too_little_room() -> None:
    """If this fails, SGLang has changed and the hook may go."""
    args = sizing_args(8, 1)
    assert _stock_extra(args) < allocation_sizing.get_alloc_reserve_per_decode(args)


@pytest.mark.parametrize("algorithm", [None, "EAGLE"])
def test_other_algorithms_keep_their_room(algorithm: str | None) -> None:
    assert hooks._extra_context_len(lambda args: 7, sizing_args(16, 1, algorithm)) == 7


# -- the other hooks -----------------------------------------------------------------------------


def test_there_is_no_draft_kv_pool_for_ssd_alone() -> None:
    ssd, other = SimpleNamespace(name=NAME), SimpleNamespace(name="EAGLE")
    assert hooks._draft_kv_pool(lambda **kw: "pool", spec_algorithm=ssd, x=1) is None
    assert hooks._draft_kv_pool(lambda **kw: kw, spec_algorithm=other, x=1) == {
        "spec_algorithm": other, "x": 1,
    }  # fmt: skip


def test_graphs_are_captured_with_a_chain() -> None:
    ssd = SimpleNamespace(name=NAME)
    made = hooks._dummy_verify_input(None, ssd, None, None, 5, False)
    assert made.draft_token_num == 5
    runner = SimpleNamespace(model_runner=SimpleNamespace(spec_algorithm=ssd), captured_req_width=3)
    assert hooks._graph_spec_info(None, runner, 99).draft_token_num == 3
    runner.model_runner.spec_algorithm = SimpleNamespace(name="EAGLE")
    assert hooks._graph_spec_info(lambda r, n: n, runner, 99) == 99
    assert hooks._dummy_verify_input(lambda *a: a, None, 1, 2, 3, True) == (None, 1, 2, 3, True)


def test_the_worker_hears_of_every_release(monkeypatch: pytest.MonkeyPatch) -> None:
    class Worker:
        released: list[Any] = []

        def on_release(self, req: Any) -> None:
            self.released.append(req)

    monkeypatch.setattr(hooks, "_worker", None)
    assert hooks._release_kv_cache(lambda *a, **k: (a, k), "a", 1, x=2) == (("a", 1), {"x": 2})
    worker = Worker()
    hooks.set_worker(worker)  # type: ignore[arg-type]
    assert hooks._release_kv_cache(lambda *a: "done", "b") == "done"
    assert worker.released == ["b"]
    del worker
    assert hooks._release_kv_cache(lambda *a: "done", "c") == "done", "a dead worker is no worker"


def resolve(path: str) -> Any:
    """The object at a dotted path: a module, then attributes."""
    parts = path.split(".")
    for i in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:i]))
        except ModuleNotFoundError:
            continue
        for name in parts[i:]:
            found = getattr(found, name)
        return found
    raise AssertionError(path)


def test_every_hook_fits_the_function_it_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: dict[str, Any] = {}
    monkeypatch.setattr(
        HookRegistry, "register", lambda target, hook, kind: registered.update({target: hook})
    )
    hooks.install()
    assert len(registered) >= 6
    for target, hook in registered.items():
        stock = inspect.signature(inspect.unwrap(resolve(target))).parameters
        mine = list(inspect.signature(hook).parameters.values())[1:]
        named = {p.name for p in mine if p.kind is p.KEYWORD_ONLY}
        assert named <= set(stock), target
        if not named and all(p.kind is not p.VAR_KEYWORD for p in mine):
            assert len(mine) == len(stock), target


def test_a_session_goes_on_from_the_end_of_the_text(tokenizer: Any) -> None:
    """Not from what a run had behind a stop token."""
    last = in_one_run(make_req(tokenizer, [10], stop_token_ids=[STOP]), [11, STOP, 12, 13])
    turn = SimpleNamespace(input_ids=array("q", [20, 21]))
    how = SimpleNamespace(drop_previous_output=False, offset=0)
    stock = inspect.unwrap(Session._concat_token_arrays)
    assert 12 in stock(last, turn, how)[0], "SGLang itself needs the hook"
    both = hooks._session_turn(stock, last, turn, how)
    assert [list(ids) for ids in both] == [[5, 6, 10, 11, STOP, 20, 21]] * 2


def test_load_snapshots_lie_in_the_launchers_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def upstream(name: str) -> str:
        return f"/dev/shm/sglang_loads_{name}.shm"

    monkeypatch.setenv("TMPDIR", "/tmp/sgl_ssd_abc")
    path = hooks._load_snapshot_path(upstream, "x")
    assert path == "/tmp/sgl_ssd_abc/sglang_loads_x.shm"
    for other in ("/tmp", "/tmp/sgl_ssd_abc/deeper", ""):
        monkeypatch.setenv("TMPDIR", other)
        assert hooks._load_snapshot_path(upstream, "x") == upstream("x")


# -- adapters ------------------------------------------------------------------------------------


class FrozenArgs:
    """As SGLang's arguments are once they are resolved."""

    def __init__(self, algorithm: str | None) -> None:
        object.__setattr__(self, "speculative_algorithm", algorithm)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{name} assigned after resolution")


@pytest.mark.parametrize(
    ("algorithm", "seen"), [(NAME, None), (None, None), ("NGRAM", "NGRAM"), ("EAGLE", "EAGLE")]
)
def test_adapters_are_checked_as_without_drafts(algorithm: str | None, seen: str | None) -> None:
    args = FrozenArgs(algorithm)

    def check(given: FrozenArgs) -> None:
        assert given.speculative_algorithm == seen
        raise ValueError("what the check says")

    with pytest.raises(ValueError, match="what the check says"):
        hooks._check_lora_server_args(check, args)
    assert args.speculative_algorithm == algorithm
