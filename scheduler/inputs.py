"""What travels with a batch: the input of one verify, and the relay to the next one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType


@dataclass
class VerifyInput(DFlashVerifyInput):
    """A chain of `draft_token_num` tokens a row.

    `SpecInputType` is a closed enum, so this reuses DFlash's type: also a chain without a tree
    mask, which is all that attention backends ask for.
    """

    capture_hidden_mode: CaptureHiddenMode = CaptureHiddenMode.NULL


def dummy_verify_input(width: int) -> VerifyInput:
    """A `VerifyInput` with shapes only, for CUDA-graph capture."""
    return VerifyInput(draft_token=None, positions=None, draft_token_num=width)


@dataclass
class DraftInput(SpecInput):
    """Relay between two forwards: the token each row continues from, and its length.

    Attributes:
        bonus_tokens: int64 [bs], the last committed token, whose KV is not there yet.
        new_seq_lens: int64 [bs], number of tokens with KV.
        future_indices: int64 [bs] rows of the future map, set by the overlap loop.
    """

    bonus_tokens: torch.Tensor
    new_seq_lens: torch.Tensor
    future_indices: torch.Tensor | None = None
    topk_p: Any = None
    topk_index: Any = None
    hidden_states: Any = None

    def __post_init__(self) -> None:
        super().__init__(SpecInputType.DFLASH_DRAFT)
        self.num_tokens_per_req = 1
        self.num_tokens_for_logprob_per_req = 1

    def filter_batch(self, new_indices: torch.Tensor, new_indices_cpu: Any = None) -> None:
        """Keep rows `new_indices`."""
        if self.future_indices is not None:
            self.future_indices = self.future_indices[new_indices]
            return
        self.bonus_tokens = self.bonus_tokens[new_indices]
        self.new_seq_lens = self.new_seq_lens[new_indices]

    def merge_batch(self, other: DraftInput) -> None:
        """Append the rows of `other`."""
        if self.future_indices is not None and other.future_indices is not None:
            self.future_indices = torch.cat([self.future_indices, other.future_indices])
            return
        self.bonus_tokens = torch.cat([self.bonus_tokens, other.bonus_tokens])
        self.new_seq_lens = torch.cat([self.new_seq_lens, other.new_seq_lens])
