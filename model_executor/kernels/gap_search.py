"""The search of a token in the gaps of a line: device functions of the sampling kernels (sampling.py).

A token's gap is the best token's log probability less its own. Gaps are not negative, so their bits, read as integers,
have the same order as the gaps. A token's weight is its probability as an integer, in units of 2**-34 of the best
token's probability. Sums of weights are exact in any order. A bisection of the bits finds a threshold: the smallest gap
for which the tokens up to it satisfy one of these conditions:

- top-k: there are at least k of them,
- top-p: their weights sum to at least the mass,
- the draw: their weights sum to more than the draw.

Tokens of equal gap are ranked by id. Most functions read tokens at `values`: their gaps, with their `ids` (GATHERED),
or the logits of the vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl

_ONE = tl.constexpr(2**34)
WEIGHTLESS = tl.constexpr(0x41C26666)
"""The bits of 24.3. exp(-24.3) * 2**34 < 0.5: the weight of a token with a larger gap rounds to 0."""
_UNLIMITED = tl.constexpr(2**62)
_NEVER = tl.constexpr(2**31 - 1)
# A bucket is 1/64 of an octave of gaps. The first one has all gaps below 2**-6, and 673 is the last that has a weight.
_BUCKET_SHIFT = tl.constexpr(17)
_FIRST_BUCKET = tl.constexpr(0x3C800000 >> 17)


@triton.jit
def weigh(gap):
    """The weights of tokens with these gaps: int64."""
    return (tl.exp(-gap) * _ONE + 0.5).to(tl.int64)


@triton.jit
def gaps_of(x, best, temperature):
    """The gaps of tokens with the logits x: float32, not negative. best: the largest logit."""
    return tl.div_rn(tl.maximum(best - x, 0.0), temperature)


@triton.jit
def mass_of(total, top_p):
    """The weight that top-p keeps at least. `total`: the weight of the vocabulary."""
    return tl.where(top_p < 1.0, tl.ceil(total.to(tl.float64) * top_p).to(tl.int64), _UNLIMITED)


@triton.jit
def bucket_of(bits):
    """The bucket of gaps with these bits."""
    return tl.maximum((bits >> _BUCKET_SHIFT) - _FIRST_BUCKET, 0)


@triton.jit
def bucket_end(bucket):
    """The bits of the largest gap of a bucket."""
    return ((bucket + _FIRST_BUCKET + 1) << _BUCKET_SHIFT) - 1


@triton.jit
def _read(values, ids, start, n, best, temperature, GATHERED: tl.constexpr, BLOCK: tl.constexpr):
    """(gap, bits of the gap, id) of the tokens start .. start + BLOCK; from the n-th on the bits are the largest."""
    i = start + tl.arange(0, BLOCK)
    valid = i < n
    if GATHERED:
        gap = tl.load(values + i, mask=valid, other=float("inf"))
        i = tl.load(ids + i, mask=valid, other=0)
    else:
        x = tl.load(values + i, mask=valid, other=float("-inf"))
        gap = gaps_of(x, best, temperature)
    return gap, tl.where(valid, gap.to(tl.int32, bitcast=True), _NEVER), i


@triton.jit
def _count(values, ids, n, limit, best, temperature, GATHERED: tl.constexpr, BLOCK: tl.constexpr):
    """The number of tokens with gaps of at most `limit` (bits)."""
    total = tl.zeros([BLOCK], tl.int32)
    for start in range(0, n, BLOCK):
        _, bits, _ = _read(values, ids, start, n, best, temperature, GATHERED, BLOCK)
        total += (bits <= limit).to(tl.int32)
    return tl.sum(total, axis=0)


@triton.jit
def _weight(values, ids, n, limit, best, temperature, GATHERED: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of the weights of tokens with gaps of at most `limit` (bits)."""
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, n, BLOCK):
        gap, bits, _ = _read(values, ids, start, n, best, temperature, GATHERED, BLOCK)
        total += tl.where(bits <= limit, weigh(gap), 0)
    return tl.sum(total, axis=0)


@triton.jit
def _reach(values, ids, n, low, high, wanted, best, temperature, GATHERED: tl.constexpr, BLOCK: tl.constexpr):
    """The smallest gap (bits) from `low` on up to which the weights sum to `wanted`, or `high` if none is below it."""
    while low < high:
        middle = low + (high - low) // 2
        if _weight(values, ids, n, middle, best, temperature, GATHERED, BLOCK) >= wanted:
            high = middle
        else:
            low = middle + 1
    return high


@triton.jit
def draw_by_rank(
    values, ids, n, limit, top_k, mass, draw, best, temperature, GATHERED: tl.constexpr, BLOCK: tl.constexpr
):
    """The token drawn from the n tokens at `values`, which include all with gaps of at most `limit` (bits).

    `limit` ends the first bucket in which a filter ends, or is the largest gap that may be kept.
    """
    bucket = bucket_of(limit)
    low = tl.where(bucket > 0, bucket_end(bucket - 1) + 1, 0)
    by_count = limit * 0 + _NEVER
    if _count(values, ids, n, limit, best, temperature, GATHERED, BLOCK) >= top_k:
        by_count = limit
        start = low
        while start < by_count:
            middle = start + (by_count - start) // 2
            count = _count(values, ids, n, middle, best, temperature, GATHERED, BLOCK)
            if count >= top_k:
                by_count = middle
            else:
                start = middle + 1
            if count == top_k:
                start = by_count
    last = tl.minimum(limit, by_count)
    if mass < _UNLIMITED:
        last = _reach(values, ids, n, low, last, mass, best, temperature, GATHERED, BLOCK)
    total = _weight(values, ids, n, last, best, temperature, GATHERED, BLOCK)
    if last == by_count:
        # Among the tokens with exactly this gap, the ones with the highest ids are beyond the k-th.
        excess = _count(values, ids, n, last, best, temperature, GATHERED, BLOCK) - top_k
        total -= tl.maximum(excess, 0) * weigh(last.to(tl.float32, bitcast=True))
    point = tl.minimum((draw * total.to(tl.float64)).to(tl.int64), total - 1)
    chosen = _reach(values, ids, n, limit * 0, last, point + 1, best, temperature, GATHERED, BLOCK)
    before = _weight(values, ids, n, chosen - 1, best, temperature, GATHERED, BLOCK)
    each = tl.maximum(weigh(chosen.to(tl.float32, bitcast=True)), 1)
    rank = ((point - before) // each).to(tl.int32)
    # Tokens of equal gap are ranked by id. Mostly there is one.
    first = limit * 0 + _NEVER
    final = limit * 0
    for start in range(0, n, BLOCK):
        _, bits, token = _read(values, ids, start, n, best, temperature, GATHERED, BLOCK)
        first = tl.minimum(first, tl.min(tl.where(bits == chosen, token, _NEVER), axis=0))
        final = tl.maximum(final, tl.max(tl.where(bits == chosen, token, 0), axis=0))
    while first < final:
        middle = first + (final - first) // 2
        equal = tl.zeros([BLOCK], tl.int32)
        for start in range(0, n, BLOCK):
            _, bits, token = _read(values, ids, start, n, best, temperature, GATHERED, BLOCK)
            equal += ((bits == chosen) & (token <= middle)).to(tl.int32)
        if tl.sum(equal, axis=0) > rank:
            final = middle
        else:
            first = middle + 1
    return final


@triton.jit
def draw_by_id(
    values, sums, last, draw, best, temperature, vocab, num_chunks, CHUNK: tl.constexpr, PARTS: tl.constexpr
):
    """The token drawn from all with gaps of at most `last` (bits). `sums`: the weight of each chunk of them."""
    part = tl.arange(0, PARTS)
    weights = tl.load(sums + part, mask=part < num_chunks, other=0)
    total = tl.sum(weights, axis=0)
    point = tl.minimum((draw * total.to(tl.float64)).to(tl.int64), total - 1)
    chunk = tl.min(tl.where(tl.cumsum(weights, axis=0) > point, part, num_chunks - 1), axis=0)
    before = tl.sum(tl.where(part < chunk, weights, 0), axis=0)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    gap = gaps_of(tl.load(values + i, mask=i < vocab, other=float("-inf")), best, temperature)
    inside = (gap.to(tl.int32, bitcast=True) <= last) & (i < vocab)
    cumulative = before + tl.cumsum(tl.where(inside, weigh(gap), 0), axis=0)
    return tl.min(tl.where(cumulative > point, i, vocab - 1), axis=0)
