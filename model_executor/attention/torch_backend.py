"""The attention backend in plain PyTorch: the reference for the kernels, and the fallback without compiled operations.

Rows with one new token are grouped into padded rectangles, and each rectangle is one call. The query heads of a KV head
are folded into the query length, so that keys are not repeated. Each row with several new tokens is one call. torch's
attention has neither sinks nor soft caps, so layers with one of them compute the softmax in steps. So does latent
attention, whose keys and values differ in size: for them torch's operation would hold all scores at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from ...mem_cache.token_to_kv_pool import TokenToKVPool
from ..forward_batch import ForwardBatch
from ..step import Int32Array
from .base import AttentionBackend, AttentionSpec

_MAX_PADDING = 2
"""The context lengths of a rectangle's rows differ by at most this factor."""
_MAX_RECTANGLE = 1 << 16
"""Most tokens of a rectangle, padding included, unless it has one row. Its K and V are gathered at once."""
_MAX_SCORES = 1 << 22
"""Most scores of a layer that computes in steps that exist at once, unless those of one token are more."""


@dataclass(slots=True)
class _Rectangle:
    """Rows with one new token each, padded to the longest context."""

    tokens: torch.Tensor | None
    """int64 [b], indices of the rows' tokens in [T]; None: all tokens of the batch, in order"""
    slots: torch.Tensor
    """int64 [b * L], slots of the context; padding repeats the slot of position 0"""
    mask: torch.Tensor | None
    """bool [b, 1, 1, L], False at padding; None: no padding"""


@dataclass(slots=True)
class _Span:
    """A row with several new tokens, [start, end) of [T]."""

    start: int
    end: int
    slots: torch.Tensor
    """int64 [L], slots of the context, the new tokens last"""
    mask: torch.Tensor | None
    """bool [end - start, L]; None: the plain causal mask, without a cached prefix"""


@dataclass(slots=True)
class _Plan:
    rectangles: list[_Rectangle]
    spans: list[_Span]


def gathered_tokens(num_rows: int, longest: int) -> int:
    """The most tokens whose K and V are gathered at once, with `num_rows` rows of at most `longest` tokens."""
    return min(num_rows * longest, max(_MAX_RECTANGLE, longest))


def scores_at_once(num_heads: int, num_rows: int, longest: int) -> int:
    """The most scores of a layer that computes in steps that exist at once. Arguments as in `gathered_tokens`."""
    return max(_MAX_SCORES, num_heads * gathered_tokens(num_rows, longest))


class TorchAttentionBackend(AttentionBackend):
    """Attention by torch's scaled_dot_product_attention.

    Other rows of the batch change a row's padding and with it the rounding of its sums, but nothing else.
    """

    name = "torch"

    def __init__(self, specs: Sequence[AttentionSpec], kv_pool: TokenToKVPool) -> None:
        super().__init__(specs, kv_pool)
        self._plans: dict[int | None, _Plan] = {}
        # index_select over flat rows is one memcpy per slot, several times faster than indexing [slot, head, dim].
        self._keys = [buffer.view(buffer.shape[0], -1) for buffer in kv_pool.k_buffer]
        self._values = [buffer.view(buffer.shape[0], -1) for buffer in kv_pool.v_buffer]

    def plan(self, batch: ForwardBatch) -> None:
        self._plans = {window: self._plan(batch, window) for window in set(self.sliding_windows)}

    def _plan(self, batch: ForwardBatch, window: int | None) -> _Plan:
        seq_lens = batch.seq_lens_host
        if batch.extend_lens_host is None:
            extend_lens = np.ones_like(seq_lens)
        else:
            extend_lens = batch.extend_lens_host
        ends = np.cumsum(extend_lens, dtype=np.int64)
        single = np.flatnonzero(extend_lens == 1)
        contexts = seq_lens[single] if window is None else np.minimum(seq_lens[single], window)
        groups = _similar_lengths(contexts)
        alone = len(groups) == 1 and len(single) == len(seq_lens)
        rectangles = []
        for group in groups:
            # A rectangle of the whole batch keeps the batch's order, so its output needs no scattering.
            members = single if alone else single[group]
            rectangles.append(self._rectangle(batch, members, ends, window, alone))
        spans = [
            self._span(batch, int(row), int(ends[row] - extend_lens[row]), int(ends[row]), window)
            for row in np.flatnonzero(extend_lens > 1)
        ]
        return _Plan(rectangles, spans)

    def _rectangle(
        self,
        batch: ForwardBatch,
        members: npt.NDArray[np.signedinteger],
        ends: npt.NDArray[np.int64],
        window: int | None,
        alone: bool,
    ) -> _Rectangle:
        device = batch.seq_lens.device
        lens = batch.seq_lens_host[members].astype(np.int64)
        starts = np.zeros_like(lens) if window is None else np.maximum(lens - window, 0)
        contexts = lens - starts
        columns = np.arange(contexts.max())
        valid = columns < contexts[:, None]
        # Padding reads the row's own position 0: its KV is finite, and the mask drops it.
        positions = np.where(valid, starts[:, None] + columns, 0)
        rows = batch.rows if alone else batch.rows[torch.from_numpy(members).to(device)]
        slots = batch.req_to_token[rows[:, None], torch.from_numpy(positions).to(device)]
        padded = not valid.all()
        return _Rectangle(
            tokens=None if alone else torch.from_numpy(ends[members] - 1).to(device),
            slots=slots.flatten().long(),
            mask=torch.from_numpy(valid).to(device)[:, None, None, :] if padded else None,
        )

    def _span(self, batch: ForwardBatch, row: int, start: int, end: int, window: int | None) -> _Span:
        num_new, seq_len = end - start, int(batch.seq_lens_host[row])
        prefix_len = seq_len - num_new
        first = 0 if window is None else max(0, prefix_len - window + 1)
        slots = batch.req_to_token[batch.rows[row], first:seq_len].long()
        if prefix_len == 0 and (window is None or window >= seq_len):
            return _Span(start, end, slots, None)
        queries = torch.arange(prefix_len, seq_len, device=slots.device)[:, None]
        keys = torch.arange(first, seq_len, device=slots.device)
        mask = keys <= queries
        if window is not None:
            mask &= keys > queries - window
        return _Span(start, end, slots, mask)

    def attend(
        self, q: torch.Tensor, layer_id: int, batch: ForwardBatch, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        self._check_sinks(layer_id, sinks)
        plan = self._plans[self.sliding_windows[layer_id]]
        if len(plan.rectangles) == 1 and plan.rectangles[0].tokens is None:
            return self._attend_rectangle(q, plan.rectangles[0], layer_id, sinks)
        out = q.new_empty(q.shape[0], self.num_heads * self.attended_dim)
        for rectangle in plan.rectangles:
            assert rectangle.tokens is not None
            out[rectangle.tokens] = self._attend_rectangle(q[rectangle.tokens], rectangle, layer_id, sinks)
        for span in plan.spans:
            out[span.start : span.end] = self._attend_span(q[span.start : span.end], span, layer_id, sinks)
        return out

    def _in_steps(self, layer_id: int) -> bool:
        """Whether the layer computes the softmax in steps."""
        is_capped = self.soft_caps[layer_id] is not None
        return is_capped or self._have_sinks[layer_id] or self.latent_dim is not None

    def _attend_rectangle(
        self, q: torch.Tensor, rectangle: _Rectangle, layer_id: int, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        num_rows = q.shape[0]
        grouped = q.reshape(num_rows, self.num_kv_heads, -1, self.head_dim)  # [b, kv_heads, group, head_dim]
        shape = (num_rows, -1, self.num_kv_heads)
        k = self._keys[layer_id].index_select(0, rectangle.slots).view(*shape, self.head_dim).transpose(1, 2)
        v = self._values[layer_id].index_select(0, rectangle.slots).view(*shape, self.attended_dim).transpose(1, 2)
        scale = self.scales[layer_id]
        soft_cap = self.soft_caps[layer_id]
        if self._in_steps(layer_id):
            mask = None if rectangle.mask is None else rectangle.mask[:, 0]
            return _attend_in_steps(grouped[:, :, :, None], k, v, mask, scale, soft_cap, sinks).reshape(num_rows, -1)
        out = F.scaled_dot_product_attention(
            grouped, k.to(q.dtype), v.to(q.dtype), attn_mask=rectangle.mask, scale=scale
        )
        return out.reshape(num_rows, -1)

    def _attend_span(self, q: torch.Tensor, span: _Span, layer_id: int, sinks: torch.Tensor | None) -> torch.Tensor:
        shape = (-1, self.num_kv_heads)
        k = self._keys[layer_id].index_select(0, span.slots).view(*shape, self.head_dim).transpose(0, 1)[None]
        v = self._values[layer_id].index_select(0, span.slots).view(*shape, self.attended_dim).transpose(0, 1)[None]
        scale = self.scales[layer_id]
        soft_cap = self.soft_caps[layer_id]
        if self._in_steps(layer_id):
            mask = span.mask
            if mask is None:
                mask = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).tril_()
            grouped = q.transpose(0, 1).unflatten(0, (self.num_kv_heads, -1))[None]
            attended = _attend_in_steps(grouped, k, v, mask[None], scale, soft_cap, sinks)
            return attended.flatten(1, 2)[0].transpose(0, 1).reshape(len(q), -1)
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k.to(q.dtype),
            v.to(q.dtype),
            attn_mask=span.mask,
            is_causal=span.mask is None,
            scale=scale,
            enable_gqa=self.num_heads != self.num_kv_heads,
        )
        return out[0].transpose(0, 1).reshape(q.shape[0], -1)


def _attend_in_steps(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention in float32, its softmax in steps: q [b, kv_heads, group, T, head_dim] -> the same with attended_dim.

    k: [b, kv_heads, L, head_dim]. v: [b, kv_heads, L, attended_dim]. mask: bool [b, T, L]; None: all positions. sinks:
    float32 [kv_heads * group].
    """
    num_rows, num_kv_heads, group, num_tokens, _ = q.shape
    # One copy each, in the order of the products.
    k, v = (torch.empty(kv.shape, dtype=torch.float32, device=kv.device).copy_(kv) for kv in (k, v))
    if sinks is not None:
        sinks = sinks.view(num_kv_heads, group, 1, 1)
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    at_once = max(1, _MAX_SCORES // (num_rows * num_kv_heads * group * k.shape[2]))
    for begin in range(0, num_tokens, at_once):
        part = slice(begin, begin + at_once)
        some = q[..., part, :].float().flatten(2, 3) * scale
        scores = (some @ k.mT).unflatten(2, (group, -1))
        if soft_cap is not None:
            scores.div_(soft_cap).tanh_().mul_(soft_cap)
        if mask is not None:
            scores.masked_fill_(~mask[:, None, None, part], float("-inf"))
        top = scores.amax(-1, keepdim=True)
        if sinks is not None:
            top = torch.maximum(top, sinks)
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total += (sinks - top).exp()
        out[..., part, :] = (weights.flatten(2, 3) @ v).unflatten(2, (group, -1)) / total
    return out


def _similar_lengths(lengths: Int32Array) -> list[npt.NDArray[np.int64]]:
    """Group the indices of `lengths`, for one rectangle each.

    Lengths within a group differ by at most a factor of _MAX_PADDING.
    """
    order = np.argsort(-lengths, kind="stable")
    groups: list[npt.NDArray[np.int64]] = []
    begin = 0
    while begin < len(order):
        longest = lengths[order[begin]]
        similar = int(np.sum(lengths[order[begin:]] * _MAX_PADDING >= longest))
        end = begin + min(similar, max(_MAX_RECTANGLE // int(longest), 1))
        groups.append(order[begin:end])
        begin = end
    return groups
