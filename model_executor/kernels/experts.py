"""The feed-forward layers of a mixture of experts: products of grouped rows, and the sum over a token's experts.

    out = sum over the chosen experts of weight * down(silu(gate x) * up x)

In GPT-OSS, each product has a bias, and the activation is that of ClampedGate.

`choose_experts` groups the (token, expert) pairs by expert, in tiles. A program of a product has the outputs of a tile
for some columns of the expert's weight. Weights are tensors of their own: a table on the device has their addresses.
So a model is loaded and updated in place as any other, and no weight is stacked.

The grid has a program for each tile that may exist, so that it depends on shapes only. Those of tiles that do not exist
return at once.

Weights of fp8 (float8_e4m3fn) stay so in memory. A tile of them is widened to float32, multiplied by its scales and
rounded to the type of the activations. So the products are those of weights that a CPU widens at load. Activations are
not rounded to fp8, as those of linear layers are (fp8_linear.py): the products take the time of 16 bits.

A row has the same bits in every batch. The number of tokens decides only the height of a tile, 64 or 128. Its width and
its instruction stay, and in the tile of 128 rows, each of two groups of warps does what the tile of 64 rows does. One
row takes as many products as 64. They cost no time: few rows take as long as reading the weights.

A step takes five launches of up to 32 tokens, and six of more: two or three for the choice, the gated product, the
product after it, and the sum. No GPU has run these kernels yet: they are tested in Triton's interpreter, and compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...srt.model_files.experts_config import ClampedGate
from .bound import bound
from .expert_choice import ExpertPairs, choose_experts, choose_experts_ref
from .fp8_layout import FP8_BLOCK
from .primitives import KV_FP8_SOFT, decode_kv, dot, has_dense_rows, is_interpreted, kv_format
from .tuning import INTERPRETER, arch_of, cdiv

ALIGNMENT = 16
"""Each weight begins at a multiple of this many bytes, so that copies of 16 bytes can read it."""
_SUM_BLOCK = 1024


class _Tile(NamedTuple):
    low: int
    """rows of a tile of few tokens"""
    high: int
    """rows of a tile of many tokens"""
    columns: int
    """of a weight. A gated product has half of them for the gate, and half for the other factor"""
    block_k: int
    stages: tuple[int, int]
    """pipeline stages of the tiles of few and of many tokens"""


_TILES = {2: _Tile(64, 128, 128, 64, (4, 3)), 4: _Tile(32, 32, 32, 32, (2, 2))}
"""By the bytes of a number. Tiles in flight take 96 KB: less than a block may have on sm_89, and less than half of what
sm_90 has. float32 has no matrix units on NVIDIA, so its operands are in registers."""
_INTERPRETED_TILE = _Tile(16, 32, 32, 32, (1, 1))
_SOFT_COLUMNS = 64
"""Most columns of a tile of fp8 weights that are decoded with shifts: wider ones spill registers."""


class WeightTable(NamedTuple):
    """A weight of each expert of a layer."""

    weights: torch.Tensor
    """int64 [experts], addresses of weights [n, k]"""
    n: int
    k: int
    dtype: torch.dtype
    """of the weights"""
    biases: torch.Tensor | None
    """int64 [experts], addresses of biases [n]; None: there are none"""
    scales: torch.Tensor | None
    """int64 [experts], addresses of scales, float32 [ceil(k / scaled), n]; None: weights are not fp8"""
    scaled: int
    """numbers of a row that share a scale"""


class ExpertWeightTables(NamedTuple):
    """The weights of all experts of a layer."""

    gate_up: WeightTable
    """of weights [2 * inter, hidden], the gate's rows first"""
    down: WeightTable
    """of weights [hidden, inter]"""


@triton.jit
def _load_weight(weights, scales, mask, in_columns, FORMAT: tl.constexpr, dtype: tl.constexpr):
    """Load a tile of a weight in the type of the activations. FORMAT: as that of fp8 KV; 0: it is stored in dtype."""
    if FORMAT:
        scale = tl.load(scales, mask=in_columns, other=0.0)  # before the weight: after it, some compilers spill
        weight = decode_kv(tl.load(weights, mask=mask, other=0), FORMAT, tl.float32)
        weight = (weight * scale[:, None]).to(dtype)
    else:
        weight = tl.load(weights, mask=mask, other=0.0)
    return weight


@bound
@triton.jit
def _expert_product_kernel(
    x_ptr, table_ptr, scales_ptr, biases_ptr, order_ptr, tiles_ptr, num_tiles_ptr, out_ptr, stride_x, N: tl.constexpr,
    K: tl.constexpr, TOP_K: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, FORMAT: tl.constexpr, SCALED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ALIGNMENT: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    # Programs of the same tile run together, so they share its rows in the cache.
    tile = tl.program_id(1)
    if tile >= tl.load(num_tiles_ptr):
        return
    record = tiles_ptr + tile * 3
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    address = tl.load(table_ptr + tl.load(record)).to(tl.pointer_type(tl.uint8 if FORMAT else dtype))
    place = tl.load(record + 1) + tl.arange(0, BLOCK_M)
    in_rows = place < tl.load(record + 2)
    pair = tl.load(order_ptr + place, mask=in_rows, other=0)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_columns = column < N
    # The rows of x are those of tokens before a gate, and those of pairs after it.
    row = pair // TOP_K if GATED else pair
    rows = x_ptr + row.to(tl.int64)[:, None] * stride_x
    weights = tl.multiple_of(address, ALIGNMENT) + column.to(tl.int64)[:, None] * K
    scales = scales_ptr
    if FORMAT:
        scales = tl.load(scales_ptr + tl.load(record)).to(tl.pointer_type(tl.float32)) + column
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    total_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if BIASED:  # before the loop, which has no register left for its address
        biases = tl.load(biases_ptr + tl.load(record)).to(tl.pointer_type(dtype)) + column
        bias = tl.load(biases, mask=in_columns, other=0.0).to(tl.float32)
        total = tl.broadcast_to(bias[None, :], [BLOCK_M, BLOCK_N])
        if GATED:
            bias = tl.load(biases + N, mask=in_columns, other=0.0).to(tl.float32)
            total_up = tl.broadcast_to(bias[None, :], [BLOCK_M, BLOCK_N])
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        row_mask, weight_mask = in_rows[:, None], in_columns[:, None]
        if K % BLOCK_K:
            row_mask, weight_mask = row_mask & (k < K)[None, :], weight_mask & (k < K)[None, :]
        x = tl.load(rows + k[None, :], mask=row_mask, other=0.0)
        of_block = scales + start // SCALED * (2 * N if GATED else N)  # of which BLOCK_K is a part
        weight = _load_weight(weights + k[None, :], of_block, weight_mask, in_columns, FORMAT, dtype)
        total = dot(x, tl.trans(weight), total, WIDEN)
        if GATED:
            up = _load_weight(weights + N * K + k[None, :], of_block + N, weight_mask, in_columns, FORMAT, dtype)
            total_up = dot(x, tl.trans(up), total_up, WIDEN)
    if GATED:
        if CLAMPED:  # by comparisons, because a NaN stays one
            total = tl.where(total > LIMIT, LIMIT, total)
            total_up = tl.where(total_up > LIMIT, LIMIT, tl.where(total_up < -LIMIT, -LIMIT, total_up))
            total = total / (1.0 + tl.exp(-ALPHA * total)) * (total_up + 1.0)
        else:
            total = total / (1.0 + tl.exp(-total)) * total_up
    out = out_ptr + pair.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=in_rows[:, None] & in_columns[None, :])


@bound
@triton.jit
def _expert_sum_kernel(x_ptr, weights_ptr, out_ptr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for pair in range(TOP_K):
        weight = tl.load(weights_ptr + row * TOP_K + pair)
        x = tl.load(x_ptr + (row * TOP_K + pair) * WIDTH + i, mask=i < WIDTH, other=0.0)
        total += weight * x.to(tl.float32)
    tl.store(out_ptr + row * WIDTH + i, total.to(out_ptr.dtype.element_ty), mask=i < WIDTH)


def expert_weight_tables(
    gate_up: Sequence[torch.Tensor],
    down: Sequence[torch.Tensor],
    gate_up_bias: Sequence[torch.Tensor] = (),
    down_bias: Sequence[torch.Tensor] = (),
    gate_up_scales: Sequence[torch.Tensor] = (),
    down_scales: Sequence[torch.Tensor] = (),
) -> ExpertWeightTables:
    """The tables of the addresses of weights. The caller keeps the tensors, and writes new weights in their place.

    gate_up: of each expert, [2 * inter, hidden]. down: [hidden, inter]. gate_up_bias: [2 * inter]. down_bias: [hidden].
    Either all experts have biases or none. gate_up_scales, down_scales: of weights [n, k] of float8_e4m3fn, float32
    [1, n] or [ceil(k / FP8_BLOCK), n]. All are contiguous and on one device. Weights have one type. Biases have it too,
    or with float8_e4m3fn the type of the activations.
    """
    tables = _table(gate_up, gate_up_bias, gate_up_scales), _table(down, down_bias, down_scales)
    of_gate_up, of_down = tables
    assert len(gate_up) == len(down) and of_gate_up.dtype == of_down.dtype
    assert (of_gate_up.n, of_gate_up.k) == (2 * of_down.k, of_down.n) and len(gate_up_bias) == len(down_bias)
    return ExpertWeightTables(*tables)


def _table(
    weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor], scales: Sequence[torch.Tensor]
) -> WeightTable:
    (n, k), like = weights[0].shape, weights[0]
    is_fp8 = like.dtype == torch.float8_e4m3fn
    scaled = FP8_BLOCK if scales and len(scales[0]) > 1 else k
    of_biases = biases[0].dtype if is_fp8 and biases else like.dtype

    def addresses(tensors: Sequence[torch.Tensor], dtype: torch.dtype, *shape: int) -> torch.Tensor:
        assert len(tensors) == len(weights)
        for x in tensors:
            assert x.shape == shape and x.dtype == dtype and x.device == like.device and x.is_contiguous()
            # A device allocates each weight. Weights of a CPU may begin anywhere in a file, and are only interpreted.
            assert like.device.type == "cpu" or x.data_ptr() % ALIGNMENT == 0
        return torch.tensor([x.data_ptr() for x in tensors], dtype=torch.int64, device=like.device)

    return WeightTable(
        addresses(weights, like.dtype, n, k), n, k, like.dtype,
        addresses(biases, of_biases, n) if biases else None,
        addresses(scales, torch.float32, cdiv(k, scaled), n) if is_fp8 else None, scaled,
    )  # fmt: skip


def high_tile_from(dtype: torch.dtype, num_experts: int, top_k: int, device: torch.device) -> int:
    """The fewest tokens of a step with the higher tile: enough to fill one for each expert."""
    tile = _tile(dtype, device)
    return cdiv(tile.high * num_experts, top_k)


def experts_forward(
    x: torch.Tensor,
    router: torch.Tensor,
    weights: ExpertWeightTables,
    top_k: int,
    *,
    normalized: bool,
    router_bias: torch.Tensor | None = None,
    sigmoids: bool = False,
    corrections: torch.Tensor | None = None,
    least_sum: float = 0.0,
    scale: float = 1.0,
    num_groups: int = 1,
    groups_per_token: int = 1,
    gate: ClampedGate | None = None,
) -> torch.Tensor:
    """Choose the experts of each token, and add up what they compute: [T, hidden] -> [T, hidden].

    The sum over a token's experts is in float32, in ascending order of experts, and is rounded once. What an expert
    computes is rounded to x's type, as the output of any linear layer.

    x: [T, hidden], last dimension contiguous. router: [experts, hidden], contiguous. router_bias: [experts]. All of the
    weights' type, or of any if the weights are float8_e4m3fn. Router and router_bias may also have float32. sigmoids,
    corrections, least_sum, scale, num_groups, groups_per_token: those of `choose_experts`. gate: the activation; None:
    silu(gate) * up.
    """
    (num_rows, hidden), num_experts = x.shape, len(router)
    gate_up, down = weights
    assert hidden == down.n and num_experts == len(down.weights) and down.dtype in (x.dtype, torch.float8_e4m3fn)
    out = torch.empty((num_rows, hidden), dtype=x.dtype, device=x.device)
    if not num_rows:
        return out
    tile = _tile(x.dtype, x.device)
    is_high = num_rows >= high_tile_from(x.dtype, num_experts, top_k, x.device)
    pairs = choose_experts(
        x.to(router.dtype), router, top_k, normalized=normalized, tile_rows=tile.high if is_high else tile.low,
        bias=router_bias, sigmoids=sigmoids, corrections=corrections, least_sum=least_sum, scale=scale,
        num_groups=num_groups, groups_per_token=groups_per_token,
    )  # fmt: skip
    gated = _product(x, gate_up, pairs, tile, gated=True, gate=gate)
    computed = _product(gated, down, pairs, tile, gated=False)
    _expert_sum_kernel[(num_rows, cdiv(hidden, _SUM_BLOCK))](
        computed, pairs.weights, out, WIDTH=hidden, TOP_K=top_k, BLOCK=_SUM_BLOCK, num_warps=4
    )
    return out


def _product(
    x: torch.Tensor,
    table: WeightTable,
    pairs: ExpertPairs,
    tile: _Tile,
    *,
    gated: bool,
    gate: ClampedGate | None = None,
) -> torch.Tensor:
    """The product of each pair with its expert's weight: [pairs, outputs]."""
    assert has_dense_rows(x)
    num_pairs, top_k = pairs.experts.numel(), pairs.experts.shape[1]
    num_out = table.n // 2 if gated else table.n
    out = torch.empty((num_pairs, num_out), dtype=x.dtype, device=x.device)
    weight_format = kv_format(table.dtype, arch_of(x.device))
    columns = min(tile.columns, _SOFT_COLUMNS) if weight_format == KV_FP8_SOFT.value else tile.columns
    width = columns // 2 if gated else columns
    is_high = pairs.tile_rows > tile.low
    scales, biases = (table.weights if of_all is None else of_all for of_all in (table.scales, table.biases))
    _expert_product_kernel[(cdiv(num_out, width), len(pairs.tiles))](
        x, table.weights, scales, biases, pairs.order, pairs.tiles, pairs.num_tiles, out, x.stride(0), N=num_out,
        K=table.k, TOP_K=top_k, GATED=gated, BIASED=table.biases is not None, CLAMPED=gate is not None,
        ALPHA=gate.alpha if gate else 0.0, LIMIT=gate.limit if gate else 0.0, FORMAT=weight_format,
        SCALED=table.scaled, BLOCK_M=pairs.tile_rows, BLOCK_N=width, BLOCK_K=tile.block_k, ALIGNMENT=ALIGNMENT,
        WIDEN=is_interpreted(_expert_product_kernel) and x.dtype == torch.bfloat16, num_warps=8 if is_high else 4,
        num_stages=_stages(tile, x.device)[is_high],
    )  # fmt: skip
    return out


def _tile(dtype: torch.dtype, device: torch.device) -> _Tile:
    return _INTERPRETED_TILE if arch_of(device) == INTERPRETER else _TILES[dtype.itemsize]


def _stages(tile: _Tile, device: torch.device) -> tuple[int, int]:
    """AMD has 64 KB of shared memory for a block."""
    return (2, 2) if arch_of(device).startswith("gfx") else tile.stages


def experts_forward_ref(
    x: torch.Tensor,
    router: torch.Tensor,
    gate_up: Sequence[torch.Tensor],
    down: Sequence[torch.Tensor],
    top_k: int,
    *,
    normalized: bool,
    router_bias: torch.Tensor | None = None,
    sigmoids: bool = False,
    corrections: torch.Tensor | None = None,
    least_sum: float = 0.0,
    scale: float = 1.0,
    num_groups: int = 1,
    groups_per_token: int = 1,
    gate_up_bias: Sequence[torch.Tensor] = (),
    down_bias: Sequence[torch.Tensor] = (),
    gate: ClampedGate | None = None,
) -> torch.Tensor:
    """`experts_forward` in plain torch, without a rounding before the end."""
    wide = torch.promote_types(x.dtype, torch.float32)
    pairs = choose_experts_ref(
        x, router, top_k, normalized=normalized, tile_rows=1, bias=router_bias, sigmoids=sigmoids,
        corrections=corrections, least_sum=least_sum, scale=scale, num_groups=num_groups,
        groups_per_token=groups_per_token,
    )  # fmt: skip
    out = torch.zeros_like(x, dtype=wide)
    for row, experts in enumerate(pairs.experts.tolist()):
        for expert, weight in zip(experts, pairs.weights[row], strict=True):
            products = x[row].to(wide) @ gate_up[expert].to(wide).T
            lower, up = (products + gate_up_bias[expert] if gate_up_bias else products).chunk(2)
            if gate is None:
                inner = torch.nn.functional.silu(lower) * up
            else:
                lower, up = lower.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
                inner = lower * torch.sigmoid(gate.alpha * lower) * (up + 1)
            outputs = inner @ down[expert].to(wide).T
            out[row] += weight * (outputs + down_bias[expert] if down_bias else outputs)
    return out.to(x.dtype)
