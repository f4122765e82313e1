"""Sampling with temperature, top-k, top-p and min-p, by bisection for thresholds instead of a sort of the vocabulary.

The filters are joint, as in joint_sampling.py: each threshold is computed on the whole distribution after temperature,
and a token must pass all filters. The kept tokens are renormalised, and the draw inverts their cumulative distribution.
A token's weight is its probability as an integer, in units of 2**-34 of the best token's probability. Sums of weights
are exact in any order.

A token's gap is the best token's log probability less its own. Gaps are not negative, so their bits, read as integers,
have the same order as the gaps. A bisection of 31 bits finds a threshold: the smallest gap for which the tokens up to
it satisfy one of these conditions:

- top-k: there are at least k of them,
- top-p: their weights sum to at least the mass,
- the draw: their weights sum to more than the draw.

Tokens of equal gap are ranked by id. The kernel first gathers the most probable tokens. It bisects over these instead
of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from .primitives import has_dense_rows

# With 16 warps neither kernel spills registers under Triton 3.6 and 3.9. Not yet measured on a device.
_RANKED_BLOCK = 4096
_OPEN_BLOCK = 2048
_CANDIDATES = 4096
_ONE = tl.constexpr(2**34)
_INF_BITS = tl.constexpr(0x7F800000)
# exp(-24.3) * 2**34 < 0.5: the weight of a token with a larger gap rounds to 0.
_WEIGHTLESS_BITS = tl.constexpr(0x41C26666)
_COARSE_BITS = tl.constexpr(19)
_UNLIMITED = tl.constexpr(2**62)


@triton.jit
def _weigh(gap):
    return (tl.exp(-gap) * _ONE + 0.5).to(tl.int64)


@triton.jit
def _best(peak):
    """The largest logit, made finite. -0.0 becomes 0.0, because a gap of -0.0 would have the wrong bits."""
    return tl.where(peak == 0.0, 0.0, tl.minimum(peak, 3.4028234663852886e38))


@triton.jit
def _gaps(values_ptr, start, n, best, temperature, GATHERED: tl.constexpr, BLOCK: tl.constexpr):
    """(gap, bits of the gap, whether the position is below n) for positions start .. start + BLOCK."""
    i = start + tl.arange(0, BLOCK)
    valid = i < n
    if GATHERED:
        gap = tl.load(values_ptr + i, mask=valid, other=float("inf"))
    else:
        x = tl.load(values_ptr + i, mask=valid, other=float("-inf")).to(tl.float32)
        gap = tl.div_rn(tl.maximum(best - x, 0.0), temperature)
    return gap, gap.to(tl.int32, bitcast=True), valid


@triton.jit
def _count(values_ptr, n, limit, best, temperature, GATHERED: tl.constexpr, BLOCK: tl.constexpr):
    """The number of tokens with gaps of at most `limit` (bits)."""
    total = tl.zeros([BLOCK], tl.int32)
    for start in range(0, n, BLOCK):
        _, bits, valid = _gaps(values_ptr, start, n, best, temperature, GATHERED, BLOCK)
        total += ((bits <= limit) & valid).to(tl.int32)
    return tl.sum(total, axis=0)


@triton.jit
def _weight(values_ptr, n, limit, best, temperature, GATHERED: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of the weights of tokens with gaps of at most `limit` (bits)."""
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, n, BLOCK):
        gap, bits, valid = _gaps(values_ptr, start, n, best, temperature, GATHERED, BLOCK)
        total += tl.where((bits <= limit) & valid, _weigh(gap), 0)
    return tl.sum(total, axis=0)


@triton.jit
def _reach(values_ptr, n, high, wanted, best, temperature, GATHERED: tl.constexpr, BLOCK: tl.constexpr):
    """The smallest gap (bits) up to which the weights sum to at least `wanted`, or `high` if none is below it."""
    low = 0
    while low < high:
        middle = low + (high - low) // 2
        if _weight(values_ptr, n, middle, best, temperature, GATHERED, BLOCK) >= wanted:
            high = middle
        else:
            low = middle + 1
    return high


@triton.jit
def _draw(
    values_ptr,
    n,
    top_k,
    mass,
    max_gap_bits,
    draw,
    best,
    temperature,
    GATHERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The position of the drawn token among the n tokens at values_ptr, which include all tokens that may be kept."""
    by_count = _INF_BITS + 0
    if top_k < n:
        low = 0
        while low < by_count:
            middle = low + (by_count - low) // 2
            count = _count(values_ptr, n, middle, best, temperature, GATHERED, BLOCK)
            if count >= top_k:
                by_count = middle
            else:
                low = middle + 1
            if count == top_k:
                low = by_count
    by_mass = _INF_BITS + 0
    if mass < _UNLIMITED:
        by_mass = _reach(values_ptr, n, by_mass, mass, best, temperature, GATHERED, BLOCK)
    limit = tl.minimum(tl.minimum(by_mass, max_gap_bits), by_count)
    total = _weight(values_ptr, n, limit, best, temperature, GATHERED, BLOCK)
    if (limit == by_count) & (top_k < n):
        # Among the tokens with exactly this gap, the ones with the highest ids are beyond the k-th.
        excess = _count(values_ptr, n, limit, best, temperature, GATHERED, BLOCK) - top_k
        total -= tl.maximum(excess, 0) * _weigh(limit.to(tl.float32, bitcast=True))
    point = tl.minimum((draw * total.to(tl.float64)).to(tl.int64), total - 1)
    chosen = _reach(values_ptr, n, limit, point + 1, best, temperature, GATHERED, BLOCK)
    before = _weight(values_ptr, n, chosen - 1, best, temperature, GATHERED, BLOCK)
    each = tl.maximum(_weigh(chosen.to(tl.float32, bitcast=True)), 1)
    nth = ((point - before) // each).to(tl.int32)
    seen = nth * 0
    position = seen + n
    for start in range(0, n, BLOCK):
        _, bits, valid = _gaps(values_ptr, start, n, best, temperature, GATHERED, BLOCK)
        equal = ((bits == chosen) & valid).to(tl.int32)
        rank = seen + tl.cumsum(equal, axis=0) - 1
        hit = (equal == 1) & (rank == nth)
        position = tl.minimum(position, tl.min(tl.where(hit, start + tl.arange(0, BLOCK), n), axis=0))
        seen += tl.sum(equal, axis=0)
    # In bounds for any input: a row with NaN finds no token, and its result is dropped.
    return tl.minimum(position, n - 1)


@triton.jit
def _sample_ranked_kernel(
    x_ptr,
    peak_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    max_gap_ptr,
    draw_ptr,
    gap_ptr,
    id_ptr,
    out_ptr,
    stride_x,
    vocab,
    BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    values = x_ptr + row * stride_x
    peak = tl.load(peak_ptr + row)
    best = _best(peak)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row).to(tl.int32)
    max_gap_bits = tl.load(max_gap_ptr + row).to(tl.int32, bitcast=True)
    draw = tl.load(draw_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    mass = draw.to(tl.int64) * 0 + _UNLIMITED
    if top_p < 1.0:
        everything = _weight(values, vocab, _WEIGHTLESS_BITS, best, temperature, False, BLOCK)
        mass = tl.ceil(everything.to(tl.float64) * top_p).to(tl.int64)

    # Find a coarse limit of the gap below which all tokens fit into the candidates.
    limit = _WEIGHTLESS_BITS + 0
    if _count(values, vocab, limit, best, temperature, False, BLOCK) > CANDIDATES:
        low = 0
        high = limit >> _COARSE_BITS
        while low < high:
            middle = (low + high + 1) // 2
            edge = ((middle + 1) << _COARSE_BITS) - 1
            if _count(values, vocab, edge, best, temperature, False, BLOCK) <= CANDIDATES:
                low = middle
            else:
                high = middle - 1
        limit = ((low + 1) << _COARSE_BITS) - 1
    found = top_k * 0
    weight = mass * 0
    for start in range(0, vocab, BLOCK):
        gap, bits, valid = _gaps(values, start, vocab, best, temperature, False, BLOCK)
        near = ((bits <= limit) & valid).to(tl.int32)
        place = found + tl.cumsum(near, axis=0) - 1
        fits = (near == 1) & (place < CANDIDATES)
        tl.store(gap_ptr + row * CANDIDATES + place, gap, mask=fits)
        tl.store(id_ptr + row * CANDIDATES + place, start + tl.arange(0, BLOCK), mask=fits)
        weight += tl.sum(tl.where(near == 1, _weigh(gap), 0), axis=0)
        found += tl.sum(near, axis=0)
    tl.debug_barrier()  # the next loads read what other threads stored
    # The candidates include all tokens that may be kept if any one filter ends within them.
    enough = (top_k <= found) | (weight >= mass) | (max_gap_bits <= limit) | (limit == _WEIGHTLESS_BITS)
    if enough & (found <= CANDIDATES):
        gathered = gap_ptr + row * CANDIDATES
        position = _draw(gathered, found, top_k, mass, max_gap_bits, draw, best, temperature, True, BLOCK)
        token = tl.load(id_ptr + row * CANDIDATES + tl.maximum(position, 0), mask=found > 0, other=0)
    else:
        token = _draw(values, vocab, top_k, mass, max_gap_bits, draw, best, temperature, False, BLOCK)
    token = tl.where(peak > float("-inf"), token, -1)
    tl.store(out_ptr + row, token.to(tl.int64))


@triton.jit
def _sample_open_kernel(
    x_ptr,
    peak_ptr,
    temperature_ptr,
    max_gap_ptr,
    draw_ptr,
    out_ptr,
    stride_x,
    vocab,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    values = x_ptr + row * stride_x
    peak = tl.load(peak_ptr + row)
    best = _best(peak)
    temperature = tl.load(temperature_ptr + row)
    limit = tl.load(max_gap_ptr + row).to(tl.int32, bitcast=True)
    draw = tl.load(draw_ptr + row)
    total = _weight(values, vocab, limit, best, temperature, False, BLOCK)
    point = tl.minimum((draw * total.to(tl.float64)).to(tl.int64), total - 1)
    before = point * 0
    token = (point * 0).to(tl.int32) + vocab
    for start in range(0, vocab, BLOCK):
        gap, bits, valid = _gaps(values, start, vocab, best, temperature, False, BLOCK)
        weights = tl.where((bits <= limit) & valid, _weigh(gap), 0)
        cumulative = before + tl.cumsum(weights, axis=0)
        past = tl.where((cumulative > point) & valid, start + tl.arange(0, BLOCK), vocab)
        token = tl.minimum(token, tl.min(past, axis=0))
        before += tl.sum(weights, axis=0)
    token = tl.where(peak > float("-inf"), tl.minimum(token, vocab - 1), -1)
    tl.store(out_ptr + row, token.to(tl.int64))


def sample_open(
    x: torch.Tensor, peak: torch.Tensor, temperature: torch.Tensor, max_gap: torch.Tensor, draw: torch.Tensor
) -> torch.Tensor:
    """Draw a token of each row without top-k and top-p: int64 [n], or -1 if the row's peak is NaN or -inf.

    Inverts the cumulative distribution over the tokens in order of id, in two passes.
    x: [n, vocab] logits, any float dtype, last dimension contiguous, vocab at most 2**19 (sums stay below 2**53).
    peak: float32 [n], the largest logit of each row. temperature: float32 [n], > 0. max_gap: float32 [n], the largest
    gap (after temperature) of a kept token. draw: float64 [n] in [0, 1).
    """
    n, vocab = x.shape
    assert has_dense_rows(x) and vocab <= 2**19
    assert peak.shape == temperature.shape == max_gap.shape == draw.shape == (n,)
    assert draw.dtype == torch.float64 and peak.dtype == temperature.dtype == max_gap.dtype == torch.float32
    out = torch.empty(n, dtype=torch.int64, device=x.device)
    if n:
        _sample_open_kernel[(n,)](
            x,
            peak,
            temperature,
            max_gap,
            draw,
            out,
            x.stride(0),
            vocab,
            BLOCK=min(_OPEN_BLOCK, triton.next_power_of_2(vocab)),
            num_warps=16,
        )
    return out


def sample_ranked(
    x: torch.Tensor,
    peak: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    max_gap: torch.Tensor,
    draw: torch.Tensor,
    *,
    num_candidates: int = _CANDIDATES,
) -> torch.Tensor:
    """Draw a token of each row with top-k and top-p: int64 [n], or -1 if the row's peak is NaN or -inf.

    Inverts the cumulative distribution over the kept tokens, the most probable first, then by id.
    top_k: int [n], keeps tokens of rank < top_k. top_p: float64 [n], keeps a token if the strictly more probable tokens
    together weigh less than top_p of the total; 1 keeps all. Other arguments as in `sample_open`.
    num_candidates: room for gathered tokens. A row that needs more searches the whole vocabulary, with the same result.
    """
    n, vocab = x.shape
    assert has_dense_rows(x) and vocab <= 2**19
    assert peak.shape == temperature.shape == top_k.shape == top_p.shape == max_gap.shape == draw.shape == (n,)
    assert draw.dtype == top_p.dtype == torch.float64
    assert peak.dtype == temperature.dtype == max_gap.dtype == torch.float32
    out = torch.empty(n, dtype=torch.int64, device=x.device)
    gaps = torch.empty((n, num_candidates), dtype=torch.float32, device=x.device)
    ids = torch.empty((n, num_candidates), dtype=torch.int32, device=x.device)
    if n:
        _sample_ranked_kernel[(n,)](
            x,
            peak,
            temperature,
            top_k,
            top_p,
            max_gap,
            draw,
            gaps,
            ids,
            out,
            x.stride(0),
            vocab,
            BLOCK=min(_RANKED_BLOCK, triton.next_power_of_2(vocab)),
            CANDIDATES=num_candidates,
            num_warps=16,
        )
    return out


def weigh_ref(gap: torch.Tensor) -> torch.Tensor:
    """Weights in units of 2**-34 of the best token's: int64, in the shape of gap."""
    return (torch.exp(-gap) * 2.0**34 + 0.5).long()


def sample_ref(
    x: torch.Tensor,
    peak: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    max_gap: torch.Tensor,
    draw: torch.Tensor,
    weigh: Callable[[torch.Tensor], torch.Tensor] = weigh_ref,
) -> torch.Tensor:
    """`sample_ranked` in plain torch, with a sort; with top_k and top_p None, `sample_open`.

    weigh: the function from gaps to weights. Tests pass one with the exp of the device.
    """
    out = torch.full((x.shape[0],), -1, dtype=torch.int64, device=x.device)
    for row in range(x.shape[0]):
        if not peak[row] > -torch.inf:
            continue
        best = peak[row].clamp(max=torch.finfo(torch.float32).max)
        gap = (best - x[row].float()).clamp(min=0) / temperature[row]
        weights = weigh(gap)
        rank = order = torch.arange(len(gap), device=x.device)
        kept = gap <= max_gap[row]
        if top_k is not None and top_p is not None:
            gap, order = gap.sort(stable=True)
            weights = weights[order]
            kept = (gap <= max_gap[row]) & (rank < top_k[row])
            if top_p[row] < 1:
                mass = torch.ceil(weights.sum() * top_p[row])
                strictly_better = torch.searchsorted(gap, gap)
                before = torch.nn.functional.pad(weights.cumsum(0), (1, 0))[strictly_better]
                kept &= before < mass
        cumulative = (weights * kept).cumsum(0)
        point = torch.minimum((draw[row] * cumulative[-1]).long(), cumulative[-1] - 1)
        out[row] = order[torch.searchsorted(cumulative, point, right=True)]
    return out
