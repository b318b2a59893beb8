"""SGLang plugin that spoils the logits of tensor-parallel rank 1, to be put into a test's server.

`install` makes an environment in which SGLang finds it; the product knows nothing of it. Noise is
added while the file `noise` is there, after the logits of all ranks have been gathered, and the
file `flips` counts rows, and those whose likeliest token it changed.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

FOLDER_ENV = "RANK_NOISE_FOLDER"
NOISY_RANK = 1
SCALE = 8.0  # standard deviation; logits of the bundled target span about as much


@dataclass(frozen=True)
class RankNoise:
    """The test's side: switches the noise and reads what it did."""

    folder: Path

    @staticmethod
    def install(folder: Path) -> RankNoise:
        """Lay out a distribution with this module as its plugin in `folder`."""
        info = folder / "rank_noise-1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rank-noise\nVersion: 1\n")
        (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nnoise = rank_noise:load\n")
        shutil.copy(__file__, folder / "rank_noise.py")
        return RankNoise(folder)

    @property
    def environment(self) -> dict[str, str]:
        """For the server that shall have it."""
        paths = [str(self.folder), os.environ.get("PYTHONPATH", "")]
        return {FOLDER_ENV: str(self.folder), "PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def switch(self, on: bool) -> None:
        if on:
            (self.folder / "noise").touch()
        else:
            (self.folder / "noise").unlink()

    def flips(self) -> tuple[int, int]:
        """Rows of logits that had noise added, and those whose likeliest token became another."""
        path = self.folder / "flips"
        rows, flipped = map(int, path.read_text().split()) if path.exists() else (0, 0)
        return rows, flipped


def load() -> None:
    """SGLang calls this in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.layers.logits_processor.LogitsProcessor.forward"
    HookRegistry.register(target, _spoil, HookType.AFTER)


def _spoil(output: Any, *args: Any, **kwargs: Any) -> None:
    from sglang.srt.distributed import get_tensor_model_parallel_rank

    noise = RankNoise(Path(os.environ[FOLDER_ENV]))
    logits = output.next_token_logits
    if get_tensor_model_parallel_rank() != NOISY_RANK or logits is None:
        return
    if not (noise.folder / "noise").exists():
        return
    best = logits.argmax(-1)
    logits += SCALE * torch.randn_like(logits)
    rows, flipped = noise.flips()
    flipped += int((logits.argmax(-1) != best).sum())
    new = noise.folder / "flips.new"
    new.write_text(f"{rows + len(best)} {flipped}")
    new.replace(noise.folder / "flips")
