"""The tiles, warps and pipeline stages of the attention kernels on each architecture.

They are a table because autotuning must not run while serving. The rows of decode attention for sm_90 and head dims up
to 128 were measured on an H200 (docs/log.md). The others were chosen from the compiler's reports for each target: no
register spills, and for decode, shared memory for two programs per multiprocessor. sm_80 has 163 KB of shared memory
per block, sm_89 99 KB, sm_90 227 KB, gfx942 64 KB. A [64, 128] bf16 tile is 16 KB.

A `split` affects the bits of a result, not only its speed, because partial softmaxes are merged at multiples of it. It
is the same for every batch, so a request's bits do not depend on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from functools import cache

import torch

INTERPRETER = "interpreter"
"""The architecture of CPU tensors: only TRITON_INTERPRET=1 runs kernels on them."""


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """The tile of decode attention: a work unit is `split` tokens of one KV head, read `block_n` at a time."""

    split: int
    block_n: int
    num_warps: int
    num_stages: int
    programs: int
    """persistent programs per multiprocessor"""
    paged: bool = False
    """whether the page size is a multiple of `block_n`, so that a KV tile has consecutive slots"""
    max_heads: int = 64
    """most query heads of a program; if more share a KV head, several programs read its KV"""


@dataclass(frozen=True, slots=True)
class ExtendTile:
    """The tile of extend attention: a program has `block_m` (token, query head) pairs, and reads `block_n` KV tokens
    at a time."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    split: int = 2048
    """tokens of KV of a partial softmax. Merging costs about 4 % of the time of a split, and a long prefix is shared
    by as many programs as it has splits"""
    paged: bool = False
    """whether the page size is a multiple of `block_n`, so that a KV tile has consecutive slots"""


LESS_SHARED_MEMORY = ("sm_86", "sm_89", "sm_120", "sm_121")
"""NVIDIA GPUs with at most 99 KB of shared memory in a block. They have the rows of sm_89.
Source: CUDA C++ programming guide, compute capabilities."""

# The kernels pad head dims to 64, 128 or 256. The address of a KV tile depends on another load (its slots), so on
# NVIDIA a tile takes two pipeline stages: 5 stages keep two tiles in flight, 3 keep one.
_DECODE = {
    "sm_80": {
        64: DecodeTile(256, 64, 4, 5, 4),
        128: DecodeTile(256, 64, 4, 5, 2),
        256: DecodeTile(256, 32, 4, 5, 2),
    },
    "sm_90": {
        64: DecodeTile(256, 64, 2, 7, 4),
        128: DecodeTile(256, 64, 2, 5, 3),
        256: DecodeTile(256, 32, 4, 5, 2),
    },
    "gfx942": {
        64: DecodeTile(256, 64, 4, 2, 4),
        128: DecodeTile(256, 32, 4, 2, 4),
        256: DecodeTile(256, 16, 4, 2, 4),
    },
    # Small tiles, so that tests with a few dozen tokens cross every boundary.
    INTERPRETER: {dim: DecodeTile(32, 16, 1, 1, 3) for dim in (64, 128, 256)},
}
_DECODE["sm_89"] = _DECODE["sm_80"]
_EXTEND = {
    "sm_80": {
        64: ExtendTile(128, 64, 8, 5),
        128: ExtendTile(128, 32, 8, 7),
        256: ExtendTile(64, 32, 8, 5),
    },
    "sm_90": {
        64: ExtendTile(128, 128, 8, 5),
        128: ExtendTile(128, 64, 8, 5),
        256: ExtendTile(128, 32, 8, 5),
    },
    "gfx942": {
        64: ExtendTile(128, 64, 8, 1),
        128: ExtendTile(128, 32, 8, 1),
        256: ExtendTile(64, 16, 4, 1),
    },
    INTERPRETER: {dim: ExtendTile(16, 16, 1, 1, 32) for dim in (64, 128, 256)},
}
_EXTEND["sm_89"] = _EXTEND["sm_80"] | {256: ExtendTile(64, 32, 8, 3)}
# With one look-up for a KV tile, a tile takes one pipeline stage. For sm_90, kernels with the same loops were measured.
# Decode attention of heads up to 64, or with fp8 KV, gains little or nothing.
_DECODE_PAGED = {("sm_90", 128): DecodeTile(256, 64, 4, 3, 3, paged=True)} | {
    (INTERPRETER, width): DecodeTile(32, 16, 1, 1, 3, paged=True) for width in (64, 128, 256)
}
_EXTEND_PAGED = {("sm_90", width): ExtendTile(128, 64, 8, 4, paged=True) for width in (64, 128)} | {
    (INTERPRETER, width): ExtendTile(16, 16, 1, 1, 32, paged=True) for width in (64, 128, 256)
}
# Decoding fp8 takes registers. These smaller tiles replace the ones that would spill.
_EXTEND_FP8 = {
    ("sm_80", 128): ExtendTile(64, 64, 8, 5),
    ("sm_89", 128): ExtendTile(64, 64, 8, 5),
    ("sm_80", 256): ExtendTile(32, 32, 4, 3),
    ("sm_89", 256): ExtendTile(32, 32, 4, 3),
    ("sm_90", 256): ExtendTile(32, 32, 4, 3),
}
# The same tiles with more programs: half the bytes are on their way, and fewer registers are taken. Those of head dims
# up to 128 were measured on an H200 (docs/log.md).
_DECODE_FP8 = {
    ("sm_90", 64): DecodeTile(256, 64, 2, 7, 6),
    ("sm_90", 128): DecodeTile(256, 64, 2, 5, 4),
    ("sm_90", 256): DecodeTile(256, 32, 4, 5, 4),
}
# fp32 products do not use matrix units on NVIDIA, so operands and sums are in registers. For tests and small models.
_DECODE_FP32 = {
    (arch, width): tile
    for arch in ("sm_80", "sm_89", "sm_90")
    for width, tile in ((128, DecodeTile(256, 32, 4, 5, 2)), (256, DecodeTile(256, 32, 8, 3, 2)))
} | {("sm_90", 64): DecodeTile(256, 64, 4, 7, 4)}
_EXTEND_FP32 = {
    (arch, width): tile
    for arch in ("sm_80", "sm_89", "sm_90")
    for width, tile in (
        (64, ExtendTile(64, 32, 8, 1)),
        (128, ExtendTile(32, 16, 8, 1)),
        (256, ExtendTile(16, 32, 8, 1)),
    )
} | {("gfx942", 128): ExtendTile(64, 32, 8, 1)}
# Latent attention. The sums of 64 rows and 512 components take half of the registers of a multiprocessor, and the
# queries of 64 rows 72 KB of shared memory, as much as 64 keys. So no tile has more rows. By the rows of a tile, which
# are query heads: few heads leave room for two programs. A partial result has 2 KB for each head, so splits are longer
# than those of other attention. None was measured (docs/performance.md).
_LATENT_DECODE = {
    "sm_80": {16: DecodeTile(512, 32, 8, 3, 2), 32: DecodeTile(512, 32, 8, 5, 1), 64: DecodeTile(1024, 32, 8, 5, 1)},
    "sm_89": {16: DecodeTile(512, 32, 8, 3, 1), 32: DecodeTile(512, 32, 8, 3, 1)},
    "sm_90": {16: DecodeTile(512, 64, 8, 3, 2), 32: DecodeTile(512, 64, 8, 3, 1), 64: DecodeTile(1024, 64, 8, 3, 1)},
    # Sums of 64 rows would be in tensor memory, and spill 600 bytes on their way out.
    "sm_100": {16: DecodeTile(512, 64, 8, 3, 2), 32: DecodeTile(512, 64, 8, 3, 1)},
    "gfx942": {16: DecodeTile(512, 32, 4, 1, 1), 32: DecodeTile(512, 32, 4, 1, 1)},
    INTERPRETER: {16: DecodeTile(32, 16, 1, 1, 3), 32: DecodeTile(32, 16, 1, 1, 3)},
}
_LATENT_DECODE_PAGED = {
    "sm_90": {
        16: DecodeTile(512, 64, 8, 3, 1, paged=True),
        32: DecodeTile(512, 64, 8, 3, 1, paged=True),
        64: DecodeTile(1024, 64, 8, 2, 1, paged=True),
    },
    INTERPRETER: {rows: DecodeTile(32, 16, 1, 1, 3, paged=True) for rows in (16, 32)},
}
_LATENT_EXTEND = {
    "sm_80": ExtendTile(64, 32, 8, 5),
    "sm_89": ExtendTile(32, 32, 8, 3),
    "sm_90": ExtendTile(64, 64, 8, 3),
    "gfx942": ExtendTile(32, 32, 4, 1),
    INTERPRETER: ExtendTile(16, 16, 1, 1, 32),
}
_LATENT_EXTEND_PAGED = {
    "sm_90": ExtendTile(64, 64, 8, 2, paged=True),
    INTERPRETER: ExtendTile(16, 16, 1, 1, 32, paged=True),
}
HOPPER_TILE = ExtendTile(128, 128, num_warps=4, num_stages=2, paged=True)
"""The tile of `hopper_extend_attention`. num_warps: of one consumer; num_stages: KV tiles in shared memory."""
HOPPER_PAGE = 64
"""The page size of that kernel must be a multiple: a box of TMA does not cross a page."""
HOPPER_HEAD_DIMS = (64, 128)
"""The components of a head that it serves."""
MAX_HEAD_DIM = 256
_REGISTERS = 65_536


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. `triton.cdiv` takes over 2 us on the host."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n > 0. `triton.next_power_of_2` takes over 2 us on the host."""
    return 1 << (n - 1).bit_length()


def arch_of(device: torch.device) -> str:
    """The name of a device's architecture in the tables: `sm_90`, `gfx942`, ..., or `interpreter` for a CPU."""
    if device.type != "cuda":
        return INTERPRETER
    return _arch_of_gpu(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _arch_of_gpu(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


@cache
def _num_multiprocessors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def num_multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors of a GPU; 1 for a CPU."""
    if device.type != "cuda":
        return 1
    return _num_multiprocessors(torch.cuda.current_device() if device.index is None else device.index)


def programs_that_fit(planned: int, registers: int, threads: int) -> int:
    """The programs that the registers of an NVIDIA multiprocessor hold at once: at least 1 and at most `planned`.

    registers: of a thread, as the compiler reports them. Other Tritons give the same kernel other registers. A
    multiprocessor has 65,536, and a warp takes them in blocks of 256.
    Source: CUDA C++ programming guide, compute capabilities.
    """
    per_warp = -(-32 * registers // 256) * 256
    return max(1, min(planned, _REGISTERS // (per_warp * threads // 32)))


def padded_head_dim(head_dim: int) -> int:
    """The width of the kernels' tiles for this head dim: a power of two, at least 64. Raises ValueError above 256."""
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"the Triton attention kernels support head dims up to {MAX_HEAD_DIM}, got {head_dim}")
    return padded_width(head_dim)


def padded_width(num_components: int) -> int:
    """The width of a tile of so many components: a power of two, at least 64."""
    return max(64, next_power_of_2(num_components))


def _tuned_arch(arch: str, tuned: Container[str]) -> str:
    """The architecture whose rows serve `arch`: itself if `tuned`, or a related one with no more shared memory."""
    if arch in tuned:
        return arch
    if arch in LESS_SHARED_MEMORY:
        return "sm_89"
    return "gfx942" if arch.startswith("gfx") else "sm_80"


def decode_tile(arch: str, head_dim: int, *, fp32: bool = False, fp8: bool = False, page_size: int = 1) -> DecodeTile:
    """The tile of decode attention. `fp32`: whether queries are float32; `fp8`: whether the KV is float8.

    page_size: of the KV pool, in slots. All page sizes have the same `split`.
    """
    arch, width = _tuned_arch(arch, _DECODE), padded_head_dim(head_dim)
    plain = _DECODE[arch][width]
    if fp32:
        return _DECODE_FP32.get((arch, width), plain)
    if fp8:
        return _DECODE_FP8.get((arch, width), plain)
    paged = _DECODE_PAGED.get((arch, width))
    return paged if paged and page_size % paged.block_n == 0 else plain


def extend_tile(arch: str, head_dim: int, fp8: bool = False, *, fp32: bool = False, page_size: int = 1) -> ExtendTile:
    """The tile of extend attention. `fp8`: whether the KV is float8; `fp32`: whether queries and KV are float32.

    page_size: of the KV pool, in slots.
    """
    arch, width = _tuned_arch(arch, _DECODE), padded_head_dim(head_dim)
    plain = _EXTEND[arch][width]
    if fp8 or fp32:
        return (_EXTEND_FP8 if fp8 else _EXTEND_FP32).get((arch, width), plain)
    paged = _EXTEND_PAGED.get((arch, width))
    return paged if paged and page_size % paged.block_n == 0 else plain


@cache
def latent_decode_tile(arch: str, num_heads: int, page_size: int = 1) -> DecodeTile:
    """The tile of decode attention for latent heads. page_size: of the KV pool, in slots."""
    arch = _tuned_arch(arch, _LATENT_DECODE)
    rows = min(rows for rows in _LATENT_DECODE[arch] if rows >= min(num_heads, max(_LATENT_DECODE[arch])))
    plain = _LATENT_DECODE[arch][rows]
    paged = _LATENT_DECODE_PAGED[arch][rows] if arch in _LATENT_DECODE_PAGED else None
    return replace(paged if paged and page_size % paged.block_n == 0 else plain, max_heads=rows)


def latent_extend_tile(arch: str, page_size: int = 1) -> ExtendTile:
    """The tile of extend attention for latent heads. page_size: of the KV pool, in slots."""
    arch = _tuned_arch(arch, _LATENT_EXTEND)
    paged = _LATENT_EXTEND_PAGED.get(arch)
    return paged if paged and page_size % paged.block_n == 0 else _LATENT_EXTEND[arch]


def row_warps(block: int) -> int:
    """The number of warps of a kernel that processes a row of `block` elements: about 8 elements per thread."""
    return min(16, max(1, block // 256))
