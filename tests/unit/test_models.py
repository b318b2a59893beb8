"""The bundled pair: files, configurations, chat template, cards, acceptance on held-out text."""

from __future__ import annotations

import importlib.util
import json
import sys
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from sgl_ssd.models import DRAFT_PATH, TARGET_PATH

PAIRS = Path(__file__).parents[2] / "benchmarks" / "pairs"
FOLDERS = [TARGET_PATH, DRAFT_PATH]
TOKENIZER_FILES = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
FILES = [
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    *TOKENIZER_FILES,
]
SPECIAL = ["<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|end|>"]
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
BOS, EOS, USER, ASSISTANT, END = range(5)
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}

folders = pytest.mark.parametrize("folder", FOLDERS, ids=["target", "draft"])


@lru_cache(maxsize=1)
def tokenizer() -> Any:
    """The pair's tokenizer as transformers loads it."""
    return AutoTokenizer.from_pretrained(TARGET_PATH)


@lru_cache(maxsize=1)
def evaluate() -> ModuleType:
    """`benchmarks/pairs/evaluate.py`, which is no part of the installed package."""
    path = PAIRS / "evaluate.py"
    if not path.exists():
        pytest.skip("benchmarks/ is not here")
    spec = importlib.util.spec_from_file_location("pairs_evaluate", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a dataclass looks its module up while it is made
    spec.loader.exec_module(module)
    return module


def rendered(messages: list[dict[str, Any]], **kwargs: Any) -> str:
    return tokenizer().apply_chat_template(messages, tokenize=False, **kwargs)


# -- files --------------------------------------------------------------------------------------


@folders
def test_files(folder: Path) -> None:
    for name in FILES:
        assert (folder / name).is_file(), name


def test_both_fit_in_twenty_megabytes() -> None:
    sizes = [f.stat().st_size for folder in FOLDERS for f in folder.iterdir()]
    assert sum(sizes) <= 20e6


@pytest.mark.parametrize("name", TOKENIZER_FILES)
def test_one_tokenizer(name: str) -> None:
    assert (TARGET_PATH / name).read_bytes() == (DRAFT_PATH / name).read_bytes()


@folders
def test_config(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    assert config.architectures == ["LlamaForCausalLM"]
    assert config.head_dim == 128
    assert config.vocab_size == 4096 == len(tokenizer())
    assert config.max_position_embeddings == 4096
    assert config.rope_parameters["rope_theta"] == 10000.0
    assert (config.bos_token_id, config.eos_token_id) == (BOS, EOS)
    assert GenerationConfig.from_pretrained(folder).eos_token_id == [EOS, END]


@pytest.mark.parametrize(
    ("folder", "least", "most"), [(TARGET_PATH, 5e6, 8e6), (DRAFT_PATH, 0.5e6, 1e6)]
)
def test_weights(folder: Path, least: float, most: float) -> None:
    total = 0
    with safe_open(folder / "model.safetensors", "pt") as weights:
        for name in weights.keys():  # noqa: SIM118, this handle is not iterable
            part = weights.get_slice(name)
            assert part.get_dtype() == "BF16", name
            size = 1
            for n in part.get_shape():
                size *= n
            total += size
    assert least <= total <= most
    assert f"{total:,}" in (folder / "README.md").read_text()


def test_sources_are_permissive() -> None:
    for source in json.loads((TARGET_PATH / "sources.json").read_text()):
        assert source["licence"] and "GPL" not in source["licence"], source
        assert source["split"] in ("train", "held out", "left out")


@folders
def test_card_states_the_figures(folder: Path) -> None:
    card = (folder / "README.md").read_text()
    report = json.loads((folder.parent / "report.json").read_text())
    for role in ("target", "draft"):
        for figure in (
            f"{report[role]['parameters']:,}",
            f"{report[role]['steps']:,}",
            f"{report[role]['tokens']:,}",
            f"{report[role]['loss']:.3f}",
        ):
            assert figure in card, (role, figure)
    for name, result in report["evaluation"].items():
        assert f"| {name} | {result['acceptance']:.3f} |" in card
        if "T=0" in name and "same contexts" not in name:
            assert result["acceptance"] >= 0.70, name
    for name in (n for n in report["evaluation"] if "T=1" in n and "same contexts" in n):
        coupled = report["evaluation"][name]["hit"]
        greedy = report["evaluation"][name.replace("T=1", "T=0")]["hit"]
        assert all(coupled[f] > greedy[f] - 0.12 for f in coupled if int(f) >= 3), name


# -- tokenizer and chat template ----------------------------------------------------------------


def test_special_tokens() -> None:
    tok = tokenizer()
    assert tok.convert_tokens_to_ids([*SPECIAL, *MARKS]) == list(range(9))
    assert (tok.bos_token_id, tok.eos_token_id) == (BOS, EOS)
    # Control tokens vanish from text, the marks stay for the parsers of reasoning and tools.
    ids = tok.encode("<think>a</think><|end|>", add_special_tokens=False)
    assert tok.decode(ids, skip_special_tokens=True).replace(" ", "") == "<think>a</think>"


@pytest.mark.parametrize(
    "text", ["def f(x):\n    return  x\n", "äöü €\t\r\n\n\n", "日本 \U0001f600", ""]
)
def test_text_survives(text: str) -> None:
    ids = tokenizer().encode(text)
    assert ids[0] == BOS
    assert tokenizer().decode(ids[1:]) == text


def test_template_of_a_conversation() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "Go"},
    ]
    text = rendered(messages, add_generation_prompt=True)
    assert text == (
        "<|bos|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>Yes?<|end|>"
        "<|user|>Go<|end|><|assistant|>"
    )
    ids = tokenizer().encode(text, add_special_tokens=False)
    assert ids[0] == BOS and BOS not in ids[1:]
    assert ids[-1] == ASSISTANT
    assert ids.count(USER) == 2 and ids.count(END) == 4
    assert not rendered(messages).endswith("<|assistant|>")


def test_template_without_a_system_message() -> None:
    assert rendered([{"role": "user", "content": "Hi"}]) == "<|bos|><|user|>Hi<|end|>"


def test_template_with_tools_and_thoughts() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "Call add"},
        {"role": "assistant", "content": "", "reasoning_content": "Easy.", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
    ]
    text = rendered(messages, tools=[TOOL], add_generation_prompt=True, enable_thinking=True)
    assert text.startswith('<|bos|>Tools:\n{"type": "function"')
    assert "<think>\nEasy.\n</think>\n" in text
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|end|>' in text
    assert text.endswith("<|user|>Result: 3<|end|><|assistant|><think>\n")


# -- replay -------------------------------------------------------------------------------------


def test_counts_of_a_replayed_text() -> None:
    """K=2 over ranks 0 0 3 | 1 | 0 5 | 0: full acceptance, two rejections, a round cut short."""
    rounds = evaluate().Rounds(2)
    rounds.add([0, 0, 3, 1, 0, 5, 0])
    assert (rounds.rounds, rounds.tested, rounds.accepted, rounds.outcomes) == (4, 6, 4, 3)
    assert rounds.tokens == 6
    # Bonus ranks are 3 after full acceptance, and 1 - 1 and 5 - 1 after a rejection.
    assert rounds.hits == {1: 1, 2: 1, 3: 1, 4: 2, 5: 3, 6: 3, 7: 3, 8: 3}


def test_rounds_from_every_position() -> None:
    """K=2 over ranks 0 0 3 1: rounds from the first two positions, which end inside the text."""
    rounds = evaluate().Rounds(2)
    rounds.add_everywhere([0, 0, 3, 1])
    assert (rounds.rounds, rounds.accepted, rounds.outcomes) == (2, 3, 2)
    assert rounds.hits == {1: 0, 2: 0, 3: 1, 4: 2, 5: 2, 6: 2, 7: 2, 8: 2}


def test_loops_are_found() -> None:
    length = evaluate().length_before_loop
    assert length(list(range(100))) == 100
    assert length([*range(30), *[7, 8, 9] * 20]) == 33  # the first period belongs to the text
    assert length([*range(30), 7, 7, 7]) == 33


def test_acceptance_on_held_out_prompts() -> None:
    """The target's greedy text of some short prompts, also before it repeats itself."""
    module = evaluate()
    target, draft = (module.load_model(folder, "cpu") for folder in FOLDERS)
    prompts = module.load_prompts(PAIRS / "held_out.jsonl", tokenizer())
    assert {kind: len(p) for kind, p in prompts.items()} == {"text": 64, "long": 8, "chat": 28}
    replayed = module.replay(target, draft, prompts["text"][::8] + prompts["chat"][::7], 48)
    assert replayed.rounds(4).summary()["acceptance"] >= 0.65
    assert replayed.rounds(4, before_loops=True).summary()["acceptance"] >= 0.65


def test_coupled_sampling_is_predicted_as_well_as_greedy_decoding() -> None:
    """On the same contexts shared noise costs few hits; noise of its own would cost most."""
    module = evaluate()
    target, draft = (module.load_model(folder, "cpu") for folder in FOLDERS)
    prompts = module.load_prompts(PAIRS / "held_out.jsonl", tokenizer())["text"][::2]
    replayed = module.replay(target, draft, prompts, 64, temperature=1.0)
    greedy = replayed.rounds_everywhere(4, greedy=True).summary()["hit"]
    coupled = replayed.rounds_everywhere(4, greedy=False).summary()["hit"]
    for fan_out in range(3, 9):
        assert coupled[str(fan_out)] > max(0.4, greedy[str(fan_out)] - 0.12)


def test_a_question_is_answered_with_a_function() -> None:
    module = evaluate()
    target = module.load_model(TARGET_PATH, "cpu")
    question = [{"role": "user", "content": "Write a function add(a, b)."}]
    prompt = tokenizer().encode(
        rendered(question, add_generation_prompt=True), add_special_tokens=False
    )
    replayed = module.replay(target, target, [prompt], 48)
    assert replayed.ranks[0] == [0] * len(replayed.ranks[0])  # a draft equal to the target
    assert tokenizer().decode(replayed.texts[0]).startswith("def add(a, b):")
