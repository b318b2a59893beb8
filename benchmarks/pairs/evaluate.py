"""Replay speculative rounds of a pair on held-out prompts and print the rates.

Under greedy and under coupled sampling the target's text does not depend on the draft, and a draft
token is tested only when all drafts before it were the target's own. So the draft's token at a
position follows from the target's text before it: one pass of the draft over that text gives the
rank of every target token among the draft's scores, and rounds at any K are read off those ranks.

    python benchmarks/pairs/evaluate.py sgl_ssd/models/target sgl_ssd/models/draft

Acceptance is accepted drafts / drafts tested, up to and with the first rejection of a round. A
round's outcome is hit at uniform fan-out F when its bonus token is among the F best scores of the
draft at the accepted depth, the chain's own token left out after a rejection.

A small model's greedy text soon repeats itself, and repetition is easy to draft. So greedy rounds
are also counted over the text before its final loop alone. Even so, greedy texts are easier to
draft than sampled ones. What temperature alone does is seen on the same contexts: rounds that begin
at every position of the texts of T=1, with the tokens drawn there and with the greedy ones.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

HELD_OUT_FILE = Path(__file__).with_name("held_out.jsonl")
FAN_OUTS = tuple(range(1, 9))
LOOKAHEADS = (4, 7)


@dataclass
class Rounds:
    """Counts over replayed rounds at one K."""

    lookahead: int
    rounds: int = 0
    tested: int = 0
    accepted: int = 0
    outcomes: int = 0
    tokens: int = 0  # of rounds that came to their bonus token
    hits: dict[int, int] = field(default_factory=lambda: dict.fromkeys(FAN_OUTS, 0))

    def add(self, ranks: Sequence[int]) -> None:
        """Replay one text. `ranks`: each target token's rank in the draft's scores."""
        start = 0
        while start < len(ranks):
            start = self._add_round(ranks, start)

    def add_everywhere(self, ranks: Sequence[int]) -> None:
        """Replay a round from every position whose round ends inside the text."""
        for start in range(len(ranks) - self.lookahead):
            self._add_round(ranks, start)

    def _add_round(self, ranks: Sequence[int], start: int) -> int:
        """Count one round; returns where the next one starts."""
        window = ranks[start : start + self.lookahead]
        matches = next((j for j, rank in enumerate(window) if rank), len(window))
        self.rounds += 1
        self.accepted += matches
        self.tested += min(matches + 1, len(window))
        bonus = start + matches
        if bonus < len(ranks):
            # After a rejection the best score is the chain's own token's, which is left out.
            rank = ranks[bonus] - (matches < self.lookahead)
            self.outcomes += 1
            self.tokens += matches + 1
            for fan_out in self.hits:
                self.hits[fan_out] += rank < fan_out
        return bonus + 1

    def summary(self) -> dict[str, Any]:
        """Rates: acceptance, tokens a round (the bonus counted), hit rate by fan-out."""
        return {
            "acceptance": round(self.accepted / max(1, self.tested), 4),
            "tokens_per_round": round(self.tokens / max(1, self.outcomes), 3),
            "hit": {str(f): round(n / max(1, self.outcomes), 3) for f, n in self.hits.items()},
            "rounds": self.rounds,
        }


def gumbel(rows: int, vocabulary: int, seed: int, position: int) -> Tensor:
    """Noise [rows, vocabulary] of one position, float64 on the CPU, the same for both models."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + position)
    uniform = torch.rand(rows, vocabulary, generator=generator, dtype=torch.float64)
    return -torch.log(-torch.log(uniform.clamp(1e-12, 1 - 1e-12)))


def scores(logits: Tensor, temperature: float, seed: int, position: int) -> Tensor:
    """What both models take the argmax of. logits: [N, V] → [N, V]."""
    if temperature == 0:
        return logits
    noise = gumbel(logits.shape[0], logits.shape[1], seed, position).to(logits.device)
    return logits.double() / temperature + noise


def pad_left(prompts: list[list[int]], pad: int, device: str) -> tuple[Tensor, Tensor]:
    """Ids and mask [N, P] of prompts of any lengths."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    return ids, mask


@torch.no_grad()
def target_text(
    model: Any, prompts: Tensor, mask: Tensor, new_tokens: int, temperature: float, seed: int
) -> Tensor:
    """The target's tokens [N, new_tokens] after prompts [N, P], each row with its own noise."""
    cache, ids = None, prompts
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    tokens = []
    for n in tqdm(range(new_tokens), desc="target", mininterval=5, leave=False):
        out = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache = out.past_key_values
        ids = scores(out.logits[:, -1], temperature, seed, n).argmax(-1, keepdim=True)
        tokens.append(ids)
        mask = torch.cat((mask, torch.ones_like(ids)), dim=1)
        positions = positions[:, -1:] + 1
    return torch.cat(tokens, dim=1)


@torch.no_grad()
def logits_along(model: Any, prompts: Tensor, mask: Tensor, text: Tensor) -> Tensor:
    """A model's logits [N, G, V] for each token of text [N, G] after prompts [N, P]."""
    mask = torch.cat((mask, torch.ones_like(text)), dim=1)
    out = model(
        input_ids=torch.cat((prompts, text), dim=1),
        attention_mask=mask,
        position_ids=(mask.cumsum(-1) - 1).clamp_min(0),
        logits_to_keep=text.shape[1] + 1,
    )
    return out.logits[:, :-1]


def ranks_of(tokens: Tensor, logits: Tensor, temperature: float, seed: int) -> Tensor:
    """Rank [N, G] of each of tokens [N, G] among the scores made of logits [N, G, V]."""
    ranks = []
    for n in range(tokens.shape[1]):
        values = scores(logits[:, n], temperature, seed, n)
        ranks.append((values > values.gather(1, tokens[:, n : n + 1])).sum(1))
    return torch.stack(ranks, dim=1)


def length_to_end(tokens: list[int], end_ids: Iterable[int]) -> int:
    """Length of a text up to and with the first token that ends it."""
    ends = set(end_ids)
    return next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))


def length_before_loop(tokens: list[int], longest_period: int = 80, least: int = 20) -> int:
    """Length of a text without the loop it ends in.

    A loop is a last stretch of `least` or more tokens, and of two periods or more, each of which
    equals the token one period before.
    """
    length = len(tokens)
    for period in range(1, longest_period):
        first = len(tokens)
        while first > period and tokens[first - 1] == tokens[first - 1 - period]:
            first -= 1
        if len(tokens) - first >= max(least, 2 * period):
            length = min(length, first)
    return length


@dataclass(frozen=True)
class Replayed:
    """The target's tokens of each prompt, cut at the end of the text, and their ranks.

    `greedy_ranks` are those of the target's likeliest token in the same place, by the draft's
    logits.
    """

    texts: list[list[int]]
    ranks: list[list[int]]
    greedy_ranks: list[list[int]]

    def rounds(self, lookahead: int, before_loops: bool = False) -> Rounds:
        """Counts of all prompts at one K."""
        counts = Rounds(lookahead)
        for tokens, ranks in zip(self.texts, self.ranks, strict=True):
            counts.add(ranks[: length_before_loop(tokens)] if before_loops else ranks)
        return counts

    def rounds_everywhere(self, lookahead: int, greedy: bool) -> Rounds:
        """Counts of rounds from every position, of the text's tokens or of the greedy ones."""
        counts = Rounds(lookahead)
        for ranks in self.greedy_ranks if greedy else self.ranks:
            counts.add_everywhere(ranks)
        return counts

    def loop_share(self) -> float:
        """Share of all tokens that stand in a final loop."""
        return 1 - sum(map(length_before_loop, self.texts)) / sum(map(len, self.texts))


def replay(
    target: Any,
    draft: Any,
    prompts: list[list[int]],
    new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> Replayed:
    """Let the target continue the prompts and rank its tokens by the draft's scores."""
    generation = target.generation_config
    ids, mask = pad_left(prompts, generation.pad_token_id, str(target.device))
    text = target_text(target, ids, mask, new_tokens, temperature, seed)
    drafted = logits_along(draft, ids, mask, text)
    likeliest = logits_along(target, ids, mask, text).argmax(-1)
    rows = (
        text,
        ranks_of(text, drafted, temperature, seed),
        ranks_of(likeliest, drafted, 0.0, seed),
    )
    lengths = [length_to_end(tokens, generation.eos_token_id) for tokens in text.tolist()]
    return Replayed(
        *([row[:n] for row, n in zip(part.tolist(), lengths, strict=True)] for part in rows)
    )


def load_prompts(path: Path, tokenizer: Any) -> dict[str, list[list[int]]]:
    """Token ids of the held-out prompts, by kind: text, long, chat."""
    prompts: dict[str, list[list[int]]] = {}
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        if "messages" in entry:
            rendered = tokenizer.apply_chat_template(
                entry["messages"], tokenize=False, add_generation_prompt=True
            )
            ids = tokenizer.encode(rendered, add_special_tokens=False)
        else:
            ids = tokenizer.encode(entry["text"])
        prompts.setdefault(entry["kind"], []).append(ids)
    return prompts


def load_model(folder: Path, device: str) -> Any:
    """A model in float32, whatever it is stored in."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()


def evaluate(
    target_folder: Path, draft_folder: Path, prompts_file: Path, device: str, new_tokens: int
) -> dict[str, dict[str, Any]]:
    """All figures, by kind of prompt and sampling."""
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    target, draft = load_model(target_folder, device), load_model(draft_folder, device)
    results: dict[str, dict[str, Any]] = {}
    for kind, prompts in load_prompts(prompts_file, tokenizer).items():
        greedy = replay(target, draft, prompts, new_tokens)
        coupled = replay(target, draft, prompts, new_tokens, temperature=1.0)
        for lookahead in LOOKAHEADS:
            name = f"K={lookahead}"
            results[f"{kind}, T=0, {name}"] = greedy.rounds(lookahead).summary()
            before = greedy.rounds(lookahead, before_loops=True).summary()
            before["loop_share"] = round(greedy.loop_share(), 3)
            results[f"{kind}, T=0, {name}, before loops"] = before
            results[f"{kind}, T=1, {name}"] = coupled.rounds(lookahead).summary()
            for t, greedy_there in (("T=0", True), ("T=1", False)):
                everywhere = coupled.rounds_everywhere(lookahead, greedy_there).summary()
                results[f"{kind}, {t}, {name}, same contexts"] = everywhere
    return results


def table(results: dict[str, dict[str, Any]]) -> str:
    """The figures as a Markdown table."""
    head = ["prompts", "acceptance", "tokens a round", *(f"hit F={f}" for f in FAN_OUTS)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, r in results.items():
        hits = [f"{h:.2f}" for h in r["hit"].values()]
        cells = [name, f"{r['acceptance']:.3f}", f"{r['tokens_per_round']:.2f}", *hits]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path, help="folder of the target model")
    parser.add_argument("draft", type=Path, help="folder of the draft model")
    parser.add_argument("--prompts", type=Path, default=HELD_OUT_FILE, help="a .jsonl of prompts")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--new-tokens", type=int, default=256, help="tokens after each prompt")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    results = evaluate(args.target, args.draft, args.prompts, args.device, args.new_tokens)
    print(table(results))
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
