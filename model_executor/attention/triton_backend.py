"""The attention backend of GPUs: Triton kernels that read the KV pool by slot.

The decode kernels serve requests with one new token, in mixed batches too. The extend kernel serves requests with
several. So the kernel that computes a token, and the token's bits, do not depend on the other requests of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...mem_cache.token_to_kv_pool import MHATokenToKVPool
from ..forward_batch import ForwardBatch
from ..kernels.decode_attention import decode_attention
from ..kernels.extend_attention import extend_attention, extend_work, max_part_bytes
from ..kernels.fused_decode import can_fuse_decode, fused_decode
from ..kernels.skinny_linear import MAX_ROWS
from ..kernels.store_kv import store_kv
from ..kernels.tuning import arch_of, decode_tile, extend_tile
from ..kernels.work_map import WorkMap, split_map
from ..step import ForwardMode, Int32Array
from .base import AttentionBackend, AttentionSpec


@dataclass(frozen=True, slots=True)
class _Plan:
    """The work of one step."""

    decode: WorkMap | None
    """None: no request has one new token"""
    extend: WorkMap | None
    """None: no request has several new tokens"""
    q_loc: torch.Tensor | None
    """[B], index of each request's first token in [T]; None in a DECODE step, where it is the request's index"""
    longest: int
    """tokens of the longest request with several new tokens"""


class TritonAttentionBackend(AttentionBackend):
    """Attention by Triton kernels. Needs a CUDA or ROCm device, or a CPU with TRITON_INTERPRET=1."""

    name = "triton"

    def __init__(self, specs: Sequence[AttentionSpec], kv_pool: MHATokenToKVPool) -> None:
        super().__init__(specs, kv_pool)
        arch = arch_of(kv_pool.k_buffer[0].device)
        fp32, fp8 = kv_pool.dtype == torch.float32, kv_pool.dtype == torch.float8_e4m3fn
        page_size = kv_pool.page_size
        self._decode_tile = decode_tile(arch, self.head_dim, fp32=fp32, fp8=fp8, page_size=page_size)
        self._extend_tile = extend_tile(arch, self.head_dim, fp8, fp32=fp32, page_size=page_size)
        self._plan: _Plan | None = None
        self._counts = torch.zeros(MAX_ROWS * self.num_kv_heads, dtype=torch.int32, device=kv_pool.k_buffer[0].device)
        """zeros between launches (`fused_decode`)"""

    def num_splits(self, seq_lens: Int32Array) -> int:
        return int((-(-seq_lens // self._decode_tile.split)).sum())

    def max_part_bytes(self, context_len: int) -> int:
        device = self.kv_pool.k_buffer[0].device
        return max_part_bytes(device, context_len, self.num_kv_heads, self.head_dim, self._extend_tile)

    def plan(self, batch: ForwardBatch) -> None:
        """Number the work units on the device. The host's copy of the lengths only sizes the buffers."""
        if batch.mode is ForwardMode.DECODE:
            capacity = self.num_splits(batch.seq_lens_host)
            work = split_map(batch.seq_lens, batch.rows, self._decode_tile.split, capacity)
            self._plan = _Plan(work, None, None, 0)
            return
        assert batch.extend_start_loc is not None and batch.extend_lens_host is not None
        single = batch.extend_lens_host == 1
        decode = extend = None
        if single.any():
            capacity = self.num_splits(batch.seq_lens_host[single])
            decode = split_map(batch.seq_lens, batch.rows, self._decode_tile.split, capacity, batch.extend_start_loc)
        if not single.all():
            extend = extend_work(
                batch.extend_start_loc, batch.seq_lens, batch.extend_lens_host, batch.seq_lens_host,
                self.num_heads, self.num_kv_heads, self._extend_tile,
            )  # fmt: skip
        longest = int(batch.seq_lens_host[~single].max(initial=0))
        self._plan = _Plan(decode, extend, batch.extend_start_loc[:-1], longest)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: ForwardBatch
    ) -> torch.Tensor:
        pool = self.kv_pool
        store_kv(k, v, pool.k_buffer[layer_id], pool.v_buffer[layer_id], batch.out_cache_loc)
        return self.attend(q, layer_id, batch)

    def attend(self, q: torch.Tensor, layer_id: int, batch: ForwardBatch) -> torch.Tensor:
        plan = self._plan
        assert plan is not None, "plan() comes first"
        k_buffer, v_buffer = self.kv_pool.k_buffer[layer_id], self.kv_pool.v_buffer[layer_id]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        window, scale = self.sliding_windows[layer_id], self.scales[layer_id]
        if plan.decode is not None:
            decode_attention(
                q, k_buffer, v_buffer, batch.req_to_token, batch.rows, batch.seq_lens, plan.decode, out,
                sm_scale=scale, window=window, q_loc=plan.q_loc, tile=self._decode_tile,
            )  # fmt: skip
        if plan.extend is not None:
            self._extend(q, layer_id, batch, plan.extend, plan.longest, out)
        return out.view(q.shape[0], -1)

    def _extend(
        self, q: torch.Tensor, layer_id: int, batch: ForwardBatch, work: WorkMap, longest: int, out: torch.Tensor
    ) -> None:
        """Compute the attention of requests with several new tokens."""
        assert batch.extend_start_loc is not None and batch.prefix_lens is not None
        extend_attention(
            q, self.kv_pool.k_buffer[layer_id], self.kv_pool.v_buffer[layer_id], batch.req_to_token, batch.rows,
            batch.extend_start_loc, batch.prefix_lens, work, out, longest=longest, sm_scale=self.scales[layer_id],
            window=self.sliding_windows[layer_id], tile=self._extend_tile,
        )  # fmt: skip

    def can_fuse(self, batch: ForwardBatch, dtype: torch.dtype) -> bool:
        """Whether `attend_fused` serves this step: one token for each of a few requests."""
        is_small = batch.mode is ForwardMode.DECODE and len(batch.rows) <= MAX_ROWS
        return is_small and can_fuse_decode(self.num_heads, self.num_kv_heads, self.head_dim, dtype)

    def attend_fused(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        layer_id: int,
        batch: ForwardBatch,
        *,
        dependent: bool = False,
        **norm: Any,
    ) -> torch.Tensor:
        """Normalise, rotate and store the new tokens, then `attend`, all in one launch.

        qkv: [T, num_heads + 2 * num_kv_heads, head_dim]. norm: `q_weight`, `k_weight` and `eps`, or nothing.
        dependent: see `fused_decode`.
        """
        plan = self._plan
        assert plan is not None and plan.decode is not None, "plan() comes first"
        out = fused_decode(
            qkv, self.num_heads, cos, sin, self.kv_pool.k_buffer[layer_id], self.kv_pool.v_buffer[layer_id],
            batch.out_cache_loc, batch.req_to_token, batch.rows, batch.seq_lens, plan.decode, self._counts,
            sm_scale=self.scales[layer_id], window=self.sliding_windows[layer_id], tile=self._decode_tile,
            dependent=dependent, **norm,
        )  # fmt: skip
        return out.view(len(out), -1)
