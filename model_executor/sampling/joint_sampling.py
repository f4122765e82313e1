"""Sampling with temperature, top-k, top-p and min-p, by inverting the cumulative distribution.

The three filters are joint: each threshold is computed on the whole distribution after temperature, a token must pass
all filters, and the kept tokens are renormalised. The most probable token always passes.

Floating-point sums depend on the order of addition, and so on the batch and on the kernel. Probabilities are therefore
converted to integers ("weights"). Their sums are exact, so a draw gives the same token on all code paths.
"""

from __future__ import annotations

import torch

WEIGHT_BITS = 34
"""The most probable token has weight 2**34. A token that is 2**35 times less probable has weight 0."""
MAX_VOCAB_SIZE = 2**19
"""With more tokens the sum of weights could exceed 2**53, above which float64 does not hold every integer."""


def gaps_below_best(x: torch.Tensor, peak: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """The gap of each token: the best token's log probability less its own. float32 [n, vocab], >= 0. Overwrites x.

    Logits of +inf have equal gaps.
    """
    # Adding 0 turns -0.0 into 0.0. So the gap of each best token is 0.0. -0.0 has other bits and another rank.
    best = peak.clamp(max=torch.finfo(torch.float32).max).add_(0.0)
    return x.neg_().add_(best).clamp_(min=0).div_(temperature)


def weigh(gap: torch.Tensor) -> torch.Tensor:
    """Weights: probabilities relative to the best token's, in units of 2**-WEIGHT_BITS. int64, in the shape of gap."""
    return torch.neg(gap).exp_().mul_(2.0**WEIGHT_BITS).round_().long()


def choose_open(gap: torch.Tensor, draw: torch.Tensor, max_gap: torch.Tensor | None) -> torch.Tensor:
    """Draw tokens without top-k and top-p, by inverting the cumulative distribution over tokens in order of id.

    Args:
        gap: float32 [n, vocab]
        draw: float64 [n, 1] in [0, 1)
        max_gap: float32 [n, 1], the largest gap of a kept token; None: all tokens are kept
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
    """Draw tokens with top-k and top-p, by inverting the cumulative distribution over the kept tokens.

    Tokens are ranked by probability, the most probable first, then by id. The kept tokens are always the first ranks.

    Args:
        widths: numbers of tokens to rank. Rows that may keep more than widths[0] tokens are drawn again with
            widths[1:]; with several widths this waits for the result. The last width must suffice for all rows.
        gap: float32 [n, vocab]
        draw: float64 [n, 1] in [0, 1)
        top_k: int64 [n, 1], keeps a token of rank < top_k
        mass: int64 [n, 1], top_p times the weight of the whole vocabulary, rounded up. Keeps a token if the strictly
            more probable tokens together weigh less
        max_gap: float32 [n, 1], the largest gap of a kept token
    """
    width, *wider = widths
    gaps, ids = _closest(gap, width)
    cumulative = weigh(gaps).cumsum(dim=-1)
    # The token that completes the mass is kept, and so are the tokens of equal probability.
    completes = torch.searchsorted(cumulative, mass).clamp_(max=width - 1)
    last_gap = torch.minimum(gaps.gather(1, completes), max_gap)
    kept = (torch.arange(width, device=gap.device) < top_k) & (gaps <= last_gap)
    # The clamp is for a row of NaN, which keeps no token: its index must be in bounds, and its result is dropped.
    last = kept.sum(dim=-1, keepdim=True).sub_(1).clamp_(min=0)
    tokens = ids.gather(1, _invert(cumulative, cumulative.gather(1, last), draw)).squeeze(1)
    if wider:
        cut_short = (kept[:, -1:] & (top_k > width)).squeeze(1).nonzero().squeeze(1)
        if len(cut_short):
            again = [t.index_select(0, cut_short) for t in (gap, draw, top_k, mass, max_gap)]
            tokens.index_copy_(0, cut_short, choose_ranked(tuple(wider), *again))
    return tokens


def _closest(gap: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `width` smallest gaps in ascending order, and the tokens' ids: float32 and int64 [n, width].

    Equal gaps are in order of id. Non-negative floats have the order of their bits as integers. So keys of (bits, id)
    in one integer are unique, and every sorting algorithm gives the same order.
    """
    keys = gap.view(torch.int32).to(torch.int64).bitwise_left_shift_(32)
    keys += torch.arange(gap.shape[1], device=gap.device)
    if width < gap.shape[1]:
        keys = keys.topk(width, dim=-1, largest=False, sorted=True).values
    else:
        keys = keys.sort(dim=-1).values
    return (keys >> 32).to(torch.int32).view(torch.float32), keys & 0xFFFFFFFF


def _invert(cumulative: torch.Tensor, total: torch.Tensor, draw: torch.Tensor) -> torch.Tensor:
    """The first index whose cumulative weight exceeds draw * total: int64 [n, 1]. It is in bounds for any input."""
    point = torch.minimum((draw * total).long(), total - 1)
    found = torch.searchsorted(cumulative, point, right=True)
    return found.clamp_(max=cumulative.shape[1] - 1)
