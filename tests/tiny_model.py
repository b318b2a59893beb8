"""A tiny random Llama with a tokenizer, made in seconds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

VOCAB_SIZE = 512
CONTEXT_LENGTH = 2048
_TEXT = (
    "The quick brown fox jumps over the lazy dog. A draft model writes ahead, and the target "
    "checks what it wrote; def function(argument): return argument + 1\n"
)


def make_tiny_llama(folder: Path, *, seed: int = 0, layers: int = 2, hidden: int = 64) -> Path:
    """Write a random fp32 Llama (head dim 32, 2 query heads a KV head) and return its folder.

    The same arguments give the same weights. Weights are large enough that the greedy choice is
    far from a tie nearly everywhere, and the text does not run into a loop at once.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    head_dim = 32
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=CONTEXT_LENGTH,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
        initializer_range=0.2,
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).float()
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def resize(source: Path, folder: Path, *, vocab_size: int, context_length: int) -> Path:
    """The model in `source` with embeddings for other ids and another context; same tokenizer.

    Fewer ids are the first of them; more are such that none of them is ever the likeliest.
    """
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"vocab_size": vocab_size, "max_position_embeddings": context_length}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    for name in {"model.embed_tokens.weight", "lm_head.weight"} & tensors.keys():
        rows = torch.zeros(vocab_size, tensors[name].shape[1], dtype=tensors[name].dtype)
        kept = min(vocab_size, len(tensors[name]))
        rows[:kept] = tensors[name][:kept]
        tensors[name] = rows
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_tokenizer(folder: Path, size: int = VOCAB_SIZE) -> None:
    """A byte-level BPE tokenizer of exactly `size` entries: specials, 256 bytes, merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken("<s>", special=True), AddedToken("</s>", special=True)]
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = sorted(set(_TEXT.split()))
    tokenizer.train_from_iterator([_TEXT, *words, " ".join(words)], trainer)
    missing = size - tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"<unused{i}>" for i in range(missing)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT_LENGTH,
        "chat_template": (
            "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
            "assistant:"
        ),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
