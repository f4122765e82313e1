"""The compiled operations of LoRA adapters, against plain torch: any mix of adapters, ranks, shapes and types."""

from __future__ import annotations

import pytest
import torch
from cpu_ops import DTYPES, assert_close
from hypothesis import given
from hypothesis import strategies as st

from tercet.model_executor import cpu_extension
from tercet.model_executor.forward_batch import TokenAdapters
from tercet.model_executor.layers.activation import gated_activation
from tercet.model_executor.layers.lora_layers import LoraShape, LoraSize, LoraWeight, TorchLoraTables
from tercet.srt.machine.huge_pages import Arena

pytestmark = pytest.mark.skipif(cpu_extension.load() is None, reason="no build of csrc/cpu for this processor")
ops = torch.ops.tercet_cpu
CPU = torch.device("cpu")


def make_tables(shape, size, dtype):
    from tercet.model_executor.layers.cpu_lora import CpuLoraTables  # needs the compiled operations

    return CpuLoraTables(shape, size, dtype, Arena())


def random_weight(shape, rank, generator):
    a = torch.randn(len(shape.rows), rank, shape.columns, generator=generator) / shape.columns**0.5
    return LoraWeight(a, torch.randn(sum(shape.rows), rank, generator=generator))


@st.composite
def cases(draw):
    shape = LoraShape(tuple(draw(st.lists(st.integers(1, 90), min_size=1, max_size=3))), draw(st.integers(1, 150)))
    size = LoraSize(draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 3, 8, 16, 33, 70])))
    ranks = draw(st.lists(st.integers(0, size.max_rank), min_size=size.num_slots, max_size=size.num_slots))
    runs = draw(st.lists(st.tuples(st.integers(0, size.num_slots), st.integers(1, 60)), min_size=1, max_size=6))
    adapters = [slot for slot, count in runs for _ in range(count)]
    return shape, size, ranks, adapters, draw(st.sampled_from(DTYPES)), draw(st.booleans()), draw(st.integers(0, 99))


@given(cases())
def test_sums_are_those_of_torch(case):
    shape, size, ranks, adapters, dtype, to_float, seed = case
    generator = torch.Generator().manual_seed(seed)
    tables, exact = make_tables(shape, size, dtype), TorchLoraTables(shape, size, torch.float64, CPU)
    for slot, rank in enumerate(ranks, start=1):
        tables.write(slot, random_weight(shape, size.max_rank, generator))  # what an earlier adapter left
        weight = random_weight(shape, rank, generator) if rank else None
        tables.write(slot, weight)
        if weight is not None:
            weight = LoraWeight(*(matrix.to(tables._dtype) for matrix in weight))
        exact.write(slot, weight)
    slots = torch.tensor(adapters, dtype=torch.int32)
    x = torch.randn(len(slots), shape.columns, generator=generator).to(dtype)
    before = torch.randn(len(slots), sum(shape.rows), generator=generator).to(torch.float32 if to_float else dtype)
    out, expected = before.clone(), before.double()
    tables.add(x, out, TokenAdapters(slots))
    exact.add(x.double(), expected, TokenAdapters(slots))
    assert_close(out, expected, dtype, typical=1.0)
    untouched = torch.tensor([not slot or not ranks[slot - 1] for slot in adapters])
    assert torch.equal(out[untouched], before[untouched])
    for row in {0, len(slots) // 2, len(slots) - 1}:  # a row alone has the same bits
        alone = before[row : row + 1].clone()
        tables.add(x[row : row + 1].clone(), alone, TokenAdapters(slots[row : row + 1]))
        assert torch.equal(alone, out[row : row + 1]), row


@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbours_of_a_result_keep_their_bits(dtype):
    """Rows of a result end within a panel; the store of one row must not touch the next."""
    shape, size = LoraShape((5, 37), 24), LoraSize(2, 4)
    tables = make_tables(shape, size, dtype)
    generator = torch.Generator().manual_seed(0)
    tables.write(2, random_weight(shape, 4, generator))
    out = torch.zeros(9, 42, dtype=dtype)
    x = torch.randn(9, 24, generator=generator).to(dtype)
    tables.add(x, out, TokenAdapters(torch.tensor([0, 2] * 4 + [0], dtype=torch.int32)))
    assert not out[::2].any() and out[1::2].all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activations(activation, dtype):
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(7, 2 * 77, generator=generator) * 3
    found = ops.gated_activation(gate_up, dtype, activation)
    assert found.dtype == dtype
    assert_close(found, gated_activation(gate_up.double(), activation), dtype)
    narrow = gate_up.to(dtype)
    expected = gated_activation(narrow.double(), activation)
    assert_close(ops.gated_activation(narrow, dtype, activation), expected, dtype)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"adapters": torch.tensor([3, 0], dtype=torch.int32)}, r"adapters must be in \[0, 2\], got 3"),
        ({"adapters": torch.tensor([-1, 0], dtype=torch.int32)}, r"adapters must be in \[0, 2\], got -1"),
        ({"adapters": torch.tensor([1], dtype=torch.int32)}, "adapters must have shape"),
        ({"adapters": torch.tensor([1, 1])}, "adapters must be Int"),
        ({"ranks": torch.tensor([0, 5, 0])}, "slot 1 has an invalid rank: 5"),
        ({"ranks": torch.tensor([0, 4])}, "ranks must have shape"),
        ({"out": torch.zeros(2, 43)}, "out must have shape"),
        ({"rows": [42, 0]}, "rows must be positive"),
        ({"x": torch.zeros(2, 25)}, "a must have shape"),
    ],
)
def test_wrong_arguments(change, named):
    tables = make_tables(LoraShape((5, 37), 24), LoraSize(2, 4), torch.float32)
    arguments = {
        "x": torch.zeros(2, 24), "out": torch.zeros(2, 42), "a": tables._a, "b": tables._b,
        "ranks": torch.tensor([0, 4, 0]), "adapters": torch.tensor([1, 0], dtype=torch.int32), "rows": [5, 37],
    }  # fmt: skip
    ops.add_lora(*arguments.values())
    with pytest.raises(RuntimeError, match=named):
        ops.add_lora(*(arguments | change).values())


def test_numbers_too_large_for_the_type():
    shape = LoraShape((8,), 8)
    tables = TorchLoraTables(shape, LoraSize(1, 2), torch.float16, CPU)
    with pytest.raises(ValueError, match="too large for float16"):
        tables.write(1, LoraWeight(torch.zeros(1, 2, 8), torch.full((8, 2), 1e6)))
