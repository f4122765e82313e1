from __future__ import annotations

import torch
from delta_net_cases import EPS, DeltaNetCase, check_saved_states
from fused_cases import same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_interpreter import examples

from tercet.model_executor.layers.delta_net import DeltaNet
from tercet.model_executor.layers.triton_layers import TritonDeltaNet
from tercet.srt.model_files.delta_net_config import DeltaNetConfig


@settings(max_examples=examples(15))
@given(
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    heads=st.sampled_from([(1, 1), (2, 2), (1, 3), (2, 4)]),
    dims=st.sampled_from([(4, 4), (3, 5), (8, 40)]),
    width=st.integers(2, 4),
    lens=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    num_padded=st.integers(0, 2),
)
def test_any_steps_have_the_bits_of_whole_prompts(seed, dtype, heads, dims, width, lens, num_padded) -> None:
    """Outputs and states, which are those of torch except for rounding. Other rows keep their states."""
    case = DeltaNetCase(seed, dtype, DeltaNetConfig((0,), *heads, *dims, width), lens)
    expected, wholes, states = (case.states() for _ in range(3))
    prompts = [(k, 0, length) for k, length in enumerate(lens)]
    by_torch = case.run(DeltaNet(case.sizes, expected, case.weights, EPS), prompts)
    outputs = case.run(TritonDeltaNet(case.sizes, wholes, case.weights, EPS), prompts)
    tolerance = 2e-4 if dtype == torch.float32 else 4e-3
    for out, of_torch in zip(outputs, by_torch, strict=True):
        torch.testing.assert_close(out, of_torch, rtol=tolerance, atol=tolerance)
    layer = TritonDeltaNet(case.sizes, states, case.weights, EPS)
    for chunks, decode in case.random_steps(seed):
        found = case.run(layer, chunks, decode=decode, num_padded=num_padded if decode else 0)
        for (k, start, end), out in zip(chunks, found, strict=True):
            assert same_bits(out, outputs[k][start:end])
    rows = case.rows.tolist()
    others = [row for row in range(1, case.num_rows + 1) if row not in rows]
    for found, whole, of_torch in zip(states, wholes, expected, strict=True):
        assert same_bits(found[rows], whole[rows]) and found[others].isnan().all()
        torch.testing.assert_close(whole[rows], of_torch[rows], rtol=2e-4, atol=2e-4, equal_nan=True)


@settings(max_examples=examples(15))
@given(
    seed=st.integers(0, 2**31),
    heads=st.sampled_from([(1, 1), (1, 3), (2, 4)]),
    dims=st.sampled_from([(3, 5), (8, 40)]),
    width=st.integers(2, 4),
    lens=st.lists(st.integers(1, 6), min_size=1, max_size=3),
)
def test_states_are_saved_after_any_token(seed, heads, dims, width, lens) -> None:
    case = DeltaNetCase(seed, torch.float32, DeltaNetConfig((0,), *heads, *dims, width), lens)
    check_saved_states(case, lambda states: TritonDeltaNet(case.sizes, states, case.weights, EPS), seed)
