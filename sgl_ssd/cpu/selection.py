"""Decides whether this process serves on the CPU. No SGLang import: SGLang asks while it loads.

SGLang picks its platform when its first module is imported, before any argument is parsed. So the
answer comes from the environment and the raw command line:

* `SGLANG_SSD_DEVICE=cpu` (or any other device) settles it; our launchers set it for their children;
* `SGLANG_PLATFORM=sgl_ssd_cpu`, SGLang's own way to pick one of several platform plugins;
* `--device cpu` on the command line;
* else the CPU serves where torch sees no accelerator and no other platform plugin is installed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points

DEVICE_ENV = "SGLANG_SSD_DEVICE"  # SGLang renames what begins with SGL_, with a warning
PLATFORM_NAME = "sgl_ssd_cpu"
_GROUP = "sglang.srt.platforms"


def requested_device(environ: Mapping[str, str], argv: Sequence[str]) -> str | None:
    """The device asked for in words ("cpu", "cuda", ...), or None if nobody asked."""
    device = environ.get(DEVICE_ENV, "").strip().lower()
    if device and device != "auto":
        return device.split(":")[0]
    platform = environ.get("SGLANG_PLATFORM", "").strip()
    if platform:
        return "cpu" if platform == PLATFORM_NAME else platform
    for place, argument in enumerate(argv):
        if argument == "--device" and place + 1 < len(argv):
            return argv[place + 1].lower().split(":")[0]
        if argument.startswith("--device="):
            return argument.partition("=")[2].lower().split(":")[0]
    return None


def use_cpu() -> bool:
    """Whether the CPU platform is to be active in this process.

    Raises RuntimeError where the CPU was asked for and cannot be had any more.
    """
    device = requested_device(os.environ, sys.argv)
    if device is not None and device != "cpu":
        return False
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        if os.environ.get(DEVICE_ENV):
            raise RuntimeError(
                f"{DEVICE_ENV}=cpu and SGLANG_USE_CPU_ENGINE=1 are two different CPU backends; "
                "unset one of them"
            )
        return False
    if device is None:
        others = [ep.name for ep in entry_points(group=_GROUP) if ep.name != PLATFORM_NAME]
        return not others and not _accelerator_available()
    _hide_accelerators()
    return True


def _accelerator_available() -> bool:
    import torch

    return bool(torch.accelerator.is_available())


def _hide_accelerators() -> None:
    """Make `torch.cuda.is_available()` false: much of SGLang asks that instead of its platform."""
    import torch

    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ[DEVICE_ENV] = "cpu"  # spawned children have another command line
    if torch.cuda.is_available():
        raise RuntimeError(
            "the CPU was asked for, but CUDA was already in use in this process; "
            f"set {DEVICE_ENV}=cpu and CUDA_VISIBLE_DEVICES= in the environment instead"
        )
