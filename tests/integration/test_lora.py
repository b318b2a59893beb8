"""LoRA adapters of the target: each request's text is its adapter's, with drafts or without.

The draft knows nothing of adapters. The servers hold fewer adapters at a time than are asked for.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from adapters import ATTENTION, EMBEDDINGS, LINEAR, make_adapter, merge
from parity.harness import Body, compare, configure, send_all, ssd_state
from parity.mixes import RequestMix
from servers import ServerProcess
from sgl_ssd.models import TARGET_PATH

pytestmark = pytest.mark.integration

NEW_TOKENS = 48
GREEDY = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
NAMES = [None, "attention", "linear", "whole"]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders by name; "late" is not loaded at the start."""
    folder = tmp_path_factory.mktemp("adapters")

    def make(name: str, *args: Any, **kwargs: Any) -> Path:
        return make_adapter(folder / name, TARGET_PATH, *args, **kwargs)

    return {
        "attention": make("attention", seed=1, rank=4, modules=ATTENTION),
        "linear": make("linear", seed=2, rank=8),
        "whole": make("whole", seed=3, rank=8, modules=LINEAR + EMBEDDINGS, strength=0.05),
        "late": make("late", seed=4, rank=6),
    }


@pytest.fixture(scope="module")
def flags(adapters: dict[str, Path]) -> list[str]:
    """What both servers are started with: three places, one of them for no adapter."""
    args = ["--device", "cpu", "--dtype", "float32", "--chunked-prefill-size", "64"]
    args += ["--lora-paths", *(f"{name}={adapters[name]}" for name in NAMES if name)]
    return [*args, "--lora-target-modules", "all", "--max-lora-rank", "8", "--max-loras-per-batch"]


@pytest.fixture(scope="module")
def ssd(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("lora-ssd") / "server.log"
    args = [*flags, "3", "--speculative-num-steps", "12"]
    env = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
    with ServerProcess("sgl_ssd.launch_server", args, log=log, env=env) as server:
        configure(server, ssd_num_steps=4, ssd_fan_out=4, ssd_backup=2)
        yield server
        server.assert_ends_cleanly()


@pytest.fixture(scope="module")
def plain(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Plain SGLang on the same target and adapters."""
    log = tmp_path_factory.mktemp("lora-plain") / "server.log"
    args = [*flags, "3", "--model-path", str(TARGET_PATH), "--disable-overlap-schedule"]
    with ServerProcess("sglang.launch_server", args, log=log) as server:
        yield server


def with_adapters(bodies: list[Body]) -> list[Body]:
    """The same requests, each with another adapter than its neighbours, or none."""
    return [body | {"lora_path": NAMES[i % len(NAMES)]} for i, body in enumerate(bodies)]


@pytest.fixture(scope="module")
def greedy(prompts: list[list[int]]) -> list[Body]:
    return with_adapters([{"input_ids": ids, "sampling_params": GREEDY} for ids in prompts[4:24]])


def without_drafts(server: ServerProcess, bodies: list[Body], concurrency: int = 8) -> list[Any]:
    configure(server, ssd_drafting=0)
    return send_all(server, bodies, concurrency)


def with_drafts(server: ServerProcess, bodies: list[Body], concurrency: int = 8) -> list[Any]:
    """Asserts that drafts came and that some of them were right; then drafting is off."""
    configure(server, ssd_drafting=1)
    before = ssd_state(server)
    answers = send_all(server, bodies, concurrency)
    after = ssd_state(server)
    for name in ("drafted", "accepted", "hits"):
        assert after[name] > before[name], name
    configure(server, ssd_drafting=0)
    return answers


def test_greedy_equals_plain_sglang(ssd, plain, greedy):
    expected = send_all(plain, greedy, 8)
    compare(ssd, greedy, expected, without_drafts(ssd, greedy), "drafting off").check()
    for steps, fan_out in ((4, 4), (12, 2)):
        configure(ssd, ssd_num_steps=steps, ssd_fan_out=fan_out)
        answers = with_drafts(ssd, greedy)
        compare(ssd, greedy, expected, answers, f"K={steps}").check()
    configure(ssd, ssd_num_steps=4, ssd_fan_out=4)
    alone = with_drafts(ssd, greedy[:8], 1)
    compare(ssd, greedy[:8], expected[:8], alone, "alone").check()


def test_each_adapter_says_something_else(ssd, prompts):
    """One prompt under every name: the caches of prefixes are not mixed up, either."""
    bodies = with_adapters([{"input_ids": prompts[10], "sampling_params": GREEDY}] * 8)
    answers = with_drafts(ssd, bodies, 4)
    texts = [tuple(answer["output_ids"]) for answer in answers]
    assert texts[:4] == texts[4:] and len(set(texts)) == 4


def test_probabilities_are_those_of_merged_weights(ssd, prompts, adapters):
    """An adapter adds scaling x B A to the weights, its share of the last layer included."""
    ids = prompts[9][:60]
    body = {"input_ids": ids, "return_logprob": True, "logprob_start_len": 0}
    body["sampling_params"] = GREEDY | {"max_new_tokens": 1}
    model = AutoModelForCausalLM.from_pretrained(
        TARGET_PATH, dtype=torch.float32, tie_word_embeddings=False
    )
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    original = {name: weight.clone() for name, weight in model.state_dict().items()}
    for name in NAMES:
        weights = {key: weight.clone() for key, weight in original.items()}
        if name is not None:
            merge(weights, adapters[name])
        model.load_state_dict(weights)
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        want = logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1)
        got = ssd.post("/generate", body | {"lora_path": name})["meta_info"]
        numbers = torch.tensor([item[0] for item in got["input_token_logprobs"][1:]])
        assert torch.allclose(numbers, want, atol=2e-3), (name, (numbers - want).abs().max())


def test_seeded_sampling_does_not_depend_on_drafting(ssd, prompts):
    sampled = GREEDY | {"temperature": 0.8, "top_p": 0.95}
    bodies = with_adapters(
        [
            {"input_ids": ids, "sampling_params": sampled | {"sampling_seed": i}}
            for i, ids in enumerate(prompts[24:44])
        ]
    )
    without = without_drafts(ssd, bodies)
    compare(ssd, bodies, without, with_drafts(ssd, bodies), "T=0.8").check()


def test_every_sampling_field(ssd, prompts, tokenizer):
    bodies = with_adapters(RequestMix(prompts, len(tokenizer), seed=23).draw_many(40, 32))
    without = without_drafts(ssd, bodies)
    compare(ssd, bodies, without, with_drafts(ssd, bodies), "mixed").check()


def test_retracted_requests_keep_their_adapter(ssd, greedy):
    bodies = greedy[:8]
    without = without_drafts(ssd, bodies)
    configure(ssd, ssd_drafting=1)
    rounds = ssd_state(ssd)["rounds"]
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(ssd.post, "/generate", body, 600) for body in bodies]
        while ssd_state(ssd)["rounds"] < rounds + 10:
            time.sleep(0.01)
        ssd.post("/pause_generation", {"mode": "retract"})
        assert not all(future.done() for future in futures)
        ssd.post("/continue_generation", {})
        answers = [future.result() for future in futures]
    configure(ssd, ssd_drafting=0)
    compare(ssd, bodies, without, answers, "retracted").check()


def test_adapters_come_and_go(ssd, plain, prompts, adapters):
    """Also a new one under an old name, whose cached prefixes are not the old one's."""
    bodies = [
        {"input_ids": ids, "sampling_params": GREEDY, "lora_path": "late"} for ids in prompts[4:10]
    ]
    with pytest.raises(RuntimeError, match=r"400.*late"):
        ssd.post("/generate", bodies[0])
    texts = []
    for name in ("late", "linear", "late"):
        for server in (ssd, plain):
            new = {"lora_name": "late", "lora_path": str(adapters[name])}
            assert server.post("/load_lora_adapter", new)["success"]
        expected = send_all(plain, bodies, 4)
        answers = with_drafts(ssd, bodies, 4)
        compare(ssd, bodies, expected, answers, f"late is {name}").check()
        texts.append([answer["output_ids"] for answer in answers])
        for server in (ssd, plain):
            assert server.post("/unload_lora_adapter", {"lora_name": "late"})["success"]
    assert texts[0] == texts[2] != texts[1]


def test_an_unloaded_adapter_finishes_its_requests(ssd, prompts, adapters):
    new = {"lora_name": "late", "lora_path": str(adapters["late"])}
    long = GREEDY | {"max_new_tokens": 400}
    body = {"input_ids": prompts[12], "sampling_params": long, "lora_path": "late"}
    ssd.post("/load_lora_adapter", new)
    (without,) = without_drafts(ssd, [body])
    configure(ssd, ssd_drafting=1)
    rounds = ssd_state(ssd)["rounds"]
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(ssd.post, "/generate", body, 600)
        while ssd_state(ssd)["rounds"] < rounds + 2:
            time.sleep(0.01)
        assert not future.done()
        assert ssd.post("/unload_lora_adapter", {"lora_name": "late"})["success"]
        answer = future.result()
    configure(ssd, ssd_drafting=0)
    assert answer["output_ids"] == without["output_ids"]


def test_openai_names_an_adapter_behind_a_colon(ssd, prompts):
    assert {"attention", "linear", "whole"} <= {m["id"] for m in ssd.get("/v1/models")["data"]}
    configure(ssd, ssd_drafting=1)
    for name in ("linear", "whole"):
        native = ssd.post(
            "/generate",
            {"input_ids": prompts[11], "sampling_params": GREEDY, "lora_path": name},
        )
        body = {"model": f"bundled:{name}", "prompt": prompts[11], "temperature": 0}
        body |= {"max_tokens": NEW_TOKENS, "ignore_eos": True}
        assert ssd.post("/v1/completions", body)["choices"][0]["text"] == native["text"]
    configure(ssd, ssd_drafting=0)
