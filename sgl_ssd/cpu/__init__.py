"""SGLang on a plain CPU: an out-of-tree platform, attention and replacements of Triton kernels."""


def activate() -> str | None:
    """Entry point of group `sglang.srt.platforms`: the platform class to use, or None."""
    return None


def is_active() -> bool:
    """Whether this process serves on the CPU through this package."""
    return False


def install() -> None:
    """Register attention and hooks (idempotent)."""
