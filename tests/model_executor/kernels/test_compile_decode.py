"""Decode attention in the shapes that serving uses, compiled for GPUs that need not be here."""

from __future__ import annotations

import pytest
from serving_shapes import BATCH, SHAPES, Shape, meta, operands, options
from triton_aot import TARGETS, assert_fits, compile_launch, recorded

from tercet.model_executor.kernels import decode_attention as decode_module
from tercet.model_executor.kernels.tuning import decode_tile
from tercet.model_executor.kernels.work_map import split_map


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("arch", TARGETS)
def test_decode(arch: str, shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_module, "arch_of", lambda device: arch)
    with recorded() as launches:
        work = split_map(meta(BATCH), decode_tile(arch, shape.head_dim, fp32=shape.fp32).split, 1000)
        q, *kv = operands(shape, BATCH)
        out = meta(*q.shape, dtype=q.dtype)
        decode_module.decode_attention(q, *kv, meta(BATCH), meta(BATCH), work, out, **options(shape))
    assert [launch.kernel.fn.__name__ for launch in launches[1:]] == ["_decode_split_kernel", "_decode_merge_kernel"]
    for launch in launches:
        assert_fits(compile_launch(launch, arch), arch)
