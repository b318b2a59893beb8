"""Adapters' products on the CPU: right, and the same for a row whatever stands beside it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sgl_ssd.cpu import lora

IN, OUT, RANK = 256, [128, 64, 64], 8
SLOTS = [(0, 0.0), (8, 2.0), (4, 0.5)]  # rank and scaling; the first is the model itself
RANKS, SCALINGS = [rank for rank, _ in SLOTS], [scaling for _, scaling in SLOTS]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def backend(slots: list[int], lengths: list[int], mode: ForwardMode | None = None) -> Any:
    """Prepared for requests of these slots and lengths."""
    made = lora.TorchLoRABackend(len(SLOTS), torch.device("cpu"), server_args=None)
    if mode is None:
        width = lengths[0]
        mode = ForwardMode.DECODE if width == 1 else ForwardMode.TARGET_VERIFY
    batch = SimpleNamespace(
        forward_mode=mode, batch_size=len(slots), return_logprob=False,
        spec_info=SimpleNamespace(draft_token_num=lengths[0]),
        extend_seq_lens=torch.tensor(lengths), extend_seq_lens_cpu=lengths,
    )  # fmt: skip
    made.prepare_lora_batch(batch, slots, RANKS, SCALINGS, False)
    return made


def weights(slices: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B of every slot, with rubbish where an adapter's rank leaves room."""
    return torch.randn(3, slices * RANK, IN), torch.randn(3, width, RANK)


def dense(slot: int, a: torch.Tensor, b: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """What the adapter adds to the layer's weight: [out, in]."""
    rank, scaling = SLOTS[slot]
    rows, start = [], 0
    for i, size in enumerate(sizes):
        down = a[slot, i * rank : (i + 1) * rank]
        rows.append(scaling * b[slot, start : start + size, :rank] @ down)
        start += size
    return torch.cat(rows)


def offsets(sizes: list[int]) -> torch.Tensor:
    return torch.tensor([0, *sizes]).cumsum(0)


@pytest.mark.parametrize("width", [1, 5, 13])
def test_stacked_layers_add_each_rows_own_adapter(width: int) -> None:
    slots = [1, 0, 2, 1, 0]
    a, b = weights(3, sum(OUT))
    x, base = torch.randn(len(slots) * width, IN), torch.randn(len(slots) * width, sum(OUT))
    got = backend(slots, [width] * 5).run_qkv_lora(
        x=x, qkv_lora_a=a, qkv_lora_b=b, output_offset=None, output_offset_cpu=offsets(OUT),
        max_qkv_out_dim=max(OUT), base_output=base.clone(),
    )  # fmt: skip
    for row, slot in enumerate(torch.tensor(slots).repeat_interleave(width).tolist()):
        want = base[row] + x[row] @ dense(slot, a, b, OUT).T
        assert torch.allclose(got[row], want, atol=2e-3)
        assert slot > 0 or torch.equal(got[row], base[row])


def test_a_row_is_the_same_alone_and_in_company() -> None:
    """Decoded, or as one of K+1, among requests with and without adapters."""
    a, b = weights(2, 2 * 96)
    x = torch.randn(13, IN)

    def run(slots: list[int], width: int, rows: torch.Tensor) -> torch.Tensor:
        return backend(slots, [width] * len(slots)).run_gate_up_lora(
            x=rows, gate_up_lora_a=a, gate_up_lora_b=b, output_offset=None,
            output_offset_cpu=offsets([96, 96]), base_output=torch.zeros(len(rows), 192),
        )  # fmt: skip

    alone = torch.cat([run([2], 1, x[i : i + 1]) for i in range(13)])
    others = torch.randn(26, IN)
    assert torch.equal(run([2], 13, x), alone)
    assert torch.equal(run([2] * 13, 1, x), alone)
    among = run([1, 2, 0], 13, torch.cat([others[:13], x, others[13:]]))
    assert torch.equal(among[13:26], alone)


def test_the_last_layer_sees_one_token_of_a_prompt() -> None:
    a, b = weights(1, 64)
    prefill = backend([2, 0, 1], [7, 3, 20], ForwardMode.EXTEND)
    for rows in (3, 4):  # four: as padded for `invariance`
        x = torch.randn(rows, IN)
        small = prefill.run_lora_a_sgemm(x, a, pruned_batch_info=None)
        got = prefill.run_lora_b_sgemm(
            x=small, weights=b, output_offset=None, output_offset_cpu=offsets([64]),
            base_output=torch.zeros(rows, 64), pruned_batch_info=None,
        )  # fmt: skip
        for row, slot in enumerate((2, 0, 1)):
            assert torch.allclose(got[row], x[row] @ dense(slot, a, b, [64]).T, atol=2e-3)
        assert not got[3:].any()


def test_rows_of_a_chunk_of_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_LOGPROB_CHUNK_SIZE", "2")
    a, _ = weights(1, 64)
    prefill = backend([2, 1, 1], [7, 3, 20], ForwardMode.EXTEND)
    x = torch.randn(3, IN)
    whole = prefill.run_lora_a_sgemm(x, a, pruned_batch_info=None)
    prefill._lm_head_pass_idx = 1
    chunk = prefill.run_lora_a_sgemm(x[2:], a, pruned_batch_info=None)
    assert torch.equal(chunk, whole[2:])


def test_embeddings_are_looked_up() -> None:
    table = torch.randn(3, RANK, 50)
    ids = torch.tensor([3, 49, 0, 7])
    got = backend([1, 2], [2, 2]).run_lora_a_embedding(ids, table, vocab_size=50)
    assert torch.allclose(got[:2], 2.0 * table[1][:, ids[:2]].T)
    assert torch.allclose(got[2:, :4], 0.5 * table[2, :4][:, ids[2:]].T)
    assert not got[2:, 4:].any()


def test_memory_is_not_pinned() -> None:
    made: list[torch.Tensor] = []

    def init(size: int) -> None:
        made.append(torch.zeros(size, device="cpu", pin_memory=True).pin_memory())

    lora.manager_init(init, 3)
    assert made[0].shape == (3,) and not made[0].is_pinned()
