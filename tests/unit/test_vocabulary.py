"""Fingerprints of vocabularies, and models that cannot serve as a target or draft."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_ssd import vocabulary
from sgl_ssd.errors import ConfigError, PairMismatchError
from sgl_ssd.vocabulary import Vocabulary, check_pair, check_rollback, read_vocabulary
from tiny_model import VOCAB_SIZE, write_tokenizer


def write_config(folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., Path]:
    """Writes a model folder; `change` may alter the content of its tokenizer.json."""

    def make(name: str, change: Callable[[dict], object] | None = None, **config: Any) -> Path:
        folder = write_config(tmp_path / name, **{"vocab_size": VOCAB_SIZE, **config})
        write_tokenizer(folder)
        if change is not None:
            file = folder / "tokenizer.json"
            content = json.loads(file.read_text())
            change(content)
            file.write_text(json.dumps(content))
        return folder

    return make


def read(folder: Path) -> Vocabulary:
    return read_vocabulary(str(folder))


def swap_ids(content: dict) -> None:
    vocab = content["model"]["vocab"]
    vocab["A"], vocab["B"] = vocab["B"], vocab["A"]


def rename_special(content: dict) -> None:
    vocab = content["model"]["vocab"]
    vocab["<eos>"] = vocab.pop("</s>")
    for token in content["added_tokens"]:
        token["content"] = token["content"].replace("</s>", "<eos>")


def rename_last(content: dict) -> None:
    content["added_tokens"][-1]["content"] = "<another>"


def one_more(content: dict) -> None:
    last = content["added_tokens"][-1]
    content["added_tokens"].append({**last, "id": last["id"] + 1, "content": "<one more>"})


def one_less(content: dict) -> None:
    content["added_tokens"].pop()


# -- fingerprints ----------------------------------------------------------------------------------


def test_equal_tokenizers_have_equal_fingerprints(model: Callable) -> None:
    one, two = read(model("one")), read(model("two"))
    assert one == two
    assert one.size == VOCAB_SIZE and len(one.fingerprint) == 32
    check_pair(one, two, "one", "two")


def test_another_model_with_the_same_tokenizer_fits(model: Callable) -> None:
    """Embedding tables may be padded differently: only what ids mean counts."""
    target = read(model("target", vocab_size=VOCAB_SIZE + 128, model_type="qwen3"))
    draft = read(model("draft", vocab_size=VOCAB_SIZE))
    assert target == draft
    check_pair(target, draft, "target", "draft")


@pytest.mark.parametrize("change", [swap_ids, rename_special, rename_last, one_more, one_less])
def test_a_changed_tokenizer_has_another_fingerprint(
    model: Callable, change: Callable[[dict], object]
) -> None:
    target, draft = read(model("target")), read(model("draft", change))
    assert target.fingerprint != draft.fingerprint
    with pytest.raises(PairMismatchError) as error:
        check_pair(target, draft, "/models/target", "/models/draft")
    message = str(error.value)
    for part in ("/models/target", "/models/draft", f"{target.size} tok", f"{draft.size} tok"):
        assert part in message
    assert "--speculative-draft-model-path" in message


def test_merges_do_not_matter(model: Callable) -> None:
    """How text becomes tokens is the target's affair alone; both sides speak of ids."""
    assert read(model("one")) == read(model("two", lambda c: c["model"]["merges"].reverse()))


def test_an_id_without_a_token_counts(model: Callable) -> None:
    whole = read(model("whole"))
    holed = read(model("holed", lambda c: c["model"]["vocab"].update({"\u0106": 600})))
    assert holed.size == 601 and holed.fingerprint != whole.fingerprint


def test_transformers_reads_the_same_table(
    model: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name on a hub goes through transformers, a folder does not: one fingerprint for both."""
    folder = model("one")
    direct = read(folder)
    hidden = SimpleNamespace(join=os.path.join, isfile=lambda path: not path.endswith("izer.json"))
    monkeypatch.setattr(vocabulary, "os", SimpleNamespace(path=hidden))
    assert read(folder) == direct


def test_a_model_without_a_tokenizer_has_its_configs_size(tmp_path: Path) -> None:
    plain = read(write_config(tmp_path / "a", vocab_size=1234))
    nested = read(write_config(tmp_path / "b", text_config={"vocab_size": 99, "model_type": "x"}))
    assert plain == Vocabulary(1234, "") and nested == Vocabulary(99, "")


def test_an_unknown_vocabulary_fits_any(model: Callable, tmp_path: Path) -> None:
    known = read(model("known"))
    unknown = read(write_config(tmp_path / "unknown", vocab_size=7))
    for a, b in ((known, unknown), (unknown, known), (unknown, unknown)):
        check_pair(a, b, "a", "b")


def test_a_folder_that_is_no_model_is_named_with_its_flag(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        read(tmp_path / "nothing")
    path = str(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="--speculative-draft-model-path") as error:
        check_rollback(path, "draft")
    assert path in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="--model-path"):
        check_rollback(path, "target")


# -- models whose state cannot be rolled back ---------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "mamba2"}, {"model_type": "jamba"}, {"model_type": "qwen3_next"},
        {"model_type": "falcon_h1"}, {"model_type": "recurrent_gemma"}, {"model_type": "rwkv"},
        {"layer_types": ["full_attention", "linear_attention"]},
        {"layer_types": ["conv", "full_attention"]}, {"layers_block_type": ["mamba", "attention"]},
        {"model_type": "some_vl", "text_config": {"model_type": "qwen3_next"}},
        {"model_type": "some_vl", "llm_config": {"layer_types": ["linear_attention"]}},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("role", ["target", "draft"])
def test_recurrent_models_are_refused(tmp_path: Path, config: dict, role: str) -> None:
    folder = write_config(tmp_path / "model", **config)
    with pytest.raises(PairMismatchError) as error:
        check_rollback(str(folder), role)
    assert role in str(error.value) and str(folder) in str(error.value)
    assert "attention-only" in str(error.value)


@pytest.mark.parametrize(
    "config",
    [
        {}, {"model_type": "qwen3"}, {"layer_types": ["sliding_attention", "full_attention"]},
        {"layer_types": None}, {"layer_types": []}, {"layers_block_type": ["attention"] * 3},
        {"layer_types": [0, 1]}, {"model_type": "gemma3", "text_config": {"model_type": "gemma3"}},
    ],
    ids=str,
)  # fmt: skip
def test_attention_models_pass(tmp_path: Path, config: dict) -> None:
    check_rollback(str(write_config(tmp_path / "model", **config)), "target")


def test_a_corrupt_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(PairMismatchError, match=r"cannot read the tokenizer .*tokenizer\.json"):
        read_vocabulary(str(tmp_path))


@pytest.mark.parametrize("content", [None, "{"])
def test_a_folder_without_a_model_is_named_without_words_of_the_hub(
    content: str | None, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError) as refusal:
        check_rollback(str(tmp_path), "draft")
    text = f"the draft model '{tmp_path}' (--speculative-draft-model-path): "
    assert str(refusal.value) == text + "no readable config.json there"
