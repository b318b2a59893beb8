"""SGLang's scheduler with the few things that SSD adds to it."""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.managers.io_struct import SetInternalStateReqOutput
from sglang.srt.managers.scheduler import Scheduler

from sgl_ssd.errors import ConfigError
from sgl_ssd.sampling import request_seed
from sgl_ssd.scheduler import settings
from sgl_ssd.scheduler.algorithm import NAME
from sgl_ssd.scheduler.reporter import SSDMetricsReporter
from sgl_ssd.scheduler.worker import SSDWorker

logger = logging.getLogger(__name__)
SHOWN_REQUESTS = 32


class SSDScheduler(Scheduler):
    """Stock scheduler unless the SSD algorithm runs."""

    _arrivals = 0
    waiting_queue: list[Any]

    @property
    def _ssd_worker(self) -> SSDWorker | None:
        worker = getattr(self, "draft_worker", None)
        return worker if isinstance(worker, SSDWorker) else None

    def _add_request_to_queue(self, req: Any, is_retracted: bool = False) -> None:
        if not is_retracted:
            self._check_input_ids(req)
        if getattr(self.spec_algorithm, "name", None) == NAME and not hasattr(req, "ssd_seed"):
            # Every rank receives the same requests in the same order.
            seed = req.sampling_params.sampling_seed
            if seed is None:
                # Replicas count on their own; no two requests shall have one seed.
                number = self._arrivals * self.ps.dp_size + (self.ps.dp_rank or 0)
                seed = request_seed(self.server_args.random_seed, number)
                self._arrivals += 1
            req.ssd_seed = ((int(seed) + 2**63) % 2**64) - 2**63
        super()._add_request_to_queue(req, is_retracted)

    def _check_input_ids(self, req: Any) -> None:
        """Refuse token ids that the model does not have: on a CPU they would end the server.

        Images and audio stand in the prompt as ids beyond the vocabulary, to be replaced later.
        """
        ids = req.origin_input_ids
        if req.multimodal_inputs is not None or req.input_embeds is not None or not len(ids):
            return
        if min(ids) < 0 or max(ids) >= self.model_config.vocab_size:
            req.set_finish_with_abort(
                f"input_ids must lie in 0..{self.model_config.vocab_size - 1}"
            )

    def init_metrics_reporter(self, tp_rank: int, pp_rank: int, dp_rank: int | None) -> None:
        self.metrics_reporter = SSDMetricsReporter(
            scheduler=self,
            tp_rank=tp_rank,
            pp_rank=pp_rank,
            dp_rank=dp_rank,
            metrics_collector_context=self.metrics_collector_context,
            metrics_collector=self.metrics_collector,
        )

    def process_input_requests(self, recv_reqs: list) -> None:
        worker = self._ssd_worker
        if worker is not None:
            worker.tick()
        super().process_input_requests(recv_reqs)
        if self._engine_paused:  # the loop turns without a rest, until it may go on
            self.maybe_sleep_on_idle()

    def flush_cache(self, empty_cache: bool = True) -> bool:
        """Also while generation is paused and its requests are retracted: they hold no KV.

        Upstream means to, but counts requests that wait as pending, and new weights that cannot
        flush the cache end the server.
        """
        waiting = self.waiting_queue
        if self._engine_paused:
            self.waiting_queue = []
        try:
            return bool(super().flush_cache(empty_cache))
        finally:
            self.waiting_queue = waiting

    def is_disable_overlap_for_batch(self, batch: Any, last_batch: Any) -> bool:
        if super().is_disable_overlap_for_batch(batch, last_batch):
            return True
        # A custom logit processor reads the request's output so far: it must be there.
        return bool(
            self._ssd_worker is not None
            and batch
            and batch.forward_mode.is_decode()
            and batch.sampling_info.has_custom_logit_processor
            and len(self.result_queue) > 0
        )

    def get_internal_state(self, recv_req: Any) -> Any:
        output = super().get_internal_state(recv_req)
        worker = self._ssd_worker
        if worker is not None:
            output.internal_state["ssd"] = self._ssd_state(worker)
        return output

    def _ssd_state(self, worker: SSDWorker) -> dict[str, Any]:
        state: dict[str, Any] = worker.stats.as_dict()
        state["num_steps_max"] = worker.num_steps
        state["verification"] = worker.exchange.verification
        state.update(worker.tuner.as_dict())
        state["drafting"] = "on" if worker.exchange.drafting else "off"
        state["trace"] = worker.trace_state
        state["trace_file"] = worker.trace_file
        client = worker.client
        if client is not None:
            state.update(
                num_steps=client.num_steps,
                fan_out=client.fan_out,
                backup=client.backup,
                push="on" if client.push else "off",
                draft="up" if client.up else "down",
                draft_model=client.server.model_path if client.server else "",
                draft_stats=client.server_stats,
                draft_servers=client.states(),
                open_sessions=len(client.sessions),
            )
        state["requests"] = self._ssd_requests()
        state["kv_total"] = self.max_total_num_tokens
        state["kv_available"] = self.token_to_kv_pool_allocator.available_size()
        state["kv_evictable"] = self.tree_cache.evictable_size()
        return state

    def _ssd_requests(self) -> list[dict[str, Any]]:
        """The running requests that came first, for the live view."""
        return [
            {
                "rid": req.rid,
                "prompt_tokens": len(req.origin_input_ids),
                "tokens": len(req.output_ids),
                "rounds": req.spec_verify_ct,
                "accept_length": 1 + req.spec_num_correct_drafts / req.spec_verify_ct
                if req.spec_verify_ct
                else None,
            }
            for req in self.running_batch.reqs[:SHOWN_REQUESTS]
        ]

    def set_internal_state(self, recv_req: Any) -> Any:
        """SGLang's endpoint, which also changes K, fan-out, backup and drafting while serving."""
        args = dict(recv_req.server_args)
        ours = {k: args.pop(k) for k in list(args) if k.startswith("ssd_")}
        if not ours:
            return super().set_internal_state(recv_req)
        worker = self._ssd_worker
        try:
            if worker is None or args:
                raise ConfigError(f"cannot be set together: {', '.join([*ours, *args])}")
            settings.apply(worker, ours)
        except ConfigError as e:
            logger.warning("settings not changed: %s", e)
            return SetInternalStateReqOutput(updated=False)
        return SetInternalStateReqOutput(updated=True)
