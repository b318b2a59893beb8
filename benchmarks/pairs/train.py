"""Train the bundled pair: a small target on Python text, and a smaller draft distilled from it.

    python -m benchmarks.pairs.train --out build/pair --minutes 9

The draft learns in two stages: on the text with the target's distributions, then on what the target
itself writes, because acceptance is agreement with the target on the target's own text. Every stage
is bounded by time, and weights are saved after each, so a run that is cut short leaves what it has.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from . import tokenizer as tok
from .card import write_cards
from .data import SMOKE, Data, Plan, Sizes, Stream, prepare
from .evaluate import evaluate, table
from .model import DRAFT, TARGET, Llama, generate, save_model

logger = logging.getLogger(__name__)

CHAT_SHARE = 0.15
RESERVE_SECONDS = 100  # for the last measurements
STAGES = {"target": 0.48, "draft on text": 0.16, "target writes": 0.09, "draft on policy": 0.27}


def language_loss(hidden: Tensor, embedding: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy. hidden: [B, T, H], embedding: [V, H], labels: [B·T]."""
    return F.cross_entropy(F.linear(hidden, embedding).flatten(0, 1).float(), labels)


def distillation_loss(
    hidden: Tensor,
    embedding: Tensor,
    teacher_hidden: Tensor,
    teacher_embedding: Tensor,
    labels: Tensor,
    hard: Tensor,
) -> Tensor:
    """Cross-entropy to the teacher's distribution and, weighted `hard`, to the labels.

    Shapes as in `language_loss`.
    """
    log_q = F.linear(hidden, embedding).flatten(0, 1).float().log_softmax(-1)
    with torch.no_grad():
        p = F.linear(teacher_hidden, teacher_embedding).flatten(0, 1).float().softmax(-1)
    soft = -(p * log_q).sum(-1).mean()
    return (1 - hard) * soft + hard * F.nll_loss(log_q, labels)


class Trainer:
    """AdamW over one model, with the learning rate a function of the time used."""

    def __init__(self, model: Llama, peak: float, batch_tokens: int, compiled: bool) -> None:
        self.model, self.peak, self.batch_tokens = model, peak, batch_tokens
        self.steps = 0
        device = next(model.parameters()).device
        self.device = device.type
        groups = [
            {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=peak, betas=(0.9, 0.95), fused=self.device == "cuda"
        )
        self.language_loss: Callable[..., Tensor] = language_loss
        self.distillation_loss: Callable[..., Tensor] = distillation_loss
        self.compiled = compiled
        if compiled:
            self.language_loss = torch.compile(language_loss, dynamic=False)
            self.distillation_loss = torch.compile(distillation_loss, dynamic=False)

    def loss(self, inputs: Tensor, labels: Tensor, teacher: Llama | None, hard: Tensor) -> Tensor:
        """Loss of one batch, in bfloat16 autocast."""
        weight = self.model.embed_tokens.weight
        with torch.autocast(self.device, torch.bfloat16):
            own = self.model.compiled(inputs) if self.compiled else self.model(inputs)
            if teacher is None:
                return self.language_loss(own, weight, labels)
            with torch.no_grad():
                known = teacher.compiled(inputs) if self.compiled else teacher(inputs)
            return self.distillation_loss(
                own, weight, known, teacher.embed_tokens.weight, labels, hard
            )

    def run(
        self,
        name: str,
        plans: list[Plan],
        seconds: float,
        rate: Callable[[float], float],
        teacher: Llama | None = None,
        hard: float = 0.1,
    ) -> None:
        """Train for some seconds, the plans in turn.

        Args:
            rate: share of the time used → share of the peak learning rate.
        """
        start, smooth, before = time.monotonic(), math.nan, self.steps
        weight = torch.tensor(hard, device=self.device)  # as a number it would compile anew
        bar = tqdm(total=int(seconds), desc=name, unit="s", mininterval=5)
        while (used := time.monotonic() - start) < seconds:
            warm_up = min(1.0, (self.steps + 1) / 150)
            for group in self.optimizer.param_groups:
                group["lr"] = self.peak * warm_up * rate(used / seconds)
            inputs, labels = plans[self.steps % len(plans)].batch(self.batch_tokens)
            loss = self.loss(inputs, labels, teacher, weight)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.steps += 1
            if self.steps % 50 == 0:  # reading the loss waits for the device
                value = loss.item()
                smooth = value if math.isnan(smooth) else 0.8 * smooth + 0.2 * value
                bar.set_postfix(loss=f"{smooth:.3f}", steps=self.steps, refresh=False)
                bar.update(int(time.monotonic() - start) - bar.n)
        bar.close()
        logger.info("%s: %d steps, loss %.3f", name, self.steps - before, smooth)


def held(share: float) -> Callable[[float], float]:
    """Peak rate until `share` of the time, then a straight line to a hundredth."""
    return lambda used: min(1.0, max(0.01, (1 - used) / (1 - share))) if share < 1 else 1.0


def write_policy_text(
    target: Llama, data: Data, sizes: Sizes, seconds: float
) -> tuple[Stream, Stream, int]:
    """Let the target write sequences of the two training lengths; also counts the tokens.

    Three rows of five are greedy, the others sampled at T=1; a fifth of the short prompts ends in a
    chat question. Three batches of short rows come to one of long rows, whose prompts are three
    quarters of the sequence.
    """
    start, device = time.monotonic(), data.text.tokens.device
    # One token more than a training length, since labels are shifted by one.
    short_prompt, long_prompt = sizes.short // 8, sizes.long * 3 // 4
    made: dict[int, list[Tensor]] = {sizes.short: [], sizes.long: []}
    longest, written, turn = 0.0, 0, 0
    while time.monotonic() - start + longest < seconds or turn < 2:
        began = time.monotonic()
        is_long = turn % 4 == 1
        length, prompt, rows = (
            (sizes.long, long_prompt, sizes.long_rows)
            if is_long
            else (sizes.short, short_prompt, sizes.short_rows)
        )
        prompts = data.text.windows(rows, prompt - 1)
        if not is_long:
            chats = rows // 5
            pick = torch.randint(0, data.questions.numel(), (chats, 1), device=device)
            at = data.questions[pick].clamp_min(prompt) + torch.arange(1 - prompt, 1, device=device)
            prompts[:chats] = data.chat.tokens[at].long()
            prompts[:, 0] = tok.BOS
        temperature = (torch.arange(rows, device=device) % 5 >= 3).float()
        new = length + 1 - prompt
        made[length].append(generate(target, prompts, new, temperature).int().flatten())
        written += rows * new
        turn += 1
        longest = max(longest, time.monotonic() - began)
        logger.info("target wrote %d tokens in %.1f s", rows * new, time.monotonic() - began)
    short, long = (
        Stream(tokens, torch.arange(0, tokens.numel(), length + 1, device=device))
        for length, tokens in ((n, torch.cat(parts)) for n, parts in made.items())
    )
    return short, long, written


@torch.no_grad()
def held_out_loss(model: Llama, data: Data, sizes: Sizes) -> tuple[float, list[float]]:
    """Nats a token in float32 on held-out text, overall and at positions of three ranges."""
    length, tokens = sizes.long, data.held_out.tokens
    count = max(1, min(tokens.numel() // (length + 1), sizes.loss_tokens // length))
    windows = tokens[: count * (length + 1)].view(count, length + 1).long()
    windows[:, 0] = tok.BOS
    parts = []
    for w in windows.split(16):
        logits = model.logits(model(w[:, :-1])).transpose(1, 2)
        parts.append(F.cross_entropy(logits, w[:, 1:], reduction="none"))
    losses = torch.cat(parts)
    ranges = ((0, length // 4), (length // 4, length // 2), (length // 2, length))
    return losses.mean().item(), [losses[:, a:b].mean().item() for a, b in ranges]


@torch.no_grad()
def agreement(target: Llama, draft: Llama, data: Data, sizes: Sizes) -> float:
    """Share of the target's greedy tokens on held-out text that are the draft's likeliest too."""
    torch.manual_seed(1)
    prompts = data.held_out.windows(96, 63)
    text = generate(target, prompts, sizes.eval_tokens, torch.zeros(96, device=prompts.device))
    guesses = draft.logits(draft(text[:, :-1])).argmax(-1)
    return (guesses == text[:, 1:])[:, 63:].float().mean().item()


def describe(model: Llama, trainer: Trainer, data: Data, sizes: Sizes) -> dict[str, Any]:
    """A model's part of the report."""
    loss, by_position = held_out_loss(model, data, sizes)
    return {
        "shape": asdict(model.shape),
        "parameters": model.size(),
        "steps": trainer.steps,
        "tokens": trainer.steps * trainer.batch_tokens,
        "loss": loss,
        "loss_by_position": by_position,
    }


def train_pair(
    data: Data, sizes: Sizes, out: Path, device: str, deadline: float, compiled: bool
) -> dict[str, Any]:
    """All stages; returns the report without the evaluation."""
    total = deadline - time.monotonic() - RESERVE_SECONDS
    seconds = {name: max(2.0, total * share) for name, share in STAGES.items()}
    report = dict(data.report)
    mixture = [(data.text, 1 - CHAT_SHARE), (data.chat, CHAT_SHARE)]
    short, long = Plan(sizes.short, mixture), Plan(sizes.long, mixture)

    target = Llama(TARGET).to(device)
    trainer = Trainer(target, 2.5e-3, sizes.batch_tokens, compiled)
    trainer.run("target", [short, short, long], seconds["target"], held(0.3))
    target.eval().requires_grad_(False)
    save_model(target, out / "target")
    report["target"] = describe(target, trainer, data, sizes)
    logger.info("target: held-out loss %.3f", report["target"]["loss"])

    draft = Llama(DRAFT).to(device)
    student = Trainer(draft, 3.5e-3, sizes.batch_tokens, compiled)
    student.run("draft on text", [short, short, long], seconds["draft on text"], held(1), target)
    save_model(draft, out / "draft")
    report["agreement_text_only"] = agreement(target, draft, data, sizes)
    logger.info("agreement on held-out text %.3f", report["agreement_text_only"])

    own_short, own_long, report["policy_tokens"] = write_policy_text(
        target, data, sizes, seconds["target writes"]
    )
    short = Plan(sizes.short, [(own_short, 0.8), (data.text, 0.12), (data.chat, 0.08)])
    long = Plan(sizes.long, [(own_long, 0.8), (data.text, 0.12), (data.chat, 0.08)])
    student.run(
        "draft on policy", [short, short, long], seconds["draft on policy"], held(0.2), target, 0.4
    )
    draft.eval()
    save_model(draft, out / "draft")
    report["draft"] = describe(draft, student, data, sizes)
    report["agreement"] = agreement(target, draft, data, sizes)
    logger.info("agreement on held-out text %.3f", report["agreement"])
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    for question in ("Write a function read_json.", "Write the function add(a, b)."):
        asked = tok.chat_renderer()(
            {"messages": [{"role": "user", "content": question}], "add_generation_prompt": True}
        )
        ids = torch.tensor(
            [data.tokenizer.encode(asked, add_special_tokens=False).ids], device=device
        )
        text = generate(target, ids, 120, torch.zeros(1, device=device))
        logger.info("%s", data.tokenizer.decode(text[0].tolist(), skip_special_tokens=False))
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the two models")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=9.0, help="time for everything")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--eager", action="store_true", help="do not compile the layers")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to try the script")
    args = parser.parse_args()
    deadline = time.monotonic() + 60 * args.minutes
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)9d ms %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("highest")  # the measurements are in float32
    # One compiled layer serves both models, both lengths, with and without gradients.
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.suppress_errors = True

    sizes = SMOKE if args.smoke else Sizes()
    data = prepare(args.out, sizes, args.device, args.seed, args.workers)
    report = train_pair(data, sizes, args.out, args.device, deadline, not args.eager)
    report["evaluation"] = evaluate(
        args.out / "target",
        args.out / "draft",
        args.out / "held_out.jsonl",
        args.device,
        sizes.eval_tokens,
    )
    write_cards(args.out, report)
    print(table(report["evaluation"]))


if __name__ == "__main__":
    main()
