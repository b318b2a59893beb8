"""The out-of-tree SGLang platform for a plain CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


class CpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Serves on any CPU with torch operators only.

    SGLang's own CPU engine (`SGLANG_USE_CPU_ENGINE=1`) needs another build of its kernel package;
    an out-of-tree platform needs none and keeps the overlap scheduler.
    """

    _enum = PlatformEnum.OOT

    def apply_server_args_defaults(self, server_args: ServerArgs) -> None:
        from sgl_ssd.cpu.defaults import apply_defaults

        apply_defaults(server_args)

    def get_device(self, local_rank: int | None = None) -> Any:
        # Read back as `server_args.device`, which is compared with strings everywhere.
        return "cpu"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_mha_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool

    def get_mla_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

        return MLATokenToKVPool

    def get_paged_allocator_cls(self) -> Any:
        from sgl_ssd.cpu.allocator import create_allocator

        return create_allocator

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "inductor"

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU
