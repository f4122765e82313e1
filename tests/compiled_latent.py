"""The launches of latent attention, to compile them for GPUs that need not be here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import torch
from serving_shapes import BATCH, CONTEXT, SLOTS, TOKENS, meta
from triton_aot import SHARED_LIMIT, Launch, Resources, recorded

from tercet.model_executor.kernels import latent_attention as module
from tercet.model_executor.kernels.tuning import latent_decode_tile, latent_extend_tile
from tercet.model_executor.kernels.work_map import query_split_map, query_tile_map, split_map

LATENT_DIM, HEAD_DIM = 512, 576
"""Of DeepSeek-V2 and V3."""
HEADS = (16, 32, 128)
"""Of DeepSeek-V2-Lite; between; of DeepSeek-V3."""
SPLITS = ("one split", "splits in turn", "splits as units")


def _operands(num_heads: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """q, the pool, latent_dim and the slot table."""
    q = meta(num_tokens, num_heads, HEAD_DIM, dtype=torch.bfloat16)
    return q, meta(SLOTS, 1, HEAD_DIM, dtype=torch.bfloat16), LATENT_DIM, meta(257, CONTEXT, dtype=torch.int32)


def latent_decode_launches(num_heads: int, arch: str, *, page_size: int = 1, mixed: bool = False) -> list[Launch]:
    """mixed: in a step with prompts, where each request's token has to be looked up (HAS_Q_LOC)."""
    tile = latent_decode_tile(arch, num_heads, page_size)
    q, *kv = _operands(num_heads, TOKENS if mixed else BATCH)
    out = meta(len(q), num_heads, LATENT_DIM, dtype=q.dtype)
    with patch.object(module, "arch_of", lambda device: arch), recorded() as launches:
        work = split_map(meta(BATCH), meta(BATCH), tile.split, 1000)
        module.latent_decode_attention(
            q, *kv, meta(BATCH), meta(BATCH), work, out, sm_scale=0.1, tile=tile, q_loc=meta(BATCH) if mixed else None
        )  # fmt: skip
    return launches[1:]


def latent_extend_launches(num_heads: int, arch: str, splits: str, *, page_size: int = 1) -> list[Launch]:
    tile = latent_extend_tile(arch, page_size)
    q, *kv = _operands(num_heads, TOKENS)
    out = meta(TOKENS, num_heads, LATENT_DIM, dtype=q.dtype)
    with patch.object(module, "arch_of", lambda device: arch), recorded() as launches:
        if splits == "splits as units":
            work = query_split_map(meta(BATCH + 1), meta(BATCH), num_heads, tile.block_m, tile.split, 1000)
        else:
            work = query_tile_map(meta(BATCH + 1), num_heads, tile.block_m, TOKENS)
        module.latent_extend_attention(
            q, *kv, meta(BATCH), meta(BATCH + 1), meta(BATCH), work, out, sm_scale=0.1, tile=tile,
            longest=tile.split if splits == "one split" else CONTEXT,
        )  # fmt: skip
    return launches[1:]


CASES: dict[str, Callable[[], list[Launch]]] = {
    "latent-decode, 16 heads": partial(latent_decode_launches, 16, "sm_90", page_size=64),
    "latent-decode, 128 heads": partial(latent_decode_launches, 128, "sm_90", page_size=64),
    "latent-extend, in turn": partial(latent_extend_launches, 16, "sm_90", "splits in turn", page_size=64),
    "latent-extend, one split": partial(latent_extend_launches, 128, "sm_90", "one split"),
}

_MATRIX_PRODUCTS = {
    "sm_80": "mma.sync", "sm_89": "mma.sync", "sm_100": "mma", "gfx942": "v_mfma_f32_",
}  # fmt: skip
_SPILLED = {"sm_80": 48, "sm_90": 352}
"""Most bytes of a thread that Triton 3.9.0 spills. Only tiles of 64 rows spill: their sums take 128 of 255 registers.
3.6.0 and 3.7.1, which CUDA builds of torch bring, spill nothing."""
_SPILLED_IN_LOOP = 56
"""Most accesses to them in the loop, whose products take about 4,000 cycles for a KV tile (sm_90)."""


def assert_is_latent(resources: Resources, arch: str) -> None:
    """Checks shared memory and registers, and for sm_90 that copies and the products of 64 rows are asynchronous."""
    assert resources.shared <= SHARED_LIMIT[arch], resources
    if "merge" in resources.kernel:
        assert resources.spilled == 0, resources
        return
    assert resources.spilled <= _SPILLED.get(arch, 0), resources
    if arch == "sm_90":
        counts = resources.counts
        assert counts is not None and counts.wide_copies > 0 and counts.byte_loads == 0, resources
        assert counts.spills_in_loops <= _SPILLED_IN_LOOP, resources
        # A loop with three products: q @ K of the rotated and of the latent components, and p @ V.
        assert counts.wgmma_batches == counts.wgmma_waits == (3 if counts.wgmma else 0), resources
        assert bool(counts.wgmma) is not bool(counts.mma), resources
    else:
        assert _MATRIX_PRODUCTS[arch] in resources.assembly, resources
