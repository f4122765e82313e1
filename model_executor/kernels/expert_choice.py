"""The choice of experts of a mixture of experts, and the grouping of (token, expert) pairs by expert.

`choose_experts` takes three launches, or two for up to ROWS tokens:

- The logits of the router, x @ router.T + bias in float32.
- The choice. A program has ROWS tokens. It marks the experts with the largest probabilities or sigmoids in a table of
  tokens by experts. If the experts are in groups, it first leaves only those of some groups in the table. The marks
  before a token in its column are its rank among the program's tokens of that expert. Those before an expert in its row
  are the number of the pair within the token. So a token's pairs are in ascending order of experts.
- The places. Each program adds up how many tokens of each expert the programs before it have. Then it knows where the
  pairs of its tokens belong. If one program has all tokens, it does this in the second launch.

No program adds to a number that another one writes. So the order of the pairs is always the same: by expert, then by
token. All launches depend on shapes only, so a graph may record them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .bound import bound
from .primitives import dot, has_dense_rows, is_interpreted
from .tuning import INTERPRETER, arch_of, cdiv, next_power_of_2

_ROWS = 32
"""Tokens of a program. At most the rows of a tile, so that an expert has no more tiles than there are programs."""
_INTERPRETED_ROWS = 16
_BLOCK_CHUNKS = 8
"""Programs whose counts are added at once."""
_LOWEST = tl.constexpr(-3.4028234663852886e38)
"""The lowest finite number of float32."""


class _Tile(NamedTuple):
    block_m: int
    block_n: int
    block_k: int
    num_stages: int


_ROUTER_TILES = {2: _Tile(64, 16, 128, 4), 4: _Tile(16, 16, 64, 2)}
"""By the bytes of a number. Few experts are in a tile, so that a small step has some programs. 64 tokens are the least
of sm_90's asynchronous products."""
_INTERPRETED_TILE = _Tile(16, 16, 64, 1)


class ExpertPairs(NamedTuple):
    """The (token, expert) pairs of T tokens, and how they are divided into tiles of pairs with the same expert.

    Pair number token * top_k + i belongs to the token's i-th expert, in ascending order of experts.
    """

    experts: torch.Tensor
    """int32 [T, top_k], ascending in each row"""
    weights: torch.Tensor
    """float32 [T, top_k]"""
    order: torch.Tensor
    """int32 [T * top_k], numbers of the pairs, by expert and then by token"""
    tiles: torch.Tensor
    """int32 [most tiles, 3]: expert, and the first and the last place in `order`, that after the last one"""
    num_tiles: torch.Tensor
    """int32 [1], the tiles that exist"""
    tile_rows: int
    """most pairs of a tile"""


@bound
@triton.jit(do_not_specialize=["num_rows"])
def _router_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, stride_x, num_rows, EXPERTS: tl.constexpr, K: tl.constexpr,
    BIASED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    expert = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows, in_experts = row < num_rows, expert < EXPERTS
    rows = x_ptr + row.to(tl.int64)[:, None] * stride_x
    weights = weight_ptr + expert[:, None] * K
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        row_mask, weight_mask = in_rows[:, None], in_experts[:, None]
        if K % BLOCK_K:
            row_mask, weight_mask = row_mask & (k < K)[None, :], weight_mask & (k < K)[None, :]
        x = tl.load(rows + k[None, :], mask=row_mask, other=0.0)
        weight = tl.load(weights + k[None, :], mask=weight_mask, other=0.0)
        total = dot(x, tl.trans(weight), total, WIDEN)
    if BIASED:
        total += tl.load(bias_ptr + expert, mask=in_experts, other=0.0).to(tl.float32)[None, :]
    place = row.to(tl.int64)[:, None] * EXPERTS + expert[None, :]
    tl.store(out_ptr + place, total, mask=in_rows[:, None] & in_experts[None, :])


@triton.jit
def _place(
    chosen, before, total, row, program, order_ptr, tiles_ptr, num_tiles_ptr, TOP_K: tl.constexpr, TILE: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Write the pairs of a program's tokens to their places, and the tile number `program` of each expert.

    chosen: int32 [ROWS, BLOCK_E], 1 for a chosen expert. before, total: int32 [BLOCK_E], tokens of each expert in the
    programs before, and in all.
    """
    starts = tl.cumsum(total, 0) - total
    place = (starts + before)[None, :] + tl.cumsum(chosen, 0) - chosen
    pair = row[:, None] * TOP_K + tl.cumsum(chosen, 1) - chosen
    tl.store(order_ptr + place, pair, mask=chosen > 0)
    num_tiles = (total + TILE - 1) // TILE
    tile = tiles_ptr + (tl.cumsum(num_tiles, 0) - num_tiles + program) * 3
    exists = program < num_tiles
    first = starts + program * TILE
    tl.store(tile, tl.arange(0, BLOCK_E), mask=exists)
    tl.store(tile + 1, first, mask=exists)
    tl.store(tile + 2, tl.minimum(first + TILE, starts + total), mask=exists)
    if program == 0:
        tl.store(num_tiles_ptr, tl.sum(num_tiles, axis=0))


@triton.jit
def _of_best_groups(
    left, expert, GROUPS: tl.constexpr, SIZE: tl.constexpr, KEPT: tl.constexpr, SUMS_TWO: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """The numbers `left` [ROWS, BLOCK_E] of the experts of each row's KEPT groups with the highest scores, -inf for
    other experts. No number is NaN, and only experts that do not exist have -inf."""
    group = expert // SIZE
    scores = tl.full(left.shape, float("-inf"), tl.float32)
    for number in range(GROUPS):
        members = tl.where(group == number, left, float("-inf"))
        score = tl.max(members, axis=1)[:, None]
        if SUMS_TWO:
            first = tl.min(tl.where(members == score, expert, BLOCK_E), axis=1)[:, None]
            second = tl.max(tl.where(expert == first, float("-inf"), members), axis=1)[:, None]
            score = tl.maximum(score + second, _LOWEST)  # -inf is only that of groups that are chosen already
        scores = tl.where(group == number, score, scores)
    kept = tl.full(left.shape, float("-inf"), tl.float32)
    for _ in range(KEPT):
        most = tl.max(scores, axis=1)[:, None]
        best = tl.min(tl.where(scores == most, group, BLOCK_E), axis=1)[:, None]
        kept = tl.where(group == best, left, kept)
        scores = tl.where(group == best, float("-inf"), scores)
    return kept


@bound
@triton.jit(do_not_specialize=["num_rows"])
def _choose_kernel(
    logits_ptr, corrections_ptr, experts_ptr, weights_ptr, counts_ptr, order_ptr, tiles_ptr, num_tiles_ptr, num_rows,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, NORMALIZED: tl.constexpr, SIGMOIDS: tl.constexpr,
    CORRECTED: tl.constexpr, SCALE: tl.constexpr, LEAST_SUM: tl.constexpr, GROUPS: tl.constexpr,
    GROUPS_OF_TOKEN: tl.constexpr, ALONE: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = program * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, BLOCK_E)[None, :]
    in_rows = (row < num_rows)[:, None]
    at = logits_ptr + row[:, None] * EXPERTS + expert
    logits = tl.load(at, mask=in_rows & (expert < EXPERTS), other=float("-inf"))
    logits = tl.where(in_rows, logits, 0.0)
    if SIGMOIDS:
        chances = 1 / (1 + tl.exp(-logits))
    else:
        powers = tl.exp(logits - tl.max(logits, axis=1)[:, None])
        chances = powers / tl.sum(powers, axis=1)[:, None]
    left = chances
    if CORRECTED:
        left += tl.load(corrections_ptr + expert, mask=expert < EXPERTS, other=0.0)
    # Only experts that may not be chosen have -inf, and those that are chosen. So each token gets TOP_K experts, also
    # if its row has a NaN (then it has no other number), or if corrections are -inf.
    left = tl.where(left == left, tl.maximum(left, _LOWEST), 0.0)
    left = tl.where(expert < EXPERTS, left, float("-inf"))
    if GROUPS > 1:
        left = _of_best_groups(left, expert, GROUPS, EXPERTS // GROUPS, GROUPS_OF_TOKEN, CORRECTED, BLOCK_E)
    chosen = tl.zeros([ROWS, BLOCK_E], tl.int32)
    for _ in range(TOP_K):
        most = tl.max(left, axis=1)[:, None]
        first = tl.min(tl.where(left == most, expert, BLOCK_E), axis=1)[:, None]
        chosen = tl.where(expert == first, 1, chosen)
        left = tl.where(expert == first, float("-inf"), left)
    weights = tl.where(chosen > 0, chances, 0.0)
    if NORMALIZED:
        total = tl.sum(weights, axis=1)[:, None]
        weights = weights / (tl.maximum(total, LEAST_SUM) if CORRECTED else total)
    weights *= SCALE
    chosen = tl.where(in_rows, chosen, 0)
    place = row[:, None] * TOP_K + tl.cumsum(chosen, 1) - chosen
    tl.store(experts_ptr + place, tl.broadcast_to(expert, place.shape), mask=chosen > 0)
    tl.store(weights_ptr + place, weights, mask=chosen > 0)
    counts = tl.sum(chosen, axis=0)
    if ALONE:
        none = tl.zeros([BLOCK_E], tl.int32)
        _place(chosen, none, counts, row, program, order_ptr, tiles_ptr, num_tiles_ptr, TOP_K, TILE, BLOCK_E)
    else:
        tl.store(counts_ptr + program * BLOCK_E + tl.arange(0, BLOCK_E), counts)


@bound
@triton.jit(do_not_specialize=["num_rows", "num_programs"])
def _place_kernel(
    experts_ptr, counts_ptr, order_ptr, tiles_ptr, num_tiles_ptr, num_rows, num_programs, TOP_K: tl.constexpr,
    TILE: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_CHUNKS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    before = tl.zeros([BLOCK_E], tl.int32)
    total = tl.zeros([BLOCK_E], tl.int32)
    for start in range(0, num_programs, BLOCK_CHUNKS):
        chunk = start + tl.arange(0, BLOCK_CHUNKS)[:, None]
        at = counts_ptr + chunk * BLOCK_E + tl.arange(0, BLOCK_E)[None, :]
        counts = tl.load(at, mask=chunk < num_programs, other=0)
        total += tl.sum(counts, axis=0)
        before += tl.sum(tl.where(chunk < program, counts, 0), axis=0)
    row = program * ROWS + tl.arange(0, ROWS)
    chosen = tl.zeros([ROWS, BLOCK_E], tl.int32)
    for i in range(TOP_K):
        expert = tl.load(experts_ptr + row * TOP_K + i, mask=row < num_rows, other=-1)
        chosen += (expert[:, None] == tl.arange(0, BLOCK_E)[None, :]).to(tl.int32)
    _place(chosen, before, total, row, program, order_ptr, tiles_ptr, num_tiles_ptr, TOP_K, TILE, BLOCK_E)


def most_tiles(num_pairs: int, num_experts: int, tile_rows: int) -> int:
    """The most tiles that pairs can have: each expert with pairs has one tile that is not full."""
    used = min(num_experts, num_pairs)
    return used + (num_pairs - used) // tile_rows


def choose_experts(
    x: torch.Tensor,
    router: torch.Tensor,
    top_k: int,
    *,
    normalized: bool,
    tile_rows: int,
    bias: torch.Tensor | None = None,
    sigmoids: bool = False,
    corrections: torch.Tensor | None = None,
    least_sum: float = 0.0,
    scale: float = 1.0,
    num_groups: int = 1,
    groups_per_token: int = 1,
) -> ExpertPairs:
    """Choose the `top_k` experts of each token with the largest softmax of x @ router.T + bias in float32.

    With `sigmoids`, those of the logits take the place of the softmax. Corrections are added for the choice. The
    weights are multiplied by `scale`. If the experts are in groups, a token chooses from those with the highest scores.
    The score of a group is its largest number, or with corrections the sum of its two largest ones.

    Of equal ones, the smaller index is chosen. A row has the same bits in every batch. The weights of a row with a NaN
    are NaN.

    Args:
        x: [T, hidden], T > 0, last dimension contiguous
        router: [experts, hidden], contiguous, of x's dtype
        normalized: whether the weights of a token are divided by their sum
        tile_rows: most pairs of a tile
        bias: [experts] of x's dtype; None: there is none
        sigmoids: needs corrections
        corrections: float32 [experts]; None: there are none
        least_sum: with corrections, what the sum of a token's weights is at least, where they are divided by it
        num_groups: groups of neighbouring experts, of equal size; 1: there are none
        groups_per_token: the groups from which a token chooses
    """
    (num_rows, width), (num_experts, num_in) = x.shape, router.shape
    assert num_rows and width == num_in and has_dense_rows(x) and router.is_contiguous() and router.dtype == x.dtype
    assert 0 < top_k <= num_experts and (bias is None or (bias.shape == (num_experts,) and bias.dtype == x.dtype))
    size = num_experts // num_groups
    assert num_experts == num_groups * size and 0 < groups_per_token <= num_groups and top_k <= groups_per_token * size
    if corrections is None:
        assert not sigmoids
    else:
        assert corrections.shape == (num_experts,) and corrections.dtype == torch.float32
        assert num_groups == 1 or size > 1
    interpreted = arch_of(x.device) == INTERPRETER
    rows = _INTERPRETED_ROWS if interpreted else _ROWS
    assert tile_rows >= rows
    num_programs, num_pairs = cdiv(num_rows, rows), num_rows * top_k
    block = next_power_of_2(num_experts)

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)

    logits = new(num_rows, num_experts, dtype=torch.float32)
    tile = _INTERPRETED_TILE if interpreted else _ROUTER_TILES[x.itemsize]
    _router_kernel[(cdiv(num_rows, tile.block_m), cdiv(num_experts, tile.block_n))](
        x, router, router if bias is None else bias, logits, x.stride(0), num_rows, EXPERTS=num_experts, K=width,
        BIASED=bias is not None, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        WIDEN=is_interpreted(_router_kernel) and x.dtype == torch.bfloat16, num_warps=4, num_stages=tile.num_stages,
    )  # fmt: skip
    most = most_tiles(num_pairs, num_experts, tile_rows)
    pairs = ExpertPairs(
        new(num_rows, top_k), new(num_rows, top_k, dtype=torch.float32), new(num_pairs), new(most, 3), new(1), tile_rows
    )
    alone = num_programs == 1
    counts = pairs.num_tiles if alone else new(num_programs, block)
    num_warps = max(1, min(8, rows * block // 512))
    _choose_kernel[(num_programs,)](
        logits, logits if corrections is None else corrections, pairs.experts, pairs.weights, counts, pairs.order,
        pairs.tiles, pairs.num_tiles, num_rows, EXPERTS=num_experts, TOP_K=top_k, NORMALIZED=normalized,
        SIGMOIDS=sigmoids, CORRECTED=corrections is not None, SCALE=scale, LEAST_SUM=least_sum, GROUPS=num_groups,
        GROUPS_OF_TOKEN=groups_per_token, ALONE=alone, TILE=tile_rows if alone else 0, ROWS=rows, BLOCK_E=block,
        num_warps=num_warps,
    )  # fmt: skip
    if not alone:
        _place_kernel[(num_programs,)](
            pairs.experts, counts, pairs.order, pairs.tiles, pairs.num_tiles, num_rows, num_programs, TOP_K=top_k,
            TILE=tile_rows, ROWS=rows, BLOCK_E=block, BLOCK_CHUNKS=_BLOCK_CHUNKS, num_warps=num_warps,
        )  # fmt: skip
    return pairs


def choose_experts_ref(
    x: torch.Tensor,
    router: torch.Tensor,
    top_k: int,
    *,
    normalized: bool,
    tile_rows: int,
    bias: torch.Tensor | None = None,
    sigmoids: bool = False,
    corrections: torch.Tensor | None = None,
    least_sum: float = 0.0,
    scale: float = 1.0,
    num_groups: int = 1,
    groups_per_token: int = 1,
) -> ExpertPairs:
    """`choose_experts` in plain torch. The tiles are those that exist."""
    wide = torch.promote_types(x.dtype, torch.float32)
    logits = x.to(wide) @ router.to(wide).T
    if bias is not None:
        logits = logits + bias
    # Not by probabilities: torch may round those of equal logits differently.
    # Numbers of float64 are rounded, for the same reason.
    chances = logits.sigmoid() if sigmoids else logits.softmax(-1)
    ranked = logits
    if corrections is not None:
        wider = logits.double()
        ranked = ((wider.sigmoid() if sigmoids else wider.softmax(-1)) + corrections).float()
    ranked = ranked.nan_to_num(0)
    if num_groups > 1:
        by_group = ranked.unflatten(1, (num_groups, -1))
        scores = by_group.sort(dim=-1, descending=True).values[..., : 1 if corrections is None else 2].sum(-1)
        best = scores.sort(dim=-1, descending=True, stable=True).indices[:, :groups_per_token]
        is_best = torch.zeros_like(scores, dtype=torch.bool).scatter(1, best, value=True)
        ranked = by_group.masked_fill(~is_best[..., None], -torch.inf).flatten(1)
    experts = ranked.sort(dim=-1, descending=True, stable=True).indices[:, :top_k].sort(-1).values
    weights = chances.gather(1, experts)
    if normalized:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=least_sum)
    weights = weights * scale
    by_expert = experts.flatten().sort(stable=True)
    totals = experts.flatten().bincount(minlength=len(router)).tolist()
    tiles, start = [], 0
    for expert, total in enumerate(totals):
        for first in range(start, start + total, tile_rows):
            tiles.append([expert, first, min(first + tile_rows, start + total)])
        start += total
    numbers = experts.int(), weights, by_expert.indices.int(), torch.tensor(tiles, dtype=torch.int32)
    return ExpertPairs(*numbers, torch.tensor([len(tiles)], dtype=torch.int32), tile_rows)
