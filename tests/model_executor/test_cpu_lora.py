"""The compiled operations of LoRA adapters, against plain torch: any mix of adapters, ranks, shapes and types."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from cpu_ops import DTYPES, TOLERANCE, assert_close
from hypothesis import given
from hypothesis import strategies as st

from tercet.model_executor import cpu_extension
from tercet.model_executor.forward_batch import TokenAdapters
from tercet.model_executor.layers.activation import gated_activation
from tercet.model_executor.layers.linear import can_pack
from tercet.model_executor.layers.lora_layers import LoraShape, LoraSize, LoraWeight, TorchLoraTables
from tercet.model_executor.layers.quantized_weight import quantize
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
        earlier = random_weight(shape, size.max_rank, generator)  # nothing is left of it
        tables.write(slot, earlier)
        exact.write(slot, earlier)
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


class Gates(NamedTuple):
    """A fused gate and up projection with adapters, and the same in float64."""

    layer: Any
    tables: Any
    exact: TorchLoraTables
    weight: torch.Tensor
    activation: str

    def run(self, x, slots):
        from tercet.model_executor.layers.cpu_lora import CpuLoraGatedLinear  # needs the compiled operations

        batch = SimpleNamespace(adapters=TokenAdapters(slots))
        return CpuLoraGatedLinear(self.layer, self.tables)(x, batch)

    def expected(self, x, slots):
        gate_up = x.double() @ self.weight.double().T
        self.exact.add(x.double(), gate_up, TokenAdapters(slots))
        return gated_activation(gate_up, self.activation)


KINDS = ["float", "onednn", "int8", "int4"]


def make_gates(kind, dtype, n, k, ranks, *, is_stacked, activation="silu", seed=0):
    """`is_stacked`: the checkpoint has one A for gate and up."""
    from tercet.model_executor.layers.cpu_layers import CpuGatedLinear
    from tercet.model_executor.layers.onednn_layers import OneDnnLinear
    from tercet.model_executor.layers.quantized_layers import QuantizedGatedLinear

    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(2 * n, k, generator=generator).div(k**0.5).to(dtype)
    if kind == "onednn":
        layer = OneDnnLinear(weight, None, activation)
    elif kind == "float":
        layer = CpuGatedLinear(weight, None, activation)
    else:
        quantized = quantize(weight, kind)
        layer, weight = QuantizedGatedLinear(quantized, None, activation), quantized.dequantize()
    shape, size = LoraShape((2 * n,) if is_stacked else (n, n), k, gated=True), LoraSize(len(ranks), max(1, *ranks))
    tables, exact = make_tables(shape, size, dtype), TorchLoraTables(shape, size, torch.float64, CPU)
    for slot, rank in enumerate(ranks, start=1):
        tables.write(slot, random_weight(shape, size.max_rank, generator))  # what an earlier adapter left
        adapter = random_weight(shape, rank, generator) if rank else None
        tables.write(slot, adapter)
        exact.write(slot, adapter and LoraWeight(*(matrix.to(tables._dtype) for matrix in adapter)))
    return Gates(layer, tables, exact, weight, activation)


@given(
    st.sampled_from(KINDS),
    st.sampled_from(DTYPES),
    st.integers(1, 150),
    st.integers(1, 3),
    st.lists(st.sampled_from([0, 1, 2, 7, 16, 40]), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from([1, 2, 3, 13, 40])), min_size=1, max_size=5),
    st.booleans(),
    st.sampled_from(["silu", "gelu_tanh"]),
    st.integers(0, 99),
)
def test_adapters_of_a_fused_gate_and_up_projection(kind, dtype, n, groups, ranks, runs, is_stacked, activation, seed):
    if kind in ("float", "onednn") and not cpu_extension.multiplies(dtype):
        kind = "int8"
    if kind == "onednn" and not can_pack(torch.empty(1, 1, dtype=dtype)):
        kind = "float"
    gates = make_gates(kind, dtype, n, 32 * groups, ranks, is_stacked=is_stacked, activation=activation, seed=seed)
    slots = torch.tensor([min(slot, len(ranks)) for slot, count in runs for _ in range(count)], dtype=torch.int32)
    x = torch.randn(len(slots), 32 * groups, generator=torch.Generator().manual_seed(seed)).to(dtype)
    out = gates.run(x, slots)
    error = (out.double() - gates.expected(x, slots)).abs().max()
    assert error < (0.05 if kind in ("int8", "int4") else 4 * TOLERANCE[dtype]) * (1 + out.double().abs().max())
    without = torch.tensor([not slot or not ranks[slot - 1] for slot in slots.tolist()])
    assert torch.equal(out[without], gates.layer(x)[without]), "as without adapters"
    for row in {0, len(slots) // 2, len(slots) - 1}:
        assert torch.equal(gates.run(x[row : row + 1].clone(), slots[row : row + 1]), out[row : row + 1]), row


CHANGES = [
    ({"adapters": torch.tensor([3, 0], dtype=torch.int32)}, r"adapters must be in \[0, 2\], got 3"),
    ({"adapters": torch.tensor([-1, 0], dtype=torch.int32)}, r"adapters must be in \[0, 2\], got -1"),
    ({"adapters": torch.tensor([1], dtype=torch.int32)}, "adapters must have shape"),
    ({"adapters": torch.tensor([1, 1])}, "adapters must be Int"),
    ({"ranks": torch.tensor([0, -1, 0])}, "slot 1 has an invalid rank: -1"),
    ({"ranks": torch.tensor([0, 4])}, "ranks must have shape"),
]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        *CHANGES,
        ({"ranks": torch.tensor([0, 17, 0])}, "slot 1 has an invalid rank: 17"),
        ({"x": torch.zeros(2, 25)}, "a must have shape"),
        ({"matrices": 0}, "there must be matrices"),
        ({"a": torch.zeros(2, 1, 24, 16, 1, dtype=torch.float64)}, "a must be float or bfloat16, got Double"),
    ],
)
def test_wrong_arguments_of_a(change, named):
    tables = make_tables(LoraShape((5, 37), 24), LoraSize(2, 4), torch.float32)
    arguments = {
        "x": torch.zeros(2, 24), "a": tables._a, "ranks": torch.tensor([0, 4, 0]),
        "adapters": torch.tensor([1, 0], dtype=torch.int32), "matrices": 2,
    }  # fmt: skip
    if 17 in change.get("ranks", ()) and cpu_extension.lanes() < 16:
        pytest.skip("an A of this width holds no such rank")
    ops.shrink_lora(*arguments.values())
    with pytest.raises(RuntimeError, match=named):
        ops.shrink_lora(*(arguments | change).values())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        *CHANGES,
        ({"ranks": torch.tensor([0, 5, 0])}, "slot 1 has an invalid rank: 5"),
        ({"out": torch.zeros(2, 43)}, "out must have shape"),
        ({"rows": [42, 0]}, "rows must be positive"),
        ({"rows": [], "out": torch.zeros(2, 0)}, "there must be rows of at least one matrix"),
        ({"shrunk": torch.zeros(1, 32)}, "shrunk must have shape"),
        ({"shrunk": torch.zeros(2, 7)}, "slot 1 has an invalid rank: 4"),
    ],
)
def test_wrong_arguments_of_b(change, named):
    tables = make_tables(LoraShape((5, 37), 24), LoraSize(2, 4), torch.float32)
    arguments = {
        "shrunk": torch.zeros(2, 32), "out": torch.zeros(2, 42), "b": tables._b, "ranks": torch.tensor([0, 4, 0]),
        "adapters": torch.tensor([1, 0], dtype=torch.int32), "rows": [5, 37],
    }  # fmt: skip
    ops.expand_lora(*arguments.values())
    with pytest.raises(RuntimeError, match=named):
        ops.expand_lora(*(arguments | change).values())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        *CHANGES,
        ({"ranks": torch.tensor([0, 5, 0])}, "slot 1 has an invalid rank: 5"),
        ({"shrunk": torch.zeros(1, 32)}, "shrunk must have shape"),
        ({"shrunk": torch.zeros(2, 7)}, "slot 1 has an invalid rank: 4"),
        ({"b": torch.zeros(2, 1, 4, 2 * cpu_extension.lanes() if cpu_extension.load() else 8, 1)}, "b must have shape"),
        ({"more": torch.zeros(1)}, "lora must have four tensors, got 5"),
    ],
)
def test_wrong_arguments_of_gates(change, named):
    from tercet.model_executor.layers.cpu_layers import CpuGatedLinear

    layer = CpuGatedLinear(torch.zeros(10, 24))
    tables = make_tables(LoraShape((5, 5), 24, gated=True), LoraSize(2, 4), torch.float32)
    arguments = {
        "shrunk": torch.zeros(2, 32), "b": tables._b, "ranks": torch.tensor([0, 4, 0]),
        "adapters": torch.tensor([1, 0], dtype=torch.int32),
    }  # fmt: skip
    layer(torch.zeros(2, 24), None, list(arguments.values()))
    with pytest.raises(RuntimeError, match=named):
        layer(torch.zeros(2, 24), None, list((arguments | change).values()))


def test_a_layer_of_onednn_without_gates_has_no_adapters():
    with pytest.raises(RuntimeError, match="only gated layers"):
        ops.onednn_linear(torch.zeros(1, 8), [], [], 0, "", [torch.zeros(1)])


def test_numbers_too_large_for_the_type():
    shape = LoraShape((8,), 8)
    tables = TorchLoraTables(shape, LoraSize(1, 2), torch.float16, CPU)
    with pytest.raises(ValueError, match="too large for float16"):
        tables.write(1, LoraWeight(torch.zeros(1, 2, 8), torch.full((8, 2), 1e6)))
