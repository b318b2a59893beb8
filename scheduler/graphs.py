"""Two widths of CUDA graphs for the target: K+1 tokens a row, and one token a row.

SGLang captures the wide ones itself (mode TARGET_VERIFY). A batch without any drafts must cost what
plain decoding costs, so this captures plain decode graphs beside them, with an attention backend of
their own: a backend keeps one set of static buffers, which graphs of one width are bound to. So do
LoRA adapters.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

logger = logging.getLogger(__name__)


class PlainDecodeGraphs:
    """Graphs and attention backend for batches without drafts.

    Where no decode graphs are captured (CPU, `--disable-cuda-graph`) batches run eagerly with the
    target's own backend, and `active` does nothing.
    """

    def __init__(self, model_runner: Any) -> None:
        self._runner = model_runner
        self._plain: _InUse | None = None

    def capture(self) -> None:
        """Capture plain decode graphs if the target has verify graphs. Call once, after those."""
        verify_graphs = self._runner.decode_cuda_graph_runner
        if verify_graphs is None:
            return
        started = time.perf_counter()
        wide = _InUse.of(self._runner)
        with self._as_plain_decoding():
            workspace = self._runner.init_new_workspace
            try:
                backend = self._runner._get_attention_backend(init_new_workspace=True)
            finally:
                self._runner.init_new_workspace = workspace
            graphs = type(verify_graphs)(self._runner, attn_backend=backend)
        self._plain = replace(_InUse.of(self._runner), graphs=graphs, backend=backend)
        wide.put(self._runner)
        logger.info(
            "captured decode graphs for batches without drafts in %.1f s",
            time.perf_counter() - started,
        )

    @contextmanager
    def _as_plain_decoding(self) -> Iterator[None]:
        algorithm = self._runner.spec_algorithm
        self._runner.spec_algorithm = SpeculativeAlgorithm.NONE
        try:
            yield
        finally:
            self._runner.spec_algorithm = algorithm

    @contextmanager
    def active(self) -> Iterator[None]:
        """Run the target's forward with these graphs instead of the verify graphs."""
        if self._plain is None:
            yield
            return
        wide = _InUse.of(self._runner)
        self._plain.put(self._runner)
        try:
            yield
        finally:
            wide.put(self._runner)


@dataclass(frozen=True)
class _InUse:
    """What a model runner's decode forwards use."""

    graphs: Any
    backend: Any
    adapters: tuple[int, Any] | None
    """Largest batch, and the buffers that tell its graphs which row has which LoRA adapter. Each
    capture makes new ones, and forwards fill in the newest."""

    @classmethod
    def of(cls, runner: Any) -> _InUse:
        adapters = None
        if runner.server_args.enable_lora:
            lora = runner.lora_manager
            adapters = lora.max_bs_in_cuda_graph, lora.lora_backend.cuda_graph_batch_info
        return cls(runner.decode_cuda_graph_runner, runner.attn_backend, adapters)

    def put(self, runner: Any) -> None:
        runner.decode_cuda_graph_runner, runner.attn_backend = self.graphs, self.backend
        if self.adapters is not None:
            lora = runner.lora_manager
            lora.max_bs_in_cuda_graph, lora.lora_backend.cuda_graph_batch_info = self.adapters
