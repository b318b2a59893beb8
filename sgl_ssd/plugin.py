"""Entry point of group `sglang.srt.plugins`: registers the hooks of this package in SGLang."""


def load() -> None:
    """Register every hook that this process needs. SGLang calls it in each of its processes."""
    from sgl_ssd import cpu

    if cpu.is_active():
        cpu.install(apply=False)
