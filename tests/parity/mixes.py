"""Random requests over every sampling field that `/generate` accepts."""

from __future__ import annotations

import random
from typing import Any

Body = dict[str, Any]


def plain_agrees(body: Body) -> bool:
    """Whether plain SGLang, which draws other samples, must say the same: greedy requests.

    But not those that ignore the end of text inside a grammar: ours end where the grammar ends,
    plain SGLang goes on with end-of-text tokens (llguidance) or one token more (xgrammar). And not
    those that both add and scale penalties: plain SGLang keeps its penalties in a `set` of classes,
    so which of them comes first changes from one start of the server to the next.
    """
    params = body["sampling_params"]
    if "regex" in params and params["ignore_eos"]:
        return False
    if "repetition_penalty" in params and _adds_penalties(params):
        return False
    return params["temperature"] == 0.0


def make_plain_agree(body: Body) -> None:
    """Change a request as little as it takes for `plain_agrees`."""
    params = body["sampling_params"]
    params["temperature"] = 0.0
    if "regex" in params:
        params["ignore_eos"] = False
    if _adds_penalties(params):
        params.pop("repetition_penalty", None)


def _adds_penalties(params: dict[str, Any]) -> bool:
    return "frequency_penalty" in params or "presence_penalty" in params


class RequestMix:
    """Draws request bodies; the same seed gives the same requests.

    `prompts` are token id lists to start from; `vocab_size` bounds the ids in biases and stops.
    """

    def __init__(self, prompts: list[list[int]], vocab_size: int, seed: int = 0) -> None:
        self._prompts = prompts
        self._vocab_size = vocab_size
        self._random = random.Random(seed)

    def draw(self, max_new_tokens: int = 64) -> Body:
        """One request; always seeded, so that it can be repeated."""
        r = self._random
        params: dict[str, Any] = {
            "max_new_tokens": r.choice([1, 2, 3, 7, max_new_tokens, max_new_tokens]),
            "temperature": r.choice([0.0, 0.0, 0.3, 0.8, 1.0, 1.5]),
            "sampling_seed": r.randrange(1 << 31),
            "ignore_eos": r.random() < 0.5,
        }
        self._sometimes(params, 0.3, "top_p", lambda: r.choice([0.5, 0.9, 0.99]))
        self._sometimes(params, 0.3, "top_k", lambda: r.choice([1, 2, 20, 200]))
        self._sometimes(params, 0.2, "min_p", lambda: r.choice([0.01, 0.1, 0.5]))
        self._sometimes(params, 0.2, "frequency_penalty", lambda: r.choice([-1.0, 0.3, 1.5]))
        self._sometimes(params, 0.2, "presence_penalty", lambda: r.choice([-0.5, 0.7]))
        self._sometimes(params, 0.2, "repetition_penalty", lambda: r.choice([0.8, 1.1, 1.5]))
        self._sometimes(params, 0.2, "min_new_tokens", lambda: r.choice([1, 3, 9]))
        self._sometimes(params, 0.2, "stop_token_ids", lambda: self._ids(3))
        self._sometimes(params, 0.2, "stop", lambda: r.choice(["\n", "(", " = ", ["):", "self"]]))
        self._sometimes(params, 0.2, "logit_bias", self._bias)
        self._sometimes(
            params, 0.1, "regex", lambda: r.choice(["(cat|dog)+!", "[a-z]{3,9}", r"\d+\.\d\d"])
        )
        if params.get("min_new_tokens", 0) > params["max_new_tokens"]:
            params["min_new_tokens"] = params["max_new_tokens"]
        body: Body = {"input_ids": r.choice(self._prompts), "sampling_params": params}
        if r.random() < 0.2:
            body["return_logprob"] = True
            body["top_logprobs_num"] = r.choice([0, 3])
            if r.random() < 0.3:
                body["logprob_start_len"] = 0
            if r.random() < 0.3:
                body["token_ids_logprob"] = self._ids(2)
        return body

    def draw_many(self, count: int, max_new_tokens: int = 64) -> list[Body]:
        return [self.draw(max_new_tokens) for _ in range(count)]

    def _sometimes(self, params: dict[str, Any], chance: float, name: str, value: Any) -> None:
        if self._random.random() < chance:
            params[name] = value()

    def _ids(self, count: int) -> list[int]:
        return [self._random.randrange(self._vocab_size) for _ in range(count)]

    def _bias(self) -> dict[str, float]:
        return {str(t): self._random.choice([-100.0, -2.0, 3.0]) for t in self._ids(4)}
