"""What LoRA adapters add to the outputs of a linear layer: each row has its own adapter, or none.

    out[t] += B[s] @ (A[s] @ x[t]),  s = the adapter slot of row t

Two launches: `_shrink_kernel` computes A x, the hidden numbers of a row, and `_expand_kernel` multiplies them by B and
adds the products to the outputs. A program has a tile of rows. For each adapter of the tile, it computes the rows of
this adapter. So neighbouring rows may have any adapters, and no row is sorted. With few tiles, the programs of a tile
share its adapters among themselves.

The grids depend on shapes only, so graphs record the launches. A program whose rows have no adapter of its own returns
at once.

A row has the same bits in every batch. The weight is the first operand of each product, and the rows are the second. So
each row is a column of the product, in instructions of one shape, and its sums are added in one order. A sum over the
inputs has parts, which are added in ascending order. Their number depends on the number of inputs only. In small steps
each part has a program of its own, and the second launch adds up the parts. In large steps, one program adds them up.

The hidden numbers are float32, and are not rounded. For adapters of 16 bits, NVIDIA's matrix units multiply each as the
sum of two tf32 numbers, which have 22 bits together. tf32 holds every number of bfloat16 and float16.

No GPU has run these kernels yet: they are tested in Triton's interpreter, and compiled.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .bound import bound
from .primitives import dot, has_dense_rows, is_interpreted
from .tuning import INTERPRETER, arch_of, cdiv, next_power_of_2

MAX_PARTS = 3
"""Most stacked layers: q, k and v."""
_MAX_SPLITS = 8
"""Most parts of a sum over the inputs."""
_NUM_WARPS = 4
_NO_SLOT = tl.constexpr(2**31 - 1)
_OF_TF32 = tl.constexpr(-(1 << 13))
"""The bits of a float32 that tf32 keeps."""


class _Tile(NamedTuple):
    rows: int
    few_rows: int
    """of a program that adds up the parts of sums, which are as many rows of hidden numbers"""
    hidden: int
    """most hidden numbers that a program of the first kernel computes"""
    ranks: int
    """most columns of B in a product"""
    outputs: int
    block_k: int
    split: int
    """fewest inputs of a part of a sum"""
    apart: int
    """most rows of a step in which each part of a sum has a program of its own"""
    groups: int
    """most programs that share the adapters of a tile"""
    num_stages: int


_TILES = {2: _Tile(32, 16, 32, 32, 32, 64, 512, 1024, 16, 4), 4: _Tile(16, 16, 32, 16, 32, 32, 512, 1024, 16, 1)}
"""By the bytes of a number. They have not been measured. A product of 32 rows of a weight never takes the instructions
of a warp group, whose sums may be other ones. Tiles in flight take at most 32 KB."""
_INTERPRETED_TILE = _Tile(16, 8, 32, 16, 32, 16, 32, 40, 4, 1)


@triton.jit
def _slots_of_rows(adapters_ptr, row, num_rows):
    """The adapter slots of a tile's rows that this program has, and _NO_SLOT for the other rows."""
    slot = tl.load(adapters_ptr + row, mask=row < num_rows, other=0)
    is_own = (slot > 0) & (slot % tl.num_programs(2) == tl.program_id(2))
    return tl.where(is_own, slot, _NO_SLOT)


@triton.jit
def _sum_of_split(
    rows, weights, is_row, is_rank, split, K: tl.constexpr, SPLIT: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """A x of the inputs of one part, [BLOCK_R, BLOCK_T]."""
    total = tl.zeros([BLOCK_R, BLOCK_T], tl.float32)
    for start in range(split * SPLIT, tl.minimum(split * SPLIT + SPLIT, K), BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        row_mask, weight_mask = is_row[:, None], is_rank[:, None]
        if K % BLOCK_K:
            row_mask, weight_mask = row_mask & (k < K)[None, :], weight_mask & (k < K)[None, :]
        x = tl.load(rows + k[None, :], mask=row_mask, other=0.0)
        weight = tl.load(weights + k[None, :], mask=weight_mask, other=0.0)
        total = dot(weight, tl.trans(x), total, WIDEN)
    return total


@bound
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["adapters_ptr"])
def _shrink_kernel(
    x_ptr, a_ptr, adapters_ptr, hidden_ptr, stride_x, num_rows, RANKS: tl.constexpr, K: tl.constexpr,
    SPLIT: tl.constexpr, SPLITS: tl.constexpr, APART: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    # Programs of the same rows run together, so they share the rows in the cache.
    row = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    left = _slots_of_rows(adapters_ptr, row, num_rows)
    RANK_BLOCKS: tl.constexpr = (RANKS + BLOCK_R - 1) // BLOCK_R
    rank = tl.program_id(0) % RANK_BLOCKS * BLOCK_R + tl.arange(0, BLOCK_R)
    own_split = tl.program_id(0) // RANK_BLOCKS
    is_rank = rank < RANKS
    rows = x_ptr + row.to(tl.int64)[:, None] * stride_x
    slot = tl.min(left, axis=0)
    while slot < _NO_SLOT:
        is_row = left == slot
        weights = a_ptr + ((slot - 1).to(tl.int64) * RANKS + rank)[:, None] * K
        if APART:
            total = _sum_of_split(rows, weights, is_row, is_rank, own_split, K, SPLIT, BLOCK_T, BLOCK_R, BLOCK_K, WIDEN)
        else:
            total = tl.zeros([BLOCK_R, BLOCK_T], tl.float32)
            for split in range(SPLITS):
                total += _sum_of_split(
                    rows, weights, is_row, is_rank, split, K, SPLIT, BLOCK_T, BLOCK_R, BLOCK_K, WIDEN
                )
        place = hidden_ptr + (own_split.to(tl.int64) * num_rows + row)[None, :] * RANKS + rank[:, None]
        tl.store(place, total, mask=is_row[None, :] & is_rank[:, None])
        left = tl.where(is_row, _NO_SLOT, left)
        slot = tl.min(left, axis=0)


@triton.jit
def _exact_dot(weight, hidden, total, PAIRS: tl.constexpr):
    """total + weight @ hidden in float32. PAIRS: by two products in tf32."""
    weight = weight.to(tl.float32)
    if PAIRS:
        high = (hidden.to(tl.int32, bitcast=True) & _OF_TF32).to(tl.float32, bitcast=True)
        total = tl.dot(weight, hidden - high, total, input_precision="tf32")
        return tl.dot(weight, high, total, input_precision="tf32")
    else:
        return tl.dot(weight, hidden, total, input_precision="ieee")


@bound
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["adapters_ptr"])
def _expand_kernel(
    hidden_ptr, b_ptr, adapters_ptr, out_ptr, stride_out, num_rows, FIRST: tl.constexpr, SECOND: tl.constexpr,
    THIRD: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    left = _slots_of_rows(adapters_ptr, row, num_rows)
    # A program has outputs of one of the stacked layers.
    block = tl.program_id(0)
    part, first, end = 0, block * BLOCK_N, FIRST
    if PARTS > 1:
        IN_FIRST: tl.constexpr = (FIRST + BLOCK_N - 1) // BLOCK_N
        IN_SECOND: tl.constexpr = (SECOND + BLOCK_N - 1) // BLOCK_N
        part = (block >= IN_FIRST).to(tl.int32) + (block >= IN_FIRST + IN_SECOND).to(tl.int32)
        later = tl.where(
            part == 1, FIRST + (block - IN_FIRST) * BLOCK_N, FIRST + SECOND + (block - IN_FIRST - IN_SECOND) * BLOCK_N
        )
        first = tl.where(part == 0, first, later)
        end = tl.where(part == 0, FIRST, tl.where(part == 1, FIRST + SECOND, FIRST + SECOND + THIRD))
    column = first + tl.arange(0, BLOCK_N)
    is_column = column < end
    slot = tl.min(left, axis=0)
    while slot < _NO_SLOT:
        is_row = left == slot
        weights = b_ptr + ((slot - 1).to(tl.int64) * (FIRST + SECOND + THIRD) + column)[:, None] * RANK
        total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        for start in range(0, RANK, BLOCK_R):
            rank = start + tl.arange(0, BLOCK_R)
            is_rank = rank < RANK
            hidden = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
            for split in tl.static_range(SPLITS):
                at = (split * num_rows.to(tl.int64) + row)[:, None] * (PARTS * RANK) + part * RANK + rank[None, :]
                hidden += tl.load(hidden_ptr + at, mask=is_row[:, None] & is_rank[None, :], other=0.0)
            weight = tl.load(weights + rank[None, :], mask=is_column[:, None] & is_rank[None, :], other=0.0)
            total = _exact_dot(weight, tl.trans(hidden), total, PAIRS)
        place = out_ptr + row.to(tl.int64)[:, None] * stride_out + column[None, :]
        inside = is_row[:, None] & is_column[None, :]
        out = tl.load(place, mask=inside, other=0.0).to(tl.float32) + tl.trans(total)
        tl.store(place, out.to(out_ptr.dtype.element_ty), mask=inside)
        left = tl.where(is_row, _NO_SLOT, left)
        slot = tl.min(left, axis=0)


def lora_delta(
    x: torch.Tensor,
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    adapters: torch.Tensor,
    part_sizes: tuple[int, ...] | None = None,
) -> None:
    """Add to each row of `out` what its adapter computes of that row of x. Rows without an adapter keep their bits.

    Both products and the sum with `out` are in float32, and `out` is rounded once.

    Args:
        x: [T, in], last dimension contiguous
        out: [T, out], last dimension contiguous, of any float type: the outputs of the linear layer. Changed in place
        a: [slots, parts * rank, in], contiguous, of x's type. Slot s is a[s - 1]
        b: [slots, out, rank], contiguous, of x's type, with the adapter's scale. The rows of part p multiply the rows
            p * rank to (p + 1) * rank of A x
        adapters: int32 [T], contiguous: the slot of each row, from 1; 0 for none
        part_sizes: outputs of each of the stacked layers (q, k, v; gate, up), at most MAX_PARTS; None: all of one
    """
    num_rows, num_in = x.shape
    slots, num_out, rank = b.shape
    sizes = (num_out,) if part_sizes is None else part_sizes
    num_ranks = len(sizes) * rank
    assert len(sizes) <= MAX_PARTS and sum(sizes) == num_out and all(size > 0 for size in sizes)
    assert a.shape == (slots, num_ranks, num_in) and out.shape == (num_rows, num_out) and rank
    assert x.dtype == a.dtype == b.dtype and a.is_contiguous() and b.is_contiguous()
    assert has_dense_rows(x) and has_dense_rows(out)
    assert adapters.shape == (num_rows,) and adapters.dtype == torch.int32 and adapters.is_contiguous()
    if not num_rows:
        return
    arch = arch_of(x.device)
    tile, is_amd = _tile(x.dtype, arch), arch.startswith("gfx")
    split, splits = _splits(num_in, tile)
    is_apart = num_rows <= tile.apart
    hidden = torch.empty((splits if is_apart else 1, num_rows, num_ranks), dtype=torch.float32, device=x.device)
    # On AMD, the shape of an instruction would depend on the tile's.
    options = {"matrix_instr_nonkdim": 16} if is_amd else {}
    block_r = _padded(num_ranks, tile.hidden)
    _shrink_kernel[(cdiv(num_ranks, block_r) * len(hidden), *_tiles(num_rows, tile.rows, slots, tile))](
        x, a, adapters, hidden, x.stride(0), num_rows, RANKS=num_ranks, K=num_in, SPLIT=split, SPLITS=splits,
        APART=is_apart, BLOCK_T=tile.rows, BLOCK_R=block_r, BLOCK_K=tile.block_k,
        WIDEN=is_interpreted(_shrink_kernel) and x.dtype == torch.bfloat16, num_warps=_NUM_WARPS,
        num_stages=min(2, tile.num_stages) if is_amd else tile.num_stages, **options,
    )  # fmt: skip
    first, second, third = (*sizes, 0, 0)[:MAX_PARTS]
    block_t = tile.few_rows if is_apart else tile.rows
    _expand_kernel[(sum(cdiv(size, tile.outputs) for size in sizes), *_tiles(num_rows, block_t, slots, tile))](
        hidden, b, adapters, out, out.stride(0), num_rows, FIRST=first, SECOND=second, THIRD=third, PARTS=len(sizes),
        RANK=rank, SPLITS=len(hidden), BLOCK_T=block_t, BLOCK_N=tile.outputs, BLOCK_R=_padded(rank, tile.ranks),
        PAIRS=not is_amd and x.itemsize == 2, num_warps=_NUM_WARPS, num_stages=1, **options,
    )  # fmt: skip


def lora_row_counts(dtype: torch.dtype, device: torch.device) -> tuple[int, ...]:
    """The numbers of rows from which `lora_delta` has another kernel, in ascending order."""
    tile = _tile(dtype, arch_of(device))
    return 1, tile.apart + 1


def lora_hidden_bytes(num_rows: int, num_in: int, num_ranks: int, dtype: torch.dtype, device: torch.device) -> int:
    """The memory that `lora_delta` takes until it returns. num_ranks: parts * rank."""
    tile = _tile(dtype, arch_of(device))
    splits = _splits(num_in, tile)[1] if num_rows <= tile.apart else 1
    return splits * num_rows * num_ranks * torch.float32.itemsize


def _tile(dtype: torch.dtype, arch: str) -> _Tile:
    return _INTERPRETED_TILE if arch == INTERPRETER else _TILES[dtype.itemsize]


def _tiles(num_rows: int, block: int, slots: int, tile: _Tile) -> tuple[int, int]:
    """The tiles of rows, and the programs that share the adapters of each."""
    tiles = cdiv(num_rows, block)
    return tiles, min(slots, max(1, tile.groups // tiles))


def _padded(ranks: int, most: int) -> int:
    return min(most, max(16, next_power_of_2(ranks)))


def _splits(num_in: int, tile: _Tile) -> tuple[int, int]:
    """The inputs of a part of a sum, a power of two, and the number of parts."""
    split = max(tile.split, next_power_of_2(cdiv(num_in, _MAX_SPLITS)))
    return split, cdiv(num_in, split)


def lora_delta_ref(
    x: torch.Tensor,
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    adapters: torch.Tensor,
    part_sizes: tuple[int, ...] | None = None,
) -> None:
    """`lora_delta` in plain torch, one adapter after the other, in float32 or x's wider type."""
    wide = torch.promote_types(x.dtype, torch.float32)
    sizes = (b.shape[1],) if part_sizes is None else part_sizes
    for slot in adapters[adapters > 0].unique().tolist():
        rows = (adapters == slot).nonzero()[:, 0]
        hidden = (x[rows].to(wide) @ a[slot - 1].to(wide).T).chunk(len(sizes), dim=-1)
        weights = b[slot - 1].to(wide).split(sizes)
        delta = torch.cat([one @ weight.T for one, weight in zip(hidden, weights, strict=True)], dim=-1)
        out[rows] = (out[rows].to(wide) + delta).to(out.dtype)
