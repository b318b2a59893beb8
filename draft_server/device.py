"""Chooses the device, and readies this process for it before SGLang is imported."""

from __future__ import annotations

import os

from sgl_ssd.cpu.selection import DEVICE_ENV
from sgl_ssd.errors import ConfigError


def default_dtype(dtype: str, device: str) -> str:
    """`"auto"` means float32 on a CPU, where half precision is emulated and slower."""
    return "float32" if dtype == "auto" and device == "cpu" else dtype


def prepare_device(device: str, num_threads: int | None, gpu_id: int = 0) -> str:
    """`"auto"`, `"cpu"` or `"cuda"` -> `"cpu"` or `"cuda"`, with SGLang's CPU platform installed.

    On the CPU one torch thread by default: the verifier may need the other cores. Raises
    `ConfigError` when the device is not there.
    """
    if device == "auto" and os.environ.get(DEVICE_ENV, "auto") != "auto":
        device = os.environ[DEVICE_ENV].split(":")[0]
    if device == "cpu":
        # SGLang picks its platform at its first import; this variable tells ours to be it.
        os.environ[DEVICE_ENV] = "cpu"
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no GPU here; use --device cpu")
    if device == "cuda" and gpu_id >= torch.cuda.device_count():
        raise ConfigError(
            f"--ssd-draft-base-gpu-id {gpu_id}: this host has GPUs 0 to "
            f"{torch.cuda.device_count() - 1} only; to share one with the target give its id and a "
            "share of its memory to each (--mem-fraction-static, --ssd-draft-mem-fraction-static)"
        )
    os.environ[DEVICE_ENV] = device
    torch.set_grad_enabled(False)
    if device == "cpu":
        threads = num_threads or 1
        os.environ["OMP_NUM_THREADS"] = str(threads)
        from sgl_ssd import cpu

        cpu.install()
        torch.set_num_threads(threads)
    elif num_threads:
        torch.set_num_threads(num_threads)
    return device
