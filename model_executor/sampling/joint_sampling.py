"""Draws a token from logits under temperature, top-k, top-p and min-p, by inverting the cumulative distribution.

The three selections are joint: each threshold is taken on the whole distribution after temperature, a token has to
pass all of them, and what is kept is renormalised. The most probable token always passes.

Floating-point sums depend on the order of addition, hence on the shape of the batch and on the kernel. Probabilities
are turned into integers first, so every sum is exact, and a draw is the same bit for bit on any path through here.
"""

from __future__ import annotations

import torch

WEIGHT_BITS = 34
"""The most probable token weighs 2**34, and one that is 2**35 times less probable nothing."""
MAX_VOCAB_SIZE = 2**19
"""The weights of more tokens could exceed 2**53, beyond which float64 does not hold every integer."""


def gaps_below_best(x: torch.Tensor, peak: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """How far each token's log-probability is below the best one's: float32 [n, vocab], >= 0. Changes x.

    Logits of +inf, should there be any, share the probability.
    """
    # Adding 0 turns -0.0 into 0.0. Every best token's gap is then 0.0, never -0.0, which other bits would rank apart.
    best = peak.clamp(max=torch.finfo(torch.float32).max).add_(0.0)
    return x.neg_().add_(best).clamp_(min=0).div_(temperature)


def weigh(gap: torch.Tensor) -> torch.Tensor:
    """Probabilities relative to the best token's, in units of 2**-WEIGHT_BITS: int64 like gap."""
    return torch.neg(gap).exp_().mul_(2.0**WEIGHT_BITS).round_().long()


def choose_open(gap: torch.Tensor, draw: torch.Tensor, max_gap: torch.Tensor | None) -> torch.Tensor:
    """Inverts the cumulative distribution over all tokens in order of id.

    Args:
        gap: float32 [n, vocab]
        draw: float64 [n, 1] in [0, 1)
        max_gap: float32 [n, 1] or None: tokens further below the best are out
    """
    weights = weigh(gap)
    if max_gap is not None:
        weights.mul_(gap <= max_gap)
    cumulative = weights.cumsum(dim=-1)
    return _invert(cumulative, cumulative[:, -1:], draw).squeeze(1)


def choose_ranked(
    widths: tuple[int, ...],
    gap: torch.Tensor,
    draw: torch.Tensor,
    top_k: torch.Tensor,
    mass: torch.Tensor,
    max_gap: torch.Tensor,
) -> torch.Tensor:
    """Inverts the cumulative distribution over the kept tokens, the most probable first, then by id.

    The kept tokens are the first few in that order, whatever the parameters.

    Args:
        widths: how many tokens to rank. Rows that may keep more than widths[0] are done again with the rest of
            widths, which needs a look at the result. The last width has to be enough for every row.
        gap: float32 [n, vocab]
        draw: float64 [n, 1] in [0, 1)
        top_k: int64 [n, 1], keeps a token of rank < top_k
        mass: int64 [n, 1], top_p of the weight of the whole vocabulary, rounded up: keeps a token when all that
            are strictly more probable weigh less
        max_gap: float32 [n, 1], keeps a token no further below the best
    """
    width, *wider = widths
    gaps, ids = _closest(gap, width)
    cumulative = weigh(gaps).cumsum(dim=-1)
    # The token that completes the mass is the last one in, with those as probable as itself.
    completes = torch.searchsorted(cumulative, mass).clamp_(max=width - 1)
    last_gap = torch.minimum(gaps.gather(1, completes), max_gap)
    kept = (torch.arange(width, device=gap.device) < top_k) & (gaps <= last_gap)
    # Never 0, even in a row of NaN, whose choice is thrown away but has to be within bounds.
    last = kept.sum(dim=-1, keepdim=True).sub_(1).clamp_(min=0)
    tokens = ids.gather(1, _invert(cumulative, cumulative.gather(1, last), draw)).squeeze(1)
    if wider:
        cut_short = (kept[:, -1:] & (top_k > width)).squeeze(1).nonzero().squeeze(1)
        if len(cut_short):
            again = [t.index_select(0, cut_short) for t in (gap, draw, top_k, mass, max_gap)]
            tokens.index_copy_(0, cut_short, choose_ranked(tuple(wider), *again))
    return tokens


def _closest(gap: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `width` smallest gaps in ascending order, equal ones by id: float32 and int64 [n, width].

    Non-negative floats are ordered as their bits are, so (bits, id) in one integer makes every key unique and
    the order the same from any sorting algorithm.
    """
    keys = gap.view(torch.int32).to(torch.int64).bitwise_left_shift_(32)
    keys += torch.arange(gap.shape[1], device=gap.device)
    if width < gap.shape[1]:
        keys = keys.topk(width, dim=-1, largest=False, sorted=True).values
    else:
        keys = keys.sort(dim=-1).values
    return (keys >> 32).to(torch.int32).view(torch.float32), keys & 0xFFFFFFFF


def _invert(cumulative: torch.Tensor, total: torch.Tensor, draw: torch.Tensor) -> torch.Tensor:
    """The first index whose cumulative weight exceeds draw * total: int64 [n, 1], in bounds for any input."""
    point = torch.minimum((draw * total).long(), total - 1)
    found = torch.searchsorted(cumulative, point, right=True)
    return found.clamp_(max=cumulative.shape[1] - 1)
