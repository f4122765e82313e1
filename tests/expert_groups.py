"""Groups of experts: the definition of the choice, and logits of a router with exact weights in any kind of layers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from hypothesis import strategies as st


class Groups(NamedTuple):
    """The numbers of groups and of those that a token has, as in ExpertsConfig, and the experts of a group."""

    count: int
    per_token: int
    size: int

    @property
    def num_experts(self) -> int:
        return self.count * self.size

    @property
    def experts_per_token(self) -> int:
        """The most experts that a token may have."""
        return self.per_token * self.size


@st.composite
def drawn_groups(draw: st.DrawFn) -> Groups:
    """Groups of at least two experts."""
    count = draw(st.integers(2, 6))
    return Groups(count, draw(st.integers(1, count)), draw(st.integers(2, 5)))


def chosen_experts(ranked: list[float], per_token: int, groups: Groups, num_scored: int) -> list[int]:
    """The experts of a token, in ascending order, by a number of each expert.

    `num_scored`: the score of a group is the sum of so many of its largest numbers.
    """
    members = [range(first, first + groups.size) for first in range(0, groups.num_experts, groups.size)]

    def score(group: int) -> float:
        return sum(sorted((ranked[expert] for expert in members[group]), reverse=True)[:num_scored])

    best = sorted(range(groups.count), key=lambda group: (-score(group), group))[: groups.per_token]
    allowed = [expert for group in best for expert in members[group]]
    return sorted(sorted(allowed, key=lambda expert: (-ranked[expert], expert))[:per_token])


def exact_rows(seed: int, rows: int, num_experts: int) -> torch.Tensor:
    """Logits float32 [rows, num_experts], of which many are equal.

    Their sigmoids are 1/2 and 1. Their probabilities are 0 and a power of two, because that many experts share them.
    """
    generator = torch.Generator().manual_seed(seed)
    places = torch.rand(rows, num_experts, generator=generator).argsort(-1)
    sharing = 2 ** torch.randint(0, num_experts.bit_length(), (rows, 1), generator=generator)
    return (places < sharing) * 256.0


def exact_corrections(seed: int, num_experts: int) -> torch.Tensor:
    """Corrections float32 [num_experts]. Their sums with such weights are exact, and many are equal."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, (num_experts,), generator=generator) / 2


def exact_weights(logits: torch.Tensor, *, sigmoids: bool) -> torch.Tensor:
    """The weights of all experts in float32, as every kind of layers rounds them."""
    wide = logits.double()
    return (wide.sigmoid() if sigmoids else wide.softmax(-1)).float()
