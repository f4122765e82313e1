"""Work maps: the list of the work units of a batch of requests with different lengths.

A grid of [requests, longest request] is mostly empty when lengths differ, and in a CUDA graph the longest request is
unknown. So the units of all requests have consecutive numbers: request b has ceil(length_b * scale / tile) units,
beginning with number starts[b]. The attention kernels divide the units among a number of programs that suits the
device. The division does not change the results.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .bound import bound
from .tuning import cdiv

_FILL = 128
_BATCH_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class WorkMap:
    """The work units of a batch.

    starts: int32 [B + 1], number of the first unit of each request, then the total. rows: int32 [capacity], request of
    each unit. records: int32 [capacity, 4], of decode attention: all that a program has to know of a unit, so that it
    waits for one look-up: the request, its length, the number of its first unit, and its row of `req_to_token`.
    """

    starts: torch.Tensor
    rows: torch.Tensor
    tile: int
    """size of a unit, in tokens or (token, query head) pairs"""
    split: int | None = None
    """Extend attention: tokens of KV of a unit. None: a unit is a query tile with all its KV."""
    records: torch.Tensor | None = None

    @property
    def capacity(self) -> int:
        return self.rows.shape[0]


# The batch size and the alignment of these buffers vary from step to step. Specialising on them would compile kernels
# while serving.
@bound
@triton.jit(
    do_not_specialize=["batch", "scale", "tile", "split", "capacity"],
    do_not_specialize_on_alignment=["lens_ptr", "extend_start_ptr", "table_rows_ptr", "starts_ptr", "rows_ptr"],
)
def _work_map_kernel(
    lens_ptr,
    extend_start_ptr,
    table_rows_ptr,
    starts_ptr,
    rows_ptr,
    batch,
    scale,
    tile,
    split,
    capacity,
    SELECT: tl.constexpr,
    BLOCK_B: tl.constexpr,
    FILL: tl.constexpr,
):
    b = tl.program_id(0)
    start = 0
    count = 0
    # One block size for all batches, so that no step waits for the compiler.
    for first in range(0, b + 1, BLOCK_B):
        i = first + tl.arange(0, BLOCK_B)
        live = i < batch
        if SELECT == 0:
            length = tl.load(lens_ptr + i, mask=live, other=0).to(tl.int32)
        else:
            new = tl.load(extend_start_ptr + i + 1, mask=live, other=0)
            new = (new - tl.load(extend_start_ptr + i, mask=live, other=0)).to(tl.int32)
            if SELECT == 1:
                length = tl.load(lens_ptr + i, mask=live, other=0).to(tl.int32)
                length = tl.where(new == 1, length, 0)
            else:
                length = tl.where(new == 1, 0, new)
        units = (length * scale + tile - 1) // tile
        if SELECT == 3:
            units *= (tl.load(lens_ptr + i, mask=live, other=0).to(tl.int32) + split - 1) // split
        start += tl.sum(tl.where(i < b, units, 0), axis=0)
        count += tl.sum(tl.where(i == b, units, 0), axis=0)
    tl.store(starts_ptr + b, start)
    if b == batch - 1:
        tl.store(starts_ptr + batch, start + count)
    f = tl.arange(0, FILL)
    if SELECT <= 1:  # records
        own_length = tl.load(lens_ptr + b).to(tl.int32)
        row = tl.load(table_rows_ptr + b).to(tl.int32)
        field = tl.arange(0, 4)[None, :]
        record = tl.where(field < 2, tl.where(field == 0, b, own_length), tl.where(field == 2, start, row))
        for w in range(start, start + count, FILL):
            unit = (w + f)[:, None]
            mask = (unit < start + count) & (unit < capacity)
            tl.store(rows_ptr + unit * 4 + field, tl.broadcast_to(record, [FILL, 4]), mask=mask)
    else:
        for w in range(start, start + count, FILL):
            tl.store(rows_ptr + w + f, b + f * 0, mask=(w + f < start + count) & (w + f < capacity))


def _launch(
    lens: torch.Tensor,
    extend_start_loc: torch.Tensor,
    scale: int,
    tile: int,
    capacity: int,
    select: int,
    split: int | None = None,
    table_rows: torch.Tensor | None = None,
) -> WorkMap:
    batch = lens.shape[0]
    assert lens.is_contiguous() and extend_start_loc.is_contiguous()
    starts = torch.empty(batch + 1, dtype=torch.int32, device=lens.device)
    shape = (max(capacity, 1),) if table_rows is None else (max(capacity, 1), 4)
    units = torch.empty(shape, dtype=torch.int32, device=lens.device)
    _work_map_kernel[(batch,)](
        lens,
        extend_start_loc,
        extend_start_loc if table_rows is None else table_rows,
        starts,
        units,
        batch,
        scale,
        tile,
        split or 0,
        capacity,
        SELECT=select,
        BLOCK_B=_BATCH_BLOCK,
        FILL=_FILL,
        num_warps=4,
    )
    if table_rows is None:
        return WorkMap(starts, units, tile, split)
    return WorkMap(starts, units[:, 0], tile, split, units)


def split_map(
    seq_lens: torch.Tensor,
    rows: torch.Tensor,
    split: int,
    capacity: int,
    extend_start_loc: torch.Tensor | None = None,
) -> WorkMap:
    """The work units of decode attention: `split` tokens of KV each.

    seq_lens, rows: int [B], lengths and rows of `req_to_token`. With extend_start_loc (int [B + 1]), only requests with
    exactly one new token have units. `capacity` must be at least the total number of units, which the host knows: units
    beyond it would be lost.
    """
    assert rows.shape == seq_lens.shape and rows.is_contiguous()
    if extend_start_loc is None:
        return _launch(seq_lens, seq_lens, 1, split, capacity, 0, table_rows=rows)
    assert extend_start_loc.shape[0] == seq_lens.shape[0] + 1
    return _launch(seq_lens, extend_start_loc, 1, split, capacity, 1, table_rows=rows)


def query_tile_map(extend_start_loc: torch.Tensor, group: int, block_m: int, num_tokens: int) -> WorkMap:
    """The work units of extend attention: `block_m` (token, query head) pairs each.

    extend_start_loc: int [B + 1]. Requests with exactly one new token have no units, because decode attention serves
    them. The capacity is computed from the number of tokens, so the host's copy of the lengths is not needed.
    """
    batch = extend_start_loc.shape[0] - 1
    capacity = cdiv(num_tokens * group, block_m) + batch
    return _launch(extend_start_loc[:-1], extend_start_loc, group, block_m, capacity, 2)


def query_split_map(
    extend_start_loc: torch.Tensor, seq_lens: torch.Tensor, group: int, block_m: int, split: int, capacity: int
) -> WorkMap:
    """The work units of extend attention for few query tiles and long prefixes: a query tile and a split of its KV.

    Each query tile of a request has ceil(seq_len / split) units, although its last splits may be empty. seq_lens: int
    [B], prefix included. `capacity` must be at least the total number of units, which the host knows.
    """
    return _launch(seq_lens, extend_start_loc, group, block_m, capacity, 3, split)


def split_map_ref(
    seq_lens: torch.Tensor, rows: torch.Tensor, split: int, extend_start_loc: torch.Tensor | None = None
) -> WorkMap:
    """`split_map` in plain torch. The capacity is the number of units."""
    units = torch.ceil(seq_lens / split).to(torch.int32)
    if extend_start_loc is not None:
        units = torch.where(extend_start_loc.diff() == 1, units, 0)
    work = _map_of_units(units, split)
    fields = work.rows, seq_lens[work.rows], work.starts[work.rows], rows[work.rows]
    return dataclasses.replace(work, records=torch.stack([field.to(torch.int32) for field in fields], 1))


def query_tile_map_ref(extend_start_loc: torch.Tensor, group: int, block_m: int) -> WorkMap:
    """`query_tile_map` in plain torch. The capacity is the number of units."""
    new = extend_start_loc.diff()
    units = torch.ceil(torch.where(new == 1, 0, new) * group / block_m).to(torch.int32)
    return _map_of_units(units, block_m)


def query_split_map_ref(
    extend_start_loc: torch.Tensor, seq_lens: torch.Tensor, group: int, block_m: int, split: int
) -> WorkMap:
    """`query_split_map` in plain torch. The capacity is the number of units."""
    tiles = query_tile_map_ref(extend_start_loc, group, block_m).starts.diff()
    units = tiles * torch.ceil(seq_lens / split).to(torch.int32)
    return dataclasses.replace(_map_of_units(units, block_m), split=split)


def _map_of_units(units: torch.Tensor, tile: int) -> WorkMap:
    starts = torch.nn.functional.pad(units.cumsum(0), (1, 0)).to(torch.int32)
    rows = torch.repeat_interleave(torch.arange(len(units), device=units.device), units).to(torch.int32)
    return WorkMap(starts, rows, tile)
