"""Puts the CPU replacements into SGLang."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sgl_ssd.cpu import grammar, invariance, kernels

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.managers.overlap_utils import FutureMap
    from sglang.srt.managers.schedule_batch import ScheduleBatch


def register(*, invariant: bool) -> None:
    """Register attention and hooks; `HookRegistry.apply_hooks` puts the hooks in place."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    from sgl_ssd.cpu import lora
    from sgl_ssd.cpu.attention import TorchAttentionBackend

    disable_compilation()
    grammar.serve_reasoning()
    lora.register()
    register_attention_backend("torch_native")(
        lambda model_runner: TorchAttentionBackend(model_runner, invariant=invariant)
    )
    replace = HookType.REPLACE
    for target, hook, kind in (
        (
            "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func",
            kernels.assign_req_to_token_pool,
            replace,
        ),
        (
            "sglang.kernels.ops.activation.softcap.softcap_inplace_logits",
            kernels.softcap_logits,
            replace,
        ),
        (
            "sglang.srt.managers.overlap_utils.FutureMap._resolve_spec_extras",
            resolve_spec_extras,
            replace,
        ),
        (
            "sglang.srt.distributed.parallel_state.GroupCoordinator.__init__",
            without_gpu_communicators,
            HookType.BEFORE,
        ),
        (
            "sglang.srt.model_executor.model_runner.adjust_config_with_unaligned_cpu_tp",
            keep_heads,
            replace,
        ),
        (
            "sglang.srt.constrained.llguidance_backend.GuidanceBackend.dispatch_structural_tag",
            grammar.dispatch_structural_tag,
            HookType.AROUND,
        ),
        (
            "sglang.srt.lora.lora_manager.LoRAManager.__init__",
            lora.manager_init,
            HookType.AROUND,
        ),
    ):
        HookRegistry.register(target, hook, kind)
    if invariant:
        HookRegistry.register(
            "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply",
            invariance.linear,
            HookType.AROUND,
        )
        HookRegistry.register(
            "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head",
            invariance.lm_head,
            HookType.AROUND,
        )


def disable_compilation() -> None:
    """Run functions under `torch.compile` as they are, here and in child processes.

    SGLang decorates small helpers (penalties, the seeded sampler, positions) with it; on a CPU each
    one would want a C++ compiler and many seconds at its first call.
    """
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and os.environ["TORCH_COMPILE_DISABLE"] == "1":
        dynamo.config.disable = True


def resolve_spec_extras(future_map: FutureMap, batch: ScheduleBatch) -> None:
    """The overlap scheduler's relay of the last sampled tokens to the next speculative round.

    The original calls `record_stream`, which a CPU tensor does not have.
    """
    if future_map.need_topk or future_map.need_hidden_states:
        raise NotImplementedError(
            "on the CPU only speculative algorithms without relayed draft state run under overlap"
        )
    draft_input = batch.spec_info
    if draft_input is None or draft_input.future_indices.shape[0] == 0:
        return
    draft_input.bonus_tokens = future_map.output_tokens_buf[draft_input.future_indices]


_GPU_COMMUNICATORS = (
    "use_pynccl",
    "use_pymscclpp",
    "use_custom_allreduce",
    "use_torch_symm_mem_all_reduce",
)


def without_gpu_communicators(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Switch off what only works between GPUs; CPU tensors are reduced by the gloo group."""
    for name in _GPU_COMMUNICATORS:
        if name in kwargs:
            kwargs[name] = False
    return args, kwargs


def keep_heads(model_config: ModelConfig, load_config: Any, tp_size: int) -> ModelConfig:
    """Leave the numbers of heads as they are: ranks beyond the KV heads get copies, as on a GPU.

    The original pads them, for weight loaders that only SGLang's own CPU platform has.
    """
    return model_config
