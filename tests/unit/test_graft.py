"""A grafted model computes what the small one computes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.pairs import prove_graft
from benchmarks.pairs.graft import (
    SHAPES,
    Grafter,
    Shape,
    big_config,
    copies_of,
    kv_sources,
    query_heads,
    write,
)
from sgl_ssd.models import DRAFT_PATH, TARGET_PATH

BIG = Shape(8, 1024, 8, 2, 128, 1024, 5000, False)


def _source(path: Path) -> dict:
    return json.loads((path / "config.json").read_text())


def _logits(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(ids).logits


@pytest.mark.parametrize(
    ("path", "big"),
    [
        (TARGET_PATH, BIG),  # d / D = 1/4: one copy
        (TARGET_PATH, replace(BIG, hidden_size=512, tie_word_embeddings=True)),  # two copies
        (TARGET_PATH, replace(BIG, num_key_value_heads=8)),  # a KV head is repeated
        (DRAFT_PATH, BIG),
    ],
)
def test_same_logits_in_fp32(path: Path, big: Shape):
    source = _source(path)
    small = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
    state = small.state_dict()
    config = LlamaConfig(**big_config(source, big))
    grafted = LlamaForCausalLM(config).to(torch.float32)
    weights = dict(Grafter(state.items(), Shape.of(source), big, "cpu", torch.float32))
    if big.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    grafted.load_state_dict(weights)
    ids = torch.randint(0, 4096, (2, 48), generator=torch.Generator().manual_seed(1))
    want, got = _logits(small, ids), _logits(grafted, ids)[..., :4096]
    assert want.abs().max() > 5
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


def test_nothing_leaks_and_everything_else_is_computed():
    source = _source(TARGET_PATH)
    small = Shape.of(source)
    state = LlamaForCausalLM.from_pretrained(TARGET_PATH, dtype=torch.float32).state_dict()
    made = dict(Grafter(state.items(), small, BIG, "cpu", torch.float32))
    for name, tensor in made.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            assert not tensor[small.hidden_size :].any()
            assert bool(tensor.any()) == (int(name.split(".")[2]) < small.num_hidden_layers)
        elif tensor.ndim == 2 and "embed" not in name:
            assert tensor[:, small.hidden_size :].std() > 0.01
    assert not made["model.embed_tokens.weight"][: small.vocab_size, small.hidden_size :].any()


def test_heads_keep_their_keys():
    target = Shape.of(_source(TARGET_PATH))
    wide = replace(target, num_attention_heads=6, num_key_value_heads=2)
    assert query_heads(target, SHAPES["8b"]) == [0, 1]
    assert query_heads(wide, SHAPES["8b"]) == [0, 1, 2, 4, 5, 6]
    narrow = replace(BIG, num_attention_heads=8, num_key_value_heads=4)  # two query heads a KV head
    assert query_heads(wide, narrow) == [0, 1, 2, 4, 5, 6]
    assert kv_sources(wide, narrow) == [0, 0, 1, 1]


@pytest.mark.parametrize("name", SHAPES)
def test_known_shapes_take_the_bundled_pair(name: str):
    for path in (TARGET_PATH, DRAFT_PATH):
        config = big_config(_source(path), SHAPES[name])
        share = (
            copies_of(Shape.of(_source(path)), SHAPES[name]) * Shape.of(_source(path)).hidden_size
        )
        root = (share / config["hidden_size"]) ** 0.5
        assert root == torch.tensor(root, dtype=torch.bfloat16).item()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"hidden_size": 640}, "multiple"),
        ({"head_dim": 64}, "head_dim"),
        ({"num_hidden_layers": 5}, "num_hidden_layers"),
        ({"num_attention_heads": 1, "num_key_value_heads": 1}, "heads"),
    ],
)
def test_refuses_what_has_no_room(change: dict, text: str):
    with pytest.raises(ValueError, match=text):
        big_config(_source(TARGET_PATH), replace(BIG, **change))


def test_writes_a_folder_without_large_files(tmp_path: Path):
    write(TARGET_PATH, SHAPES["8b"], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["GraftedLlamaForCausalLM"]
    assert config["hidden_size"] == 4096 and config["graft"]["hidden_size"] == 256
    assert config["rms_norm_eps"] == pytest.approx(1e-5 / 16)
    assert (tmp_path / "tokenizer.json").exists()
    assert sum(f.stat().st_size for f in tmp_path.iterdir()) < 20e6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["0.6b", "1b"])
def test_same_logits_at_the_full_size_of_a_draft(name: str):
    ids = prove_graft.prompts(DRAFT_PATH)[:1]
    found = prove_graft.prove(DRAFT_PATH, SHAPES[name], ids)
    assert found.largest < 1e-3 and found.same_best == 1.0


def test_same_logits_to_rounding_in_bf16():
    """As near to the small model's bf16 logits as those are to its fp32 ones."""
    ids = prove_graft.prompts(TARGET_PATH)
    exact, _ = prove_graft.small_logits(TARGET_PATH, ids, "cpu", torch.float32)
    rounded, _ = prove_graft.small_logits(TARGET_PATH, ids, "cpu", torch.bfloat16)
    rounding = prove_graft.Difference.of(exact, rounded)
    found = prove_graft.prove(TARGET_PATH, BIG, ids, dtype=torch.bfloat16)
    assert found.mean < 1.5 * rounding.mean and found.largest < 2 * rounding.largest
    assert found.same_best > 0.95


def test_a_wrong_graft_is_noticed(monkeypatch: pytest.MonkeyPatch):
    norm = Grafter._norm
    monkeypatch.setattr(Grafter, "_norm", lambda self, weight: norm(self, weight) * 1.01)
    found = prove_graft.prove(TARGET_PATH, BIG, prove_graft.prompts(TARGET_PATH)[:1])
    assert found.largest > 1e-2
