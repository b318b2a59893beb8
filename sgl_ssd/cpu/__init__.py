"""SGLang on a plain CPU: an out-of-tree platform, attention and replacements of Triton kernels.

For the verifier everything happens by itself: SGLang calls `activate` (entry point group
`sglang.srt.platforms`) and the plugin's `load` calls `install`. Another process that builds a
`ModelRunner` by hand calls `install` before it does so. `SGLANG_SSD_DEVICE=cpu` asks for the CPU
on a machine with a GPU (see `selection`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgl_ssd.cpu.selection import DEVICE_ENV, PLATFORM_NAME, use_cpu

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

__all__ = ["DEVICE_ENV", "PLATFORM_NAME", "activate", "apply_defaults", "install", "is_active"]

_installed = False


def activate() -> str | None:
    """Entry point of SGLang's platform plugins: the platform class to use, or None."""
    if not use_cpu():
        return None
    from sgl_ssd.cpu.hooks import disable_compilation

    disable_compilation()
    return "sgl_ssd.cpu.platform.CpuPlatform"


def is_active() -> bool:
    """Whether SGLang serves on this package's CPU platform in this process."""
    from sglang.srt.platforms import current_platform

    from sgl_ssd.cpu.platform import CpuPlatform

    return isinstance(current_platform, CpuPlatform)


def install(*, invariant: bool = True, apply: bool = True) -> None:
    """Register attention and hooks in SGLang; does nothing the second time or off the CPU.

    `invariant`: in fp32, logits do not depend on the batch or on the way a token is fed (see
    `invariance`); it costs a little, and a process that only drafts needs no such thing.
    `apply=False` leaves it to SGLang's plugin loader to put the hooks in place, together with all
    others; a process that does not call `load_plugins` keeps the default.
    """
    global _installed
    if not is_active():
        return
    if not _installed:
        from sgl_ssd.cpu.hooks import register

        register(invariant=invariant)
        _installed = True
    if apply:
        from sglang.srt.plugins.hook_registry import HookRegistry

        HookRegistry.apply_hooks()


def apply_defaults(server_args: ServerArgs) -> None:
    """Fill in the arguments the user left open with what suits a CPU (ValueError: impossible ones).

    SGLang itself calls this for every `ServerArgs` it resolves.
    """
    from sgl_ssd.cpu.defaults import apply_defaults as apply

    apply(server_args)
