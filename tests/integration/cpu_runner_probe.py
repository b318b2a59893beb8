"""Builds SGLang's ModelRunner by hand on the CPU and compares ways to compute the same logits.

Run by test_cpu_platform.py in a process of its own: `python cpu_runner_probe.py MODEL_FOLDER`
prints one JSON object of largest differences between logits.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch

LENGTHS = [5, 37, 130, 600]  # tokens in the cache of each request before the drafts
WIDTH = 6


def build_runner(model: str) -> Any:
    """A ModelRunner with its pools, as another process than SGLang's scheduler builds it."""
    from sglang.benchmark.one_batch import load_model
    from sglang.srt.server_args import PortArgs, ServerArgs, set_global_server_args_for_scheduler

    from sgl_ssd import cpu

    cpu.install()
    args = ServerArgs(model_path=model, device="cpu", dtype="float32", max_running_requests=16)
    set_global_server_args_for_scheduler(args)
    runner, _tokenizer = load_model(args, PortArgs.init_new(args), 0, 0)
    return runner.torch_runner


class Rows:
    """Requests as rows of the request-to-token table, driven without a scheduler."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.table = runner.req_to_token_pool.req_to_token

    def forward(
        self,
        mode: Any,
        rows: list[int],
        prefix: list[int],
        tokens: list[list[int]],
        spec_info: Any = None,
    ) -> torch.Tensor:
        """Logits [rows or their widths' sum, vocabulary] of `tokens` at positions prefix.. ."""
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        widths = [len(row) for row in tokens]
        total = sum(widths)
        slots = self.runner.token_to_kv_pool_allocator.alloc(total)
        positions = torch.cat([torch.arange(p, p + w) for p, w in zip(prefix, widths, strict=True)])
        where = torch.repeat_interleave(torch.tensor(rows), torch.tensor(widths))
        self.table[where, positions] = slots.int()
        seq = torch.tensor(prefix) + torch.tensor(widths)
        fields: dict[str, Any] = {}
        if mode.is_target_verify():
            seq = torch.tensor(prefix)
        elif mode.is_extend():
            fields = {
                "extend_num_tokens": total,
                "extend_seq_lens": torch.tensor(widths, dtype=torch.int32),
                "extend_prefix_lens": torch.tensor(prefix, dtype=torch.int32),
                "extend_start_loc": torch.tensor(widths).cumsum(0).int() - torch.tensor(widths),
                "extend_seq_lens_cpu": widths,
                "extend_prefix_lens_cpu": prefix,
                "extend_logprob_start_lens_cpu": [0] * len(rows),
            }
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(rows),
            input_ids=torch.tensor([token for row in tokens for token in row]),
            req_pool_indices=torch.tensor(rows),
            seq_lens=seq,
            seq_lens_cpu=seq,
            seq_lens_sum=int(seq.sum()),
            orig_seq_lens=seq.int(),
            out_cache_loc=slots,
            positions=positions,
            num_token_non_padded_cpu=total,
            spec_algorithm=SpeculativeAlgorithm.NONE,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            return_logprob=False,
            spec_info=spec_info,
            **fields,
        )
        with torch.inference_mode():
            return self.runner.forward(batch).logits_output.next_token_logits.clone()


def measure(model: str) -> dict[str, float]:
    """Largest absolute difference of logits, by what was compared with decoding all rows."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    rows = Rows(build_runner(model))
    random = torch.Generator().manual_seed(1)
    vocab = rows.runner.model_config.vocab_size
    text = [
        torch.randint(2, vocab, (length + WIDTH,), generator=random).tolist() for length in LENGTHS
    ]
    count = len(LENGTHS)
    decode_rows, verify_rows = list(range(1, count + 1)), list(range(count + 1, 2 * count + 1))
    whole_row = 2 * count + 1
    prompts = [ids[:length] for ids, length in zip(text, LENGTHS, strict=True)]
    for block in (decode_rows, verify_rows):
        rows.forward(ForwardMode.EXTEND, block, [0] * count, prompts)
    decoded = []
    for step in range(WIDTH):
        tokens = [[ids[length + step]] for ids, length in zip(text, LENGTHS, strict=True)]
        prefix = [length + step for length in LENGTHS]
        decoded.append(rows.forward(ForwardMode.DECODE, decode_rows, prefix, tokens))
    by_decode = torch.stack(decoded, 1)  # [rows, width, vocabulary]
    drafts = [ids[length:] for ids, length in zip(text, LENGTHS, strict=True)]
    spec_info = SimpleNamespace(draft_token_num=WIDTH, num_tokens_per_req=WIDTH)
    flat = rows.forward(ForwardMode.TARGET_VERIFY, verify_rows, LENGTHS, drafts, spec_info)
    by_verify = flat.view(count, WIDTH, -1)
    single = torch.cat(
        [
            rows.forward(ForwardMode.DECODE, [row], [LENGTHS[i] + WIDTH - 1], [drafts[i][-1:]])
            for i, row in enumerate(decode_rows)
        ]
    )
    alone = torch.stack(
        [
            rows.forward(ForwardMode.TARGET_VERIFY, [row], [LENGTHS[i]], [drafts[i]], spec_info)
            for i, row in enumerate(verify_rows)
        ]
    )
    chunked = []
    for ids in text:
        half = len(ids) // 2
        rows.forward(ForwardMode.EXTEND, [whole_row], [0], [ids[:half]])
        chunked.append(rows.forward(ForwardMode.EXTEND, [whole_row], [half], [ids[half:]])[0])
    return {
        "scale": float(by_decode.std()),
        "verify": float((by_verify - by_decode).abs().max()),
        "decode alone": float((single - by_decode[:, -1]).abs().max()),
        "verify alone": float((alone - by_decode).abs().max()),
        "chunked prefill": float((torch.stack(chunked) - by_decode[:, -1]).abs().max()),
    }


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
