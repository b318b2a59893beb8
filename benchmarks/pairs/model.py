"""A small Llama in plain torch, with the parameter names of transformers' `LlamaForCausalLM`.

Training needs little of a model library: a forward that compiles, and a decode loop over a
preallocated cache for thousands of rows at once. `save_model` writes a folder that transformers and
SGLang load.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from .tokenizer import BOS, CONTEXT_LENGTH, END, EOS, VOCAB_SIZE

HEAD_DIM = (
    128  # the sizes that attention kernels are built for include 128, but not every smaller one
)
ROPE_THETA = 10000.0
NORM_EPS = 1e-5
PREFILL_TOKENS = 131_072  # at once, over all rows of a slice


@dataclass(frozen=True)
class Shape:
    """The sizes of a model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int


TARGET = Shape(hidden=256, layers=6, heads=2, kv_heads=1, intermediate=704)
DRAFT = Shape(hidden=128, layers=2, heads=1, kv_heads=1, intermediate=416)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding. x: [B, H, T, D]; cos, sin: [T, D] float32."""
    low, high = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-high, low), dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention, over the given tokens alone or over a cache of past ones."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads = shape.heads, shape.kv_heads
        self.q_proj = nn.Linear(shape.hidden, shape.heads * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(shape.heads * HEAD_DIM, shape.hidden, bias=False)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: Tensor | None = None, start: int = 0
    ) -> Tensor:
        """x: [B, T, hidden]; cache: [2, B, kv_heads, L, D], written at start..start+T."""
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.heads, HEAD_DIM).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, self.kv_heads, HEAD_DIM).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.kv_heads, HEAD_DIM).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            cache[0, :, :, start : start + length] = k
            cache[1, :, :, start : start + length] = v
        if cache is not None and start > 0:
            # One new token: the heads of a group become query rows, so that no key is repeated.
            k, v = cache[0, :, :, : start + length], cache[1, :, :, : start + length]
            q = q.reshape(batch, self.kv_heads, self.heads // self.kv_heads, HEAD_DIM)
            y = F.scaled_dot_product_attention(q, k, v)
            y = y.reshape(batch, 1, self.heads * HEAD_DIM)
        else:
            k = k.repeat_interleave(self.heads // self.kv_heads, dim=1)
            v = v.repeat_interleave(self.heads // self.kv_heads, dim=1)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            y = y.transpose(1, 2).reshape(batch, length, self.heads * HEAD_DIM)
        out: Tensor = self.o_proj(y)
        return out


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=NORM_EPS)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=NORM_EPS)
        self.mlp = MLP(shape)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: Tensor | None = None, start: int = 0
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache, start)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Llama(nn.Module):
    """Decoder with tied embeddings."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(VOCAB_SIZE, shape.hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=NORM_EPS)
        self.compiled_layers: tuple[Callable[..., Tensor], ...] = ()  # a tuple: no submodules
        frequencies = ROPE_THETA ** (-torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
        angles = torch.outer(torch.arange(CONTEXT_LENGTH).float(), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                deep = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = 0.02 / (2 * shape.layers) ** 0.5 if deep else 0.02
                nn.init.normal_(parameter, std=std)

    def forward(self, ids: Tensor, cache: Tensor | None = None, start: int = 0) -> Tensor:
        """Last hidden states [B, T, hidden] of ids [B, T].

        With a cache [layers, 2, B, kv_heads, L, D] the tokens stand at positions start and on;
        either start is 0 or T is 1.
        """
        x: Tensor = self.embed_tokens(ids)
        cos, sin = self.cos[start : start + ids.shape[1]], self.sin[start : start + ids.shape[1]]
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, None if cache is None else cache[i], start)
        out: Tensor = self.norm(x)
        return out

    def compiled(self, ids: Tensor) -> Tensor:
        """`forward` without a cache through layers compiled for this shape of ids.

        All layers share one graph a shape, so compiling takes seconds.
        """
        if not self.compiled_layers:
            self.compiled_layers = tuple(torch.compile(x, dynamic=False) for x in self.layers)
        x: Tensor = self.embed_tokens(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.compiled_layers:
            x = layer(x, cos, sin)
        out: Tensor = self.norm(x)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] → [..., vocabulary]."""
        return F.linear(hidden, self.embed_tokens.weight)

    def size(self) -> int:
        """Number of parameters."""
        return sum(p.numel() for p in self.parameters())


@torch.no_grad()
def generate(model: Llama, prompts: Tensor, new_tokens: int, temperature: Tensor) -> Tensor:
    """Continue prompts [N, P] to [N, P + new_tokens] in bfloat16.

    Args:
        temperature: [N]; 0 takes the likeliest token. Rows go on past <|eos|> into a next
            document, as in training.
    """
    rows, length = prompts.shape
    device, shape = prompts.device, model.shape
    size = (shape.layers, 2, rows, shape.kv_heads, length + new_tokens, HEAD_DIM)
    cache = torch.empty(size, dtype=torch.bfloat16, device=device)
    out = torch.empty(rows, length + new_tokens, dtype=torch.int64, device=device)
    out[:, :length] = prompts
    with torch.autocast(device.type, torch.bfloat16):
        # Prefill in slices of rows: its activations are larger than the cache.
        step = max(1, PREFILL_TOKENS // length)
        slices = [slice(i, i + step) for i in range(0, rows, step)]
        hidden = torch.cat([model(out[s, :length], cache[:, :, s])[:, -1] for s in slices])
        for n in range(length, length + new_tokens):
            scores = model.logits(hidden).float()
            noise = -torch.log(-torch.log(torch.rand_like(scores).clamp(1e-9, 1 - 1e-7)))
            out[:, n] = (scores + temperature[:, None] * noise).argmax(-1)
            hidden = model(out[:, n : n + 1], cache, n)[:, -1]
    return out


def save_model(model: Llama, folder: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors (bfloat16)."""
    shape = model.shape
    config = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": BOS,
        "dtype": "bfloat16",
        "eos_token_id": EOS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": CONTEXT_LENGTH,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": NORM_EPS,
        "rope_scaling": None,
        "rope_theta": ROPE_THETA,
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": VOCAB_SIZE,
    }
    generation = {"bos_token_id": BOS, "eos_token_id": [EOS, END], "pad_token_id": EOS}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    weights = {
        f"model.{name}": parameter.detach().to("cpu", torch.bfloat16).contiguous()
        for name, parameter in model.named_parameters()
    }
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
