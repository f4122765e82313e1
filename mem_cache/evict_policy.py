"""Eviction policies: which unlocked leaf of the radix cache is evicted first.

A policy maps a leaf's history to a key. The leaf with the smallest key is evicted first. Times are ticks of the
cache's own counter, not of a clock, so a run can be repeated exactly. Only the ends of retentions are times of a clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ..srt.model_files.model_config import ModelConfig


class LeafHistory(Protocol):
    """The facts about a leaf that a policy may use."""

    created: int  # tick of the insert of these tokens
    last_access: int  # tick of the last match or insert of these tokens
    num_uses: int  # number of locks so far that count as a use
    end: int  # length of the prefix that ends with the leaf, in tokens
    lead: int  # age, in ticks, at which prefixes were evicted when the leaf was last accessed
    retained_until_s: float  # end of the retention on a clock, in seconds; 0: there is none


EvictPolicy = Callable[[LeafHistory], tuple[float, ...]]

MAX_EXTRA_COST = 0.25
"""The cost of a token is at most this much above that of a token at the start of a prompt. With more, prefixes of long
conversations that are over displace those of conversations that go on (docs/log.md)."""


@dataclass(frozen=True)
class Value:
    """Evicts first the prefix whose loss costs least. It is the only policy that honours retention.

    Unretained prefixes go before all retained ones. Of retained prefixes, the one that expires first goes first. The
    unretained ones go by a virtual time of the last access:

        last access + (cost - 1) * lead

    `cost` is what the computation of the leaf's last token costs, relative to a token at the start of a prompt. It
    counts only for a prefix that has saved computation, because several requests have used it. `lead` is the age at
    which prefixes were evicted at the time of that access. So at equal pressure, a token that costs a quarter more
    stays for a quarter longer, and without retention and at equal costs the order is that of `lru`. This is
    GreedyDual-Size (Cao and Irani, "Cost-Aware WWW Proxy Caching Algorithms", 1997) in units of time; every token has
    the same size.
    """

    equal_cost_depth: float
    """The position in a prompt at which attention costs as much as all matrix products with the weights."""

    def __call__(self, leaf: LeafHistory) -> tuple[float, ...]:
        extra_cost = min(leaf.end / self.equal_cost_depth, MAX_EXTRA_COST) if leaf.num_uses > 1 else 0.0
        return (leaf.retained_until_s, leaf.last_access + extra_cost * leaf.lead, leaf.last_access)


def lru(leaf: LeafHistory) -> tuple[int, ...]:
    """Least recently used first."""
    return (leaf.last_access,)


def lfu(leaf: LeafHistory) -> tuple[int, ...]:
    """Least frequently used first, then least recently used."""
    return (leaf.num_uses, leaf.last_access)


def fifo(leaf: LeafHistory) -> tuple[int, ...]:
    """Oldest first, however recently it was used."""
    return (leaf.created,)


def mru(leaf: LeafHistory) -> tuple[int, ...]:
    """Most recently used first. Keeps part of a working set that is read in a circle and does not fit."""
    return (-leaf.last_access,)


def filo(leaf: LeafHistory) -> tuple[int, ...]:
    """Newest first. Keeps the first prefixes, such as those that were warmed at the start."""
    return (-leaf.created,)


EVICT_POLICIES: dict[str, EvictPolicy] = {
    "value": Value(equal_cost_depth=4096.0),
    "lru": lru,
    "lfu": lfu,
    "fifo": fifo,
    "mru": mru,
    "filo": filo,
}


def equal_cost_depth(config: ModelConfig) -> float:
    """The position at which a token's attention takes as many multiplications as its products with the weights.

    The weights are those of the layers: of experts, those that a token computes. Routers, and sliding windows, which
    make attention cheaper, do not count.
    """
    width = float(config.intermediate_size)
    if (experts := config.experts) is not None:
        share = len(experts.dense_layers) / config.num_layers
        shared_width = 0 if experts.shared is None else experts.shared.intermediate_size
        width_of_token = experts.num_experts_per_token * experts.intermediate_size + shared_width
        width = share * width + (1 - share) * width_of_token
    # The products of a query with a key, and of a weight with a value.
    of_pair = config.num_heads * (config.head_dim + config.attended_dim)
    layers_per_attention = config.num_layers / len(config.attention_layers)
    of_weights = _projections(config) + layers_per_attention * 3 * config.hidden_size * width
    if config.convolutions is not None:  # three vectors from the input, and the output from one
        of_weights += (layers_per_attention - 1) * 4 * config.hidden_size * config.convolutions.channels
    if config.delta_net is not None:
        columns = sum(config.delta_net.projected_sizes) + config.delta_net.value_size
        of_weights += (layers_per_attention - 1) * config.hidden_size * columns
    return of_weights / of_pair


def _projections(config: ModelConfig) -> int:
    """The multiplications of a token with the weights of attention in a layer."""
    hidden_size, num_heads, latent = config.hidden_size, config.num_heads, config.latent
    if latent is None:
        return hidden_size * (2 * (num_heads + config.num_kv_heads) * config.head_dim + config.num_attention_gates)
    queries = num_heads * latent.query_dim
    of_latents = num_heads * latent.latent_dim * (latent.nope_dim + latent.value_dim)
    first, second = (queries, 0) if latent.query_rank is None else (latent.query_rank, latent.query_rank * queries)
    return hidden_size * (first + latent.key_dim + num_heads * latent.value_dim) + second + of_latents


def get_evict_policy(name: str) -> EvictPolicy:
    """The policy called `name`. Raises ValueError with a list of the names for an unknown one."""
    policy = EVICT_POLICIES.get(name)
    if policy is None:
        raise ValueError(f"unknown eviction policy {name!r}; allowed: {', '.join(EVICT_POLICIES)}")
    return policy
