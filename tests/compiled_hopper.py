"""The launches of extend attention for Hopper GPUs, in the shapes of serving, and checks of their machine code."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from serving_shapes import BATCH, CONTEXT, TOKENS, meta
from triton_aot import SHARED_LIMIT, Launch, Resources, assert_fits, recorded

from tercet.model_executor.kernels import hopper_extend as module
from tercet.model_executor.kernels.tuning import HOPPER_TILE
from tercet.model_executor.kernels.work_map import query_split_map, query_tile_map

SHAPES = {
    "hopper-32x8x128, pages of 64, splits in turn": (32, 8, 128, 64),
    "hopper-28x4x128, pages of 256, splits as units": (28, 4, 128, 256),
    "hopper-32x8x64, pages of 64, splits as units": (32, 8, 64, 64),
    "hopper-9x3x64, pages of 128, splits in turn": (9, 3, 64, 128),
}
"""Query heads, KV heads, components of a head, and the page size: both widths of a head with both kinds of splits."""
_SPILLED = 144
"""Most bytes of a thread that wait in memory outside the loops over the KV, with Triton 3.9. Others have at most 32."""


def hopper_launches(name: str) -> list[Launch]:
    """Where each split of the KV is a work unit, a second launch merges them."""
    num_heads, num_kv_heads, head_dim, page_size = SHAPES[name]
    fused = meta(TOKENS, num_heads + 2 * num_kv_heads, head_dim, dtype=torch.bfloat16)
    pool = meta(64 * page_size, num_kv_heads, head_dim, dtype=torch.bfloat16)
    table = meta(BATCH, CONTEXT, dtype=torch.int32)
    out = meta(TOKENS, num_heads, head_dim, dtype=torch.bfloat16)
    with patch.object(module, "num_multiprocessors", lambda device: 132), recorded() as launches:
        group, tile = num_heads // num_kv_heads, HOPPER_TILE
        if name.endswith("as units"):
            work = query_split_map(meta(BATCH + 1), meta(BATCH), group, tile.block_m, tile.split, 1000)
        else:
            work = query_tile_map(meta(BATCH + 1), group, tile.block_m, TOKENS)
        module.hopper_extend_attention(
            fused[:, :num_heads], pool, pool, table, meta(BATCH), meta(BATCH + 1), meta(BATCH), work, out,
            sm_scale=0.1, page_size=page_size,
        )  # fmt: skip
    return launches[1:]


CASES: dict[str, Callable[[], list[Launch]]] = {name: partial(hopper_launches, name) for name in SHAPES}


def assert_overlaps(resources: Resources, name: str) -> None:
    """Checks that products run asynchronously in few batches, TMA copies whole tiles, and the loops spill nothing."""
    *_, head_dim, page_size = SHAPES[name]
    counts: Any = resources.counts
    if resources.kernel == "extend_merge_kernel":
        assert_fits(resources, "sm_90")
        return
    # Each consumer has a first tile, two loops (with a causal mask and without) with two products each, and a last one.
    assert counts.wgmma_batches == counts.wgmma_waits == 2 * (1 + 2 * 2 + 1), resources
    score, value = head_dim // 16, 128 // 16
    assert counts.wgmma == 2 * (3 * score + 3 * value), resources
    # A tile of 128 tokens of K, and one of V, in boxes of 64 components that do not cross a page.
    assert counts.bulk_copies == 2 * (128 // min(page_size, 128)) * (head_dim // 64) and counts.copies == 0, resources
    assert resources.shared <= SHARED_LIMIT["sm_90"] and resources.registers == 168, resources
    assert counts.spills_in_loops == 0 and resources.spilled <= _SPILLED, resources
