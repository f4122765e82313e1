"""The gated short convolution of LFM2 (arXiv 2511.23404) in one launch.

A token stores the product of the first and the last of its three vectors in the pool. Its output is a weighted sum of
what it and the tokens before it have stored, times its second vector. Programs of a launch come in any order, so none
may read what another one stores. The tokens before it are of two kinds:

- Earlier steps have stored them. Their slots are read, and no program writes there: the slots that a step writes are
  new.
- They belong to this step. Their products are computed again, in the same way and with the same rounding, so they have
  the bits that the pool gets.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .bound import bound
from .primitives import has_dense_rows
from .tuning import cdiv

_BLOCK = 1024


@triton.jit
def request_of(token, starts_ptr, batch):
    """The request of a token of the step: the last one whose first token is not after it."""
    low = token * 0
    high = batch.to(tl.int64) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(starts_ptr + middle) <= token:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _channels_if(condition, i, CHANNELS: tl.constexpr):
    """The mask of the channels among i, or of none."""
    return i < tl.where(condition, CHANNELS, 0)


@triton.jit
def _stored_by(token_ptr, mask, dtype: tl.constexpr, CHANNELS: tl.constexpr):
    """What a token of this step stores. token_ptr: the channels of its first vector."""
    first = tl.load(token_ptr, mask=mask, other=0.0).to(tl.float32)
    last = tl.load(token_ptr + 2 * CHANNELS, mask=mask, other=0.0).to(tl.float32)
    return (first * last).to(dtype)


# The inputs of a step lie in one buffer, so their alignment varies with the batch size. So does the number of requests.
@bound
@triton.jit(
    do_not_specialize=["batch"],
    do_not_specialize_on_alignment=["positions_ptr", "slots_ptr", "rows_ptr", "starts_ptr"],
)
def _short_convolution_kernel(
    projected_ptr,
    weight_ptr,
    bias_ptr,
    stored_ptr,
    positions_ptr,
    slots_ptr,
    table_ptr,
    rows_ptr,
    starts_ptr,
    out_ptr,
    stride_t,
    stride_slot,
    stride_table,
    batch,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < CHANNELS
    dtype: tl.constexpr = stored_ptr.dtype.element_ty
    if HAS_STARTS:
        request = request_of(token, starts_ptr, batch)
        num_before = token - tl.load(starts_ptr + request)
    else:
        request = token
        num_before = token * 0
    position = tl.load(positions_ptr + token)
    # The token's own slot in the table. It is not read, but those before it are.
    entry_ptr = table_ptr + tl.load(rows_ptr + request) * stride_table + position
    token_ptr = projected_ptr + token * stride_t + i
    if HAS_BIAS:
        total = tl.load(bias_ptr + i, mask=mask, other=0.0)
    else:
        total = tl.zeros([BLOCK], tl.float32)
    for back in tl.static_range(WIDTH - 1, 0, -1):
        is_earlier = (back > num_before) & (back <= position)
        slot = tl.load(entry_ptr - back, mask=is_earlier, other=0).to(tl.int64)
        earlier = _channels_if(is_earlier, i, CHANNELS)
        x = tl.load(stored_ptr + slot * stride_slot + i, mask=earlier, other=0.0)
        if HAS_STARTS:
            new = _channels_if(back <= num_before, i, CHANNELS)
            x = tl.where(new, _stored_by(token_ptr - back * stride_t, new, dtype, CHANNELS), x)
        weight = tl.load(weight_ptr + (WIDTH - 1 - back) * CHANNELS + i, mask=mask, other=0.0)
        total = tl.fma(x.to(tl.float32), weight, total)  # An explicit fma: decode steps need the same bits.
    own = _stored_by(token_ptr, mask, dtype, CHANNELS)
    weight = tl.load(weight_ptr + (WIDTH - 1) * CHANNELS + i, mask=mask, other=0.0)
    total = tl.fma(own.to(tl.float32), weight, total)
    gate = tl.load(token_ptr + CHANNELS, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * CHANNELS + i, (total * gate).to(out_ptr.dtype.element_ty), mask=mask)
    slot = tl.load(slots_ptr + token)
    # Padding has the dummy slot, which several programs would write.
    tl.store(stored_ptr + slot * stride_slot + i, own, mask=_channels_if(slot > 0, i, CHANNELS))


def short_convolution(
    projected: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stored: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    extend_start_loc: torch.Tensor | None,
) -> torch.Tensor:
    """Convolve the new tokens of a step, and store what later tokens need of them: [T, 3 * n] -> [T, n].

    The sum is in float32, the bias first and then from the oldest token on. Tokens before position 0 count as zeros. A
    token has the same bits in any batch and chunk.

    Args:
        projected: [T, 3 * n], last dimension contiguous: what is stored is the product of the first and the last vector
        weight: float32 [width, n], contiguous, of the oldest token first
        bias: float32 [n], contiguous; None: there is none
        stored: [slots, n] of projected's dtype, last dimension contiguous: what tokens have stored
        positions: int64 [T], contiguous, consecutive for each request
        slots: int64 [T], contiguous, distinct, except the dummy slot 0, which is not written. Only tokens of the same
            request may read them in this step
        req_to_token: int32 [num_rows, context_len]
        rows: int64 [B], contiguous, row of `req_to_token` of each request
        extend_start_loc: int64 [B + 1], contiguous, the first token of each request; None: each has one token
    """
    num_tokens, (width, channels) = len(projected), weight.shape
    assert projected.shape[1] == 3 * channels and has_dense_rows(projected)
    assert weight.is_contiguous() and weight.dtype == torch.float32
    assert bias is None or (bias.shape == (channels,) and bias.is_contiguous() and bias.dtype == torch.float32)
    assert stored.shape[1] == channels and has_dense_rows(stored) and stored.dtype == projected.dtype
    assert positions.shape == slots.shape == (num_tokens,)
    assert req_to_token.dtype == torch.int32 and req_to_token.stride(1) == 1
    for each in (positions, slots, rows, *([] if extend_start_loc is None else [extend_start_loc])):
        assert each.dtype == torch.int64 and each.is_contiguous()
    batch = len(rows)
    assert num_tokens == batch if extend_start_loc is None else len(extend_start_loc) == batch + 1
    out = torch.empty((num_tokens, channels), dtype=projected.dtype, device=projected.device)
    if num_tokens:
        _short_convolution_kernel[(num_tokens, cdiv(channels, _BLOCK))](
            projected,
            weight,
            weight if bias is None else bias,
            stored,
            positions,
            slots,
            req_to_token,
            rows,
            rows if extend_start_loc is None else extend_start_loc,
            out,
            projected.stride(0),
            stored.stride(0),
            req_to_token.stride(0),
            batch,
            CHANNELS=channels,
            WIDTH=width,
            HAS_BIAS=bias is not None,
            HAS_STARTS=extend_start_loc is not None,
            BLOCK=_BLOCK,
            num_warps=4,
        )
    return out
