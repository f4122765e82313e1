"""The attention kernels' launches for the shapes of serving, to compile them for GPUs that need not be here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import torch
from serving_shapes import BATCH, BY_NAME, CONTEXT, TOKENS, Shape, meta, operands, options
from triton_aot import Launch, recorded

from tercet.model_executor.kernels import decode_attention as decode_module
from tercet.model_executor.kernels import extend_attention as extend_module
from tercet.model_executor.kernels import fused_decode as fused_module
from tercet.model_executor.kernels.tuning import ExtendTile, decode_tile, extend_tile
from tercet.model_executor.kernels.work_map import query_split_map, query_tile_map, split_map

SPLITS = ("one split", "splits in turn", "splits as units")


def extend_launches(
    shape: Shape, arch: str, splits: str, tile: ExtendTile | None = None, *, page_size: int = 1
) -> list[Launch]:
    tile = tile or extend_tile(arch, shape.head_dim, shape.fp8, fp32=shape.fp32, page_size=page_size)
    with patch.object(extend_module, "arch_of", lambda device: arch), recorded() as launches:
        group = shape.num_heads // shape.num_kv_heads
        if splits == "splits as units":
            work = query_split_map(meta(BATCH + 1), meta(BATCH), group, tile.block_m, tile.split, 1000)
        else:
            work = query_tile_map(meta(BATCH + 1), group, tile.block_m, TOKENS)
        q, *kv = operands(shape, TOKENS)
        out = meta(*q.shape, dtype=q.dtype)
        extend_module.extend_attention(
            q, *kv, meta(BATCH), meta(BATCH + 1), meta(BATCH), work, out, tile=tile,
            longest=tile.split if splits == "one split" else CONTEXT, **options(shape),
        )  # fmt: skip
    return launches[1:]


def decode_launches(shape: Shape, arch: str, *, mixed: bool, page_size: int = 1) -> list[Launch]:
    """mixed: in a step with prompts, where each request's token has to be looked up (HAS_Q_LOC)."""
    with recorded() as launches:
        launch_decode(shape, arch, mixed=mixed, page_size=page_size)
    return launches[1:]


def launch_decode(shape: Shape, arch: str, *, mixed: bool, page_size: int = 1) -> None:
    tile = decode_tile(arch, shape.head_dim, fp32=shape.fp32, fp8=shape.fp8, page_size=page_size)
    with patch.object(decode_module, "arch_of", lambda device: arch):
        work = split_map(meta(BATCH), meta(BATCH), tile.split, 1000)
        q, *kv = operands(shape, TOKENS if mixed else BATCH)
        out = meta(*q.shape, dtype=q.dtype)
        decode_module.decode_attention(
            q, *kv, meta(BATCH), meta(BATCH), work, out, tile=tile, q_loc=meta(BATCH) if mixed else None,
            **options(shape),
        )  # fmt: skip


def fused_launches(shape: Shape, arch: str, *, norm: bool, dependent: bool = False, page_size: int = 1) -> list[Launch]:
    """Decode attention with the rotation, in one kernel. norm: with a norm of query and key heads."""
    rows, width = 4, shape.head_dim
    tile = decode_tile(arch, width, fp32=shape.fp32, fp8=shape.fp8, page_size=page_size)
    with patch.object(fused_module, "arch_of", lambda device: arch), recorded() as launches:
        work = split_map(meta(rows), meta(rows), tile.split, 1000)
        heads = shape.num_heads + 2 * shape.num_kv_heads
        angles = meta(rows, 2, width // 2, dtype=torch.float32)[:, 0]
        weight = meta(width, dtype=shape.dtype) if norm else None
        _, *pools, table = operands(shape, rows)
        fused_module.fused_decode(
            meta(rows, heads, width, dtype=shape.dtype), shape.num_heads, angles, angles, *pools, meta(rows), table,
            meta(rows), meta(rows), work, meta(rows * shape.num_kv_heads, dtype=torch.int32), q_weight=weight,
            k_weight=weight, eps=1e-6, tile=tile, dependent=dependent, **options(shape),
        )  # fmt: skip
    return launches[1:]


def _cases() -> dict[str, Callable[[], list[Launch]]]:
    """A few shapes of each kind: the environment's own Triton compiles all of them (test_compile_*.py)."""
    extend = {
        "one split": ("32x8x128-bfloat16", "40x8x128-bfloat16-window", "8x4x256-bfloat16-cap", "32x8x128-fp8"),
        "splits in turn": ("32x8x64-bfloat16", "32x8x128-fp8", "8x4x256-bfloat16-cap"),
        "splits as units": ("32x8x128-bfloat16", "64x8x64-bfloat16-window-sinks"),
    }
    in_pages = {
        "one split": ("32x8x64-bfloat16", "40x8x128-bfloat16-window"),
        "splits in turn": ("32x8x128-bfloat16",),
    }
    decode = {
        False: ("32x8x128-bfloat16", "32x8x64-fp8", "32x8x128-fp8", "32x8x256-fp8"),
        True: ("40x8x128-bfloat16-window", "32x8x128-fp8", "64x8x64-bfloat16-window-sinks"),
    }
    fused = {
        False: ("32x8x64-bfloat16", "40x8x128-bfloat16-window", "64x8x64-bfloat16-window-sinks"),
        True: ("16x8x128-bfloat16", "32x8x128-fp8"),
    }
    decode_in_pages = ("32x8x128-bfloat16", "40x8x128-bfloat16-window", "32x32x80-bfloat16")
    cases: dict[str, Callable[[], list[Launch]]] = {}
    for splits, names in extend.items():
        for name in names:
            cases[f"extend-{name}, {splits}"] = partial(extend_launches, BY_NAME[name], "sm_90", splits)
    for splits, names in in_pages.items():
        for name in names:
            case = partial(extend_launches, BY_NAME[name], "sm_90", splits, page_size=64)
            cases[f"extend-{name}, {splits}, pages"] = case
    for mixed, names in decode.items():
        for name in names:
            kind = ", with prompts" if mixed else ""
            cases[f"decode-{name}{kind}"] = partial(decode_launches, BY_NAME[name], "sm_90", mixed=mixed)
    for norm, names in fused.items():
        for name in names:
            kind = ", with a norm" if norm else ""
            cases[f"fused-{name}{kind}"] = partial(fused_launches, BY_NAME[name], "sm_90", norm=norm)
    for i, name in enumerate(decode_in_pages):
        mixed = norm = i > 0
        of_shape = {"shape": BY_NAME[name], "arch": "sm_90", "page_size": 64}
        cases[f"decode-{name}, pages"] = partial(decode_launches, **of_shape, mixed=mixed)
        cases[f"fused-{name}, pages"] = partial(fused_launches, **of_shape, norm=norm)
    return cases


CASES = _cases()


def page_size_of(case: str) -> int:
    """The page size of a case."""
    return 64 if case.endswith(", pages") else 1


def shape_of(case: str) -> Shape:
    """The shape of a case."""
    name = case.partition("-")[2].partition(",")[0]
    return BY_NAME[name]
