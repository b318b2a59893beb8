"""SSD as a SGLang speculative algorithm: what it is, and which server arguments it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from sgl_ssd.errors import ConfigError

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

NAME = "SSD"
DEFAULT_NUM_STEPS = 4
DEFAULT_MAX_RUNNING_REQUESTS = 48


class SSDAlgorithm(CustomSpecAlgo):
    """Duck-types SGLang's `SpeculativeAlgorithm`.

    Every built-in predicate stays False: each drags in draft KV, hidden-state capture or
    branches of one built-in algorithm.
    """

    def create_future_map(
        self,
        device: Any,
        req_to_token_pool: Any,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> Any:
        """The relay that carries bonus tokens from one forward to the next."""
        from sgl_ssd.scheduler.future_map import SSDFutureMap

        return SSDFutureMap(
            device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay
        )

    def need_topk(self) -> bool:
        return False

    def carries_draft_hidden_states(self) -> bool:
        return False

    def has_draft_kv(self) -> bool:
        return False

    def supports_grammar_overlap(self) -> bool:
        return True

    def handle_server_args(self, server_args: ServerArgs) -> None:
        """Derive the verify width from K; in place."""
        if server_args.speculative_num_steps is None:
            server_args.speculative_num_steps = DEFAULT_NUM_STEPS
        server_args.speculative_num_draft_tokens = server_args.speculative_num_steps + 1
        server_args.speculative_eagle_topk = 1
        if server_args.max_running_requests is None:
            server_args.max_running_requests = DEFAULT_MAX_RUNNING_REQUESTS
        server_args.enable_mixed_chunk = False


def validate_server_args(server_args: ServerArgs) -> None:
    """Refuse what SSD cannot serve exactly. Raises `ConfigError` naming flag and remedy."""
    steps, width = server_args.speculative_num_steps, server_args.speculative_num_draft_tokens
    _require(
        width is None or width == (steps or DEFAULT_NUM_STEPS) + 1,
        f"--speculative-num-draft-tokens {width}: SSD verifies K+1 tokens; "
        "set --speculative-num-steps K and leave this flag out",
    )
    _require(
        server_args.speculative_eagle_topk in (None, 1),
        "--speculative-eagle-topk: SSD drafts chains; leave it out",
    )
    _require(server_args.pp_size == 1, "--pp-size: SSD does not support pipeline parallelism")
    _require(
        not server_args.enable_dp_attention,
        "--enable-dp-attention: SSD does not support it; --dp-size alone makes whole replicas",
    )
    _require(
        server_args.disaggregation_mode == "null",
        "--disaggregation-mode: SSD does not support prefill/decode disaggregation",
    )
    _require(
        not server_args.speculative_adaptive,
        "--speculative-adaptive: belongs to EAGLE; SSD does not support it",
    )
    _require(
        not server_args.enable_two_batch_overlap,
        "--enable-two-batch-overlap: SSD does not support it",
    )
    _require(not server_args.enable_pdmux, "--enable-pdmux: SSD does not support it")
    _require(
        server_args.grammar_backend != "outlines",
        "--grammar-backend outlines: its grammars cannot take rejected drafts back; use xgrammar "
        "or llguidance",
    )
    if server_args.enable_lora or server_args.lora_paths:
        _validate_adapters(server_args)
    _require(
        mambaish_config(server_args.get_model_config()) is None,
        f"--model-path {server_args.model_path}: this model has recurrent layers (Mamba, linear "
        "attention), whose state SSD cannot take back when a draft is rejected; serve it with "
        "sglang.launch_server",
    )


def _validate_adapters(server_args: ServerArgs) -> None:
    """Refuse LoRA backends of SGLang that cannot serve a verify.

    Outside CUDA graphs triton looks for the lengths of prompts, inside of them torch_native has
    room for one token a row.
    """
    if server_args.device == "cpu":  # has a backend of ours
        return
    backend, chunk = server_args.lora_backend, server_args.max_lora_chunk_size
    _require(
        backend == "csgmv",
        f"--lora-backend {backend}: SSD supports csgmv only; leave the flag out",
    )
    _require(
        chunk == 16,
        f"--max-lora-chunk-size {chunk}: SSD needs 16; SGLang chooses larger chunks by the number "
        "of prompt tokens, which a verify does not have",
    )


def _require(ok: bool, text: str) -> None:
    if not ok:
        raise ConfigError(text)
