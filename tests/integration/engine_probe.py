"""A user's script around `sgl_ssd.Engine`; prints one line of JSON. Run by test_engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import psutil

import sgl_ssd

assert "sglang" not in sys.modules, "import sgl_ssd must stay light"


def main(prompts: list[list[int]]) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
    with sgl_ssd.Engine(
        device="cpu", dtype="float32", speculative_num_steps=5, ssd_fan_out=3, ssd_backup="jit"
    ) as engine:
        folder = Path(engine._endpoint.removeprefix("ipc://")).parent
        greedy = engine.generate(input_ids=prompts, sampling_params=sampling)
        whole = engine.generate("def add(a, b):\n", sampling)["text"]
        chunks = list(engine.generate("def add(a, b):\n", sampling, stream=True))
        state = engine.get_server_info()["internal_states"][0]["ssd"]
        running = len(psutil.Process().children(recursive=True))
    report = {
        "output_ids": [answer["output_ids"] for answer in greedy],
        "whole": whole,
        "streamed": chunks[-1]["text"],
        "chunks": len(chunks),
        "ssd": {name: state[name] for name in ("accepted", "hits", "num_steps", "backup")},
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


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
