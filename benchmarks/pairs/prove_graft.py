"""Show that a grafted model computes what the small one does: at full size, a layer at a time.

    python -m benchmarks.pairs.prove_graft --shape 8b --source sgl_ssd/models/target
    python -m benchmarks.pairs.prove_graft --shape 8b --source sgl_ssd/models/target \\
        --device cuda --dtype bfloat16
    python -m benchmarks.pairs.prove_graft --source sgl_ssd/models/target --server URL

Only one large layer is in memory at any time, so the 8B and 32B shapes fit any machine. The rows
of the embedding beyond the small vocabulary, whose logits are masked, are left out. With `--server`
the log-probabilities of a running server of a grafted folder are compared instead: the model class,
kernels and all. Exit status 1 where they differ by more than `--tolerance`.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from benchmarks.pairs.graft import SHAPES, Grafter, Shape, big_config
from benchmarks.workloads import Texts

TOKENS = 64
PROMPTS = 8


@dataclass(frozen=True)
class Difference:
    """Largest and mean distance of two arrays, and how often their best tokens are the same."""

    largest: float
    mean: float
    same_best: float

    @staticmethod
    def of(want: torch.Tensor, got: torch.Tensor) -> Difference:
        """Logits [..., V]."""
        distance = (want.float() - got.float()).abs()
        same = (want.argmax(-1) == got.argmax(-1)).float().mean()
        return Difference(float(distance.max()), float(distance.mean()), float(same))


def small_logits(
    source: Path, ids: torch.Tensor, device: str, dtype: torch.dtype
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits [B, T, V] of the small model, and its weights."""
    model = LlamaForCausalLM.from_pretrained(source, dtype=dtype).to(device)
    with torch.inference_mode():
        return model(ids.to(device)).logits, model.state_dict()


def _by_layer(
    weights: Iterator[tuple[str, torch.Tensor]], total: int
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Weights of the parts of a model in the order they are made: `model.layers.3`, .."""

    def part(item: tuple[str, torch.Tensor]) -> str:
        names = item[0].split(".")
        return ".".join(names[:3] if names[1] == "layers" else names[:2])

    for name, items in tqdm(groupby(weights, part), total=total, unit="part", disable=None):
        yield name, {n.removeprefix(name + "."): tensor for n, tensor in items}


@torch.inference_mode()
def grafted_logits(
    source: dict[str, Any],
    weights: dict[str, torch.Tensor],
    big: Shape,
    ids: torch.Tensor,
    device: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Logits [B, T, V] of the small model in `source`, grafted into `big`.

    `ids` int64 [B, T]. transformers' own layers, one at a time.
    """
    config = LlamaConfig(**big_config(source, big), attn_implementation="sdpa")
    grafter = Grafter(weights.items(), Shape.of(source), big, device, dtype)
    ids = ids.to(device)
    positions = torch.arange(ids.shape[1], device=device)[None]
    rotary = LlamaRotaryEmbedding(config).to(device)
    with torch.device("meta"):
        layer = LlamaDecoderLayer(config, 0)
        norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
    states = head = torch.empty(0)
    cos_sin: Any = None
    parts = _by_layer(chain(iter(grafter)), big.num_hidden_layers + 3)
    for name, tensors in parts:
        if name == "model.embed_tokens":
            states, head = tensors["weight"][ids], tensors["weight"]
            cos_sin = rotary(states, positions)
        elif name == "lm_head.weight":
            (head,) = tensors.values()
        elif name == "model.norm":
            norm.load_state_dict(tensors, assign=True)
        else:
            layer.load_state_dict(tensors, assign=True)
            output = layer(states, position_embeddings=cos_sin)
            states = output[0] if isinstance(output, tuple) else output
    return torch.nn.functional.linear(norm(states), head)


def prove(
    source: Path, big: Shape, ids: torch.Tensor, device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Difference:  # fmt: skip
    """How far the grafted logits are from the small model's."""
    config = json.loads((source / "config.json").read_text())
    want, weights = small_logits(source, ids, device, dtype)
    big = replace(big, vocab_size=config["vocab_size"])
    return Difference.of(want, grafted_logits(config, weights, big, ids, device, dtype))


def compare_server(source: Path, url: str, ids: torch.Tensor, device: str) -> Difference:
    """Log-probabilities of prompts: the small model in fp32 against a server's."""
    logits, _ = small_logits(source, ids, device, torch.float32)
    logprobs = torch.log_softmax(logits.float(), -1)
    distances, same = [], []
    for row, want in zip(ids.tolist(), logprobs, strict=True):
        body = {
            "input_ids": row, "return_logprob": True, "logprob_start_len": 0,
            "top_logprobs_num": 1, "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        }  # fmt: skip
        request = urllib.request.Request(
            url.rstrip("/") + "/generate", json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=300) as answer:
            info = json.load(answer)["meta_info"]
        for position, (value, token, _) in enumerate(info["input_token_logprobs"]):
            if position:
                distances.append(abs(value - float(want[position - 1, token])))
        for position, top in enumerate(info["input_top_logprobs"]):
            if position and top:
                same.append(float(top[0][1] == int(want[position - 1].argmax())))
    mean = sum(distances) / len(distances)
    return Difference(max(distances), mean, sum(same) / max(1, len(same)))


def prompts(source: Path) -> torch.Tensor:
    """Token ids int64 [PROMPTS, TOKENS] of held-out texts."""
    stretches = Texts(AutoTokenizer.from_pretrained(source), TOKENS).stretches(TOKENS)
    return torch.tensor([next(stretches) for _ in range(PROMPTS)])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.pairs.prove_graft",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--shape", choices=SHAPES, help="the shape to graft into")
    add("--server", metavar="URL", help="compare a running server of a grafted folder")
    add("--source", type=Path, required=True, help="folder of the small model")
    add("--device", default="cpu")
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add("--tolerance", type=float, help="largest distance (1e-3 in float32, 0.5 otherwise)")
    args = parser.parse_args(argv)
    if (args.shape is None) == (args.server is None):
        parser.error("give --shape or --server")
    ids = prompts(args.source)
    exact = args.dtype == "float32" and args.server is None
    tolerance = args.tolerance or (1e-3 if exact else 0.5)
    if args.server is not None:
        found = compare_server(args.source, args.server, ids, args.device)
    else:
        dtype = getattr(torch, args.dtype)
        found = prove(args.source, SHAPES[args.shape], ids, args.device, dtype)
    print(
        f"{args.shape or args.server}: largest difference {found.largest:.2g}, mean "
        f"{found.mean:.2g}, same best token {found.same_best:.4f} of {ids.numel()} positions"
    )
    return 0 if found.largest <= tolerance else 1


if __name__ == "__main__":
    sys.exit(main())
