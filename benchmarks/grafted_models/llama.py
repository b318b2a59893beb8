"""A Llama that makes its weights from a smaller one's; see `benchmarks.pairs.graft`."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.models.llama import LlamaForCausalLM

from benchmarks.pairs.graft import Grafter, Shape


class GraftedLlamaForCausalLM(LlamaForCausalLM):
    """`config.graft` holds the shape of the checkpoint, the rest of the config the shape served."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        parameter = self.model.norm.weight
        small, big = Shape(**self.config.graft), Shape.of(self.config.to_dict())
        grafter = Grafter(weights, small, big, parameter.device, parameter.dtype)
        return super().load_weights(grafter)

    # SGLang looks at the names of the parameters.
    @functools.wraps(LlamaForCausalLM.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        logits = getattr(output, "next_token_logits", None)
        if logits is not None:
            logits[:, self.config.graft["vocab_size"] :] = float("-inf")
        return output


EntryClass = GraftedLlamaForCausalLM
