"""The start of a decode step in one kernel: all that lies between the inputs of the step and its first layer.

A program serves one request. It writes the slot of the new token into the table of slots, and copies the row of the
embedding, times a factor, and the row of the cosines and sines.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .bound import bound
from .tuning import next_power_of_2, row_warps


class Started(NamedTuple):
    """What a decode step of B requests begins with."""

    input_ids: torch.Tensor
    """int64 [B]"""
    positions: torch.Tensor
    """int64 [B]"""
    x: torch.Tensor
    """[B, hidden], the embedded tokens"""
    angles: torch.Tensor
    """float32 [B, 2 * n, head_dim / 2], cosines and sines of n rotary embeddings"""


# The inputs of a step lie in one buffer, so their alignment varies with the batch size.
@bound
@triton.jit(do_not_specialize_on_alignment=["rows_ptr", "seq_lens_ptr", "slots_ptr"])
def _decode_start_kernel(
    rows_ptr, seq_lens_ptr, slots_ptr, newest_ptr, table_ptr, embedding_ptr, angles_ptr, ids_ptr, positions_ptr, x_ptr,
    out_angles_ptr, stride_table, scale, HIDDEN: tl.constexpr, NUM_ANGLES: tl.constexpr, BLOCK_X: tl.constexpr,
    BLOCK_ANGLES: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + request)
    position = tl.load(seq_lens_ptr + request) - 1
    token = tl.load(newest_ptr + row)
    tl.store(table_ptr + row * stride_table + position, tl.load(slots_ptr + request).to(tl.int32))
    tl.store(ids_ptr + request, token)
    tl.store(positions_ptr + request, position)
    i = tl.arange(0, BLOCK_X)
    x = tl.load(embedding_ptr + token * HIDDEN + i, mask=i < HIDDEN)
    x = (x.to(tl.float32) * scale).to(x_ptr.dtype.element_ty)  # a scale of 1 changes no bit
    tl.store(x_ptr + request * HIDDEN + i, x, mask=i < HIDDEN)
    i = tl.arange(0, BLOCK_ANGLES)
    angles = tl.load(angles_ptr + position * NUM_ANGLES + i, mask=i < NUM_ANGLES)
    tl.store(out_angles_ptr + request * NUM_ANGLES + i, angles, mask=i < NUM_ANGLES)


def decode_start(
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    slots: torch.Tensor,
    newest_tokens: torch.Tensor,
    req_to_token: torch.Tensor,
    embedding: torch.Tensor,
    angles: torch.Tensor,
    scale: float = 1.0,
) -> Started:
    """Look up what the layers of a decode step need, and write the slots into the table.

    Args:
        rows, seq_lens, slots: int64 [B], contiguous. Equal rows must have equal lengths and slots
        newest_tokens: int64 [num_rows], the newest token of each row
        req_to_token: int32 [num_rows, context_len]; req_to_token[row, seq_len - 1] becomes the slot
        embedding: [vocab, hidden], contiguous
        angles: float32 [context_len, 2 * n, head_dim / 2], contiguous: cosines and sines of each position, for each of
            n rotary embeddings
        scale: what the embedding's rows are multiplied by
    """
    batch, hidden, num_angles = len(rows), embedding.shape[1], angles.shape[1] * angles.shape[2]
    assert rows.shape == seq_lens.shape == slots.shape == (batch,)
    assert rows.dtype == seq_lens.dtype == slots.dtype == newest_tokens.dtype == torch.int64
    assert rows.is_contiguous() and seq_lens.is_contiguous() and slots.is_contiguous()
    assert req_to_token.dtype == torch.int32 and req_to_token.stride(1) == 1 and newest_tokens.is_contiguous()
    assert embedding.is_contiguous() and angles.is_contiguous() and angles.dtype == torch.float32
    ids = torch.empty(batch, dtype=torch.int64, device=rows.device)
    positions = torch.empty(batch, dtype=torch.int64, device=rows.device)
    x = torch.empty((batch, hidden), dtype=embedding.dtype, device=rows.device)
    own_angles = torch.empty((batch, *angles.shape[1:]), dtype=torch.float32, device=rows.device)
    block = next_power_of_2(hidden)
    if batch:
        _decode_start_kernel[(batch,)](
            rows, seq_lens, slots, newest_tokens, req_to_token, embedding, angles, ids, positions, x, own_angles,
            req_to_token.stride(0), scale, HIDDEN=hidden, NUM_ANGLES=num_angles, BLOCK_X=block,
            BLOCK_ANGLES=next_power_of_2(num_angles), num_warps=row_warps(block),
        )  # fmt: skip
    return Started(ids, positions, x, own_angles)


def decode_start_ref(
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    slots: torch.Tensor,
    newest_tokens: torch.Tensor,
    req_to_token: torch.Tensor,
    embedding: torch.Tensor,
    angles: torch.Tensor,
    scale: float = 1.0,
) -> Started:
    """`decode_start` in plain torch."""
    positions = seq_lens - 1
    req_to_token[rows, positions] = slots.int()
    ids = newest_tokens[rows]
    return Started(ids, positions, embedding[ids] * scale, angles[positions])
