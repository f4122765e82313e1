"""The store of new tokens' K and V into the KV pool."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .bound import bound
from .fp8_layout import FP8_MAX
from .primitives import as_kernel_operand, encode_e4m3
from .tuning import next_power_of_2, row_warps


@bound
@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])  # a view with any alignment
def _store_kv_kernel(
    k_ptr,
    v_ptr,
    k_pool_ptr,
    v_pool_ptr,
    slots_ptr,
    stride_kt,
    stride_vt,
    stride_slot,
    inv_k_scale,
    inv_v_scale,
    WIDTH: tl.constexpr,
    HAS_V: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    mask = i < WIDTH
    target = tl.load(slots_ptr + token).to(tl.int64) * stride_slot + i
    k = tl.load(k_ptr + token * stride_kt + i, mask=mask)
    if HAS_V:
        v = tl.load(v_ptr + token * stride_vt + i, mask=mask)
    if FP8:
        k = encode_e4m3(k.to(tl.float32) * inv_k_scale)
        if HAS_V:
            v = encode_e4m3(v.to(tl.float32) * inv_v_scale)
    tl.store(k_pool_ptr + target, k, mask=mask)
    if HAS_V:
        tl.store(v_pool_ptr + target, v, mask=mask)


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor | None,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor | None,
    slots: torch.Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Store k and v at `slots` of k_buffer and v_buffer. Without v and v_buffer, store only k.

    k, v: [T, num_kv_heads, head_dim], each token's heads contiguous, any stride between tokens. k_buffer, v_buffer:
    [slots, num_kv_heads, head_dim], contiguous, of k's dtype or float8_e4m3fn; the latter stores values divided by the
    scale and saturated at 448. slots: int [T], distinct, except the dummy slot 0, which keeps any one of its writes.
    """
    num_tokens, num_kv_heads, head_dim = k.shape
    width = num_kv_heads * head_dim
    has_v = v is not None
    if v is None or v_buffer is None:
        assert v is v_buffer, "both or none"
        v, v_buffer = k, k_buffer
    assert v.shape == k.shape and slots.shape == (num_tokens,) and slots.is_contiguous()
    for new in (k, v):
        assert new.stride(2) == 1 and (new.stride(1) == head_dim or num_kv_heads == 1)
    assert k_buffer.is_contiguous() and v_buffer.is_contiguous() and k_buffer.shape == v_buffer.shape
    assert k_buffer.shape[1:] == k.shape[1:]
    fp8 = k_buffer.dtype == torch.float8_e4m3fn
    assert k_buffer.dtype == v_buffer.dtype and (fp8 or k_buffer.dtype == k.dtype == v.dtype)
    block = next_power_of_2(width)
    _store_kv_kernel[(num_tokens,)](
        k,
        v,
        as_kernel_operand(k_buffer),
        as_kernel_operand(v_buffer),
        slots,
        k.stride(0),
        v.stride(0),
        k_buffer.stride(0),
        1.0 / k_scale,
        1.0 / v_scale,
        WIDTH=width,
        HAS_V=has_v,
        FP8=fp8,
        BLOCK=block,
        num_warps=row_warps(block),
    )


def store_kv_ref(
    k: torch.Tensor,
    v: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    slots: torch.Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """`store_kv` in plain torch."""
    for new, pool, scale in ((k, k_buffer, k_scale), (v, v_buffer, v_scale)):
        if pool.dtype == torch.float8_e4m3fn:
            new = (new.float() * (1.0 / scale)).clamp(-FP8_MAX, FP8_MAX)
        pool[slots.long()] = new.to(pool.dtype)
