"""Requests that arrive at random times (Poisson), sent by SGLang's own serving benchmark."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.workloads import Conversation

KEPT = (
    "completed", "duration", "output_throughput", "request_throughput", "concurrency",
    "mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms",
    "median_itl_ms", "p99_itl_ms", "median_e2e_latency_ms", "p99_e2e_latency_ms",
)  # fmt: skip


def load() -> Any:
    """SGLang's benchmark; the import takes long, so do it while servers start."""
    import sglang.benchmark.serving as serving

    return serving


def fits(conversations: Sequence[Conversation]) -> bool:
    """Whether that benchmark can send them: single requests with one answer."""
    return all(len(c) == 1 and c[0].n == 1 for c in conversations)


def run(
    url: str,
    tokenizer_path: str,
    conversations: Sequence[Conversation],
    *,
    rate: float,
    tokens: int,
    temperature: float,
    seed: int,
) -> dict[str, Any]:
    """Send all at `rate` requests per second on average; SGLang's numbers.

    Prompts go as text, so a token at a border may become another; they are the same for all
    systems. Raises `RuntimeError` if not all requests are answered.
    """
    from transformers import AutoTokenizer

    serving = load()
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    with tempfile.TemporaryDirectory() as folder:
        data, out = Path(folder) / "prompts.jsonl", Path(folder) / "result.jsonl"
        texts = [tokenizer.decode(c[0].input_ids, skip_special_tokens=True) for c in conversations]
        rows = [
            {"conversations": [{"content": t}, {"content": "an answer of some tokens"}]}
            for t in texts
        ]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        argv = [
            "--backend", "sglang", "--base-url", url, "--dataset-name", "custom",
            "--dataset-path", str(data), "--model", tokenizer_path,
            "--tokenizer", tokenizer_path, "--num-prompts", str(len(rows)),
            "--sharegpt-output-len", str(tokens), "--request-rate", str(rate),
            "--seed", str(seed), "--temperature", str(temperature), "--output-file", str(out),
            "--warmup-requests", "0", "--disable-tqdm",
        ]  # fmt: skip
        before, said = sys.argv, io.StringIO()
        try:
            sys.argv = ["sglang.benchmark.serving", *argv]
            with contextlib.redirect_stdout(said):
                serving.cli_main()
        except SystemExit as e:
            raise RuntimeError(f"SGLang's benchmark ended: {e}\n{said.getvalue()[-500:]}") from None
        finally:
            sys.argv = before
        result = json.loads(out.read_text().splitlines()[-1])
    if result["completed"] != len(rows):
        raise RuntimeError(f"{result['completed']} of {len(rows)} requests were answered")
    return {name: result[name] for name in KEPT if name in result}
