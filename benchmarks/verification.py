"""Which way of verifying gives more tokens a round: coupled, or rejection with Saguaro sampling.

    python -m benchmarks.verification --out docs/verification

Replays rounds over texts of the target, which both ways of verifying write with the same
distribution, so both are measured on the same texts. What the draft does follows from the text:

* coupled: a draft is kept if it is the text's token (see `pairs.evaluate`);
* rejection: given that the text's token is y, a draft was drawn and kept with the chance
  min(1, q'(y)/p(y)), and if not, the draft was some x from norm(max(q' - p, 0)), whatever y is.

A round's outcome is a hit if its bonus token is among the F likeliest guesses at that depth, the
chain's own token left out after a rejection. After a miss the next chain is drafted anew (jit), or
is an n-gram's continuation or nothing (fast): deterministic, kept if it is the text's token.

A round after a miss that is drafted just in time waits for K draft steps. `speed` counts them: it
is tokens per verify, where a draft step takes `STEP_COST` of a verify.
"""

from __future__ import annotations

import argparse
import json
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoTokenizer

from sgl_ssd.models import DRAFT_PATH, TARGET_PATH
from sgl_ssd.ngram import ngram_continuation
from sgl_ssd.rejection import ProposalRows, propose
from sgl_ssd.sampling import TOP_K_ALL, RowSampling

from .pairs.evaluate import (
    HELD_OUT_FILE,
    load_model,
    load_prompts,
    pad_left,
    scores,
    target_text,
)

TEMPERATURES = (0.3, 0.7, 1.0, 1.5)
FAN_OUTS = (1, 3, 6)
TOP_M = 64
STEP_COST = 0.08  # a draft of 0.6B beside a target of 32B, measured on an H200
MODES = (("coupled", 1.0), ("rejection", 1.0), ("rejection", 0.5))
CHUNK = 8  # rows at a time: logits of every position are large


@dataclass
class Text:
    """What is known of each position of one text of G tokens; all lists have G entries.

    `kept`: whether a draft there is kept. `rank`: of the text's token among the guesses; `below`:
    the same with the chain's own token left out, if a draft there is not kept.
    """

    prompt: list[int]
    tokens: list[int]
    kept: list[bool]
    rank: list[int]
    below: list[int]
    guesses: Tensor  # [G, V], what ranks are taken from


@torch.no_grad()
def logits_of(model: Any, prompts: Tensor, mask: Tensor, text: Tensor) -> Tensor:
    """Logits [N, G, V] that each token of text [N, G] was, or would be, drawn from."""
    mask = torch.cat((mask, torch.ones_like(text)), dim=1)
    return torch.cat(
        [
            model(
                input_ids=torch.cat((prompts[part], text[part]), dim=1),
                attention_mask=mask[part],
                position_ids=(mask[part].cumsum(-1) - 1).clamp_min(0),
                logits_to_keep=text.shape[1] + 1,
            ).logits[:, :-1]
            for part in (slice(i, i + CHUNK) for i in range(0, len(text), CHUNK))
        ]
    )


def ranks(guesses: Tensor, tokens: Tensor) -> Tensor:
    """How many scores in guesses [..., V] are greater than that of tokens [...]."""
    return (guesses > guesses.gather(-1, tokens[..., None])).sum(-1)


def coupled_texts(
    prompts: list[list[int]], text: Tensor, draft_logits: Tensor, t: float, seed: int
) -> list[Text]:
    """Drafts drawn with the noise that `text` was drawn with."""
    columns = range(text.shape[1])
    guesses = torch.stack(
        [scores(draft_logits[:, n].double(), t, seed, n).float() for n in columns], dim=1
    )
    rank = ranks(guesses, text)
    # A draft that is not the text's token has the best score.
    return [
        Text(prompt, row.tolist(), (r == 0).tolist(), r.tolist(), (r - 1).tolist(), g)
        for prompt, row, r, g in zip(prompts, text, rank, guesses, strict=True)
    ]


def rejection_texts(
    prompts: list[list[int]], text: Tensor, target_logits: Tensor, draft_logits: Tensor, t: float,
    c: float, fan_out: int, generator: torch.Generator,
) -> list[Text]:  # fmt: skip
    """Drafts sampled from proposals, given the text."""
    count = text.shape[1]
    rows = RowSampling.of(
        [t] * count, [TOP_K_ALL] * count, [1.0] * count, [0.0] * count, [0] * count, text.device
    )
    full = torch.ones(count, device=text.device)
    how = ProposalRows((full * fan_out).long(), full * c, (full * TOP_M).long(), fan_out, TOP_M)
    texts = []
    for prompt, row, z, zq in zip(prompts, text, target_logits, draft_logits, strict=True):
        p = (z.float() / t).softmax(-1)
        guesses = zq.float() / t
        ids, probs = propose(guesses, rows, how)
        q_own = (probs * (ids == row[:, None])).sum(1)
        p_own = p.gather(1, row[:, None])[:, 0]
        kept = torch.rand(count, generator=generator).to(row.device) * p_own < q_own
        surplus = (probs - p.gather(1, ids)).clamp_min(0) + 1e-30
        place = torch.multinomial(surplus.cpu(), 1, generator=generator).to(row.device)
        own, rank = ids.gather(1, place)[:, 0], ranks(guesses, row)
        below = rank - (ranks(guesses, own) < rank).long()
        texts.append(
            Text(prompt, row.tolist(), kept.tolist(), rank.tolist(), below.tolist(), guesses)
        )
    return texts


@dataclass
class Counts:
    """Of one setting."""

    rounds: int = 0
    tokens: int = 0
    hits: int = 0

    def rates(self, steps: int, backup: str) -> dict[str, float]:
        """Tokens a round, hit rate, speed."""
        per_round, hit = self.tokens / self.rounds, self.hits / self.rounds
        wait = (1 - hit) * steps * STEP_COST if backup == "jit" else 0.0
        return {
            "tokens_per_round": round(per_round, 3),
            "hit": round(hit, 3),
            "speed": round(per_round / (1 + wait), 3),
        }

    def add(self, text: Text, steps: int, fan_out: int, fast: bool) -> None:
        """Replay one text. Its last round, which may be cut short, is left out."""
        at, hit, history = 0, True, array("q", text.prompt)
        while True:
            given = ngram_continuation(history, steps) if fast and not hit else None
            length = steps if given is None else len(given)
            if at + length >= len(text.tokens):
                return
            depth = 0
            while depth < length and (
                text.kept[at + depth] if given is None else given[depth] == text.tokens[at + depth]
            ):
                depth += 1
            bonus = at + depth
            rank = text.rank[bonus]
            if depth < length:
                if given is None:
                    rank = text.below[bonus]
                else:
                    own = ranks(text.guesses[bonus], torch.tensor(given[depth]))
                    rank -= int(own < rank)
            hit = rank < fan_out
            self.rounds += 1
            self.tokens += depth + 1
            self.hits += hit
            history.extend(text.tokens[at : bonus + 1])
            at = bonus + 1


def measure(
    target: Any, draft: Any, prompts: list[list[int]], new_tokens: int, steps: int
) -> list[dict[str, Any]]:
    """Every setting."""
    ids, mask = pad_left(prompts, target.generation_config.pad_token_id, str(target.device))
    generator = torch.Generator().manual_seed(0)
    results = []
    for t in tqdm(TEMPERATURES, desc="temperatures"):
        text = target_text(target, ids, mask, new_tokens, t, seed=0)
        target_logits, draft_logits = (logits_of(m, ids, mask, text) for m in (target, draft))
        for mode, c in MODES:
            for fan_out in FAN_OUTS:
                if mode == "coupled":
                    if fan_out == FAN_OUTS[0]:  # the fan-out changes nothing about the drafts
                        texts = coupled_texts(prompts, text, draft_logits, t, seed=0)
                else:
                    texts = rejection_texts(
                        prompts, text, target_logits, draft_logits, t, c, fan_out, generator
                    )
                for backup in ("fast", "jit"):
                    counts = Counts()
                    for one in texts:
                        counts.add(one, steps, fan_out, backup == "fast")
                    rates = counts.rates(steps, backup)
                    key = {"T": t, "mode": mode, "C": c, "backup": backup, "F": fan_out}
                    results.append({**key, **rates, "rounds": counts.rounds})
    return results


def find(
    results: list[dict[str, Any]], t: float, mode: str, c: float, backup: str, f: int
) -> dict[str, Any]:
    """The result of one setting."""
    keys = {"T": t, "mode": mode, "C": c, "backup": backup, "F": f}
    return next(r for r in results if keys.items() <= r.items())


def title(mode: str, c: float) -> str:
    """A mode's name."""
    return mode if mode == "coupled" else f"{mode} C={c:g}"


def table(results: list[dict[str, Any]], backup: str) -> str:
    """Markdown: tokens a round, hit rate and, with jit, speed; the best of a setting in bold."""
    lines = [
        "| T | F | " + " | ".join(title(mode, c) for mode, c in MODES) + " |",
        "|---|---|" + "---|" * len(MODES),
    ]
    for t in TEMPERATURES:
        for f in FAN_OUTS:
            found = [find(results, t, mode, c, backup, f) for mode, c in MODES]
            best = max(r["speed"] for r in found)
            cells = [f"{t:g}", str(f)]
            for r in found:
                speed = f"**{r['speed']:.2f}**" if r["speed"] == best else f"{r['speed']:.2f}"
                first = f"{r['tokens_per_round']:.2f} / " if backup == "jit" else ""
                cells.append(f"{first}{r['hit']:.2f} / {speed}")
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Speed over T, one panel for each backup and F."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(FAN_OUTS), figsize=(10, 6), sharex=True, sharey="row")
    for line, backup in zip(axes, ("fast", "jit"), strict=True):
        for axis, f in zip(line, FAN_OUTS, strict=True):
            for mode, c in MODES:
                values = [find(results, t, mode, c, backup, f)["speed"] for t in TEMPERATURES]
                axis.plot(TEMPERATURES, values, marker="o", label=title(mode, c))
            axis.set_title(f"{backup}, F={f}")
            axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("tokens a round")
    axes[1][0].set_ylabel("tokens per verify, waits counted")
    for axis in axes[1]:
        axis.set_xlabel("temperature")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", type=Path, default=TARGET_PATH, help="folder of the target")
    parser.add_argument("--draft", type=Path, default=DRAFT_PATH, help="folder of the draft")
    parser.add_argument("--prompts", type=Path, default=HELD_OUT_FILE, help="a .jsonl of prompts")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens after each prompt")
    parser.add_argument("--num-steps", type=int, default=4, help="K")
    parser.add_argument("--out", type=Path, help="write PATH.json and, with matplotlib, PATH.png")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    prompts = load_prompts(args.prompts, tokenizer)["text"]
    target, draft = load_model(args.target, args.device), load_model(args.draft, args.device)
    results = measure(target, draft, prompts, args.new_tokens, args.num_steps)
    rounds = [r["rounds"] for r in results]
    print(
        f"{len(prompts)} prompts, {args.new_tokens} tokens each, K = {args.num_steps}, "
        f"{min(rounds)} to {max(rounds)} rounds a cell\n"
    )
    for backup in ("fast", "jit"):
        print(f"{backup}\n\n{table(results, backup)}\n")
    if args.out:
        args.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
        plot(results, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
