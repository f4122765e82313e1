"""The compiled operation of Gated DeltaNets, against the layer in torch."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from cpu_ops import DTYPES, assert_close
from delta_net_cases import EPS, DeltaNetCase, check_saved_states
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.model_executor import cpu_extension
from tercet.model_executor.layers.cpu_delta_net import CpuDeltaNet
from tercet.model_executor.layers.delta_net import DeltaNet
from tercet.srt.model_files.delta_net_config import DeltaNetConfig

pytestmark = pytest.mark.skipif(cpu_extension.load() is None, reason="no build of csrc/cpu for this processor")
ops = torch.ops.tercet_cpu


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from(DTYPES),
    heads=st.sampled_from([(1, 1), (2, 2), (2, 6), (1, 3)]),
    dims=st.sampled_from([(4, 4), (3, 5), (32, 20), (20, 33), (16, 96)]),
    width=st.integers(2, 5),
    lens=st.lists(st.integers(1, 12), min_size=1, max_size=4),
)
def test_any_steps_have_the_bits_of_whole_prompts(
    seed: int,
    dtype: torch.dtype,
    heads: tuple[int, int],
    dims: tuple[int, int],
    width: int,
    lens: list[int],
) -> None:
    case = DeltaNetCase(seed, dtype, DeltaNetConfig((0,), *heads, *dims, width), lens)
    prompts = [(k, 0, length) for k, length in enumerate(lens)]
    states, wholes, by_torch = case.states(), case.states(), case.states()
    expected = case.run(DeltaNet(case.sizes, by_torch, case.weights, EPS), prompts)
    outputs = case.run(CpuDeltaNet(case.sizes, wholes, case.weights, EPS), prompts)
    for out, of_torch in zip(outputs, expected, strict=True):
        assert_close(out, of_torch.double(), dtype)
    layer = CpuDeltaNet(case.sizes, states, case.weights, EPS)
    for chunks, decode in case.random_steps(seed):
        found = case.run(layer, chunks, decode=decode)
        for (k, start, end), out in zip(chunks, found, strict=True):
            assert torch.equal(out, outputs[k][start:end])
    rows = case.rows.tolist()
    for found, whole in zip(states, wholes, strict=True):
        assert torch.equal(found[rows].nan_to_num(nan=9), whole[rows].nan_to_num(nan=9))
        others = [row for row in range(len(found)) if row not in rows]
        assert found[others].isnan().all(), "the states of other rows stay as they are"
    torch.testing.assert_close(states.matrices[rows], by_torch.matrices[rows], rtol=1e-4, atol=1e-4)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    layer=st.sampled_from([CpuDeltaNet, DeltaNet]),
    dtype=st.sampled_from(DTYPES),
    heads=st.sampled_from([(1, 1), (2, 6)]),
    dims=st.sampled_from([(3, 5), (20, 33), (16, 96)]),
    width=st.integers(2, 5),
    lens=st.lists(st.integers(1, 90), min_size=1, max_size=3),
)
def test_states_are_saved_after_any_token(
    seed: int,
    layer: type[DeltaNet],
    dtype: torch.dtype,
    heads: tuple[int, int],
    dims: tuple[int, int],
    width: int,
    lens: list[int],
) -> None:
    case = DeltaNetCase(seed, dtype, DeltaNetConfig((0,), *heads, *dims, width), lens)
    if layer is DeltaNet:  # whose products have the same bits only in equal batches
        case = DeltaNetCase(seed, dtype, DeltaNetConfig((0,), *heads, *dims, width), lens[:1])
    check_saved_states(case, lambda states: layer(case.sizes, states, case.weights, EPS), seed, longest=70)


@pytest.mark.parametrize("length", [31, 32, 33, 70])
def test_a_prompt_of_several_blocks_of_tokens(length: int) -> None:
    case = DeltaNetCase(1, torch.float32, DeltaNetConfig((0,), 2, 4, 128, 128, 4), [length, 3])
    chunks = [(0, 0, length), (1, 0, 3)]
    expected = case.run(DeltaNet(case.sizes, case.states(), case.weights, EPS), chunks)
    for out, of_torch in zip(
        case.run(CpuDeltaNet(case.sizes, case.states(), case.weights, EPS), chunks), expected, strict=True
    ):
        assert_close(out, of_torch.double(), torch.float32)


@dataclasses.dataclass
class _Arguments:
    """The arguments of the operation for a decode step of four requests."""

    case: DeltaNetCase

    def __post_init__(self) -> None:
        weights, sizes = self.case.weights, self.case.sizes
        self.states = self.case.states()
        self.values: dict[str, Any] = {
            "projected": torch.cat(self.case.projected),
            "convolution": weights.convolution.flatten(1).t().float().contiguous(),
            "decay_rate": weights.decay_log.exp(),
            "decay_bias": weights.decay_bias,
            "norm": weights.norm.float(),
            "eps": EPS,
            "num_key_heads": sizes.num_key_heads,
            "positions": torch.zeros(4, dtype=torch.int64),
            "rows": self.case.rows.clone(),
            "starts": None,
            "saved_lens": None,
            "saved_rows": None,
            "recent": self.states.recent,
            "states": self.states.matrices,
        }

    def run(self, **changes: Any) -> torch.Tensor:
        return ops.delta_net(*(self.values | changes).values())


@pytest.fixture
def arguments() -> _Arguments:
    return _Arguments(DeltaNetCase(2, torch.float32, DeltaNetConfig((0,), 2, 4, 16, 16, 4), [1] * 4))


def test_a_recorded_step_of_fewer_requests(arguments: _Arguments) -> None:
    graph = torch.classes.tercet_cpu.Graph()
    graph.record(4, 4, 4)
    out = arguments.run()
    graph.finish()
    expected = arguments.run()
    for count in (4, 2):
        out.fill_(7)
        graph.run(count, count, count)
        assert torch.equal(out[:count], expected[:count]) and (out[count:] == 7).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": torch.tensor([1, 2, 3, 7])}, "rows must be in"),
        ({"rows": torch.tensor([1, 2, -1, 3])}, "rows must be in"),
        ({"positions": torch.tensor([0, 0, 0, -1])}, "positions must be at least 0"),
        ({"starts": torch.tensor([1, 2, 3, 3, 4])}, "starts must begin with 0"),
        ({"starts": torch.tensor([0, 2, 2, 3, 4])}, "starts must increase"),
        ({"starts": torch.tensor([0, 1, 2, 3, 5])}, "starts must increase to at most 4"),
        ({"num_key_heads": 3}, r"must be a multiple of that of key heads \(3\), got 4"),
        ({"saved_lens": torch.tensor([0, 0, 1, 0])}, "saved_lens and saved_rows belong together"),
        ({"saved_lens": torch.tensor([0, 0, 2, 0]), "saved_rows": torch.zeros(4, dtype=torch.int64)}, "end in the new"),
        (
            {"saved_lens": torch.tensor([0, -1, 1, 0]), "saved_rows": torch.zeros(4, dtype=torch.int64)},
            "end in the new",
        ),
        ({"saved_lens": torch.tensor([0, 0, 1, 0]), "saved_rows": torch.tensor([9, 9, 7, 9])}, "saved_rows must be in"),
        ({"saved_lens": torch.ones(3).long(), "saved_rows": torch.ones(4).long()}, "saved_lens must have shape"),
        ({"norm": torch.ones(15)}, "norm must have shape"),
        ({"rows": torch.tensor([1, 2, 3])}, "every request has one new token"),
    ],
)
def test_what_would_read_or_write_elsewhere_is_refused(
    changes: dict[str, Any], message: str, arguments: _Arguments
) -> None:
    with pytest.raises(RuntimeError, match=message):
        arguments.run(**changes)
