"""What a measurement ran on: hardware, versions, git revision."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

PACKAGES = ("sglang", "torch", "triton", "transformers", "flashinfer-python", "sglang-kernel")


def _output(*command: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=20, cwd=Path(__file__).parent
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe() -> dict[str, Any]:
    """The machine and the software, as JSON.

    `SGL_SSD_REVISION` names the revision where the tree is no git checkout.
    """
    query = "--query-gpu=name,memory.total,driver_version"
    gpus = _output("nvidia-smi", query, "--format=csv,noheader").splitlines()
    return {
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "gpus": gpus,
        "cpu_cores": os.cpu_count(),
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "revision": os.environ.get("SGL_SSD_REVISION") or _output("git", "rev-parse", "HEAD"),
        "modified": bool(_output("git", "status", "--porcelain", "--untracked-files=no")),
    }
