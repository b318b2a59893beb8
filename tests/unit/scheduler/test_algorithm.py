"""What SSD cannot serve exactly is refused at the start, by flag and remedy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.configs import FalconH1Config, Qwen3NextConfig
from transformers import LlamaConfig, PretrainedConfig

from sgl_ssd.errors import ConfigError
from sgl_ssd.scheduler.algorithm import validate_server_args


def server_args(hf_config: PretrainedConfig | None = None, **changes: Any) -> Any:
    """Like SGLang's, as far as they are looked at; a Llama unless `hf_config` says otherwise."""
    model = SimpleNamespace(
        hf_config=hf_config or LlamaConfig(), is_draft_model=False, linear_attn_registry_result=None
    )
    fields = dict(
        model_path="some/model", speculative_num_steps=4, speculative_num_draft_tokens=None,
        speculative_eagle_topk=None, pp_size=1, dp_size=1, enable_dp_attention=False,
        disaggregation_mode="null", speculative_adaptive=False, enable_two_batch_overlap=False,
        enable_pdmux=False, grammar_backend="xgrammar", get_model_config=lambda: model,
        device="cuda", enable_lora=None, lora_paths=None, lora_backend="csgmv",
        max_lora_chunk_size=16,
    )  # fmt: skip
    return SimpleNamespace(**fields | changes)


def test_a_plain_transformer_is_served() -> None:
    validate_server_args(server_args())
    validate_server_args(server_args(speculative_num_draft_tokens=5, speculative_eagle_topk=1))


@pytest.mark.parametrize("config", [FalconH1Config, Qwen3NextConfig])
def test_recurrent_targets_are_refused(config: type[PretrainedConfig]) -> None:
    """Their state cannot be taken back when a draft is rejected."""
    with pytest.raises(ConfigError, match="--model-path some/model: .* recurrent layers .* serve"):
        validate_server_args(server_args(config()))


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"speculative_num_draft_tokens": 9}, "--speculative-num-draft-tokens 9"),
        ({"speculative_eagle_topk": 4}, "--speculative-eagle-topk"),
        ({"pp_size": 2}, "--pp-size"),
        ({"enable_dp_attention": True}, "--enable-dp-attention"),
        ({"disaggregation_mode": "decode"}, "--disaggregation-mode"),
        ({"speculative_adaptive": True}, "--speculative-adaptive"),
        ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap"),
        ({"enable_pdmux": True}, "--enable-pdmux"),
        ({"grammar_backend": "outlines"}, "--grammar-backend outlines"),
        ({"enable_lora": True, "lora_backend": "triton"}, "--lora-backend triton"),
        ({"lora_paths": ["a=b"], "max_lora_chunk_size": 64}, "--max-lora-chunk-size 64"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        validate_server_args(server_args(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"enable_lora": True},
        {"lora_paths": ["name=folder"]},
        {"enable_lora": True, "device": "cpu", "lora_backend": "torch_native"},
        {"lora_backend": "triton"},  # of no use without adapters
    ],
)
def test_adapters_are_served(changes: dict[str, Any]) -> None:
    validate_server_args(server_args(**changes))
