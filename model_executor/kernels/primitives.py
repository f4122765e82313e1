"""Pieces that several kernels share: how a dot product, a soft cap and an fp8 byte are spelled in Triton.

fp8 KV is stored as OCP e4m3fn bytes on every architecture (gfx942's native fp8 is another encoding, sm_80 has none):
kernels see `uint8` and decode it themselves, with the hardware's conversion where there is one, with shifts elsewhere.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
FP8_E4M3_MAX = 448.0

KV_PLAIN = tl.constexpr(0)
"""KV has the dtype of the activations."""
KV_FP8_NATIVE = tl.constexpr(1)
"""e4m3fn bytes, decoded by the hardware (sm_89 and later)."""
KV_FP8_SOFT = tl.constexpr(2)
"""e4m3fn bytes, decoded with shifts."""


def is_interpreted(kernel: object) -> bool:
    """Whether `kernel` was decorated under TRITON_INTERPRET=1 and runs on numpy instead of a device."""
    return not isinstance(kernel, triton.JITFunction)


def kv_format(dtype: torch.dtype, arch: str) -> int:
    """The KV_* constant for a pool of `dtype` on `arch` (see tuning.arch_of)."""
    if dtype != torch.float8_e4m3fn:
        return KV_PLAIN.value
    return KV_FP8_NATIVE.value if arch in ("sm_89", "sm_90", "sm_100", "sm_120") else KV_FP8_SOFT.value


def as_kernel_operand(pool: torch.Tensor) -> torch.Tensor:
    """The tensor a kernel takes for `pool`: fp8 travels as bytes."""
    return pool.view(torch.uint8) if pool.dtype == torch.float8_e4m3fn else pool


def has_dense_rows(x: torch.Tensor) -> bool:
    """Whether the last dimension is contiguous (torch gives one of length 1, or of an empty tensor, any stride)."""
    return x.stride(-1) == 1 or x.shape[-1] == 1 or not x.numel()


def score_scales(sm_scale: float, soft_cap: float | None) -> tuple[float, float]:
    """(scale, cap_scale): the score in base 2 is q @ k * scale, and with a cap tanh(q @ k * cap_scale) * scale."""
    assert sm_scale > 0, "the largest product has to be the largest score"
    if soft_cap is None:
        return sm_scale * LOG2_E, 0.0
    assert soft_cap > 0
    return soft_cap * LOG2_E, sm_scale / soft_cap


@triton.jit
def dot(a, b, acc, WIDEN: tl.constexpr):
    """acc + a @ b in fp32. WIDEN: bf16 operands go through fp32, exactly, as the interpreter's numpy has no bf16."""
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    # "ieee" is for fp32 models: the default, tf32, keeps 10 bits of mantissa.
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def tanh(x):
    """tanh(x), written so that it cannot overflow."""
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def decode_kv(x, KV_FORMAT: tl.constexpr, compute_dtype: tl.constexpr):
    """KV as loaded -> compute_dtype, without the pool's scale (the caller folds that into a later product)."""
    if KV_FORMAT == 1:
        x = x.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(compute_dtype)
    elif KV_FORMAT == 2:
        bits = x.to(tl.uint16)
        # fp16 with e4m3's exponent and mantissa in place is the value / 256 (biases 15 and 7), subnormals included.
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        half = tl.where((bits & 0x7F) == 0x7F, float("nan"), half)
        x = (half * 256.0).to(compute_dtype)
    return x


@triton.jit
def encode_e4m3(x):
    """fp32 -> e4m3fn byte, round to nearest even, saturating at 448; NaN stays NaN."""
    magnitude = tl.minimum(tl.abs(x), 448.0)
    bits = magnitude.to(tl.int32, bitcast=True)
    # Normal numbers: round the 23-bit mantissa to 3 bits; a carry moves into the exponent by itself. 120 = 127 - 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the grid is 2^-9, which is one ulp of 2^14: the addition rounds, the low bits are the mantissa.
    shifted = (magnitude + 16384.0).to(tl.int32, bitcast=True)
    small = shifted - 0x46800000
    code = tl.where(magnitude < 0.015625, small, normal)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    code = tl.where(x != x, 0x7F, code)
    return (code | sign).to(tl.uint8)
