"""Benchmark cases of the attention kernels, with shapes that occur in serving."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..model_executor.attention.registry import PAGE_OF_KV_TILES
from ..model_executor.kernels.decode_attention import decode_attention, decode_attention_ref
from ..model_executor.kernels.extend_attention import extend_attention, extend_attention_ref, extend_work
from ..model_executor.kernels.tuning import HOPPER_HEAD_DIMS, HOPPER_TILE, arch_of, cdiv, decode_tile, extend_tile
from ..model_executor.kernels.work_map import split_map
from .kernel_case import Case, CaseMaker, num_sets, poisoned, relative_error
from .limits import causal_pairs
from .timing import Call

_FP8_SCALE = 0.02
_PAGE = PAGE_OF_KV_TILES
"""The page size of the pool. Page 0 is the dummy."""
# Lengths of the checked requests and their numbers of new tokens. They cross tiles and splits, with and without prefix.
_CHECK_LENS, _CHECK_NEW = (1, 17, 300, 513), (1, 17, 44, 200)
_CHECK_LENS_CPU, _CHECK_NEW_CPU = (1, 17, 44), (1, 17, 20)
"""The same for Triton's interpreter, which uses smaller tiles."""
_GPU_BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@dataclass(frozen=True)
class Heads:
    """The attention heads of one model. `dtype`: type of the queries; `fp8`: whether K and V are float8_e4m3fn."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    fp8: bool = False

    @property
    def kv_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.fp8 else self.dtype

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim * self.kv_dtype.itemsize

    @property
    def query_bytes(self) -> int:
        """Bytes of one token's queries, and of its attention output."""
        return self.num_heads * self.head_dim * self.dtype.itemsize

    @property
    def label(self) -> str:
        kv = " fp8 KV" if self.fp8 else ""
        return f"{self.name} {self.num_heads}/{self.num_kv_heads}x{self.head_dim}{kv}"


class _Pool:
    """A KV pool with random keys and values for requests of these lengths. Each request has consecutive pages."""

    def __init__(self, heads: Heads, lens: Sequence[int]) -> None:
        self.heads = heads
        device = heads.device
        page_lens = [cdiv(length, _PAGE) * _PAGE for length in lens]
        shape = (_PAGE + sum(page_lens), heads.num_kv_heads, heads.head_dim)
        self.k, self.v = (torch.randn(shape, dtype=heads.dtype, device=device) for _ in range(2))
        self.scales: dict[str, Any] = {"k_scale": 1.0, "v_scale": 1.0}
        if heads.fp8:
            self.scales = {"k_scale": _FP8_SCALE, "v_scale": _FP8_SCALE}
            self.k, self.v = ((x / _FP8_SCALE).clamp(-448, 448).to(heads.kv_dtype) for x in (self.k, self.v))
        self.table = torch.zeros(len(lens) + 1, max(lens), dtype=torch.int32, device=device)
        start = _PAGE
        for row, (length, page_len) in enumerate(zip(lens, page_lens, strict=True), 1):
            self.table[row, :length] = torch.arange(start, start + length, device=device)
            start += page_len
        self.rows = torch.arange(1, len(lens) + 1, device=device)
        self.lens = torch.tensor(lens, device=device)

    def keys_and_values(self, requests: slice, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of some requests, which all have this length: views [B, num_kv_heads, length, head_dim]."""
        page_len = cdiv(length, _PAGE) * _PAGE
        span = slice(_PAGE + requests.start * page_len, _PAGE + requests.stop * page_len)
        shape = (requests.stop - requests.start, page_len, self.heads.num_kv_heads, self.heads.head_dim)
        k, v = (x[span].view(shape)[:, :length].transpose(1, 2) for x in (self.k, self.v))
        return k, v

    def queries(self, num_tokens: int) -> torch.Tensor:
        heads = self.heads
        return torch.randn(num_tokens, heads.num_heads, heads.head_dim, dtype=heads.dtype, device=heads.device)

    def float64_operands(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, K, V and the slot table for the reference implementation, in float64 on the CPU."""
        return q.double().cpu(), self.k.double().cpu(), self.v.double().cpu(), self.table.cpu()


# Decode


def decode_cases(heads: Heads, batch_by_context: Sequence[tuple[int, int]]) -> list[CaseMaker]:
    return [
        CaseMaker(
            "decode attention",
            f"{heads.label}, {batch} x {context}",
            partial(_decode_case, heads, batch, context),
            partial(_check_decode, heads),
        )
        for batch, context in batch_by_context
    ]


def _decode_call(pool: _Pool, rows: slice, q: torch.Tensor, out: torch.Tensor, lens: Sequence[int]) -> Call:
    """A call of the decode kernel. `rows`: the requests of the pool to decode; `lens`: their lengths."""
    heads = pool.heads
    tile = decode_tile(arch_of(heads.device), heads.head_dim, fp8=heads.fp8, page_size=_PAGE)
    capacity = sum(-(-length // tile.split) for length in lens)
    seq_lens, table_rows = pool.lens[rows], pool.rows[rows]
    work = split_map(seq_lens, table_rows, tile.split, capacity)
    return lambda: decode_attention(
        q, pool.k, pool.v, pool.table, table_rows, seq_lens, work, out,
        sm_scale=heads.head_dim**-0.5, tile=tile, **pool.scales,
    )  # fmt: skip


def _decode_case(heads: Heads, batch: int, context: int) -> Case:
    num_bytes = batch * (context * heads.kv_bytes_per_token + 2 * heads.query_bytes)
    sets = num_sets(num_bytes, heads.device)
    pool = _Pool(heads, [context] * (batch * sets))
    calls, baselines = [], []
    for i in range(sets):
        q = pool.queries(batch)
        rows = slice(i * batch, (i + 1) * batch)
        calls.append(_decode_call(pool, rows, q, torch.empty_like(q), [context] * batch))
        if not heads.fp8:
            baselines.append(partial(_sdpa, q[:, :, None], *pool.keys_and_values(rows, context)))
    return Case(
        num_bytes=num_bytes,
        flops=4 * batch * context * heads.num_heads * heads.head_dim,
        calls=calls,
        baselines=_by_backend(baselines, heads.device),
    )


def _check_decode(heads: Heads) -> float:
    check_lens = _CHECK_LENS_CPU if heads.device.type == "cpu" else _CHECK_LENS
    pool = _Pool(heads, check_lens)
    q = pool.queries(len(check_lens))
    out = poisoned(q.shape, heads.dtype, heads.device)
    _decode_call(pool, slice(None), q, out, check_lens)()
    rows, lens = pool.rows.cpu(), pool.lens.cpu()
    return relative_error(
        out, decode_attention_ref(*pool.float64_operands(q), rows, lens, sm_scale=heads.head_dim**-0.5, **pool.scales)
    )


# Extend


def extend_cases(heads: Heads, shapes: Sequence[tuple[int, int, int]]) -> list[CaseMaker]:
    """Cases of the extend kernels. `shapes`: (requests, cached tokens of each, new tokens of each)."""
    return [
        CaseMaker(
            name,
            f"{heads.label}, {requests} x {new} new" + (f" after {prefix}" if prefix else ""),
            partial(_extend_case, heads, requests, prefix, new, is_hopper),
            partial(_check_extend, heads, is_hopper),
        )
        for name, is_hopper in _extend_kernels(heads).items()
        for requests, prefix, new in shapes
    ]


def _extend_kernels(heads: Heads) -> dict[str, bool]:
    """The kernels that serving may use, by name; whether each is that of `--hopper-prefill`."""
    kernels = {"extend attention": False}
    if arch_of(heads.device) == "sm_90" and heads.kv_dtype == torch.bfloat16 and heads.head_dim in HOPPER_HEAD_DIMS:
        kernels["extend attention with --hopper-prefill"] = True
    return kernels


def _extend_call(pool: _Pool, new: Sequence[int], q: torch.Tensor, out: torch.Tensor, is_hopper: bool) -> Call:
    heads = pool.heads
    tile = HOPPER_TILE
    if not is_hopper:
        tile = extend_tile(arch_of(heads.device), heads.head_dim, heads.fp8, page_size=_PAGE)
    new_lens = torch.tensor(new, device=heads.device)
    starts = F.pad(new_lens.cumsum(0), (1, 0))
    lens_host = pool.lens.cpu().numpy()
    work = extend_work(
        starts, pool.lens, np.array(new, np.int32), lens_host, heads.num_heads, heads.num_kv_heads, tile
    )  # fmt: skip
    prefix_lens, longest = pool.lens - new_lens, int(lens_host.max())
    if is_hopper:
        # Imported here: a GPU of another kind need not have Gluon.
        from ..model_executor.kernels.hopper_extend import hopper_extend_attention

        return lambda: hopper_extend_attention(
            q, pool.k, pool.v, pool.table, pool.rows, starts, prefix_lens, work, out,
            sm_scale=heads.head_dim**-0.5, page_size=_PAGE,
        )  # fmt: skip
    return lambda: extend_attention(
        q, pool.k, pool.v, pool.table, pool.rows, starts, prefix_lens, work, out,
        longest=longest, sm_scale=heads.head_dim**-0.5, tile=tile, **pool.scales,
    )  # fmt: skip


def _extend_case(heads: Heads, requests: int, prefix: int, new: int, is_hopper: bool) -> Case:
    pool = _Pool(heads, [prefix + new] * requests)
    q = pool.queries(requests * new)
    baselines: list[Callable[[], object]] = []
    if prefix == 0 and not heads.fp8:
        queries = q.view(requests, new, *q.shape[1:]).transpose(1, 2)
        baselines.append(partial(_sdpa, queries, *pool.keys_and_values(slice(0, requests), new), is_causal=True))
    pairs = causal_pairs(prefix + new, prefix)
    return Case(
        num_bytes=requests * ((prefix + new) * heads.kv_bytes_per_token + 2 * new * heads.query_bytes),
        flops=4 * requests * pairs * heads.num_heads * heads.head_dim,
        calls=[_extend_call(pool, [new] * requests, q, torch.empty_like(q), is_hopper)],
        baselines=_by_backend(baselines, heads.device),
    )


def _check_extend(heads: Heads, is_hopper: bool) -> float:
    on_cpu = heads.device.type == "cpu"
    check_lens, check_new = (_CHECK_LENS_CPU, _CHECK_NEW_CPU) if on_cpu else (_CHECK_LENS, _CHECK_NEW)
    pool = _Pool(heads, check_lens)
    q = pool.queries(sum(check_new))
    out = poisoned(q.shape, heads.dtype, heads.device)
    _extend_call(pool, check_new, q, out, is_hopper)()
    new = torch.tensor(check_new)
    starts = F.pad(new.cumsum(0), (1, 0))
    reference = extend_attention_ref(
        *pool.float64_operands(q),
        pool.rows.cpu(),
        starts,
        pool.lens.cpu() - new,
        sm_scale=heads.head_dim**-0.5,
        **pool.scales,
    )
    assert check_new[0] == 1
    several = slice(1, None)  # the first request has one new token, which the decode kernel computes
    return relative_error(out[several], reference[several])


# torch's attention, for comparison


def _sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, backend: SDPBackend | None = None, is_causal: bool = False
) -> torch.Tensor:
    """torch's attention. q: [B, heads, new, D]; k, v: [B, kv heads, length, D], gathered from the pool before."""
    if backend is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)


def _by_backend(calls: Sequence[Callable[..., object]], device: torch.device) -> dict[str, Sequence[Call]]:
    if not calls:
        return {}
    if device.type != "cuda":
        return {"SDPA": calls}
    return {
        f"SDPA {name}": [partial(call, backend=backend) for call in calls] for name, backend in _GPU_BACKENDS.items()
    }
