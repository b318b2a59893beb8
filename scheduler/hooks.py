"""Hooks into SGLang functions that have no seam for a plugin algorithm.

Each one stands aside for every algorithm but SSD.
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sgl_ssd.scheduler.algorithm import NAME
from sgl_ssd.scheduler.inputs import dummy_verify_input

if TYPE_CHECKING:
    from sgl_ssd.scheduler.worker import SSDWorker

# One scheduler process has one worker; the release hook needs to find it.
_worker: weakref.ref[SSDWorker] | None = None


def set_worker(worker: SSDWorker) -> None:
    """Name the worker that is told when a request's KV is released."""
    global _worker
    _worker = weakref.ref(worker)


def _is_ssd(algorithm: Any) -> bool:
    return getattr(algorithm, "name", None) == NAME


def _dummy_verify_input(
    orig: Any,
    spec_algorithm: Any,
    server_args: Any,
    custom_mask: Any,
    num_tokens_per_req: int,
    is_draft_worker: bool,
) -> Any:
    if _is_ssd(spec_algorithm):
        return dummy_verify_input(num_tokens_per_req)
    return orig(spec_algorithm, server_args, custom_mask, num_tokens_per_req, is_draft_worker)


def _graph_spec_info(orig: Any, runner: Any, num_tokens: int) -> Any:
    if _is_ssd(runner.model_runner.spec_algorithm):
        return dummy_verify_input(runner.captured_req_width)
    return orig(runner, num_tokens)


def _draft_kv_pool(orig: Any, **kwargs: Any) -> Any:
    # Upstream only lets NGRAM have no draft model in this process.
    return None if _is_ssd(kwargs["spec_algorithm"]) else orig(**kwargs)


def _extra_context_len(orig: Any, server_args: Any) -> int:
    """Room behind the context in each row of req_to_token.

    Upstream leaves K+5 columns but reserves up to 2(K+1) slots past the last committed token, so
    from K = 8 on a request at the end of its context would write into its neighbour's row.
    """
    extra = orig(server_args)
    if server_args.speculative_algorithm == NAME:
        from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

        extra = max(extra, get_alloc_reserve_per_decode(server_args) + server_args.page_size)
    return extra


def _release_kv_cache(orig: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """Every way a request ends, or is retracted, passes here."""
    worker = _worker() if _worker is not None else None
    if worker is not None:
        worker.on_release(req)
    return orig(req, *args, **kwargs)


def _update_finish_state(orig: Any, req: Any, new_accepted_len: int = 1) -> None:
    """The first stop in text order wins, as if the tokens had come one by one.

    Upstream tests the length cap before stop tokens and strings over a whole accepted run.
    """
    if new_accepted_len <= 1 or req.finished():
        orig(req, new_accepted_len)
        return
    run = req.output_ids[-new_accepted_len:]
    del req.output_ids[-new_accepted_len:]
    grammar = req.grammar
    while run:
        req.output_ids.append(run.pop(0))
        # The grammar has been advanced over the whole run, which it ends at the earliest.
        req.grammar = None if run else grammar
        orig(req, 1)
        if req.finished():
            if req.finished_len is None:
                req.finished_len = len(req.output_ids)
            break
    req.grammar = grammar
    if req.finished() and req.finished_len is not None:
        # Upstream has counted the whole run before it knew where the text ends.
        req.reasoning_tokens = min(req.reasoning_tokens, req.finished_len)
    # The rest has KV in the pool: it must stay accounted for, hidden behind finished_len.
    req.output_ids.extend(run)


def _append_decode_hidden_states(
    orig: Any, *, req: Any, hidden_states: Any, start: int, accept_len: int
) -> None:
    """One hidden state for each token of the text, and none for what a run has after its end."""
    # For "last" upstream itself looks for the end of the text in the run.
    if req.finished_len is not None and req.return_hidden_states != "last":
        before = len(req.output_ids) - accept_len
        accept_len = max(0, min(accept_len, req.finished_len - before))
    orig(req=req, hidden_states=hidden_states, start=start, accept_len=accept_len)


def _session_turn(orig: Any, last_req: Any, req: Any, session_params: Any) -> Any:
    """A session's next turn follows the text of the turn before.

    Upstream appends all tokens of that turn, also those that a run has after the text's end.
    """
    if last_req.finished_len is not None:
        del last_req.output_ids[last_req.finished_len :]
    return orig(last_req, req, session_params)


def _check_lora_server_args(orig: Any, server_args: Any) -> None:
    """SGLang checks adapters' flags, and lets them stand beside NGRAM alone.

    NGRAM verifies as we do: rows of one width, whose adapters LoRA backends find by request.
    """
    if server_args.speculative_algorithm != NAME:
        orig(server_args)
        return
    # Resolved arguments are read-only; this is the check's view of them.
    object.__setattr__(server_args, "speculative_algorithm", None)
    try:
        orig(server_args)
    finally:
        object.__setattr__(server_args, "speculative_algorithm", NAME)


def _load_snapshot_path(orig: Any, ipc_name: str) -> str:
    """In the launcher's private folder, which goes with it: upstream leaves it in /dev/shm."""
    path, folder = str(orig(ipc_name)), os.environ.get("TMPDIR", "")
    if os.path.basename(folder).startswith("sgl_ssd_"):
        return os.path.join(folder, os.path.basename(path))
    return path


def install() -> None:
    """Register the hooks with SGLang."""
    spec = "sglang.srt.speculative.spec_info.create_dummy_verify_input"
    graphs = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"
    sizing = "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len"
    results = (
        "sglang.srt.managers.scheduler_components.batch_result_processor."
        "SchedulerBatchResultProcessor"
    )
    session = "sglang.srt.session.session_controller.Session"
    for target, hook in (
        (spec, _dummy_verify_input),
        (f"{graphs}.get_spec_info", _graph_spec_info),
        ("sglang.srt.mem_cache.kv_cache_builder.get_draft_kv_pool", _draft_kv_pool),
        (sizing, _extra_context_len),
        ("sglang.srt.server_args.ServerArgs.check_lora_server_args", _check_lora_server_args),
        ("sglang.srt.managers.load_snapshot.shm_path_for", _load_snapshot_path),
        ("sglang.srt.mem_cache.common.release_kv_cache", _release_kv_cache),
        ("sglang.srt.managers.schedule_batch.Req.update_finish_state", _update_finish_state),
        (f"{session}._concat_token_arrays", _session_turn),
        (f"{results}._append_decode_hidden_states", _append_decode_hidden_states),
    ):
        HookRegistry.register(target, hook, HookType.AROUND)
