"""A mixture of experts in plain torch: a feed-forward layer of which each token computes a few parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ...srt.model_files.experts_config import ExpertsConfig
from ..forward_batch import ForwardBatch
from .linear import float32_logits
from .residual import Layer


class RouterWeights(NamedTuple):
    """The weights of a router."""

    weight: Any
    """[num_experts, hidden]"""
    bias: torch.Tensor | None = None
    """[num_experts]; None: the router has none"""
    corrections: torch.Tensor | None = None
    """float32 [num_experts]: what is added to the weights for the choice; None: there are none"""


class ExpertWeights(NamedTuple):
    """The weights of an expert, of any type that the layers have. Without biases, these are None."""

    gate_up: Any
    """[2 * inter, hidden], the rows of gate first"""
    down: Any
    """[hidden, inter]"""
    gate_up_bias: torch.Tensor | None = None
    """[2 * inter]"""
    down_bias: torch.Tensor | None = None
    """[hidden]"""


class Expert(NamedTuple):
    """The layers of an expert."""

    gate_up: Layer
    """[T, hidden] -> the activation of gate and up [T, inter]"""
    down: Layer
    """[T, inter] -> [T, hidden]"""


class Choice(NamedTuple):
    """The experts of each token."""

    experts: torch.Tensor
    """int64 [T, num_experts_per_token]"""
    weights: torch.Tensor
    """float32 [T, num_experts_per_token]"""


def choose_experts(logits: torch.Tensor, config: ExpertsConfig, corrections: torch.Tensor | None = None) -> Choice:
    """The most probable experts of each token, and the smaller number of equal ones: logits float32 [T, num_experts].

    The probabilities are those of all experts. `config` says whether sigmoids take their place, and how many groups the
    experts are in. Corrections, [num_experts], are added for the choice.
    """
    of_all = _sigmoid(logits) if config.has_sigmoids else logits.softmax(-1)
    ranked = of_all if corrections is None else of_all + corrections
    allowed = None if config.num_groups == 1 else _experts_of_groups(ranked, config)
    order = (ranked if allowed is None else ranked.gather(1, allowed)).sort(dim=-1, descending=True, stable=True)
    experts = order.indices[:, : config.num_experts_per_token]
    if allowed is not None:
        experts = allowed.gather(1, experts)
    weights = of_all.gather(1, experts)
    if config.normalized:
        total = weights.sum(-1, keepdim=True)
        weights /= total if corrections is None else total.clamp_(min=config.least_sum)
    return Choice(experts, weights.mul_(config.scale))


def _experts_of_groups(ranked: torch.Tensor, config: ExpertsConfig) -> torch.Tensor:
    """The experts that each token may choose, in ascending order: int64 [T, experts of groups_per_token groups].

    `ranked`: float32 [T, num_experts], by which groups and experts are chosen.
    """
    by_group = ranked.unflatten(1, (config.num_groups, -1))
    scores = by_group.topk(2 if config.has_corrections else 1, dim=-1).values.sum(-1)
    groups = scores.sort(dim=-1, descending=True, stable=True).indices[:, : config.groups_per_token].sort(-1).values
    size = by_group.shape[2]
    return (groups[:, :, None] * size + torch.arange(size, device=ranked.device)).flatten(1)


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    """On a CPU, torch's own computes the last numbers of a tensor in another way, so bits would depend on the batch."""
    return x.sigmoid() if x.is_cuda else 1 / (1 + (-x).exp())


class ComposedExperts:
    """The experts as layers of their own. Each is called once, for the tokens that chose it.

    The outputs are added in float32, in the order of the experts. So a row does not depend on the batch, if no row of
    the layers does. Which layers are called depends on the data, so a step with such a layer cannot be recorded.
    """

    def __init__(
        self, router: Layer, experts: Sequence[Expert], config: ExpertsConfig, corrections: torch.Tensor | None
    ) -> None:
        """`corrections`: those of RouterWeights."""
        assert len(experts) == config.num_experts and config.has_corrections == (corrections is not None)
        self._router = router
        self._corrections = corrections
        self._experts = experts
        self._config = config

    def __call__(self, x: torch.Tensor, batch: ForwardBatch | None = None) -> torch.Tensor:
        chosen, weights = choose_experts(float32_logits(self._router, x, None), self._config, self._corrections)
        out = torch.zeros_like(x, dtype=torch.float32)
        for number in chosen.unique().tolist():  # in ascending order
            gate_up, down = self._experts[number]
            tokens, places = torch.where(chosen == number)
            outputs = down(gate_up(x[tokens]))
            out[tokens] += weights[tokens, places, None] * outputs
        return out.to(x.dtype)


def add_gated(out: torch.Tensor, x: torch.Tensor, gates: torch.Tensor | None) -> None:
    """Add sigmoid(gates) * x to `out` in place, rounded once: out, x [T, n], gates float32 [T, 1]. None: add x."""
    out.add_(x if gates is None else _sigmoid(gates) * x)


class WithSharedExpert:
    """The sum of a mixture of experts and of a shared expert, which each token computes."""

    def __init__(
        self,
        routed: Layer,
        shared: Expert,
        gate: Layer | None,
        add: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], None] = add_gated,
    ) -> None:
        """`routed`: the mixture. `gate`: a linear layer with one output, whose sigmoid multiplies the output of the
        shared expert; None: there is none. `add`: adds as `add_gated` does."""
        self.routed = routed
        self._shared = shared
        self._gate = gate
        self._add = add

    def __call__(self, x: torch.Tensor, batch: ForwardBatch | None = None) -> torch.Tensor:
        out = self.routed(x, batch)
        gates = None if self._gate is None else float32_logits(self._gate, x, None)
        self._add(out, self._shared.down(self._shared.gate_up(x, batch), batch), gates)
        return out
