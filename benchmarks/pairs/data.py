"""From the text on this machine to batches of tokens on the training device."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from . import corpus
from . import tokenizer as tok

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sizes:
    """What differs between a real run and a trial on a laptop."""

    files_per_package: int | None = None
    batch_tokens: int = 65_536
    short: int = 512  # sequence lengths of training
    long: int = 2048
    short_rows: int = 8192  # rows the target writes at once
    long_rows: int = 2048
    loss_tokens: int = 500_000
    eval_tokens: int = 256


SMOKE = Sizes(4, 2048, 128, 256, 32, 8, 10_000, 24)


@dataclass(frozen=True)
class Stream:
    """Tokens to cut windows from, at any place or at `starts` only."""

    tokens: Tensor  # [n] int32
    starts: Tensor | None = None  # [m] int64

    def windows(self, rows: int, length: int) -> Tensor:
        """[rows, length + 1] int64, each led by <|bos|>."""
        last = self.tokens.numel() - length - 1
        if self.starts is None:
            first = torch.randint(0, last, (rows, 1), device=self.tokens.device)
        else:
            pick = torch.randint(0, self.starts.numel(), (rows, 1), device=self.tokens.device)
            first = self.starts[pick].clamp_max(last)
        window = self.tokens[first + torch.arange(length + 1, device=first.device)].long()
        window[:, 0] = tok.BOS
        return window


@dataclass(frozen=True)
class Plan:
    """One kind of training step: a sequence length and the rows' sources with their weights."""

    length: int
    streams: list[tuple[Stream, float]]

    def batch(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels [tokens / length, length]."""
        rows = tokens // self.length
        weights = np.array([w for _, w in self.streams])
        borders = np.rint(np.cumsum(weights / weights.sum()) * rows).astype(int)
        counts = np.diff(borders, prepend=0)
        parts = [
            s.windows(int(n), self.length)
            for (s, _), n in zip(self.streams, counts, strict=True)
            if n
        ]
        window = torch.cat(parts)
        return window[:, :-1].contiguous(), window[:, 1:].reshape(-1)


@dataclass(frozen=True)
class Data:
    """Everything made from text, on the training device."""

    tokenizer: Tokenizer
    text: Stream
    chat: Stream
    held_out: Stream
    questions: Tensor  # positions of <|assistant|> in the chat stream, where an answer begins
    report: dict[str, Any]


def join(pieces: list[tok.Ids], device: str) -> Tensor:
    """One stream of all pieces."""
    return torch.from_numpy(np.concatenate(pieces)).to(device)


def prepare(out: Path, sizes: Sizes, device: str, seed: int, workers: int) -> Data:
    """Read the text, make the tokenizer, encode everything, write what needs no model."""
    packages = corpus.load_packages(sizes.files_per_package, workers)
    (out / "target").mkdir(parents=True, exist_ok=True)
    (out / "draft").mkdir(parents=True, exist_ok=True)
    listing = json.dumps(corpus.sources(packages), indent=1)
    (out / "target" / "sources.json").write_text(listing + "\n")
    rng = np.random.default_rng(seed)
    texts = [t for p in packages if not p.held_out for t in p.texts]
    rng.shuffle(texts)
    logger.info(
        "%d packages, %d texts, %.1f MB", len(packages), len(texts), sum(map(len, texts)) / 1e6
    )

    # Processes fork before the tokenizer and the device start threads. Half of the files give more
    # conversations than the mixture can use.
    talks = corpus.conversations_parallel(texts[: max(1, len(texts) // 2)], seed, workers)
    logger.info("%d conversations", len(talks))
    mean_size = sum(map(len, texts)) / len(texts)
    trained = tok.train_tokenizer(texts[: 1 + int(30e6 / mean_size)])
    plain, served = tok.plain_encoder(trained), tok.chat_tokenizer(trained)
    for role in ("target", "draft"):
        tok.save_tokenizer(served, out / role)
    logger.info("tokenizer of %d tokens", served.get_vocab_size())

    def cut(text: str, count: int) -> str:
        return str(plain.decode(plain.encode(text[: count * 12]).ids[:count]))

    prompts = corpus.held_out_prompts(packages, cut)
    lines = [json.dumps(p, ensure_ascii=False) for p in prompts]
    (out / "held_out.jsonl").write_text("\n".join(lines) + "\n")

    first, last = np.array([tok.BOS], dtype=np.int32), np.array([tok.EOS], dtype=np.int32)

    def documents(of: list[str], name: str) -> Tensor:
        return join([x for ids in tok.encode(plain, of, name) for x in (first, ids, last)], device)

    text = documents(texts, "text")
    held_out = documents([t for p in packages if p.held_out for t in p.texts], "held-out")
    render = tok.chat_renderer()
    rendered = [render(talk) for talk in talks]
    rng.shuffle(rendered)
    pieces = list(tok.encode(served, rendered, "chat"))
    chat = join([x for ids in pieces for x in (ids, last)], device)
    starts = (chat == tok.BOS).nonzero().squeeze(1)
    questions = (chat == tok.ASSISTANT).nonzero().squeeze(1)
    logger.info(
        "tokens: text %d, chat %d, held out %d", text.numel(), chat.numel(), held_out.numel()
    )
    report = {
        "text_tokens": text.numel(),
        "chat_tokens": chat.numel(),
        "held_out_tokens": held_out.numel(),
    }
    return Data(served, Stream(text), Stream(chat, starts), Stream(held_out), questions, report)
