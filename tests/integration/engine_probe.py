"""A user's script around `sgl_ssd.Engine`; prints one line of JSON. Run by test_engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import psutil

import sgl_ssd
from sgl_ssd.models import TARGET_PATH

assert "sglang" not in sys.modules, "import sgl_ssd must stay light"


def main(prompts: list[list[int]], adapter: str) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
    with sgl_ssd.Engine(
        device="cpu", dtype="float32", speculative_num_steps=5, ssd_fan_out=3, ssd_backup="jit",
        lora_paths={"adapter": adapter},
    ) as engine:  # fmt: skip
        folder = Path(engine._endpoint.removeprefix("ipc://")).parent
        greedy = engine.generate(input_ids=prompts, sampling_params=sampling)
        whole = engine.generate("def add(a, b):\n", sampling)["text"]
        chunks = list(engine.generate("def add(a, b):\n", sampling, stream=True))
        state = engine.get_server_info()["internal_states"][0]["ssd"]
        texts = changed_texts(engine, prompts, sampling)
        running = len(psutil.Process().children(recursive=True))
    report = {
        "output_ids": [answer["output_ids"] for answer in greedy],
        "whole": whole,
        "streamed": chunks[-1]["text"],
        "chunks": len(chunks),
        "ssd": {name: state[name] for name in ("accepted", "hits", "num_steps", "backup")},
        "texts": texts,
        "running": running,
        "left": [
            " ".join(child.cmdline())
            for child in psutil.Process().children(recursive=True)
            if child.status() != psutil.STATUS_ZOMBIE  # ended; this process will reap it
        ],
        "folder_left": folder.exists(),
    }
    engine.shutdown()  # a second time does no harm
    print("REPORT " + json.dumps(report))


def changed_texts(
    engine: sgl_ssd.Engine, prompts: list[list[int]], sampling: dict[str, Any]
) -> dict[str, list[list[list[int]]]]:
    """Token ids with drafts and without, under an adapter, other weights, and the old ones."""
    from safetensors.torch import load_file
    from sglang.srt.managers.io_struct import SetInternalStateReq

    def ids(drafting: int, lora_path: list[str] | None) -> list[list[int]]:
        change = SetInternalStateReq(server_args={"ssd_drafting": drafting})
        engine.loop.run_until_complete(engine.tokenizer_manager.set_internal_state(change))
        before = accepted()
        answers = engine.generate(input_ids=prompts, sampling_params=sampling, lora_path=lora_path)
        assert (accepted() > before) == bool(drafting)
        return [answer["output_ids"] for answer in answers]

    def both(lora_path: list[str] | None = None) -> list[list[list[int]]]:
        return [ids(1, lora_path), ids(0, lora_path)]

    def accepted() -> int:
        return engine.get_server_info()["internal_states"][0]["ssd"]["accepted"]

    (file,) = TARGET_PATH.glob("*.safetensors")
    tensors = load_file(file)
    name = max(name for name in tensors if "down_proj" in name)
    texts = {"adapter": both(["adapter"] * len(prompts))}
    for label, value in (("other", -tensors[name]), ("same", tensors[name])):
        assert engine.update_weights_from_tensor([(name, value)])[0]
        texts[label] = both()
    return texts


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2])
