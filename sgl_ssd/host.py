"""The SGLang we stand on: which version, and whether our plugin is in place."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from sgl_ssd import detokenizer, explain, request_checks
from sgl_ssd.errors import ConfigError

SGLANG_VERSION = "0.5.17"


def check_sglang_version() -> None:
    """Refuse another SGLang: its internals differ in ways that could go unnoticed.

    Raises `ConfigError`.
    """
    try:
        found = version("sglang")
    except PackageNotFoundError:
        raise ConfigError(
            f"sglang is not installed; run: pip install sglang=={SGLANG_VERSION}"
        ) from None
    if found != SGLANG_VERSION:
        raise ConfigError(
            f"sgl_ssd needs sglang {SGLANG_VERSION}, found {found}; "
            f"run: pip install sglang=={SGLANG_VERSION}"
        )


def load_plugins() -> None:
    """Load SGLang's plugins and make sure that ours took hold; for a process that starts others.

    SGLang logs errors of a plugin and goes on without it, which would serve without SSD.
    Raises `ConfigError`.
    """
    from sglang.srt.plugins import load_plugins as sglang_load_plugins

    sglang_load_plugins()
    import sglang.srt.managers.scheduler as scheduler_module

    if scheduler_module.Scheduler.__name__ != "SSDScheduler":
        raise ConfigError(
            "SGLang did not load the sgl_ssd plugin; install the package (pip install sgl_ssd) and "
            "check SGLANG_PLUGINS and the log above"
        )
    # Processes other than the scheduler load no plugins: this one hands them what they run.
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.entrypoints.engine.Engine._launch_detokenizer_subprocesses"
    if target not in HookRegistry._patched:
        HookRegistry.register(target, detokenizer.launch, HookType.AROUND)
        explain.install()
        request_checks.install()
        HookRegistry.apply_hooks()
