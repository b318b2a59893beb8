"""A text that comes in runs of tokens is streamed once, whole, and never inside a character."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers import detokenizer_manager
from transformers import AutoTokenizer

from sgl_ssd import detokenizer
from sgl_ssd.models import TARGET_PATH

TEXT = "A世🎉e\u0301ß界🙂 \ufffd x世界\n🎉🎉"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TARGET_PATH)


@pytest.fixture
def manager(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(detokenizer_manager, "find_printable_text", detokenizer.printable_text)
    manager = object.__new__(detokenizer_manager.DetokenizerManager)
    manager.tokenizer, manager.vocab_size = tokenizer, len(tokenizer)
    manager.decode_status, manager.disable_tokenizer_batch_decode = {}, False
    manager.is_tool_call_parser_gpt_oss = False
    return manager


def stream(manager: Any, rid: str, ids: list[int], runs: list[int]) -> list[str]:
    """The pieces that are sent when `ids` come in runs of the given lengths."""
    pieces, at = [], 0
    for i, length in enumerate(runs):
        batch = SimpleNamespace(
            rids=[rid], decoded_texts=[""], decode_ids=[ids[at : at + length]], read_offsets=[0],
            finished_reasons=[{"type": "length"} if i == len(runs) - 1 else None],
            no_stop_trim=[False], skip_special_tokens=[True],
            spaces_between_special_tokens=[True],
        )  # fmt: skip
        at += length
        pieces += manager._decode_batch_token_id_output(batch)
    return pieces


@pytest.mark.parametrize("longest", range(1, 9))
def test_pieces_make_the_whole(manager: Any, tokenizer: Any, longest: int) -> None:
    r = random.Random(longest)
    ids = tokenizer(TEXT * 3, add_special_tokens=False)["input_ids"]
    for case in range(60):
        runs: list[int] = []
        while sum(runs) < len(ids):
            runs.append(min(r.randint(1, longest), len(ids) - sum(runs)))
        pieces = stream(manager, f"{case}", ids, runs)
        assert "".join(pieces) == TEXT * 3
        # The one in TEXT is a character of its own, held back until something follows it.
        assert not any(piece.endswith("\ufffd") for piece in pieces[:-1])


def test_only_sglangs_own_process_is_replaced() -> None:
    seen: list[Any] = []

    def orig(cls: type, *, run_detokenizer_process_func: Any, port_args: int) -> int:
        seen.append(run_detokenizer_process_func)
        return port_args

    stock = detokenizer_manager.run_detokenizer_process
    for function in (stock, print):
        assert (
            detokenizer.launch(orig, int, run_detokenizer_process_func=function, port_args=3) == 3
        )
    assert seen == [detokenizer.run_detokenizer_process, print]
