"""The launches of all kernels but attention and fp8 products, in the shapes of serving, and checks of their code."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import torch
from serving_shapes import BATCH, CONTEXT, SLOTS, TOKENS, meta
from triton_aot import Launch, Resources, recorded

from tercet.model_executor.kernels import rotary as rotary_module
from tercet.model_executor.kernels import skinny_linear as skinny_module
from tercet.model_executor.kernels.activation import act_and_mul
from tercet.model_executor.kernels.argmax import argmax
from tercet.model_executor.kernels.decode_start import decode_start
from tercet.model_executor.kernels.delta_net import Recurrence, delta_net
from tercet.model_executor.kernels.logit_edits import EditTables
from tercet.model_executor.kernels.rmsnorm import add_rmsnorm, qk_rmsnorm, rmsnorm
from tercet.model_executor.kernels.rotary import rotary
from tercet.model_executor.kernels.sampling import choose_tokens
from tercet.model_executor.kernels.sampling_layout import Column, Field
from tercet.model_executor.kernels.scaled_rows import ScaledRows
from tercet.model_executor.kernels.short_convolution import short_convolution
from tercet.model_executor.kernels.skinny_linear import Norm, skinny_linear, skinny_linear_sum
from tercet.model_executor.kernels.store_kv import store_kv
from tercet.model_executor.kernels.token_logprobs import token_logprobs
from tercet.model_executor.kernels.work_map import query_split_map, query_tile_map, split_map

I32 = torch.int32
BF16, F16, F32, F64, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn


def store(heads: int, head_dim: int, dtype: torch.dtype, pool_dtype: torch.dtype) -> None:
    qkv = meta(TOKENS, 6 * heads, head_dim, dtype=dtype)
    pool = meta(SLOTS, heads, head_dim, dtype=pool_dtype)
    store_kv(qkv[:, 4 * heads : 5 * heads], qkv[:, 5 * heads :], pool, pool, meta(TOKENS))


def rotate(
    heads: int,
    kv_heads: int,
    head_dim: int,
    pool_dtype: torch.dtype | None = None,
    *,
    dtype: torch.dtype = BF16,
    norm: bool = False,
    norm_dtype: torch.dtype | None = None,
    norm_after: bool = False,
    scaled: bool = False,
) -> None:
    """`norm_dtype`: type of the norms' weights; None: `dtype`."""
    qkv = meta(TOKENS, heads + 2 * kv_heads, head_dim, dtype=dtype)
    angles = meta(TOKENS, 2, head_dim // 2, dtype=F32)[:, 0]
    weight = meta(head_dim, dtype=norm_dtype or dtype) if norm else None
    pool = None if pool_dtype is None else meta(SLOTS, kv_heads, head_dim, dtype=pool_dtype)
    slots = None if pool is None else meta(TOKENS)
    rotary(
        qkv, heads, kv_heads, angles, angles, meta(TOKENS, dtype=F32) if scaled else None, q_weight=weight,
        k_weight=weight, eps=1e-6, norm_after=norm_after, k_buffer=pool, v_buffer=pool, slots=slots,
    )  # fmt: skip


def sample(vocab: int) -> None:
    edits = EditTables(
        meta(4, vocab, dtype=I32), meta(4, vocab, dtype=F32), meta(9), meta(4, -(-vocab // 32), dtype=I32)
    )
    choose_tokens(
        meta(BATCH, vocab, dtype=F32), meta(BATCH, len(Column), dtype=F64), meta(BATCH, len(Field)), edits,
        num_edited=BATCH, any_sampled=True, any_ranked=True,
    )  # fmt: skip


def skinny(
    num_in: int,
    num_out: int,
    dtype: torch.dtype = BF16,
    *,
    bias: bool = False,
    gated: bool = False,
    dependent: bool = False,
) -> None:
    """The linear layers of a small step: after a norm, or before a sum. The output head has both kinds of input."""
    x, weight = meta(4, num_in, dtype=dtype), meta(2 * num_out if gated else num_out, num_in, dtype=dtype)
    linear = partial(skinny_linear, x, weight, dependent=dependent)
    norm, bias_or_none = Norm(meta(num_in, dtype=dtype), 1e-5), meta(len(weight), dtype=dtype) if bias else None
    scaled = ScaledRows(x, meta(-(-num_in // 16), 8, dtype=F32))
    linear(bias_or_none, norm=norm, gated=gated)
    skinny_linear(scaled, weight, bias_or_none, norm=norm, gated=gated, dependent=dependent)
    if not gated:
        skinny_linear_sum(
            x, weight, None, meta(4, num_out, dtype=dtype), meta(num_out, dtype=dtype), dependent=dependent
        )
        linear(out=meta(4, num_out, dtype=F32))
        skinny_linear(scaled, weight, norm=norm, out=meta(4, num_out, dtype=F32), dependent=dependent)


def start(hidden: int, head_dim: int, dtype: torch.dtype = BF16) -> None:
    inputs = meta(3, BATCH)
    decode_start(
        *inputs, meta(BATCH + 1), meta(BATCH + 1, CONTEXT, dtype=I32), meta(32_000, hidden, dtype=dtype),
        meta(CONTEXT, 2, head_dim // 2, dtype=F32),
    )  # fmt: skip


def norm(width: int, dtype: torch.dtype, fused: bool, weight_dtype: torch.dtype | None = None) -> None:
    x = meta(TOKENS, width, dtype=dtype)
    rmsnorm(x, meta(width, dtype=weight_dtype or dtype), 1e-5, meta(TOKENS, width, dtype=dtype) if fused else None)


def added_norm(width: int, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    add_rmsnorm(
        meta(TOKENS, width, dtype=dtype), meta(width, dtype=weight_dtype), 1e-5, meta(TOKENS, width, dtype=dtype)
    )


def row_norms(q_size: int, k_size: int, dtype: torch.dtype) -> None:
    weights = meta(q_size, dtype=dtype), meta(k_size, dtype=dtype)
    qk_rmsnorm(meta(TOKENS, q_size + 2 * k_size, dtype=dtype), *weights, 1e-5)


def convolve(
    channels: int, dtype: torch.dtype = BF16, *, width: int = 3, bias: bool = False, decode: bool = False
) -> None:
    num_tokens = BATCH if decode else TOKENS
    stored = meta(SLOTS, 10, channels, dtype=dtype)[:, 3]
    short_convolution(
        meta(num_tokens, 3 * channels, dtype=dtype), meta(width, channels, dtype=F32),
        meta(channels, dtype=F32) if bias else None, stored, meta(num_tokens), meta(num_tokens),
        meta(BATCH + 1, CONTEXT, dtype=I32), meta(BATCH), None if decode else meta(BATCH + 1),
    )  # fmt: skip


def recur(heads: int, dim: int = 128, dtype: torch.dtype = BF16, *, decode: bool = False, saved: bool = False) -> None:
    num_tokens, key_heads = BATCH if decode else TOKENS, 16
    channels = (2 * key_heads + heads) * dim
    weights = Recurrence(meta(4, channels, dtype=F32), *(meta(n, dtype=F32) for n in (heads, heads, dim)))
    delta_net(
        meta(num_tokens, channels + heads * dim + 2 * heads, dtype=dtype), weights, 1e-6, key_heads,
        meta(BATCH + 1, 3, channels, dtype=dtype), meta(BATCH + 1, heads, dim, dim, dtype=F32), meta(num_tokens),
        meta(BATCH), None if decode else meta(BATCH + 1), (meta(BATCH), meta(BATCH)) if saved else None,
    )  # fmt: skip


CALLS: dict[str, Callable[[], object]] = {
    "split_map": lambda: split_map(meta(BATCH), meta(BATCH), 256, CONTEXT),
    "split_map-mixed": lambda: split_map(meta(512), meta(512), 256, CONTEXT, meta(513)),
    "query_split_map": lambda: query_split_map(meta(BATCH + 1), meta(BATCH), 4, 128, 2048, TOKENS),
    "query_tile_map": lambda: query_tile_map(meta(BATCH + 1), 4, 128, TOKENS),
    "store-8x128": lambda: store(8, 128, BF16, BF16),
    "store-3x64-fp16": lambda: store(3, 64, F16, F16),
    "store-8x128-fp8": lambda: store(8, 128, BF16, FP8),
    "rotary-32x8x128-store": lambda: rotate(32, 8, 128, BF16),
    "rotary-32x8x128-fp8": lambda: rotate(32, 8, 128, FP8),
    "rotary-16x8x128-norm": lambda: rotate(16, 8, 128, norm=True),
    "rotary-16x8x128-norm-store": lambda: rotate(16, 8, 128, BF16, norm=True),
    "rotary-16x8x128-norm-fp8": lambda: rotate(16, 8, 128, FP8, norm=True),
    "rotary-32x8x128-norm-after-store": lambda: rotate(32, 8, 128, BF16, norm=True, norm_after=True),
    "rotary-32x8x128-scaled-store": lambda: rotate(32, 8, 128, BF16, scaled=True),
    "rotary-9x3x64-fp16-store": lambda: rotate(9, 3, 64, F16, dtype=F16),
    "rotary-9x3x64-fp32-store": lambda: rotate(9, 3, 64, F32, dtype=F32),
    "rotary-16x8x256-fp32-norm-store": lambda: rotate(16, 8, 256, F32, dtype=F32, norm=True),
    "rotary-8x4x256-norm-fp32": lambda: rotate(8, 4, 256, BF16, norm=True, norm_dtype=F32),
    "rotary-32x32x80": lambda: rotate(32, 32, 80),
    "rmsnorm-576": lambda: norm(576, BF16, False),
    "rmsnorm-4096-fused": lambda: norm(4096, BF16, True),
    "rmsnorm-16384-fused": lambda: norm(16384, F16, True),
    "rmsnorm-2560-fused-fp32": lambda: norm(2560, BF16, True, F32),
    "add_rmsnorm-4096": lambda: added_norm(4096, BF16, BF16),
    "add_rmsnorm-2560-fp32": lambda: added_norm(2560, BF16, F32),
    "qk_rmsnorm-5120-1024": lambda: row_norms(5120, 1024, BF16),
    "silu-14336": lambda: act_and_mul(meta(TOKENS, 2 * 14336, dtype=BF16)),
    "gelu-10240": lambda: act_and_mul(meta(TOKENS, 2 * 10240, dtype=BF16), "gelu_tanh"),
    "convolution-2048": lambda: convolve(2048),
    "convolution-2048-decode": lambda: convolve(2048, decode=True),
    "convolution-1536-fp32-bias": lambda: convolve(1536, F32, width=5, bias=True),
    "delta_net-32x128": lambda: recur(32),
    "delta_net-32x128-saved": lambda: recur(32, saved=True),
    "delta_net-16x128-decode": lambda: recur(16, decode=True),
    "delta_net-48x256-fp32": lambda: recur(48, 256, F32),
    "decode_start-4096x128": lambda: start(4096, 128),
    "decode_start-576x64-fp32": lambda: start(576, 64, F32),
    "decode_start-16384x256": lambda: start(16384, 256),
    "argmax-151936": lambda: argmax(meta(BATCH, 151936, dtype=BF16)),
    "argmax-49152-fp32": lambda: argmax(meta(BATCH, 49152, dtype=F32)),
    "token_logprobs-151936": lambda: token_logprobs(meta(BATCH, 151936, dtype=F32), meta(BATCH), meta(BATCH, 21)),
    "skinny-2048x3072-bias": lambda: skinny(2048, 3072, bias=True),
    "skinny-2048x8192-gated": lambda: skinny(2048, 8192, gated=True),
    "skinny-576x960-fp32": lambda: skinny(576, 960, F32),
    "skinny-576x1536-fp32-gated": lambda: skinny(576, 1536, F32, gated=True),
    "sample-128256": lambda: sample(128256),
    "sample-49153": lambda: sample(49153),
}


def launches_of(call: str, arch: str = "sm_90") -> list[Launch]:
    """The launches of one of CALLS."""
    of_target = {"arch_of": lambda device: arch}
    with patch.multiple(rotary_module, **of_target), patch.multiple(skinny_module, **of_target), recorded() as launches:
        CALLS[call]()
    return launches


CASES: dict[str, Callable[[], list[Launch]]] = {
    call: partial(launches_of, call)
    for call in (
        "split_map", "store-8x128-fp8", "rotary-16x8x128-norm-store", "rmsnorm-4096-fused", "silu-14336",
        "gelu-10240", "add_rmsnorm-4096", "qk_rmsnorm-5120-1024", "convolution-2048", "delta_net-32x128-saved",
        "decode_start-4096x128", "argmax-151936", "token_logprobs-151936", "skinny-2048x8192-gated", "sample-128256",
    )
}  # fmt: skip
"""What each Triton compiles for sm_90: calls that launch every kernel of CALLS. All calls would take too long."""


_READ_MUCH = {
    "_store_kv_kernel", "_rotary_kernel", "_rmsnorm_kernel", "_add_rmsnorm_kernel", "_qk_rmsnorm_kernel",
    "_act_and_mul_kernel", "_argmax_chunk_kernel", "_chunk_kernel", "_edit_kernel", "_weigh_kernel",
    "_short_convolution_kernel", "_delta_net_inputs_kernel", "_delta_net_outputs_kernel",
}  # fmt: skip
"""Kernels that take as long as their reading of activations or logits."""


def assert_computes_as_meant(resources: Resources) -> None:
    """Checks the widths of loads, the order of copies and products, and the rounding of products, where they matter."""
    assembly, counts = resources.assembly, resources.counts
    if resources.kernel in _READ_MUCH:
        assert counts is not None and counts.wide_loads > 0, "a thread loads less than 128 bits"
    if resources.kernel == "_skinny_linear_kernel":
        # Copies of 16 bytes are in flight before the first product, and the norm's scale is known only after the last.
        assert assembly.count("cp.async.cg.shared.global") > 16
        first_product = assembly.index("mma.sync")
        assert assembly.index("cp.async.cg") < first_product
        assert "rsqrt" not in assembly or first_product < assembly.index("rsqrt")
    if resources.kernel == "_decode_start_kernel":
        assert "ld.global.v4" in assembly and "st.global.v4" in assembly, "a thread copies less than 16 bytes"
        assert resources.registers <= 32 and not resources.spilled
    if resources.kernel == "_edit_kernel":
        assert "fma.rn.f32" not in assembly, "torch rounds each product before it is added"
