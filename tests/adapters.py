"""Small random LoRA adapters in PEFT's layout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LINEAR = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
EMBEDDINGS = ["embed_tokens", "lm_head"]


def make_adapter(
    folder: Path,
    model: Path,
    *,
    seed: int,
    rank: int,
    modules: Sequence[str] = LINEAR,
    strength: float = 0.3,
) -> Path:
    """Write an adapter for the model in `model` and return its folder.

    `strength`: size of what it adds to a weight, as a share of the weight's own. The same
    arguments give the same adapter.
    """
    torch.manual_seed(seed)
    alpha = 2 * rank
    tensors = {}
    for name, weight in _weights(model).items():
        path = name.removesuffix(".weight")
        if path.split(".")[-1] not in modules:
            continue
        out, width = weight.shape
        names = ("lora_A.weight", "lora_B.weight")
        if path.endswith("embed_tokens"):  # the weight is [vocabulary, hidden]: A is looked up
            names, out, width = ("lora_embedding_A", "lora_embedding_B"), width, out
        size = strength * weight.std() / (alpha / rank) / rank**0.5
        parts = {names[0]: torch.randn(rank, width), names[1]: torch.randn(out, rank) * size}
        tensors |= {f"base_model.model.{path}.{part}": parts[part] for part in parts}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha}
    config |= {"target_modules": list(modules), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merge(weights: dict[str, torch.Tensor], adapter: Path) -> None:
    """Add an adapter to `weights`, float32 tensors by parameter name, in place."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    scaling = config["lora_alpha"] / config["r"]
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, down in tensors.items():
        path = name.removeprefix("base_model.model.")
        if path.endswith("lora_A.weight"):
            up = tensors[name.replace("lora_A", "lora_B")]
            weights[path.replace("lora_A.", "")] += scaling * up @ down
        elif path.endswith("lora_embedding_A"):
            up = tensors[name.replace("lora_embedding_A", "lora_embedding_B")]
            weights[path.replace("lora_embedding_A", "weight")] += scaling * (up @ down).T


def _weights(model: Path) -> dict[str, torch.Tensor]:
    """All matrices of a model; the last layer also where it shares the embedding's."""
    weights = {}
    for file in sorted(model.glob("*.safetensors")):
        weights |= load_file(file)
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    return {name: weight.float() for name, weight in weights.items() if weight.dim() == 2}
