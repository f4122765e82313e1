"""Extend attention in the shapes that serving uses, compiled for GPUs that need not be here."""

from __future__ import annotations

import pytest
from serving_shapes import BATCH, SHAPES, TOKENS, Shape, meta, operands, options
from triton_aot import TARGETS, assert_fits, compile_launch, recorded

from tercet.model_executor.kernels import extend_attention as extend_module
from tercet.model_executor.kernels.tuning import ExtendTile, extend_tile
from tercet.model_executor.kernels.work_map import query_tile_map

MATRIX_INSTRUCTION = {"sm_80": "mma.sync.aligned.m16n8k16", "sm_90": "wgmma.mma_async", "gfx942": "v_mfma_f32_"}
"""What the products of 16-bit operands have to be made of."""


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("arch", TARGETS)
def test_extend(arch: str, shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extend_module, "arch_of", lambda device: arch)
    with recorded() as launches:
        tile = extend_tile(arch, shape.head_dim, shape.fp8, fp32=shape.fp32)
        work = query_tile_map(meta(BATCH + 1), shape.num_heads // shape.num_kv_heads, tile.block_m, TOKENS)
        q, *kv = operands(shape, TOKENS)
        out = meta(*q.shape, dtype=q.dtype)
        extend_module.extend_attention(
            q, *kv, meta(BATCH), meta(BATCH + 1), meta(BATCH), work, out, **options(shape)
        )  # fmt: skip
    for launch in launches:
        resources = compile_launch(launch, arch)
        assert_fits(resources, arch)
    if not shape.fp32:
        assert MATRIX_INSTRUCTION[arch] in resources.assembly or (shape.fp8 and shape.head_dim == 256)


def test_a_spill_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four warps cannot hold a tile of this size."""
    monkeypatch.setattr(extend_module, "arch_of", lambda device: "sm_90")
    tile = ExtendTile(block_m=128, block_n=128, num_warps=4, num_stages=3)
    with recorded() as launches:
        q, *kv = operands(SHAPES[2], TOKENS)
        work = query_tile_map(meta(BATCH + 1), 4, tile.block_m, TOKENS)
        out = meta(*q.shape, dtype=q.dtype)
        extend_module.extend_attention(
            q, *kv, meta(BATCH), meta(BATCH + 1), meta(BATCH), work, out, tile=tile, **options(SHAPES[2])
        )  # fmt: skip
    with pytest.raises(AssertionError, match="spilled"):
        assert_fits(compile_launch(launches[-1], "sm_90"), "sm_90")
