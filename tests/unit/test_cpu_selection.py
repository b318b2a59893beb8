"""When the CPU platform takes part, and which arguments it fills in or refuses."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_ssd.cpu import defaults, selection


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No wish in the environment or on the command line, and no accelerator."""
    for name in (selection.DEVICE_ENV, "SGLANG_PLATFORM", "SGLANG_USE_CPU_ENGINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(selection.sys, "argv", ["server"])
    monkeypatch.setattr(selection, "_accelerator_available", lambda: False)
    return monkeypatch


@pytest.mark.parametrize(
    ("environ", "argv", "device"),
    [
        ({}, [], None),
        ({}, ["--device", "cpu"], "cpu"),
        ({}, ["--device=CPU"], "cpu"),
        ({}, ["--device", "cuda:1"], "cuda"),
        ({}, ["--device"], None),
        ({}, ["--draft-device", "cpu"], None),
        ({selection.DEVICE_ENV: "cpu"}, ["--device", "cuda"], "cpu"),
        ({selection.DEVICE_ENV: "cuda"}, ["--device", "cpu"], "cuda"),
        ({selection.DEVICE_ENV: "auto"}, ["--device", "cpu"], "cpu"),
        ({"SGLANG_PLATFORM": selection.PLATFORM_NAME}, [], "cpu"),
        ({"SGLANG_PLATFORM": "another"}, [], "another"),
    ],
)
def test_requested_device(environ: dict[str, str], argv: list[str], device: str | None) -> None:
    assert selection.requested_device(environ, ["server", *argv]) == device


def test_cpu_serves_where_nothing_else_can(clean: pytest.MonkeyPatch) -> None:
    assert selection.use_cpu()


def test_accelerator_is_preferred(clean: pytest.MonkeyPatch) -> None:
    clean.setattr(selection, "_accelerator_available", lambda: True)
    assert not selection.use_cpu()


def test_other_platform_plugins_are_preferred(clean: pytest.MonkeyPatch) -> None:
    others = [SimpleNamespace(name="another"), SimpleNamespace(name=selection.PLATFORM_NAME)]
    clean.setattr(selection, "entry_points", lambda group: others)
    assert not selection.use_cpu()
    clean.setattr(selection.sys, "argv", ["server", "--device", "cpu"])
    assert selection.use_cpu()


def test_asking_for_the_cpu_hides_gpus_from_children(clean: pytest.MonkeyPatch) -> None:
    clean.setattr(selection, "_accelerator_available", lambda: True)
    clean.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    clean.setenv(selection.DEVICE_ENV, "cpu")
    clean.setattr(torch.cuda, "is_available", lambda: False)
    assert selection.use_cpu()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert os.environ[selection.DEVICE_ENV] == "cpu"


def test_asking_too_late_is_refused(clean: pytest.MonkeyPatch) -> None:
    clean.setenv(selection.DEVICE_ENV, "cpu")
    clean.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="already in use"):
        selection.use_cpu()


def test_sglangs_own_cpu_engine_goes_first(clean: pytest.MonkeyPatch) -> None:
    clean.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert not selection.use_cpu()
    clean.setenv(selection.DEVICE_ENV, "cpu")
    with pytest.raises(RuntimeError, match="unset one"):
        selection.use_cpu()


def _args(**changes: Any) -> Any:
    """What `apply_defaults` reads of SGLang's ServerArgs, as a user without flags leaves it."""
    config = SimpleNamespace(
        num_hidden_layers=2,
        head_dim=32,
        dtype=torch.float32,
        get_num_kv_heads=lambda tp_size: max(1, 2 // tp_size),
    )
    fields: dict[str, Any] = {
        "dtype": "auto",
        "quantization": None,
        "attention_backend": None,
        "prefill_attention_backend": None,
        "decode_attention_backend": None,
        "sampling_backend": None,
        "grammar_backend": None,
        "lora_backend": "csgmv",
        "enable_lora_overlap_loading": None,
        "sleep_on_idle": False,
        "disable_custom_all_reduce": False,
        "enable_torch_compile": False,
        "chunked_prefill_size": None,
        "max_running_requests": None,
        "mem_fraction_static": None,
        "max_total_tokens": None,
        "tp_size": 1,
        "get_model_config": lambda: config,
    }
    return SimpleNamespace(**{**fields, **changes})


@pytest.fixture(autouse=True)
def _keep_threads(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Defaults change the environment and torch; put both back."""
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "SGLANG_CPU_OMP_THREADS_BIND"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_defaults() -> None:
    args = _args(attention_backend="intel_amx")
    defaults.apply_defaults(args)
    assert args.attention_backend == "torch_native"
    assert args.sampling_backend == "pytorch"
    assert args.grammar_backend == "llguidance"
    assert args.lora_backend == "torch_native"
    assert args.sleep_on_idle
    assert args.dtype == "float32"
    assert args.max_running_requests == 48
    assert args.max_total_tokens == defaults.KV_POOL_TOKENS
    before = dict(vars(args))
    defaults.apply_defaults(args)
    assert vars(args) == before


def test_what_the_user_set_stays() -> None:
    chosen = {
        "dtype": "bfloat16",
        "grammar_backend": "none",
        "chunked_prefill_size": 16,
        "max_running_requests": 3,
        "mem_fraction_static": 0.1,
        "max_total_tokens": 500,
    }
    args = _args(**chosen)
    defaults.apply_defaults(args)
    assert {name: getattr(args, name) for name in chosen} == chosen


def test_a_memory_fraction_sizes_the_kv_pool() -> None:
    args = _args(mem_fraction_static=0.1)
    defaults.apply_defaults(args)
    assert args.max_total_tokens is None


def test_kv_pool_of_a_larger_model_is_bounded_in_bytes() -> None:
    args = _args()
    config = args.get_model_config()
    config.num_hidden_layers, config.head_dim = 28, 128
    config.get_num_kv_heads = lambda tp_size: 8
    tokens = defaults.default_kv_tokens(args)
    assert 1024 <= tokens <= defaults.KV_POOL_BYTES // (2 * 28 * 8 * 128 * 4)


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"attention_backend": "triton"}, "--attention-backend triton"),
        ({"decode_attention_backend": "fa3"}, "--decode-attention-backend fa3"),
        ({"grammar_backend": "xgrammar"}, "--grammar-backend xgrammar"),
        ({"sampling_backend": "flashinfer"}, "--sampling-backend flashinfer"),
        ({"lora_backend": "triton"}, "--lora-backend triton"),
        ({"enable_lora_overlap_loading": True}, "--enable-lora-overlap-loading"),
        ({"enable_torch_compile": True}, "--enable-torch-compile"),
    ],
)
def test_impossible_arguments_are_named(change: dict[str, Any], flag: str) -> None:
    with pytest.raises(ValueError, match=flag):
        defaults.apply_defaults(_args(**change))


def test_ranks_get_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defaults.os, "sched_getaffinity", lambda pid: set(range(8)))
    defaults.apply_defaults(_args(tp_size=2))
    assert os.environ["OMP_NUM_THREADS"] == "2"
    assert os.environ["SGLANG_CPU_OMP_THREADS_BIND"] == "0|4"


def test_threads_of_the_user_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    before = torch.get_num_threads()
    defaults.apply_defaults(_args())
    assert os.environ["OMP_NUM_THREADS"] == "3"
    assert torch.get_num_threads() == before
