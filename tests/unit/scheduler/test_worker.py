"""What SGLang asks of the worker besides forwards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

from sgl_ssd.errors import ConfigError
from sgl_ssd.scheduler.exchange import _draft_key
from sgl_ssd.scheduler.worker import SSDWorker, _refuse_expert_adapters


@pytest.fixture
def worker() -> Any:
    return object.__new__(SSDWorker)


# -- new weights for the target ----------------------------------------------------------------


class CountingTarget:
    """Counts the updates of its weights; says that they have failed when told to."""

    def __init__(self, success: bool) -> None:
        self.calls: list[str] = []
        self._success = success

    def __getattr__(self, name: str) -> Any:
        def update(recv_req: Any) -> tuple[bool, str]:
            self.calls.append(name)
            return self._success, "done"

        return update


@pytest.mark.parametrize("way", ["disk", "tensor", "tensor alone", "ipc", "distributed"])
@pytest.mark.parametrize("success", [True, False])
def test_new_weights_reach_the_target_once(
    way: str, success: bool, worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang asks the target's worker and ours, in an order that depends on the way."""
    monkeypatch.setattr("torch.distributed.barrier", lambda group: None)
    target, flushes = CountingTarget(success), []
    worker._target_worker = target
    manager = SchedulerWeightUpdaterManager(
        tp_worker=target, draft_worker=worker, tp_cpu_group=None, memory_saver_adapter=None,
        flush_cache=lambda empty_cache: flushes.append(empty_cache) or True,
        is_fully_idle=lambda: True,
    )  # fmt: skip
    request = SimpleNamespace(
        disable_draft_model=way == "tensor alone", flush_cache=True, torch_empty_cache=False
    )
    name = f"update_weights_from_{way.split()[0]}"
    answer = getattr(manager, name)(request)
    assert target.calls == [name]
    assert answer.success is success
    assert flushes == ([False] if success else [])


# -- adapters ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra_key", "lora_id", "key"),
    [(None, None, ""), ("salt", None, "salt"), ("ab12", "ab12", ""), ("saltab12", "ab12", "salt")],
)
def test_prompts_share_the_drafts_cache_over_adapters(extra_key: Any, lora_id: Any, key: str):
    """SGLang's `extra_key` of a request ends with its adapter's id; a salt stays."""
    assert _draft_key(SimpleNamespace(extra_key=extra_key, lora_id=lora_id)) == key


def test_adapters_on_experts_are_refused():
    def runner(enable_lora: bool, on_experts: bool) -> Any:
        backend = SimpleNamespace(is_moe_lora=on_experts)
        return SimpleNamespace(
            server_args=SimpleNamespace(enable_lora=enable_lora),
            lora_manager=SimpleNamespace(lora_backend=backend) if enable_lora else None,
        )

    _refuse_expert_adapters(runner(False, False))
    _refuse_expert_adapters(runner(True, False))
    with pytest.raises(ConfigError, match="experts.*--lora-target-modules"):
        _refuse_expert_adapters(runner(True, True))


# -- replicas ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "name"), [(None, "t.json"), (0, "t.json"), (3, "t.3.json")])
def test_each_replica_writes_a_timeline_of_its_own(rank: Any, name: str, worker: Any):
    worker.config = SimpleNamespace(trace_file="/tmp/t.json")
    worker.ps = SimpleNamespace(dp_rank=rank)
    assert worker.trace_file == f"/tmp/{name}"
