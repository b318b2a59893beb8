"""Which GPU serves what, and how target and draft share one. Pure Python."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sgl_ssd.errors import ConfigError

SHARED_FRACTION = 0.85
"""Of a shared GPU's memory, for the weights and KV of both; the rest is for what they compute."""
SHARED_DRAFT_FRACTION = 0.2


@dataclass(frozen=True)
class Memory:
    """Shares of a GPU's memory for weights and KV; None is what SGLang takes by itself.

    `capped`: both KV pools have a size in tokens, so that the shares are bounds and no sizes.
    `in_turn`: the draft must be there before the target starts, whose share is one of the rest.
    """

    target: float | None
    draft: float | None
    capped: bool = False
    in_turn: bool = False


def target_gpus(base: int, step: int, ranks: int) -> list[int]:
    """The ids of the GPUs of a target of so many ranks."""
    return [base + i * step for i in range(ranks)]


def draft_gpus(behind_target: int, replicas: int, base: int | None, given: str | None) -> list[int]:
    """The GPU of each draft server that is started here. Raises `ConfigError`.

    `given` are the ids as on the command line, `base` the first of consecutive ones.
    """
    if given is None:
        first = behind_target if base is None else base
        return list(range(first, first + replicas))
    if base is not None:
        raise ConfigError("--ssd-draft-gpu-ids names the GPUs: leave --ssd-draft-base-gpu-id out")
    try:
        ids = [int(number) for number in given.split(",")]
    except ValueError:
        raise ConfigError(f"--ssd-draft-gpu-ids {given!r}: numbers separated by commas") from None
    if len(ids) != replicas or len(set(ids)) != replicas:
        raise ConfigError(
            f"--ssd-draft-gpu-ids {given}: --ssd-draft-replicas {replicas} needs as many different "
            "GPUs"
        )
    return ids


def share(target: Sequence[int], drafts: Sequence[int], allowed: bool, memory: Memory) -> Memory:
    """The memory of each side on GPUs `target` and `drafts`.

    SGLang counts a share from what is free when a process begins, and what others take meanwhile
    against it: on a shared GPU the draft begins, and the target gets its share of the rest.

    Raises `ConfigError` where they meet and that is not allowed, or asks for more than there is.
    """
    shared = sorted(set(target) & set(drafts))
    if not shared:
        return memory
    which = f"GPU {', '.join(map(str, shared))}"
    if not allowed:
        raise ConfigError(
            f"target and draft would share {which}, its memory and its time: give the draft "
            "another one (--ssd-draft-base-gpu-id, --ssd-draft-gpu-ids) or the host's CPU "
            "(--ssd-draft-device cpu), or allow it with --ssd-allow-shared-gpu"
        )
    if memory.capped:
        return memory
    draft = memory.draft
    if draft is None:
        draft = SHARED_DRAFT_FRACTION
        if memory.target is not None:
            draft = min(draft, max(0.05, round(SHARED_FRACTION - memory.target, 2)))
    part = memory.target
    if part is None:
        part = round(SHARED_FRACTION - draft, 2)
    if part <= 0 or part + draft > 1:
        raise ConfigError(
            f"--mem-fraction-static {part:g} and --ssd-draft-mem-fraction-static {draft:g} are "
            f"shares of the same {which}: together at most 1, with something left for both"
        )
    return Memory(round(part / (1 - draft), 3), draft, in_turn=True)


def on_this_host() -> bool:
    """Whether there are GPUs to serve on; asked without loading what would use them."""
    if os.environ.get("SGLANG_SSD_DEVICE", "").startswith("cpu"):
        return False
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()


def placement(target: Sequence[int], drafts: Sequence[int] | None, remote: bool) -> str:
    """In words. `drafts` None: not on GPUs, but elsewhere (`remote`) or on the host's CPU."""
    words = f"target on {_named(target)}; "
    if remote:
        return words + "draft servers run elsewhere"
    if drafts is None:
        return words + "draft on the host's CPU"
    shared = " (shared)" if set(target) & set(drafts) else ""
    return words + f"draft on {_named(drafts)}{shared}"


def _named(ids: Sequence[int]) -> str:
    return f"GPU {ids[0]}" if len(ids) == 1 else f"GPUs {', '.join(map(str, ids))}"
