"""Entry point of group `sglang.srt.plugins`: registers the hooks of this package in SGLang."""

from __future__ import annotations


def load() -> None:
    """Register every hook that this process needs. SGLang calls it in each of its processes.

    The CPU platform serves every SGLang server on a machine without a GPU. SSD itself is
    registered only in processes that `sgl_ssd.launch_server` has configured, so that a plain
    SGLang server in the same environment stays plain.
    """
    from sgl_ssd import cpu
    from sgl_ssd.config import VerifierConfig

    if cpu.is_active():
        cpu.install(apply=False)
    if VerifierConfig.from_environment() is not None:
        _register_ssd()


def _register_ssd() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sgl_ssd.folders import keep_tqdm_in_process
    from sgl_ssd.scheduler import hooks
    from sgl_ssd.scheduler.algorithm import NAME, SSDAlgorithm, validate_server_args

    @SpeculativeAlgorithm.register(
        NAME,
        supports_overlap=True,
        spec_class=SSDAlgorithm,
        validate_server_args=validate_server_args,
    )
    def _worker_class(server_args: object) -> type:
        from sgl_ssd.scheduler.worker import SSDWorker

        return SSDWorker

    keep_tqdm_in_process()
    hooks.install()

    from sgl_ssd.scheduler.scheduler import SSDScheduler

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler", SSDScheduler, HookType.REPLACE)
