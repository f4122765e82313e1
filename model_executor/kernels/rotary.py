"""Rotary position embedding (arXiv 2104.09864), fused with the norm of queries and keys and the store of K and V.

One kernel reads the fused projection of a layer. It normalises and rotates the queries in place, normalises and rotates
the keys and stores them in the pool, and stores the values. So K and V are read once and written once.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from .bound import bound
from .primitives import as_kernel_operand, encode_e4m3
from .store_kv import store_kv_ref
from .tuning import INTERPRETER, MAX_HEAD_DIM, arch_of, cdiv, decode_tile, next_power_of_2

_HEADS_PER_PROGRAM = 8


@triton.jit
def head_scale(x, y, eps, HEAD_DIM: tl.constexpr):
    """The factor of RMSNorm for each head, whose components are x and y: [heads, 1]."""
    return tl.rsqrt((tl.sum(x * x, axis=1) + tl.sum(y * y, axis=1)) / HEAD_DIM + eps)[:, None]


@triton.jit
def turn(own, other, cos, sin):
    """own * cos + other * sin, with one rounding of the sum, whatever a compiler would fuse."""
    return tl.fma(own, cos, other * sin)


@triton.jit
def load_heads(token_ptr, head, live, stride_h, HEAD_DIM: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """Load heads of a token: x, y, mask.

    x, y: float32 [heads, BLOCK_HALF], the lower and the upper half of each head. Component i of x rotates with
    component i of y. token_ptr: the token's row.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    i = tl.arange(0, BLOCK_HALF)
    mask = live[:, None] & (i < HALF)[None, :]
    source = token_ptr + head[:, None] * stride_h
    x = tl.load(source + i[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(source + (i + HALF)[None, :], mask=mask, other=0.0).to(tl.float32)
    return x, y, mask


@triton.jit
def norm_heads(
    x, y, q_weight_ptr, k_weight_ptr, head, eps, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr
):  # fmt: skip
    """Normalise heads of `load_heads`. Returns x and y."""
    HALF: tl.constexpr = HEAD_DIM // 2
    i = tl.arange(0, x.shape[1])
    inside = i < HALF
    is_q = head < NUM_HEADS
    scale = head_scale(x, y, eps, HEAD_DIM)
    q_lower = tl.load(q_weight_ptr + i, mask=inside, other=0.0).to(tl.float32)
    q_upper = tl.load(q_weight_ptr + i + HALF, mask=inside, other=0.0).to(tl.float32)
    k_lower = tl.load(k_weight_ptr + i, mask=inside, other=0.0).to(tl.float32)
    k_upper = tl.load(k_weight_ptr + i + HALF, mask=inside, other=0.0).to(tl.float32)
    x = x * scale * tl.where(is_q[:, None], q_lower[None, :], k_lower[None, :])
    y = y * scale * tl.where(is_q[:, None], q_upper[None, :], k_upper[None, :])
    return x, y


@triton.jit
def turn_heads(
    x, y, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, head, eps, NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate those heads of `load_heads` that are queries or keys. Returns x and y.

    cos_ptr, sin_ptr: the token's rows.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    i = tl.arange(0, x.shape[1])
    inside = i < HALF
    is_v = head >= NUM_HEADS + NUM_KV_HEADS
    plain_x = x
    plain_y = y
    if HAS_NORM:
        x, y = norm_heads(x, y, q_weight_ptr, k_weight_ptr, head, eps, NUM_HEADS, HEAD_DIM)
    cos = tl.load(cos_ptr + i, mask=inside, other=1.0)[None, :]
    sin = tl.load(sin_ptr + i, mask=inside, other=0.0)[None, :]
    turned_x = tl.where(is_v[:, None], plain_x, turn(x, y, cos, -sin))
    turned_y = tl.where(is_v[:, None], plain_y, turn(y, x, cos, sin))
    return turned_x, turned_y


@triton.jit
def store_heads(
    x, y, mask, head, k_slot_ptr, v_slot_ptr, inv_k_scale, inv_v_scale, dtype: tl.constexpr,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Store those heads of `load_heads` that are keys or values, in `dtype` or in fp8.

    k_slot_ptr, v_slot_ptr: the token's slot of each pool.
    """
    is_v = head >= NUM_HEADS + NUM_KV_HEADS
    if FP8:
        inverse = tl.where(is_v, inv_v_scale, inv_k_scale)[:, None]
        # Round to the activations' dtype first, so that this store and `store_kv` write the same bytes.
        x = encode_e4m3(x.to(dtype).to(tl.float32) * inverse)
        y = encode_e4m3(y.to(dtype).to(tl.float32) * inverse)
    else:
        x = x.to(dtype)
        y = y.to(dtype)
    i = tl.arange(0, x.shape[1])[None, :]
    k_x = k_slot_ptr + (head - NUM_HEADS)[:, None] * HEAD_DIM + i
    v_x = v_slot_ptr + (head - NUM_HEADS - NUM_KV_HEADS)[:, None] * HEAD_DIM + i
    # With the upper halves as offsets of their own, Triton 3.7 spills registers.
    k_y, v_y = k_x + HEAD_DIM // 2, v_x + HEAD_DIM // 2
    k_mask = mask & ((head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS))[:, None]
    v_mask = mask & is_v[:, None]
    if FP8:
        # A thread gets 8 components, as without fp8. Triton would choose 16, because they are bytes. Then `head_scale`
        # would add squares in another order.
        k_x, k_y = tl.max_contiguous(k_x, [1, 8]), tl.max_contiguous(k_y, [1, 8])
        v_x, v_y = tl.max_contiguous(v_x, [1, 8]), tl.max_contiguous(v_y, [1, 8])
    tl.store(k_x, x, mask=k_mask)
    tl.store(k_y, y, mask=k_mask)
    tl.store(v_x, x, mask=v_mask)
    tl.store(v_y, y, mask=v_mask)


@triton.jit
def load_queries(
    token_ptr, cos_ptr, sin_ptr, heads, mask_h, stride_h, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Load query heads of a token as one tile, [heads, BLOCK_D], their partners in the rotation, and the angles."""
    HALF: tl.constexpr = HEAD_DIM // 2
    d = tl.arange(0, BLOCK_D)
    is_upper = d >= HALF
    angle = tl.where(is_upper, d - HALF, d)
    partner = tl.where(is_upper, d - HALF, d + HALF)
    inside = d < HEAD_DIM
    mask = mask_h[:, None] & inside[None, :]
    source = token_ptr + heads[:, None] * stride_h
    own = tl.load(source + d[None, :], mask=mask, other=0.0)
    other = tl.load(source + partner[None, :], mask=mask, other=0.0)
    cos = tl.load(cos_ptr + angle, mask=inside, other=1.0)
    sin = tl.load(sin_ptr + angle, mask=inside, other=0.0)
    return own, other, cos, sin


@triton.jit
def turn_queries(
    own, other, cos, sin, token_ptr, weight_ptr, heads, mask_h, stride_h, eps, HEAD_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate the queries of `load_queries`: one tile, [heads, BLOCK_D]. Memory does not change."""
    HALF: tl.constexpr = HEAD_DIM // 2
    d = tl.arange(0, BLOCK_D)
    is_upper = d >= HALF
    partner = tl.where(is_upper, d - HALF, d + HALF)
    inside = d < HEAD_DIM
    dtype: tl.constexpr = own.dtype
    own = own.to(tl.float32)
    other = other.to(tl.float32)
    if HAS_NORM:
        source = token_ptr + heads[:, None] * stride_h
        pair = tl.arange(0, BLOCK_HALF)
        mask_pair = mask_h[:, None] & (pair < HALF)[None, :]
        x = tl.load(source + pair[None, :], mask=mask_pair, other=0.0).to(tl.float32)
        y = tl.load(source + pair[None, :] + HALF, mask=mask_pair, other=0.0).to(tl.float32)
        scale = head_scale(x, y, eps, HEAD_DIM)
        own = own * scale * tl.load(weight_ptr + d, mask=inside, other=0.0).to(tl.float32)[None, :]
        other = other * scale * tl.load(weight_ptr + partner, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin = tl.where(is_upper, sin, -sin)
    return turn(own, other, cos[None, :], sin[None, :]).to(dtype)


@bound
@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])  # a view with any alignment
def _rotary_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    k_pool_ptr,
    v_pool_ptr,
    slots_ptr,
    q_scales_ptr,
    stride_t,
    stride_h,
    stride_angle,
    stride_slot,
    eps,
    inv_k_scale,
    inv_v_scale,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    NORM_AFTER: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    STORE: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    # Without a pool, values need no work.
    live = head < (NUM_HEADS + 2 * NUM_KV_HEADS if STORE else NUM_HEADS + NUM_KV_HEADS)
    token_ptr = qkv_ptr + token * stride_t
    x, y, mask = load_heads(token_ptr, head, live, stride_h, HEAD_DIM, BLOCK_HALF)
    x, y = turn_heads(
        x, y, cos_ptr + token * stride_angle, sin_ptr + token * stride_angle, q_weight_ptr, k_weight_ptr, head, eps,
        NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HAS_NORM,
    )  # fmt: skip
    if NORM_AFTER:
        is_v = (head >= NUM_HEADS + NUM_KV_HEADS)[:, None]
        normed_x, normed_y = norm_heads(x, y, q_weight_ptr, k_weight_ptr, head, eps, NUM_HEADS, HEAD_DIM)
        x = tl.where(is_v, x, normed_x)
        y = tl.where(is_v, y, normed_y)
    if HAS_SCALES:
        factor = tl.where(head < NUM_HEADS, tl.load(q_scales_ptr + token), 1.0)[:, None]
        x *= factor
        y *= factor
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    in_place = mask & (head < NUM_HEADS)[:, None] if STORE else mask
    target = token_ptr + head[:, None] * stride_h + tl.arange(0, BLOCK_HALF)[None, :]
    tl.store(target, x.to(dtype), mask=in_place)
    tl.store(target + HEAD_DIM // 2, y.to(dtype), mask=in_place)
    if STORE:
        slot = tl.load(slots_ptr + token).to(tl.int64) * stride_slot
        store_heads(
            x, y, mask, head, k_pool_ptr + slot, v_pool_ptr + slot, inv_k_scale, inv_v_scale, dtype, NUM_HEADS,
            NUM_KV_HEADS, HEAD_DIM, FP8,
        )  # fmt: skip


@cache
def _warps(arch: str, head_dim: int, fp32: bool) -> int:
    """Half of the warps of `fused_decode`, whose tiles have twice as many heads: both add squares in the same order.

    With a paged tile, `fused_decode` may have more warps. A thread still has as many components of a head
    (test_compile_others.py).
    """
    if arch == INTERPRETER or head_dim > MAX_HEAD_DIM:
        return 2
    return max(1, decode_tile(arch, head_dim, fp32=fp32).num_warps // 2)


def rotary(
    qkv: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_scales: torch.Tensor | None = None,
    *,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    norm_after: bool = False,
    k_buffer: torch.Tensor | None = None,
    v_buffer: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Rotate the query heads of a fused projection in place, and the keys in place or into the pool.

    qkv: [T, num_heads + 2 * num_kv_heads, head_dim], last dimension contiguous; without a pool the value heads may be
    missing. cos, sin: float32 [T, head_dim / 2], last dimension contiguous, equal strides. Component i rotates with
    i + head_dim / 2.
    q_scales: float32 [T], contiguous, what the queries of a token are multiplied by; None: by nothing.
    q_weight, k_weight: [head_dim], both or none. If given, RMSNorm with eps normalises each head first, or last,
    before queries are scaled, with `norm_after`.
    k_buffer, v_buffer, slots: as in `store_kv`; all or none. If given, K and V are stored there, and K in qkv does not
    change.
    """
    num_tokens, num_qkv_heads, head_dim = qkv.shape
    store = slots is not None
    assert qkv.stride(2) == 1 and num_qkv_heads >= num_heads + (2 if store else 1) * num_kv_heads
    assert cos.shape == sin.shape == (num_tokens, head_dim // 2) and cos.stride() == sin.stride() and head_dim % 2 == 0
    assert cos.stride(1) == 1 and cos.dtype == sin.dtype == torch.float32
    assert (q_weight is None) == (k_weight is None) and not (norm_after and q_weight is None)
    assert q_scales is None or (q_scales.shape == (num_tokens,) and q_scales.is_contiguous())
    assert q_scales is None or q_scales.dtype == torch.float32
    assert (k_buffer is None) == (v_buffer is None) == (slots is None)
    fp8 = False
    if store:
        assert k_buffer is not None and v_buffer is not None and slots is not None
        fp8 = k_buffer.dtype == torch.float8_e4m3fn
        assert k_buffer.is_contiguous() and v_buffer.is_contiguous() and k_buffer.shape == v_buffer.shape
        assert k_buffer.shape[1:] == (num_kv_heads, head_dim)
        assert slots.shape == (num_tokens,) and slots.is_contiguous()
        assert k_buffer.dtype == v_buffer.dtype and (fp8 or k_buffer.dtype == qkv.dtype)
    total_heads = num_heads + (2 if store else 1) * num_kv_heads
    if not num_tokens:
        return
    _rotary_kernel[(num_tokens, cdiv(total_heads, _HEADS_PER_PROGRAM))](
        qkv,
        cos,
        sin,
        cos if q_weight is None else q_weight,
        cos if k_weight is None else k_weight,
        qkv if k_buffer is None else as_kernel_operand(k_buffer),
        qkv if v_buffer is None else as_kernel_operand(v_buffer),
        cos if slots is None else slots,
        cos if q_scales is None else q_scales,
        qkv.stride(0),
        qkv.stride(1),
        cos.stride(0),
        0 if k_buffer is None else k_buffer.stride(0),
        eps,
        1.0 / k_scale,
        1.0 / v_scale,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HAS_NORM=q_weight is not None and not norm_after,
        NORM_AFTER=norm_after,
        HAS_SCALES=q_scales is not None,
        STORE=store,
        FP8=fp8,
        BLOCK_H=_HEADS_PER_PROGRAM,
        BLOCK_HALF=next_power_of_2(head_dim // 2),
        num_warps=_warps(arch_of(qkv.device), head_dim, qkv.dtype == torch.float32),
    )


def rotary_ref(
    qkv: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_scales: torch.Tensor | None = None,
    *,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    norm_after: bool = False,
    k_buffer: torch.Tensor | None = None,
    v_buffer: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """`rotary` in plain torch."""
    qk = qkv[:, : num_heads + num_kv_heads].to(torch.promote_types(qkv.dtype, torch.float32), copy=True)

    def normed(qk: torch.Tensor) -> torch.Tensor:
        if q_weight is None or k_weight is None:
            return qk
        weight = torch.cat([q_weight.expand(num_heads, -1), k_weight.expand(num_kv_heads, -1)]).to(qk.dtype)
        return qk * torch.rsqrt(qk.square().mean(-1, keepdim=True) + eps) * weight

    x, y = (qk if norm_after else normed(qk)).chunk(2, -1)
    c, s = cos[:, None].to(qk.dtype), sin[:, None].to(qk.dtype)
    qk = torch.cat((x * c - y * s, y * c + x * s), -1)
    if norm_after:
        qk = normed(qk)
    if q_scales is not None:
        qk[:, :num_heads] *= q_scales[:, None, None]
    qk = qk.to(qkv.dtype)
    qkv[:, :num_heads] = qk[:, :num_heads]
    if slots is None:
        qkv[:, num_heads : num_heads + num_kv_heads] = qk[:, num_heads:]
        return
    assert k_buffer is not None and v_buffer is not None
    v = qkv[:, num_heads + num_kv_heads : num_heads + 2 * num_kv_heads]
    store_kv_ref(qk[:, num_heads:], v, k_buffer, v_buffer, slots, k_scale=k_scale, v_scale=v_scale)
