"""Functions that several kernels share: dot products, soft caps, attention sinks, and the fp8 encoding of KV.

fp8 KV (`--kv-cache-dtype fp8_e4m3`) is stored as OCP e4m3fn bytes on every architecture, because the native fp8 of
gfx942 is another encoding and sm_80 has none. Kernels read the bytes as `uint8`. They decode with the hardware's
conversion if there is one, else with shifts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .bound import Bound

LOG2_E = 1.4426950408889634
_LOG2_E = tl.constexpr(LOG2_E)

KV_PLAIN = tl.constexpr(0)
"""KV has the dtype of the activations."""
KV_FP8_NATIVE = tl.constexpr(1)
"""e4m3fn bytes, decoded by the hardware (sm_89 and later)."""
KV_FP8_SOFT = tl.constexpr(2)
"""e4m3fn bytes, decoded with shifts."""


def is_interpreted(kernel: object) -> bool:
    """Whether `kernel` was decorated under TRITON_INTERPRET=1, and so runs in Triton's interpreter, on numpy."""
    return not isinstance(kernel, Bound)


def kv_format(dtype: torch.dtype, arch: str) -> int:
    """The KV_* constant for a pool of `dtype` on `arch` (a name from `tuning.arch_of`)."""
    if dtype != torch.float8_e4m3fn:
        return KV_PLAIN.value
    is_native = arch.startswith("sm_") and int(arch[3:]) >= 89
    return KV_FP8_NATIVE.value if is_native else KV_FP8_SOFT.value


def reads_kv_in_pairs(dtype: torch.dtype, head_dim: int, arch: str) -> bool:
    """Whether decode attention reads a pool of `dtype` in pairs of bytes.

    V has to be transposed, and NVIDIA's LDSM transposes elements of 16 bits; bytes are read one by one. On gfx942,
    pairs take the registers of the fourth program. Pairs of an odd head dim would cross heads.
    """
    return dtype == torch.float8_e4m3fn and head_dim % 2 == 0 and not arch.startswith("gfx")


def as_kernel_operand(pool: torch.Tensor) -> torch.Tensor:
    """The tensor that is passed to a kernel for `pool`: fp8 is passed as bytes."""
    return pool.view(torch.uint8) if pool.dtype == torch.float8_e4m3fn else pool


def has_dense_rows(x: torch.Tensor) -> bool:
    """Whether the last dimension is contiguous. In torch its stride is arbitrary if it has length 1 or x is empty."""
    return x.stride(-1) == 1 or x.shape[-1] == 1 or not x.numel()


def score_scales(sm_scale: float, soft_cap: float | None) -> tuple[float, float]:
    """(scale, cap_scale) of scores in base 2: q @ k * scale, or with a cap tanh(q @ k * cap_scale) * scale."""
    assert sm_scale > 0, "the largest product has to be the largest score"
    if soft_cap is None:
        return sm_scale * LOG2_E, 0.0
    assert soft_cap > 0
    return soft_cap * LOG2_E, sm_scale / soft_cap


@triton.jit
def sink_weight(sink, top):
    """The weight of sinks, where a scaled score of `top` has a weight of 1. top: -inf without KV.

    It joins the sum of weights. If it overflows, the sum is infinite, and the output is zero.
    """
    # An explicit fma: several kernels need the same bits.
    return tl.exp2(tl.fma(sink, _LOG2_E, -tl.where(top == float("-inf"), 0.0, top)))


@triton.jit
def as_operand_of(q, KV_FORMAT: tl.constexpr):
    """q in the type of its product with decoded KV."""
    if KV_FORMAT != 0 and q.dtype != tl.float32:
        # fp16 holds e4m3 exactly, and rounds probabilities less than bf16.
        q = q.to(tl.float16)
    return q


@triton.jit
def dot(a, b, acc, WIDEN: tl.constexpr):
    """acc + a @ b in fp32. WIDEN: convert bf16 operands to fp32 (exactly), for the interpreter: numpy has no bf16."""
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    # "ieee" matters for fp32 models: the default, tf32, keeps only 10 bits of the mantissa.
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def tanh(x):
    """tanh(x), with an absolute error of a few bits of 1. It keeps only one number: extend attention lacks registers.

    Where exp overflows, the result is 1.
    """
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def decode_kv(x, KV_FORMAT: tl.constexpr, compute_dtype: tl.constexpr):
    """Convert loaded KV to compute_dtype, without the pool's scale, which the caller applies to a later product."""
    if KV_FORMAT == 1:
        x = x.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(compute_dtype)
    elif KV_FORMAT == 2:
        bits = x.to(tl.uint16)
        # With e4m3's exponent and mantissa in their fields, fp16 is the value / 256 (biases 15 and 7), subnormals too.
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        half = tl.where((bits & 0x7F) == 0x7F, float("nan"), half)
        x = (half * 256.0).to(compute_dtype)
    return x


@triton.jit
def decode_kv_pairs(pairs, KV_FORMAT: tl.constexpr, compute_dtype: tl.constexpr):
    """`decode_kv` of the low and of the high bytes of uint16."""
    if KV_FORMAT == 1:
        # Of two elements, sort the bytes and convert them in twos. Triton would shift and mask each byte.
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 sorted;
            .reg .b16 low, high;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {low, high}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }""",
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
        low, high = low.to(compute_dtype), high.to(compute_dtype)
    else:
        low = decode_kv((pairs & 0xFF).to(tl.uint8), KV_FORMAT, compute_dtype)
        high = decode_kv((pairs >> 8).to(tl.uint8), KV_FORMAT, compute_dtype)
    return low, high


@triton.jit
def encode_e4m3(x):
    """Convert fp32 to an e4m3fn byte: round to nearest even, saturate at 448. NaN stays NaN."""
    magnitude = tl.minimum(tl.abs(x), 448.0)
    bits = magnitude.to(tl.int32, bitcast=True)
    # Normal numbers: round the 23-bit mantissa to 3 bits. A carry goes into the exponent. 120 = 127 - 7 (biases).
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the step is 2^-9, which is one ulp of 2^14: adding 2^14 rounds, and the low bits are the mantissa.
    shifted = (magnitude + 16384.0).to(tl.int32, bitcast=True)
    small = shifted - 0x46800000
    code = tl.where(magnitude < 0.015625, small, normal)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    code = tl.where(x != x, 0x7F, code)
    return (code | sign).to(tl.uint8)
