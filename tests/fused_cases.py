"""Decode steps for tests of `fused_decode`: drawn attention problems with the fused projection of their new tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from attention_cases import Case, Problem, build, poisoned

from tercet.model_executor.kernels.decode_attention import decode_attention
from tercet.model_executor.kernels.fused_decode import fused_decode
from tercet.model_executor.kernels.rotary import rotary
from tercet.model_executor.kernels.tuning import DecodeTile
from tercet.model_executor.kernels.work_map import split_map


@dataclass
class Step:
    """A decode step of a problem: the fused projection of the new tokens, their angles, and norms of heads or none."""

    problem: Problem
    qkv: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    norm: dict[str, torch.Tensor | float]
    tile: DecodeTile

    def pools(self, kind: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """New copies of K and V, in which the new tokens are missing."""
        p = self.problem
        pools = p.k_buffer.clone(), p.v_buffer.clone()
        for pool in pools:
            pool[self.slots(range(len(p.rows)))] = torch.nan
        return pools if kind is None else (pools[0].to(kind), pools[1].to(kind))

    def slots(self, pick: range | list[int]) -> torch.Tensor:
        p = self.problem
        return p.req_to_token[p.rows[list(pick)], p.seq_lens[list(pick)] - 1].long()

    def fused(self, pick: list[int], counts: torch.Tensor | None = None, *, room: int = 0) -> tuple[torch.Tensor, ...]:
        """The output of requests `pick` in that order, and the pools after it. counts: None: new zeros.

        room: records without a unit.
        """
        p, (k, v) = self.problem, self.pools()
        lens, before = p.seq_lens[pick], self.qkv[pick]
        qkv = before.clone()
        used = len(pick) * k.shape[1]
        if counts is None:
            counts = torch.zeros(used + 3, dtype=torch.int32, device=k.device)
        unused = counts[used:].clone()
        work = split_map(lens, p.rows[pick], self.tile.split, int((-(-lens // self.tile.split)).sum()) + room)
        out = fused_decode(
            qkv, p.case.num_heads, self.cos[pick], self.sin[pick], k, v, self.slots(pick), p.req_to_token,
            p.rows[pick], lens, work, counts, tile=self.tile, **self.norm, **p.options,
        )  # fmt: skip
        assert torch.equal(qkv, before) and not counts[:used].any() and torch.equal(counts[used:], unused)
        return out, k, v

    def apart(self) -> tuple[torch.Tensor, ...]:
        """The same of all requests by the kernels that `fused_decode` replaces."""
        p, (k, v) = self.problem, self.pools()
        heads = p.case.num_heads
        scales = {name: p.options[name] for name in ("k_scale", "v_scale") if name in p.options}
        qkv, slots = self.qkv.clone(), self.slots(range(len(p.rows)))
        rotary(qkv, heads, k.shape[1], self.cos, self.sin, k_buffer=k, v_buffer=v, slots=slots, **self.norm, **scales)
        q = qkv[:, :heads]
        work = split_map(p.seq_lens, p.rows, self.tile.split, int((-(-p.seq_lens // self.tile.split)).sum()))
        out = poisoned(q)
        decode_attention(q, k, v, p.req_to_token, p.rows, p.seq_lens, work, out, tile=self.tile, **p.options)
        return out, k, v


def make_step(case: Case, tile: DecodeTile, *, norm: bool, device: str = "cpu") -> Step:
    problem = build(case, device)
    g = torch.Generator().manual_seed(case.seed)
    rows, width = len(case.lens), case.head_dim
    qkv = torch.randn(rows, case.num_heads + 2 * case.num_kv_heads, width, generator=g).to(device, case.dtype)
    # Views of one tensor, as the layers have them.
    angles = (torch.rand(rows, 2, width // 2, generator=g) * 2 - 1).to(device)
    weights: dict[str, torch.Tensor | float] = {}
    if norm:
        weights = {name: torch.randn(width, generator=g).to(device, case.dtype) for name in ("q_weight", "k_weight")}
        weights["eps"] = 1e-6
    return Step(problem, qkv, *angles.unbind(1), weights, tile)


def same_bits(some: torch.Tensor, others: torch.Tensor) -> bool:
    return torch.equal(some.contiguous().view(torch.uint8), others.contiguous().view(torch.uint8))
