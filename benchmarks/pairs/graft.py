"""Graft a small model into a large shape: the function of the small one, the cost of the large one.

    python -m benchmarks.pairs.graft --shape 8b --source sgl_ssd/models/target --out DIR

DIR gets a config of the large shape and the small checkpoint, so nothing large is on disk; the
class `benchmarks.grafted_models.llama.GraftedLlamaForCausalLM` makes the large weights while a
server loads them. Start servers with `SGLANG_EXTERNAL_MODEL_PACKAGE=benchmarks.grafted_models`.

How it stays the same function. Of D residual channels the first `copies * d` carry the small
model's d channels, `copies` times over; all others stay zero, because the rows of `o_proj` and
`down_proj` that would write there are zero. The mean square is then `copies * d / D` times the
small one, which the norms undo: epsilon is scaled by that, the weights by its root. `copies` is
chosen such that the root is a power of two, exact in every float format. Norm weights are zero
behind the first d channels, so matrices read one copy only, and what they hold for all other
channels, heads, neurons and layers is random: it is computed, and then multiplied by the zeros of
`o_proj` or `down_proj`. Padded vocabulary rows are random too; the model class masks their logits.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ARCHITECTURE = "GraftedLlamaForCausalLM"
RANDOM_SCALE = 0.02
COPIED_FILES = (
    "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    "generation_config.json",
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama-like model, under the names of its config."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool

    @staticmethod
    def of(config: Any) -> Shape:
        """The shape in a config, a dict or an object with attributes."""
        values = config if isinstance(config, dict) else vars(config)
        return Shape(**{name: values[name] for name in Shape.__dataclass_fields__})


SHAPES = {
    "0.6b": Shape(28, 1024, 16, 8, 128, 3072, 151936, True),
    "1b": Shape(16, 2048, 32, 8, 128, 8192, 128256, True),
    "8b": Shape(32, 4096, 32, 8, 128, 14336, 128256, False),
    "32b": Shape(64, 5120, 64, 8, 128, 25600, 151936, False),
    "70b": Shape(80, 8192, 64, 8, 128, 28672, 128256, False),
}


def copies_of(small: Shape, big: Shape) -> int:
    """How often the small residual stream is repeated: D / (copies * d) is a power of four."""
    ratio = big.hidden_size // small.hidden_size
    if big.hidden_size % small.hidden_size == 0:
        for copies in range(1, ratio + 1):
            power, rest = divmod(ratio, copies)
            if rest == 0 and math.log(power, 4).is_integer():
                return copies
    raise ValueError(
        f"hidden size {small.hidden_size} does not fit into {big.hidden_size}: the latter must be "
        "a multiple"
    )


def check_fit(small: Shape, big: Shape) -> None:
    """Raise `ValueError` where the small shape has no room in the big one."""
    copies_of(small, big)
    if small.head_dim != big.head_dim:
        raise ValueError(f"head_dim {big.head_dim}: must be the small model's {small.head_dim}")
    for name in ("num_hidden_layers", "intermediate_size", "vocab_size"):
        if getattr(big, name) < getattr(small, name):
            raise ValueError(f"{name} {getattr(big, name)} is below the small model's")
    if max(query_heads(small, big)) >= big.num_attention_heads:
        raise ValueError("too few heads for those of the small model")


def _groups(shape: Shape) -> int:
    return shape.num_attention_heads // shape.num_key_value_heads


def query_heads(small: Shape, big: Shape) -> list[int]:
    """The big query head of each small one; both attend to the same keys and values.

    Where a small KV head serves more query heads than a big one can, it is repeated.
    """
    wide, repeat = _groups(big), math.ceil(_groups(small) / _groups(big))
    heads = []
    for head in range(small.num_attention_heads):
        kv_head, rank = divmod(head, _groups(small))
        heads.append((kv_head * repeat + rank // wide) * wide + rank % wide)
    return heads


def kv_sources(small: Shape, big: Shape) -> list[int]:
    """The small KV head of each big one that is used, in order."""
    repeat = math.ceil(_groups(small) / _groups(big))
    return [head for head in range(small.num_key_value_heads) for _ in range(repeat)]


class Grafter:
    """Makes the large weights one by one, under the names of a Llama checkpoint.

    `weights` are the small model's. Everything is made on `device`, in `dtype`.
    """

    def __init__(
        self,
        weights: Iterable[tuple[str, Tensor]],
        small: Shape,
        big: Shape,
        device: torch.device | str,
        dtype: torch.dtype,
        seed: int = 0,
    ) -> None:
        check_fit(small, big)
        self._weights = {name: tensor.to(device, dtype) for name, tensor in weights}
        self._small, self._big = small, big
        self._copies = copies_of(small, big)
        self._device, self._dtype = torch.device(device), dtype
        self._generator = torch.Generator(self._device).manual_seed(seed)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        small, big = self._small, self._big
        embedding = self._weights["model.embed_tokens.weight"]
        yield "model.embed_tokens.weight", self._embedding(embedding)
        if not big.tie_word_embeddings:
            head = embedding if small.tie_word_embeddings else self._weights["lm_head.weight"]
            yield "lm_head.weight", self._reader(big.vocab_size, head)
        for layer in range(big.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            source = prefix if layer < small.num_hidden_layers else None
            for name, tensor in self._layer(source):
                yield prefix + name, tensor
        yield "model.norm.weight", self._norm(self._weights["model.norm.weight"])

    def _layer(self, source: str | None) -> Iterator[tuple[str, Tensor]]:
        """One layer; without `source` (a prefix of names) one that adds zero."""
        small, big, dim = self._small, self._big, self._big.head_dim

        def of(name: str) -> Tensor | None:
            return None if source is None else self._weights[f"{source}{name}.weight"]

        for norm in ("input_layernorm", "post_attention_layernorm"):
            weight = of(norm)
            ones = torch.ones(small.hidden_size, device=self._device, dtype=self._dtype)
            yield f"{norm}.weight", self._norm(ones if weight is None else weight)

        queries, kv_heads = query_heads(small, big), kv_sources(small, big)
        sizes = big.num_attention_heads * dim, big.num_key_value_heads * dim
        query_at = _head_index(queries, dim, self._device)
        kv_at = _head_index(range(len(kv_heads)), dim, self._device)
        kv_from = _head_index(kv_heads, dim, self._device)
        yield "self_attn.q_proj.weight", self._reader(sizes[0], of("self_attn.q_proj"), query_at)
        for name in ("self_attn.k_proj", "self_attn.v_proj"):
            weight = of(name)
            weight = None if weight is None else weight[kv_from]
            yield f"{name}.weight", self._reader(sizes[1], weight, kv_at)
        yield "self_attn.o_proj.weight", self._writer(sizes[0], of("self_attn.o_proj"), query_at)
        for name in ("mlp.gate_proj", "mlp.up_proj"):
            yield f"{name}.weight", self._reader(big.intermediate_size, of(name))
        neurons = torch.arange(small.intermediate_size, device=self._device)
        down = self._writer(big.intermediate_size, of("mlp.down_proj"), neurons)
        yield "mlp.down_proj.weight", down

    def _random(self, rows: int, columns: int) -> Tensor:
        values = torch.empty(rows, columns, device=self._device, dtype=self._dtype)
        return values.normal_(0, RANDOM_SCALE, generator=self._generator)

    def _embedding(self, weight: Tensor) -> Tensor:
        made = self._random(self._big.vocab_size, self._big.hidden_size)
        made[: len(weight)] = 0
        made[: len(weight), : self._copies * self._small.hidden_size] = weight.repeat(
            1, self._copies
        )
        return made

    def _norm(self, weight: Tensor) -> Tensor:
        d = self._small.hidden_size
        made = torch.zeros(self._big.hidden_size, device=self._device, dtype=self._dtype)
        made[:d] = weight * math.sqrt(self._copies * d / self._big.hidden_size)
        return made

    def _reader(self, rows: int, weight: Tensor | None, at: Tensor | None = None) -> Tensor:
        """[rows, D] that reads the residual stream: `weight` in rows `at`, by default the first."""
        made = self._random(rows, self._big.hidden_size)
        if weight is not None:
            if at is None:
                at = torch.arange(len(weight), device=self._device)
            made[at, : self._small.hidden_size] = weight
        return made

    def _writer(self, columns: int, weight: Tensor | None, at: Tensor) -> Tensor:
        """[D, columns] that writes to the residual stream: zero but for `weight` in columns `at`"""
        made = torch.zeros(self._big.hidden_size, columns, device=self._device, dtype=self._dtype)
        if weight is not None:
            d = self._small.hidden_size
            for copy in range(self._copies):
                made[copy * d : (copy + 1) * d, at] = weight
        return made


def _head_index(heads: Iterable[int], dim: int, device: torch.device) -> Tensor:
    """Indices of the channels of `heads`, in order."""
    first = torch.tensor(list(heads), device=device)[:, None] * dim
    return (first + torch.arange(dim, device=device)).flatten()


def big_config(source: dict[str, Any], big: Shape) -> dict[str, Any]:
    """The config of the small model in `source`, grafted into `big`."""
    small = Shape.of(source)
    check_fit(small, big)
    share = copies_of(small, big) * small.hidden_size / big.hidden_size
    return {
        **source,
        **asdict(big),
        "architectures": [ARCHITECTURE],
        "rms_norm_eps": source["rms_norm_eps"] * share,
        "graft": asdict(small),
    }


def write(source: Path, big: Shape, out: Path) -> None:
    """Write a model folder that grafts the model in `source` when it is loaded."""
    config = json.loads((source / "config.json").read_text())
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(big_config(config, big), indent=2, sort_keys=True)
    (out / "config.json").write_text(text + "\n")
    for name in COPIED_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, out / name)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.pairs.graft", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--shape", required=True, choices=SHAPES, help="the shape to graft into")
    parser.add_argument("--source", required=True, type=Path, help="folder of the small model")
    parser.add_argument("--out", required=True, type=Path, help="folder to write")
    parser.add_argument("--vocab-size", type=int, help="rows of the embedding (the shape's)")
    args = parser.parse_args(argv)
    shape = SHAPES[args.shape]
    if args.vocab_size is not None:
        shape = Shape(**{**asdict(shape), "vocab_size": args.vocab_size})
    write(args.source, shape, args.out)
    print(f"{args.out}: {args.source} grafted into the {args.shape} shape")


if __name__ == "__main__":
    main()
