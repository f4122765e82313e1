"""The Gated DeltaNet in plain torch, against that of transformers."""

from __future__ import annotations

import pytest
import torch
from delta_net_cases import EPS, DeltaNetCase
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from tercet.model_executor.layers.delta_net import DeltaNet
from tercet.srt.model_files.delta_net_config import DeltaNetConfig


class _Split(torch.nn.Module):
    """A linear layer of transformers that returns its part of outputs that are given."""

    def __init__(self, start: int, size: int) -> None:
        super().__init__()
        self.columns = slice(start, start + size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[..., self.columns]


def _reference(case: DeltaNetCase) -> Qwen3_5GatedDeltaNet:
    sizes = case.sizes
    config = Qwen3_5TextConfig(
        hidden_size=8,
        linear_num_key_heads=sizes.num_key_heads,
        linear_num_value_heads=sizes.num_value_heads,
        linear_key_head_dim=sizes.key_dim,
        linear_value_head_dim=sizes.value_dim,
        linear_conv_kernel_dim=sizes.width,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        rms_norm_eps=EPS,
    )
    net = Qwen3_5GatedDeltaNet(config, 0)
    start = 0
    for name, size in zip(("qkv", "z", "b", "a"), sizes.projected_sizes, strict=True):
        setattr(net, f"in_proj_{name}", _Split(start, size))
        start += size
    net.out_proj = torch.nn.Identity()
    weights = case.weights
    parameters = (net.conv1d.weight, net.A_log, net.dt_bias, net.norm.weight)
    for parameter, value in zip(parameters, weights, strict=True):
        parameter.data.copy_(value)
    return net


@torch.inference_mode()
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    heads=st.sampled_from([(1, 1), (2, 2), (2, 6), (1, 3)]),
    dims=st.sampled_from([(4, 4), (3, 5), (16, 8)]),
    width=st.integers(2, 5),
    lens=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    num_padded=st.integers(0, 2),
)
def test_prompts_and_steps_have_the_outputs_of_transformers(
    seed: int, heads: tuple[int, int], dims: tuple[int, int], width: int, lens: list[int], num_padded: int
) -> None:
    case = DeltaNetCase(seed, torch.float32, DeltaNetConfig((0,), *heads, *dims, width), lens)
    whole = DeltaNet(case.sizes, case.states(), case.weights, EPS)
    expected = case.run(whole, [(k, 0, length) for k, length in enumerate(lens)])
    reference = _reference(case)
    for projected, out in zip(case.projected, expected, strict=True):
        torch.testing.assert_close(out, reference(projected[None])[0], rtol=2e-4, atol=2e-4)
    layer = DeltaNet(case.sizes, case.states(), case.weights, EPS)
    for chunks, decode in case.random_steps(seed):
        found = case.run(layer, chunks, decode=decode, num_padded=num_padded if decode else 0)
        for (k, start, end), out in zip(chunks, found, strict=True):
            torch.testing.assert_close(out, expected[k][start:end], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_type_rounds_only_inputs_and_outputs(dtype: torch.dtype) -> None:
    case = DeltaNetCase(0, dtype, DeltaNetConfig((0,), 2, 4, 8, 8, 4), [12, 1])
    chunks = [(0, 0, 12), (1, 0, 1)]
    found = case.run(DeltaNet(case.sizes, case.states(), case.weights, EPS), chunks)
    states = case.states()._replace(recent=case.states().recent.float())
    case.projected, case.dtype = [x.float() for x in case.projected], torch.float32
    for out, wide in zip(found, case.run(DeltaNet(case.sizes, states, case.weights, EPS), chunks), strict=True):
        assert torch.equal(out, wide.to(dtype))
