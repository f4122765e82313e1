"""The mixture of experts against a plain loop over tokens, alone and in a batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.model_executor.layers.experts import Expert, ExpertWeights, RouterWeights, choose_experts
from tercet.model_executor.layers.kinds import TorchLayers
from tercet.srt.model_files.experts_config import ClampedGate, ExpertsConfig

HIDDEN, INTER = 32, 24


def of_token(x, router, experts, config):
    """The definition, for one token: x [hidden] -> float64 [hidden]."""
    x = x.double()
    logits = router.weight.double() @ x
    logits = logits if router.bias is None else logits + router.bias
    p = logits.sigmoid() if config.has_sigmoids else logits.softmax(0)
    ranked = p if router.corrections is None else p + router.corrections
    chosen = sorted(range(config.num_experts), key=lambda number: (-ranked[number].item(), number))
    chosen = sorted(chosen[: config.num_experts_per_token])
    total = sum(p[number] for number in chosen) if config.normalized else 1.0
    if config.has_corrections and config.normalized:
        total = max(total, config.least_sum)
    out = torch.zeros_like(x)
    for number in chosen:
        weights = experts[number]
        products = weights.gate_up.double() @ x
        gate, up = (products if weights.gate_up_bias is None else products + weights.gate_up_bias).chunk(2)
        if config.gate is None:
            inner = F.silu(gate) * up
        else:
            alpha, limit = config.gate
            gate, up = gate.minimum(torch.tensor(limit)), up.clamp(-limit, limit)
            inner = gate / (1 + (-alpha * gate).exp()) * (up + 1)
        outputs = weights.down.double() @ inner
        out += (
            p[number] / total * config.scale * (outputs if weights.down_bias is None else outputs + weights.down_bias)
        )
    return out


def make(config, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

    def bias(size):
        return random(4, size)[0] if config.has_biases else None

    corrections = torch.randn(config.num_experts, generator=generator) if config.has_corrections else None
    router = RouterWeights(random(config.num_experts, HIDDEN), bias(config.num_experts), corrections)
    experts = [
        ExpertWeights(random(2 * INTER, HIDDEN), random(HIDDEN, INTER), bias(2 * INTER), bias(HIDDEN))
        for _ in range(config.num_experts)
    ]
    return router, experts, random(300, HIDDEN) * 4


@settings(max_examples=20, deadline=None)
@given(
    num_experts=st.integers(1, 9),
    of_token_count=st.integers(1, 9),
    normalized=st.booleans(),
    num_tokens=st.integers(0, 12),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    gate=st.sampled_from([None, ClampedGate(1.702, 0.6), ClampedGate(0.5, 7.0)]),
    has_biases=st.booleans(),
    corrected=st.sampled_from([None, "sigmoids", "softmax"]),
)
def test_a_layer_is_the_weighted_sum_of_the_chosen_experts(
    num_experts, of_token_count, normalized, num_tokens, dtype, gate, has_biases, corrected
):
    config = ExpertsConfig(
        num_experts=num_experts,
        num_experts_per_token=min(num_experts, of_token_count),
        intermediate_size=INTER,
        normalized=normalized,
        gate=gate,
        has_biases=has_biases,
        has_sigmoids=corrected == "sigmoids",
        has_corrections=corrected is not None,
        least_sum=0.5,
        scale=2.5 if corrected else 1.0,
    )
    if corrected:
        dtype = torch.float32  # a rounding to bfloat16 may change the choice
    router, experts, x = make(config, dtype, seed=num_experts)
    x = x[:num_tokens]
    layer = TorchLayers().experts(router, experts, config)
    found = layer(x)
    assert found.shape == x.shape and found.dtype == dtype
    expected = [of_token(row, router, experts, config) for row in x]
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    for row, wanted in zip(found, expected, strict=True):
        assert (row.double() - wanted).norm() <= tolerance * wanted.norm()


@pytest.mark.parametrize("has_gate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_token_has_the_shared_expert(dtype, has_gate):
    """Its output, times the sigmoid of its gate, is added to that of the chosen experts."""
    config = ExpertsConfig(num_experts=5, num_experts_per_token=2, intermediate_size=INTER, normalized=True)
    router, experts, x = make(config, dtype)
    shared = experts[0]
    gate = x[-1:] / 4 if has_gate else None
    layers = TorchLayers()
    parts = Expert(layers.gated_linear(shared.gate_up, None, "silu"), layers.linear(shared.down, None))
    layer = layers.with_shared_expert(layers.experts(router, experts, config), parts, gate)
    found = layer(x)
    alone = ExpertsConfig(num_experts=1, num_experts_per_token=1, intermediate_size=INTER, normalized=True)
    for row, output in zip(x, found, strict=True):
        factor = 1 if gate is None else (gate.double() @ row.double()).sigmoid()
        of_shared = of_token(row, RouterWeights(router.weight[:1]), [shared], alone)
        wanted = of_token(row, router, experts, config) + factor * of_shared
        assert (output.double() - wanted).norm() <= (1e-5 if dtype == torch.float32 else 0.05) * wanted.norm()
    assert torch.equal(torch.cat([layer(row) for row in x.split(1)]), found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_sigmoids", [None, False, True])
def test_a_row_has_the_same_bits_in_any_batch(dtype, has_sigmoids):
    """`has_sigmoids`: of a router with corrections; None: it has none."""
    config = ExpertsConfig(
        num_experts=7,
        num_experts_per_token=3,
        intermediate_size=INTER,
        normalized=True,
        has_sigmoids=bool(has_sigmoids),
        has_corrections=has_sigmoids is not None,
    )
    router, experts, x = make(config, dtype)
    layer = TorchLayers().experts(router, experts, config)
    whole = layer(x)
    for start, stop in ((0, 1), (5, 8), (7, 200), *zip(range(100, 140), range(101, 141), strict=True), (299, 300)):
        assert torch.equal(layer(x[start:stop]), whole[start:stop])


def test_the_smaller_number_of_equal_experts_is_chosen():
    config = ExpertsConfig(num_experts=64, num_experts_per_token=3, intermediate_size=INTER, normalized=True)
    logits = torch.zeros(2, 64)
    logits[1, [9, 40, 50, 63]] = torch.tensor([1.0, 2.0, 1.0, 1.0])
    found = choose_experts(logits, config)
    assert found.experts.tolist() == [[0, 1, 2], [40, 9, 50]]
    torch.testing.assert_close(found.weights.sum(1), torch.ones(2))


def test_corrections_change_the_choice_and_not_the_weights():
    config = ExpertsConfig(
        num_experts=3,
        num_experts_per_token=2,
        intermediate_size=INTER,
        normalized=False,
        has_sigmoids=True,
        has_corrections=True,
        scale=4.0,
    )
    logits = torch.tensor([[0.0, 40.0, 0.0]])
    found = choose_experts(logits, config, torch.tensor([0.0, -1.0, 0.25]))
    assert found.experts.tolist() == [[2, 0]] and found.weights.tolist() == [[2.0, 2.0]]
    normalized = replace(config, normalized=True)
    assert choose_experts(logits, normalized, torch.zeros(3)).weights[0, 0] == 4 / 1.5
    assert choose_experts(logits - 1000, normalized, torch.zeros(3)).weights.tolist() == [[0.0, 0.0]]


def test_weights_that_are_not_normalized_are_those_of_all_experts():
    config = ExpertsConfig(num_experts=4, num_experts_per_token=1, intermediate_size=INTER, normalized=False)
    found = choose_experts(torch.tensor([[0.0, 0.0, 3.0, 0.0]]).log(), config)
    torch.testing.assert_close(found.weights, torch.tensor([[1.0]]))
    found = choose_experts(torch.tensor([[1.0, 2.0, 4.0, 1.0]]).log(), config)
    torch.testing.assert_close(found.weights, torch.tensor([[0.5]]))
