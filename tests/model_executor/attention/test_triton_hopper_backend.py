"""The backend with attention of prompts for Hopper GPUs: which requests its kernel computes, and with which arguments.

The kernel itself has no interpreter (tests/gpu/test_hopper_prefill.py). Here its twin takes its place.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from backend_steps import NUM_SLOTS, Row, attend, config, make_batch, with_caps, with_sinks

from tercet.mem_cache.token_to_kv_pool import TokenToKVPool
from tercet.model_executor.attention import hopper_backend
from tercet.model_executor.attention.registry import HOPPER, create_attention_backend
from tercet.model_executor.attention.torch_backend import TorchAttentionBackend
from tercet.model_executor.kernels.extend_attention import extend_attention_ref
from tercet.model_executor.kernels.tuning import HOPPER_TILE
from tercet.model_executor.kernels.work_map import WorkMap, query_tile_map_ref
from tercet.model_executor.models.family import family_of
from tercet.srt.errors import ModelNotSupported

CONFIG = dataclasses.replace(config(group=3, window=None), sliding_windows=(None, None))
PAGE_SIZE = 16


def pool() -> TokenToKVPool:
    return TokenToKVPool(NUM_SLOTS, PAGE_SIZE, 2, 2, 16, torch.float32, "cpu")


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch) -> list[WorkMap]:
    """The work of each launch of the kernel, whose twin writes the results of requests with several new tokens."""
    seen: list[WorkMap] = []

    def twin(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, rows: torch.Tensor,
        starts: torch.Tensor, prefix_lens: torch.Tensor, work: WorkMap, out: torch.Tensor, *, page_size: int,
        **options: Any,
    ) -> None:  # fmt: skip
        assert page_size == PAGE_SIZE
        seen.append(work)
        outs = extend_attention_ref(q, k, v, table, rows, starts, prefix_lens, **options)
        for b, new in enumerate(starts.diff().tolist()):
            if new > 1:
                out[starts[b] : starts[b + 1]] = outs[starts[b] : starts[b + 1]]

    monkeypatch.setattr(hopper_backend, "hopper_extend_attention", twin)
    return seen


def test_prompts_have_the_kernel_and_single_tokens_have_decode_attention(works: list[WorkMap]) -> None:
    g = torch.Generator().manual_seed(1)
    specs = family_of(CONFIG).attention(CONFIG)
    backend, reference = create_attention_backend(HOPPER, specs, pool()), TorchAttentionBackend(specs, pool())
    pages = torch.randperm(NUM_SLOTS // PAGE_SIZE, generator=g)[:, None] + 1
    slots = (pages * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten().int()
    table = torch.zeros(4, 120, dtype=torch.int32)
    for row in (1, 2, 3):
        table[row, :64] = slots[(row - 1) * 64 : row * 64]
    rows = [Row(1, 0), Row(2, 0), Row(3, 0)]
    for new, is_decode in (([40, 1, 7], False), ([1, 1, 1], True), ([1, 9, 1], False), ([1, 1, 1], False)):
        for row, count in zip(rows, new, strict=True):
            row.length += count
        works.clear()
        batch = make_batch(rows, new, table, decode=is_decode)
        fused = torch.randn(len(batch.positions), CONFIG.num_heads + 4, 16, generator=g)
        outs, wanted = (attend(one, batch, fused, CONFIG.num_heads) for one in (backend, reference))
        for out, want in zip(outs, wanted, strict=True):
            assert (out - want).norm() / want.norm() < 1e-5
        assert len(works) == (2 if max(new) > 1 else 0), "each layer has a launch, if there is a prompt"
        for work in works:
            assert batch.extend_start_loc is not None
            expected = query_tile_map_ref(batch.extend_start_loc, 3, HOPPER_TILE.block_m)
            assert work.tile == HOPPER_TILE.block_m and work.split is None and torch.equal(work.starts, expected.starts)
            assert torch.equal(work.rows[: len(expected.rows)], expected.rows)


def test_what_the_kernel_lacks_is_refused() -> None:
    windowed = family_of(config(group=3, window=9)).attention(config(group=3, window=9))
    with pytest.raises(ModelNotSupported, match="--hopper-prefill has no kernel for sliding windows"):
        create_attention_backend(HOPPER, windowed, pool())
    sunk = with_sinks(family_of(CONFIG).attention(CONFIG), [None, torch.zeros(CONFIG.num_heads)])
    with pytest.raises(ModelNotSupported, match="--hopper-prefill has no kernel for attention sinks"):
        create_attention_backend(HOPPER, sunk, pool())
    capped = with_caps(family_of(CONFIG).attention(CONFIG), [None, 50.0])
    with pytest.raises(ModelNotSupported, match="--hopper-prefill has no kernel for soft caps of scores"):
        create_attention_backend(HOPPER, capped, pool())
