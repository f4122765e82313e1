"""The sampling kernels in plain torch, with a sort, one line at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .logit_edits import EditTables, edit_logits_ref
from .sampling_layout import Column, Field


def weigh_ref(gap: torch.Tensor) -> torch.Tensor:
    """Weights in units of 2**-34 of the best token's: int64, in the shape of gap."""
    return (torch.exp(-gap) * 2.0**34 + 0.5).long()


def choose_tokens_ref(
    logits: torch.Tensor,
    table: torch.Tensor,
    plan: torch.Tensor,
    edits: EditTables,
    weigh: Callable[[torch.Tensor], torch.Tensor] = weigh_ref,
    newest_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """`sampling.choose_tokens`.

    `weigh`: the function from gaps to weights. Tests pass one with the exp of the device.
    """
    x = edit_logits_ref(logits, table, plan, edits)
    out = torch.full((len(x),), -1, dtype=torch.int64, device=x.device)
    for line, fields in enumerate(plan.tolist()):
        if not x[line].amax() > -torch.inf:  # NaN if any logit is NaN
            continue
        params = table[fields[Field.ROW]]
        if params[Column.GREEDY]:
            token = int((x[line] == x[line].amax()).int().argmax())
        else:
            token = _draw(x[line], params, plan[line, Field.DRAW].view(torch.float64), weigh)
        out[line] = token
        if fields[Field.COUNTS] >= 0:
            edits.counts[fields[Field.COUNTS], token] += 2
    if newest_tokens is not None:
        newest_tokens[plan[:, Field.ROW]] = out.clamp(min=0)
    return out


def _draw(
    x: torch.Tensor, params: torch.Tensor, draw: torch.Tensor, weigh: Callable[[torch.Tensor], torch.Tensor]
) -> int:
    best = x.amax().clamp(max=torch.finfo(torch.float32).max) + 0.0
    gap = (best - x).clamp(min=0) / params[Column.TEMPERATURE].float()
    weights = weigh(gap)
    rank = order = torch.arange(len(gap), device=x.device)
    kept = gap <= params[Column.MAX_GAP].float()
    top_k, top_p = params[Column.TOP_K], params[Column.TOP_P]
    if top_k < len(x) or top_p < 1:
        gap, order = gap.sort(stable=True)
        weights = weights[order]
        kept = (gap <= params[Column.MAX_GAP].float()) & (rank < top_k)
        if top_p < 1:
            mass = torch.ceil(weights.sum() * top_p)
            before = torch.nn.functional.pad(weights.cumsum(0), (1, 0))[torch.searchsorted(gap, gap)]
            kept &= before < mass
    cumulative = (weights * kept).cumsum(0)
    point = torch.minimum((draw * cumulative[-1]).long(), cumulative[-1] - 1)
    return int(order[torch.searchsorted(cumulative, point, right=True)])
