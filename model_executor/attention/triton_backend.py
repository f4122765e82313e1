"""The attention backend of GPUs: Triton kernels that read the KV pool by slot.

The decode kernels serve requests with one new token, in mixed batches too. The extend kernel serves requests with
several. So the kernel that computes a token, and the token's bits, do not depend on the other requests of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...mem_cache.token_to_kv_pool import TokenToKVPool
from ..forward_batch import ForwardBatch
from ..kernels.decode_attention import decode_attention
from ..kernels.extend_attention import extend_attention, extend_work, max_part_bytes
from ..kernels.fused_decode import can_fuse_decode, fused_decode
from ..kernels.skinny_linear import MAX_ROWS
from ..kernels.store_kv import store_kv
from ..kernels.tuning import DecodeTile, ExtendTile, arch_of, cdiv, decode_tile, extend_tile
from ..kernels.work_map import WorkMap, split_map
from ..step import ForwardMode, Int32Array
from .base import AttentionBackend, AttentionSpec


@dataclass(frozen=True, slots=True)
class DecodeLaunch:
    """What one launch of decode attention serves: all requests of a step, or some of them."""

    work: WorkMap
    rows: torch.Tensor
    """[b], rows of the table of slots"""
    seq_lens: torch.Tensor
    """[b]"""
    q_loc: torch.Tensor | None
    """[b], index of each request's first token in [T]; None in a DECODE step, where it is the request's index"""
    tokens: slice | None
    """the tokens of these requests in a DECODE step; None: all tokens of the step"""


@dataclass(frozen=True, slots=True)
class _Plan:
    """The work of one step."""

    decode: list[DecodeLaunch]
    """empty: no request has one new token"""
    extend: WorkMap | None
    """None: no request has several new tokens"""
    longest: int
    """tokens of the longest request with several new tokens"""


class TritonAttentionBackend(AttentionBackend):
    """Attention by Triton kernels. Needs a CUDA or ROCm device, or a CPU with TRITON_INTERPRET=1."""

    name = "triton"

    def __init__(self, specs: Sequence[AttentionSpec], kv_pool: TokenToKVPool) -> None:
        super().__init__(specs, kv_pool)
        self._decode_tile, self._extend_tile = self._tiles(arch_of(kv_pool.k_buffer[0].device))
        self._plan: _Plan | None = None
        self._counts = torch.zeros(MAX_ROWS * self.num_kv_heads, dtype=torch.int32, device=kv_pool.k_buffer[0].device)
        """zeros between launches (`fused_decode`)"""

    def _tiles(self, arch: str) -> tuple[DecodeTile, ExtendTile]:
        pool = self.kv_pool
        fp32, fp8, page_size = pool.dtype == torch.float32, pool.dtype == torch.float8_e4m3fn, pool.page_size
        return (
            decode_tile(arch, self.head_dim, fp32=fp32, fp8=fp8, page_size=page_size),
            extend_tile(arch, self.head_dim, fp8, fp32=fp32, page_size=page_size),
        )

    def num_splits(self, seq_lens: Int32Array) -> int:
        return int((-(-seq_lens // self._decode_tile.split)).sum())

    def max_part_bytes(self, context_len: int) -> int:
        device = self.kv_pool.k_buffer[0].device
        return max_part_bytes(device, context_len, self.num_kv_heads, self.attended_dim, self._extend_tile)

    def decode_part_bytes(self, num_rows: int, context_len: int, pool_tokens: int) -> int:
        splits = min(
            num_rows * cdiv(context_len, self._decode_tile.split), self._room(num_rows, context_len, pool_tokens)
        )
        return splits * self.num_heads * (self.attended_dim + 1) * 4  # an output and a log-sum-exp in float32

    def _room(self, num_rows: int, context_len: int, pool_tokens: int) -> int:
        """The most splits of one launch of decode attention.

        The splits of twice the pool's tokens, so that no recorded step is divided (`max_work_lens`), or those of
        MAX_ROWS requests, because `attend_fused` is one launch.
        """
        split = self._decode_tile.split
        return max(2 * pool_tokens // split + num_rows, MAX_ROWS * cdiv(context_len, split))

    def plan(self, batch: ForwardBatch) -> None:
        """Number the work units on the device. The host's copy of the lengths only sizes the buffers."""
        if batch.mode is ForwardMode.DECODE:
            self._plan = _Plan(self._decode_launches(batch, batch.seq_lens_host), None, 0)
            return
        assert batch.extend_start_loc is not None and batch.extend_lens_host is not None
        single = batch.extend_lens_host == 1
        decode = self._decode_launches(batch, np.where(single, batch.seq_lens_host, 0)) if single.any() else []
        extend = None
        if not single.all():
            extend = extend_work(
                batch.extend_start_loc, batch.seq_lens, batch.extend_lens_host, batch.seq_lens_host,
                self.num_heads, self.num_kv_heads, self._extend_tile, self.attended_dim,
            )  # fmt: skip
        self._plan = _Plan(decode, extend, int(batch.seq_lens_host[~single].max(initial=0)))

    def _decode_launches(self, batch: ForwardBatch, lens: Int32Array) -> list[DecodeLaunch]:
        """Divide the requests with one new token, so that the partial results of a launch have room.

        Requests that share a long prefix may have many times the splits of the pool. lens: int32 [B], on the host; 0
        for a request with several new tokens. The division does not change the bits.
        """
        split, starts = self._decode_tile.split, batch.extend_start_loc
        splits = -(-lens // split)
        room = self._room(len(lens), batch.req_to_token.shape[1], self.kv_pool.size)
        launches = []
        for begin, end in _groups(splits, room):
            some = slice(begin, end)
            rows, seq_lens = batch.rows[some], batch.seq_lens[some]
            own_starts = None if starts is None else starts[begin : end + 1]
            work = split_map(seq_lens, rows, split, int(splits[some].sum()), own_starts)
            if own_starts is not None:
                launches.append(DecodeLaunch(work, rows, seq_lens, own_starts[:-1], None))
            else:
                launches.append(DecodeLaunch(work, rows, seq_lens, None, some if end - begin < len(lens) else None))
        return launches

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer_id: int,
        batch: ForwardBatch,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self._store(k, v, layer_id, batch)
        return self.attend(q, layer_id, batch, sinks)

    def _store(self, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: ForwardBatch) -> None:
        pool = self.kv_pool
        store_kv(k, v, pool.k_buffer[layer_id], pool.v_buffer[layer_id], batch.out_cache_loc)

    def attend(
        self, q: torch.Tensor, layer_id: int, batch: ForwardBatch, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        self._check_sinks(layer_id, sinks)
        plan = self._plan
        assert plan is not None, "plan() comes first"
        out = torch.empty(*q.shape[:2], self.attended_dim, dtype=q.dtype, device=q.device)
        for launch in plan.decode:
            own_q, own_out = (q, out) if launch.tokens is None else (q[launch.tokens], out[launch.tokens])
            self._decode(own_q, layer_id, batch, sinks, launch, own_out)
        if plan.extend is not None:
            self._extend(q, layer_id, batch, sinks, plan.extend, plan.longest, out)
        return out.view(q.shape[0], -1)

    def _decode(
        self,
        q: torch.Tensor,
        layer_id: int,
        batch: ForwardBatch,
        sinks: torch.Tensor | None,
        launch: DecodeLaunch,
        out: torch.Tensor,
    ) -> None:
        """Compute the attention of requests with one new token."""
        decode_attention(
            q, self.kv_pool.k_buffer[layer_id], self.kv_pool.v_buffer[layer_id], batch.req_to_token, launch.rows,
            launch.seq_lens, launch.work, out, sm_scale=self.scales[layer_id], soft_cap=self.soft_caps[layer_id],
            window=self.sliding_windows[layer_id], sinks=sinks, q_loc=launch.q_loc, tile=self._decode_tile,
        )  # fmt: skip

    def _extend(
        self,
        q: torch.Tensor,
        layer_id: int,
        batch: ForwardBatch,
        sinks: torch.Tensor | None,
        work: WorkMap,
        longest: int,
        out: torch.Tensor,
    ) -> None:
        """Compute the attention of requests with several new tokens."""
        assert batch.extend_start_loc is not None and batch.prefix_lens is not None
        extend_attention(
            q, self.kv_pool.k_buffer[layer_id], self.kv_pool.v_buffer[layer_id], batch.req_to_token, batch.rows,
            batch.extend_start_loc, batch.prefix_lens, work, out, longest=longest, sm_scale=self.scales[layer_id],
            soft_cap=self.soft_caps[layer_id], window=self.sliding_windows[layer_id], sinks=sinks,
            tile=self._extend_tile,
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
        sinks: torch.Tensor | None = None,
        *,
        dependent: bool = False,
        **norm: Any,
    ) -> torch.Tensor:
        """Normalise, rotate and store the new tokens, then `attend`, all in one launch.

        qkv: [T, num_heads + 2 * num_kv_heads, head_dim]. cos, sin: float32 [T, head_dim / 2]. norm: `q_weight`,
        `k_weight` and `eps`, or nothing. sinks: as in `attend`. dependent: see `fused_decode`. Returns
        [T, num_heads * head_dim].
        """
        plan = self._plan
        assert plan is not None, "plan() comes first"
        self._check_sinks(layer_id, sinks)
        (launch,) = plan.decode
        out = fused_decode(
            qkv, self.num_heads, cos, sin, self.kv_pool.k_buffer[layer_id], self.kv_pool.v_buffer[layer_id],
            batch.out_cache_loc, batch.req_to_token, batch.rows, batch.seq_lens, launch.work, self._counts,
            sm_scale=self.scales[layer_id], soft_cap=self.soft_caps[layer_id], window=self.sliding_windows[layer_id],
            sinks=sinks, tile=self._decode_tile, dependent=dependent, **norm,
        )  # fmt: skip
        return out.view(len(out), -1)


def _groups(splits: Int32Array, room: int) -> list[tuple[int, int]]:
    """Divide requests into groups of consecutive ones that have at most `room` splits, or one request.

    splits: int32 [B]. Returns the first request of each group, and the one behind its last.
    """
    if splits.sum() <= room:
        return [(0, len(splits))]
    groups, begin, used = [], 0, 0
    for i, count in enumerate(splits.tolist()):
        if i > begin and used + count > room:
            groups.append((begin, i))
            begin, used = i, 0
        used += count
    return [*groups, (begin, len(splits))]
