"""Server arguments that make sense on a CPU."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import psutil
import torch

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

KV_POOL_BYTES = 2 << 30
"""Default KV pool: at most this, and at most an eighth of the machine's memory, per rank."""
KV_POOL_TOKENS = 64 * 1024
"""... and at most this many tokens: with a tiny model 2 GiB would be millions of them."""
MAX_RUNNING_REQUESTS = 48
"""SGLang's own default under speculative decoding; bounds the request-to-token table."""
CHUNKED_PREFILL_SIZE = 2048


def apply_defaults(server_args: ServerArgs) -> None:
    """Fill in what the user left open and refuse what a CPU cannot do (ValueError).

    SGLang calls this through the platform while it resolves its arguments; the draft server may
    call it on arguments of its own. Idempotent.
    """
    args = server_args
    _refuse(args)
    if args.attention_backend in (None, "intel_amx"):  # intel_amx: SGLang's guess for a CPU
        args.attention_backend = "torch_native"
    args.sampling_backend = "pytorch"
    args.lora_backend = "torch_native"
    if args.grammar_backend is None:
        args.grammar_backend = "llguidance"
    args.sleep_on_idle = True
    if args.dtype == "auto" and args.quantization is None:
        # SGLang would turn a float32 checkpoint into float16, which a CPU emulates.
        args.dtype = "float32"
        vars(args).pop("model_config", None)  # was made for the other dtype
        logger.info("CPU: computing in float32; --dtype bfloat16 halves the memory")
    args.disable_custom_all_reduce = True
    if args.chunked_prefill_size is None:
        args.chunked_prefill_size = CHUNKED_PREFILL_SIZE
    if args.max_running_requests is None:
        args.max_running_requests = MAX_RUNNING_REQUESTS
    if args.mem_fraction_static is None:
        args.mem_fraction_static = 0.5
        if args.max_total_tokens is None:
            args.max_total_tokens = default_kv_tokens(args)
    _set_threads(args.tp_size)


def _refuse(args: ServerArgs) -> None:
    backends = {
        "--attention-backend": args.attention_backend,
        "--prefill-attention-backend": args.prefill_attention_backend,
        "--decode-attention-backend": args.decode_attention_backend,
    }
    for flag, value in backends.items():
        if value not in (None, "torch_native", "intel_amx"):
            raise ValueError(f"{flag} {value} needs a GPU; on the CPU use torch_native")
    if args.grammar_backend == "xgrammar":
        raise ValueError(
            "--grammar-backend xgrammar needs a GPU (it pins its masks in CUDA host memory); "
            "on the CPU use llguidance"
        )
    if args.sampling_backend not in (None, "pytorch"):
        raise ValueError(
            f"--sampling-backend {args.sampling_backend} needs a GPU; on the CPU use pytorch"
        )
    if args.lora_backend not in ("csgmv", "torch_native"):  # csgmv: SGLang's default
        raise ValueError(
            f"--lora-backend {args.lora_backend} needs a GPU; on the CPU use torch_native"
        )
    if args.enable_lora_overlap_loading:
        raise ValueError("--enable-lora-overlap-loading needs a GPU; leave it out on the CPU")
    if args.enable_torch_compile:
        raise ValueError("--enable-torch-compile is not supported on the CPU")


def default_kv_tokens(args: ServerArgs) -> int:
    """Size of the KV pool in tokens, one rank's share of each token counted."""
    config = args.get_model_config()
    heads = config.get_num_kv_heads(args.tp_size)
    token_bytes = 2 * config.num_hidden_layers * heads * config.head_dim * _item_size(config.dtype)
    pool_bytes = min(KV_POOL_BYTES, psutil.virtual_memory().total // 8 // args.tp_size)
    return int(max(1024, min(KV_POOL_TOKENS, pool_bytes // token_bytes)))


def _item_size(dtype: torch.dtype) -> int:
    return torch.empty((), dtype=dtype).element_size()


def _set_threads(tp_size: int) -> None:
    """Share the cores between target and draft server, and among tensor-parallel ranks.

    `OMP_NUM_THREADS` in the environment is respected. Set in the environment for the processes
    that SGLang starts, and in torch for this one.
    """
    cores = sorted(os.sched_getaffinity(0))
    if "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, len(cores) // 2 // tp_size)
        os.environ["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)
    # Threads that spin while they wait starve the other server on a small machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if tp_size > 1:
        # SGLang wants one entry per rank where there are more ranks than NUMA nodes.
        entries = [str(cores[rank * len(cores) // tp_size]) for rank in range(tp_size)]
        os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(entries))
