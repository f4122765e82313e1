"""The Gated DeltaNet of Qwen 3.5 (arXiv 2412.06464) in three launches.

1. Each token and key head: the convolution of query, key and values, and the decays and strengths of its value heads.
2. Each request, value head and block of columns of its state: the recurrence, token by token. The columns of a state do
   not depend on each other. A program has its block in registers.
3. Each token and value head: the norm and the gate of the output.

Programs of a launch come in any order. The first launch reads the inputs that earlier steps have kept. The second one
overwrites them with those of this step, because no program reads them any more.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .bound import bound
from .primitives import has_dense_rows
from .short_convolution import request_of
from .tuning import cdiv, next_power_of_2

_COLUMNS = 32
"""Of a state in a program: with 128 rows, 32 numbers in each of 128 threads."""
_L2_EPS = 1e-6


class Recurrence(NamedTuple):
    """The weights of a layer, all float32 and contiguous."""

    convolution: torch.Tensor
    """[width, channels], of the oldest token first"""
    decay_rate: torch.Tensor
    """[heads]"""
    decay_bias: torch.Tensor
    """[heads]"""
    norm: torch.Tensor
    """[value_dim]"""


@triton.jit
def _convolved(
    token_ptr,
    recent_ptr,
    weight_ptr,
    channel,
    end,
    num_before,
    position,
    stride_t,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The SiLU of the convolution of a token's channels, up to `end`. Inputs before position 0 count as zeros."""
    total = tl.zeros([channel.shape[0]], tl.float32)
    for back in tl.static_range(WIDTH - 1, -1, -1):
        weight = tl.load(weight_ptr + (WIDTH - 1 - back) * CHANNELS + channel, mask=channel < end, other=0.0)
        is_new = channel < tl.where(back <= num_before, end, 0)
        x = tl.load(token_ptr - back * stride_t + channel, mask=is_new, other=0.0).to(tl.float32)
        if back > 0:
            is_kept = channel < tl.where((back > num_before) & (back <= position), end, 0)
            place = (position - back + (WIDTH - 1)) % (WIDTH - 1)
            kept = tl.load(recent_ptr + place * CHANNELS + channel, mask=is_kept, other=0.0).to(tl.float32)
            x = tl.where(is_kept, kept, x)
        total = tl.fma(x, weight, total)  # An explicit fma: decode steps need the same bits.
    return total * tl.sigmoid(total)


@triton.jit
def _keep(
    from_ptr,
    to_ptr,
    head,
    is_kept,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Copies the channels of a token: the values of a value head, and of its key head if it is the first one of it."""
    i = tl.arange(0, BLOCK_K)
    in_key = i < tl.where(is_kept & (head % GROUP == 0), KEY_DIM, 0)
    for part in tl.static_range(2):
        key = (part * KEY_HEADS + head // GROUP) * KEY_DIM + i
        tl.store(to_ptr + key, tl.load(from_ptr + key, mask=in_key, other=0.0), mask=in_key)
    j = tl.arange(0, BLOCK_V)
    in_value = j < tl.where(is_kept, VALUE_DIM, 0)
    value = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + j
    tl.store(to_ptr + value, tl.load(from_ptr + value, mask=in_value, other=0.0), mask=in_value)


# The inputs of a step lie in one buffer, so their alignment varies with the batch size. So does the number of requests.
@bound
@triton.jit(
    do_not_specialize=["batch"],
    do_not_specialize_on_alignment=["positions_ptr", "rows_ptr", "starts_ptr"],
)
def _delta_net_inputs_kernel(
    projected_ptr,
    convolution_ptr,
    rate_ptr,
    bias_ptr,
    recent_ptr,
    positions_ptr,
    rows_ptr,
    starts_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    scalars_ptr,
    stride_t,
    scale,
    eps,
    batch,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    HEADS: tl.constexpr = KEY_HEADS * GROUP
    KEY_SIZE: tl.constexpr = KEY_HEADS * KEY_DIM
    VALUE_SIZE: tl.constexpr = HEADS * VALUE_DIM
    CHANNELS: tl.constexpr = 2 * KEY_SIZE + VALUE_SIZE
    if HAS_STARTS:
        request = request_of(token, starts_ptr, batch)
        num_before = token - tl.load(starts_ptr + request)
    else:
        request = token
        num_before = token * 0
    position = tl.load(positions_ptr + token)
    recent_ptr += tl.load(rows_ptr + request) * (WIDTH - 1) * CHANNELS
    token_ptr = projected_ptr + token * stride_t
    i = tl.arange(0, BLOCK_K)
    in_key = i < KEY_DIM
    key = head * KEY_DIM + i
    end = head * KEY_DIM + KEY_DIM
    q = _convolved(token_ptr, recent_ptr, convolution_ptr, key, end, num_before, position, stride_t, CHANNELS, WIDTH)
    k = _convolved(
        token_ptr, recent_ptr, convolution_ptr, KEY_SIZE + key, KEY_SIZE + end, num_before, position, stride_t,
        CHANNELS, WIDTH,
    )  # fmt: skip
    q = q * (scale / tl.sqrt(tl.sum(q * q, 0) + eps))
    k = k / tl.sqrt(tl.sum(k * k, 0) + eps)
    tl.store(q_ptr + token * KEY_SIZE + key, q, mask=in_key)
    tl.store(k_ptr + token * KEY_SIZE + key, k, mask=in_key)
    j = tl.arange(0, BLOCK_V)
    for of_key in tl.static_range(GROUP):
        value_head = head * GROUP + of_key
        value = value_head * VALUE_DIM + j
        v = _convolved(
            token_ptr, recent_ptr, convolution_ptr, 2 * KEY_SIZE + value,
            2 * KEY_SIZE + value_head * VALUE_DIM + VALUE_DIM, num_before, position, stride_t, CHANNELS, WIDTH,
        )  # fmt: skip
        tl.store(v_ptr + token * VALUE_SIZE + value, v, mask=j < VALUE_DIM)
        of_token = token_ptr + CHANNELS + VALUE_SIZE + value_head
        strength = tl.sigmoid(tl.load(of_token).to(tl.float32))
        decay = tl.load(of_token + HEADS).to(tl.float32) + tl.load(bias_ptr + value_head)
        # log(1 + e) of a small e, whose sum with 1 is rounded.
        e = tl.exp(tl.minimum(decay, 20.0))
        rounded = 1.0 + e
        small = tl.where(rounded == 1.0, e, tl.log(rounded) * (e / tl.where(rounded == 1.0, 1.0, rounded - 1.0)))
        softplus = tl.where(decay > 20.0, decay, small)
        decay = tl.exp(-tl.load(rate_ptr + value_head) * softplus)
        tl.store(scalars_ptr + (token * HEADS + value_head) * 2, decay)
        tl.store(scalars_ptr + (token * HEADS + value_head) * 2 + 1, strength)


@bound
@triton.jit(
    do_not_specialize_on_alignment=["positions_ptr", "rows_ptr", "starts_ptr", "saved_lens_ptr", "saved_rows_ptr"]
)
def _delta_net_recurrence_kernel(
    projected_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    scalars_ptr,
    recent_ptr,
    states_ptr,
    positions_ptr,
    rows_ptr,
    starts_ptr,
    saved_lens_ptr,
    saved_rows_ptr,
    out_ptr,
    stride_t,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_SAVED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    HEADS: tl.constexpr = KEY_HEADS * GROUP
    KEY_SIZE: tl.constexpr = KEY_HEADS * KEY_DIM
    VALUE_SIZE: tl.constexpr = HEADS * VALUE_DIM
    CHANNELS: tl.constexpr = 2 * KEY_SIZE + VALUE_SIZE
    if HAS_STARTS:
        start = tl.load(starts_ptr + request)
        end = tl.load(starts_ptr + request + 1)
    else:
        start = request
        end = request + 1
    row = tl.load(rows_ptr + request)
    i = tl.arange(0, BLOCK_K)
    j = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    in_key = i < KEY_DIM
    in_value = j < VALUE_DIM
    in_tile = i[:, None] * VALUE_DIM + j[None, :]
    tile_ptr = states_ptr + (row * HEADS + head) * KEY_DIM * VALUE_DIM + in_tile
    position = tl.load(positions_ptr + start)
    is_old = position > 0
    if HAS_SAVED:
        saved_len = tl.load(saved_lens_ptr + request)
        saved_row = tl.load(saved_rows_ptr + request)
        saved_token = tl.where(saved_len > 0, start + saved_len - 1 - position, -1)
        saved_ptr = states_ptr + (saved_row * HEADS + head) * KEY_DIM * VALUE_DIM + in_tile
    is_read = in_key[:, None] & (j < tl.where(is_old, VALUE_DIM, 0))[None, :]
    state = tl.load(tile_ptr, mask=is_read, other=0.0)
    key = head // GROUP * KEY_DIM + i
    value = head * VALUE_DIM + j
    for token in range(start, end):
        q = tl.load(q_ptr + token * KEY_SIZE + key, mask=in_key, other=0.0)
        k = tl.load(k_ptr + token * KEY_SIZE + key, mask=in_key, other=0.0)
        v = tl.load(v_ptr + token * VALUE_SIZE + value, mask=in_value, other=0.0)
        decay = tl.load(scalars_ptr + (token * HEADS + head) * 2)
        strength = tl.load(scalars_ptr + (token * HEADS + head) * 2 + 1)
        state = state * decay
        change = strength * (v - tl.sum(state * k[:, None], 0))
        state = tl.fma(tl.broadcast_to(k[:, None], state.shape), tl.broadcast_to(change[None, :], state.shape), state)
        out = tl.sum(state * q[:, None], 0)
        tl.store(out_ptr + token * VALUE_SIZE + value, out, mask=in_value)
        if HAS_SAVED:
            is_saved = in_key[:, None] & (j < tl.where(token == saved_token, VALUE_DIM, 0))[None, :]
            tl.store(saved_ptr, state, mask=is_saved)
    # Padding has row 0, which several programs would write.
    is_written = in_key[:, None] & (j < tl.where(row > 0, VALUE_DIM, 0))[None, :]
    tl.store(tile_ptr, state, mask=is_written)
    # One program for each key head keeps its query and key, and one for each value head its values.
    is_first = tl.program_id(2) == 0
    of_row_ptr = recent_ptr + row * (WIDTH - 1) * CHANNELS
    if HAS_SAVED:
        of_saved_ptr = recent_ptr + saved_row * (WIDTH - 1) * CHANNELS
        for back in tl.static_range(WIDTH - 1):
            token = saved_token - back
            is_saved = (saved_len > back) & is_first
            place = tl.where(is_saved, saved_len - 1 - back, 0) % (WIDTH - 1)
            to_ptr = of_saved_ptr + place * CHANNELS
            _keep(
                projected_ptr + token * stride_t, to_ptr, head, is_saved & (token >= start), KEY_HEADS, GROUP, KEY_DIM,
                VALUE_DIM, BLOCK_K, BLOCK_V,
            )  # fmt: skip
            _keep(  # of an earlier step
                of_row_ptr + place * CHANNELS, to_ptr, head, is_saved & (token < start), KEY_HEADS, GROUP, KEY_DIM,
                VALUE_DIM, BLOCK_K, BLOCK_V,
            )  # fmt: skip
        tl.debug_barrier()  # before the inputs of earlier steps are overwritten
    for back in tl.static_range(WIDTH - 1):
        token = end - 1 - back
        is_kept = (token >= start) & (row > 0) & is_first
        place = tl.load(positions_ptr + token, mask=is_kept, other=0) % (WIDTH - 1)
        _keep(
            projected_ptr + token * stride_t, of_row_ptr + place * CHANNELS, head, is_kept, KEY_HEADS, GROUP, KEY_DIM,
            VALUE_DIM, BLOCK_K, BLOCK_V,
        )  # fmt: skip


@bound
@triton.jit
def _delta_net_outputs_kernel(
    x_ptr,
    gates_ptr,
    norm_ptr,
    out_ptr,
    stride_t,
    eps,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK_V)
    mask = j < VALUE_DIM
    value = tl.program_id(1) * VALUE_DIM + j
    x = tl.load(x_ptr + token * HEADS * VALUE_DIM + value, mask=mask, other=0.0)
    gate = tl.load(gates_ptr + token * stride_t + value, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(norm_ptr + j, mask=mask, other=0.0)
    normed = x / tl.sqrt(tl.sum(x * x, 0) / VALUE_DIM + eps) * weight
    out = normed * (gate * tl.sigmoid(gate))
    tl.store(out_ptr + token * HEADS * VALUE_DIM + value, out.to(out_ptr.dtype.element_ty), mask=mask)


def delta_net(
    projected: torch.Tensor,
    weights: Recurrence,
    eps: float,
    num_key_heads: int,
    recent: torch.Tensor,
    states: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor,
    extend_start_loc: torch.Tensor | None,
    saved: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Compute the new tokens of a step, and change the states of their rows: [T, n] -> [T, heads * value_dim].

    Everything between inputs and outputs is in float32. A token has the same bits in any batch and chunk.

    Args:
        projected: [T, n], last dimension contiguous: queries, keys, values, gates, strengths and decays
        weights: of the layer
        eps: of the norm of outputs
        num_key_heads: each has heads / num_key_heads neighbouring value heads
        recent: [num_rows, width - 1, channels] of projected's type, contiguous (`LayerStates.recent`)
        states: float32 [num_rows, heads, key_dim, value_dim], contiguous (`LayerStates.matrices`)
        positions: int64 [T], contiguous, consecutive for each request
        rows: int64 [B], contiguous, row of each request, distinct except row 0 of padding
        extend_start_loc: int64 [B + 1], contiguous, the first token of each request; None: each has one token
        saved: int64 [B] each, contiguous: the length of each request when its state is saved, after a token of the
            step, or 0, and the row that it is saved in; None: nothing is saved
    """
    num_rows, heads, key_dim, value_dim = states.shape
    num_tokens, batch, (width, channels) = len(projected), len(rows), weights.convolution.shape
    key_size, value_size = num_key_heads * key_dim, heads * value_dim
    assert heads % num_key_heads == 0 and channels == 2 * key_size + value_size and width >= 2
    assert projected.shape[1] == channels + value_size + 2 * heads and has_dense_rows(projected)
    assert all(weight.dtype == torch.float32 and weight.is_contiguous() for weight in weights)
    assert weights.decay_rate.shape == weights.decay_bias.shape == (heads,) and weights.norm.shape == (value_dim,)
    assert recent.shape == (num_rows, width - 1, channels) and recent.dtype == projected.dtype
    assert states.dtype == torch.float32 and states.is_contiguous() and recent.is_contiguous()
    for each in (positions, rows, *([] if extend_start_loc is None else [extend_start_loc]), *(saved or ())):
        assert each.dtype == torch.int64 and each.is_contiguous()
    assert num_tokens == batch if extend_start_loc is None else len(extend_start_loc) == batch + 1
    out = torch.empty((num_tokens, value_size), dtype=projected.dtype, device=projected.device)
    if not num_tokens:
        return out

    def floats(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=projected.device)

    q, k, v, x = (floats(num_tokens, size) for size in (key_size, key_size, value_size, value_size))
    scalars = floats(num_tokens, heads, 2)
    starts = rows if extend_start_loc is None else extend_start_loc
    block_k, block_v = next_power_of_2(key_dim), next_power_of_2(value_dim)
    sizes = {
        "KEY_HEADS": num_key_heads,
        "GROUP": heads // num_key_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "WIDTH": width,
        "HAS_STARTS": extend_start_loc is not None,
        "BLOCK_K": block_k,
        "BLOCK_V": block_v,
    }
    _delta_net_inputs_kernel[(num_tokens, num_key_heads)](
        projected, weights.convolution, weights.decay_rate, weights.decay_bias, recent, positions, rows, starts, q, k,
        v, scalars, projected.stride(0), key_dim**-0.5, _L2_EPS, batch, **sizes, num_warps=1,
    )  # fmt: skip
    _delta_net_recurrence_kernel[(batch, heads, cdiv(value_dim, _COLUMNS))](
        projected, q, k, v, scalars, recent, states, positions, rows, starts, *(saved or (rows, rows)), x,
        projected.stride(0), **sizes, HAS_SAVED=saved is not None, COLUMNS=_COLUMNS, num_warps=4,
    )  # fmt: skip
    _delta_net_outputs_kernel[(num_tokens, heads)](
        x, projected[:, channels:], weights.norm, out, projected.stride(0), eps, HEADS=heads, VALUE_DIM=value_dim,
        BLOCK_V=block_v, num_warps=1,
    )  # fmt: skip
    return out
