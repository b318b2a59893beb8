"""Write the model cards from the report of a training run.

python -m benchmarks.pairs.card sgl_ssd/models
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from .evaluate import table

CARD = """---
license: apache-2.0
language: [en]
library_name: transformers
pipeline_tag: text-generation
tags: [python, speculative-decoding, tiny]
---
# sgl_ssd bundled {role}

{about}
It writes text that looks like Python and is of no use as a programmer: it exists so that a
speculative server has a real pair of models, with real acceptance, on any machine.

| | target | draft |
|---|---|---|
| parameters | {target[parameters]:,} | {draft[parameters]:,} |
| layers × hidden (heads / KV heads × 128) | {target_shape} | {draft_shape} |
| training steps | {target[steps]:,} | {draft[steps]:,} |
| training tokens seen | {target[tokens]:,} | {draft[tokens]:,} |
| held-out loss, nats a token | {target[loss]:.3f} | {draft[loss]:.3f} |
| the same at positions 0-511 / 512-1023 / 1024-2047 | {target_by} | {draft_by} |

Both: `LlamaForCausalLM`, tied embeddings, bfloat16, one byte-level BPE tokenizer of 4096 tokens,
trained on sequences of up to 2048 tokens (4096 positions). Texts start with `<|bos|>`; `<|eos|>`
ends a document, `<|end|>` ends a turn.

## Text
Python sources of the standard library and of installed packages under permissive licences (MIT,
BSD, Apache, PSF, ISC), vendored copies left out: {packages} packages, {files:,} files, {bytes:,}
bytes, {text_tokens:,} tokens, and {chat_tokens:,} tokens of conversations cut from the same files
("Write a function NAME ..." and its source; 15 % of the mixture). `{sources}` lists every package
with its version and licence. Whole packages are held out ({held_packages} packages,
{held_bytes:,} bytes), none of which repeats much of another; {left_out} left out of both parts.

## Training
One H200, about nine minutes, by `benchmarks/pairs/train.py`. The target is trained on text; the
draft first on the same text with the target's distributions, then on {policy_tokens:,} tokens that
the target wrote itself, greedily and at temperature 1, because those are the texts on which it has
to agree with the target. The second stage raised the share of greedy tokens on which the two agree
from {agreement_text_only:.3f} to {agreement:.3f}.

## Acceptance of the pair
Speculative rounds replayed in float32 on 100 held-out prompts, 256 new tokens each
(`benchmarks/pairs/evaluate.py`, prompts in `benchmarks/pairs/held_out.jsonl`): 64 short texts,
8 texts of 1500 tokens, 28 conversations. T=1 is coupled sampling: both models take the likeliest
token under shared Gumbel noise. "hit" is the share of round outcomes predicted by a uniform fan-out
F. Like every model of this size the target repeats itself under greedy decoding: {loop_share} of
the greedy tokens stand in a loop that a text ends in, where drafting is easy. The rows "before
loops" leave those out. Greedy texts are easier than sampled ones even there; the rows "same
contexts" hold the text fixed: rounds from every position of the texts of T=1, with the tokens that
are greedy there (T=0) and those drawn (T=1).

{acceptance}
"""

ABOUT = {
    "target": "The larger model of the pair: a small language model of Python source text.",
    "draft": "The smaller model of the pair: it drafts for the target beside it.",
}


def shape(model: dict[str, Any]) -> str:
    """Sizes in words of the card's table."""
    return "{layers} × {hidden} ({heads} / {kv_heads})".format(**model["shape"])


def by_position(model: dict[str, Any]) -> str:
    return " / ".join(f"{loss:.3f}" for loss in model["loss_by_position"])


def write_cards(folder: Path, report: dict[str, Any]) -> None:
    """Write README.md of both models, and report.json beside their folders."""
    sources = json.loads((folder / "target" / "sources.json").read_text())
    trained = [s for s in sources if s["split"] == "train"]
    held = [s for s in sources if s["split"] == "held out"]
    left_out = [s["name"] for s in sources if s["split"] == "left out"]
    loops = sorted(r["loop_share"] for r in report["evaluation"].values() if "loop_share" in r)
    for role in ("target", "draft"):
        text = CARD.format(
            role=role,
            about=ABOUT[role],
            target=report["target"],
            draft=report["draft"],
            target_shape=shape(report["target"]),
            draft_shape=shape(report["draft"]),
            target_by=by_position(report["target"]),
            draft_by=by_position(report["draft"]),
            packages=len(trained),
            files=sum(s["files"] for s in trained),
            bytes=sum(s["bytes"] for s in trained),
            text_tokens=report["text_tokens"],
            chat_tokens=report["chat_tokens"],
            policy_tokens=report["policy_tokens"],
            sources="sources.json" if role == "target" else "../target/sources.json",
            held_packages=len(held),
            held_bytes=sum(s["bytes"] for s in held),
            left_out=f"{', '.join(left_out)} is" if left_out else "none is",
            agreement_text_only=report["agreement_text_only"],
            agreement=report["agreement"],
            loop_share=f"{loops[0]:.0%} to {loops[-1]:.0%}",
            acceptance=table(report["evaluation"]),
        )
        (folder / role / "README.md").write_text(text)
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder with target/, draft/ and report.json")
    folder = parser.parse_args().folder
    write_cards(folder, json.loads((folder / "report.json").read_text()))


if __name__ == "__main__":
    main()
