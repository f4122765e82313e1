"""The compiled operations of a CPU against the same written out in float64, in every build that runs here."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from cpu_ops import DTYPES, assert_close
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.model_executor import cpu_extension
from tercet.model_executor.layers.activation import gated_activation, square_relu
from tercet.model_executor.layers.head_gates import gate_heads

pytestmark = pytest.mark.skipif(cpu_extension.load() is None, reason="no build of csrc/cpu for this processor")

TYPES = [(t, t) for t in DTYPES if cpu_extension.multiplies(t)] + [(torch.float32, torch.bfloat16)]
"""The types of x and of a weight in linear layers."""
ops = torch.ops.tercet_cpu


def layers():
    from tercet.model_executor.layers import cpu_layers  # needs the operations

    return cpu_layers


@st.composite
def matrices(draw):
    """x, weight, bias"""
    dtype, weight_dtype = draw(st.sampled_from(TYPES))
    rows, n, k = draw(st.integers(1, 70)), draw(st.integers(1, 150)), 2 * draw(st.integers(1, 150))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((rows, k), (n, k), (n,)))
    return x, weight.to(weight_dtype), bias if draw(st.booleans()) else None


@settings(max_examples=80)
@given(matrices(), st.booleans())
def test_linear(drawn, to_float):
    x, weight, bias = drawn
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    out = layers().CpuLinear(weight, bias, to_float=to_float)(x)
    assert out.dtype == (torch.float32 if to_float else x.dtype)
    assert_close(out, expected, x.dtype, typical=math.sqrt(x.shape[1]))


@settings(max_examples=80)
@given(matrices(), st.sampled_from(["silu", "gelu_tanh"]))
def test_gated_linear(drawn, activation):
    x, weight, bias = drawn
    if len(weight) % 2:
        weight, bias = torch.cat((weight, weight[:1])), None if bias is None else torch.cat((bias, bias[:1]))
    gate_up = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    out = layers().CpuGatedLinear(weight, bias, activation)(x)
    # Both factors are sums of about this size, so the errors of one are multiplied by the other.
    assert_close(out, gated_activation(gate_up, activation), x.dtype, typical=math.sqrt(x.shape[1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_an_activation_has_its_limits(dtype, activation):
    """The activation of a large number is the number, and that of a large negative one is 0."""
    largest = torch.finfo(dtype).max / 8
    gate = torch.tensor([[largest, 1e3, 50.0, 0.0, -50.0, -1e3, -1e4, -largest]]).to(dtype)
    weight = torch.cat((torch.eye(8), torch.zeros(8, 8))).to(dtype)
    linear = layers().CpuGatedLinear(weight, torch.cat((torch.zeros(8), torch.ones(8))).to(dtype), activation)
    assert torch.allclose(linear(gate)[0], gate[0].clamp(min=0), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("dtype", "weight_dtype"), TYPES)
def test_a_row_has_the_same_bits_whatever_is_beside_it(dtype, weight_dtype):
    x, weight = torch.randn(600, 576).to(dtype), torch.randn(100, 576).to(weight_dtype)
    for make in (layers().CpuLinear, layers().CpuGatedLinear):
        linear = make(weight)
        everything = linear(x)
        for rows in (*range(1, 65), 100, 255, 600):
            assert torch.equal(linear(x[-rows:].contiguous()), everything[-rows:]), rows


@settings(max_examples=60)
@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 90),
    n=st.integers(1, 700),
    summed=st.booleans(),
    seed=st.integers(),
)
def test_rms_norm(dtype, rows, n, summed, seed):
    generator = torch.Generator().manual_seed(seed % 2**63)
    x, residual = torch.randn(2, rows, n, generator=generator).to(dtype)
    weight = torch.randn(n, generator=generator)
    total = (x + residual) if summed else x
    expected = F.rms_norm(total.double(), (n,), weight.double(), 1e-5)
    wide = torch.full((rows, n + 3), math.nan, dtype=dtype)  # rows of x may be part of longer ones
    wide[:, 1:-2] = x
    out = ops.rms_norm(wide[:, 1:-2], residual if summed else None, weight, 1e-5)
    assert_close(out, expected, dtype)
    if summed:
        assert torch.equal(residual, total)


@settings(max_examples=40)
@given(dtype=st.sampled_from(DTYPES), rows=st.integers(0, 90), n=st.integers(1, 700), seed=st.integers(0, 2**31))
def test_scale_rows(dtype, rows, n, seed):
    x = torch.randn(rows, n, generator=torch.Generator().manual_seed(seed)).to(dtype)
    expected = (x.float() * 54.545454).to(dtype)
    ops.scale_rows(x, 54.545454)
    assert torch.equal(x, expected)


@settings(max_examples=40)
@given(dtype=st.sampled_from(DTYPES), rows=st.integers(0, 90), n=st.integers(1, 700), seed=st.integers(0, 2**31))
def test_square_relu(dtype, rows, n, seed):
    x = torch.randn(rows, n, generator=torch.Generator().manual_seed(seed)).to(dtype)
    x[:, 0] = torch.nan
    expected = x.clone()
    square_relu(expected)
    ops.square_relu(x)
    assert torch.equal(x.nan_to_num(7), expected.nan_to_num(7)), "the bits of torch"


@settings(max_examples=60)
@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(0, 40),
    heads=st.integers(1, 5),
    dim=st.sampled_from([1, 20, 32, 33, 128]),
    seed=st.integers(0, 2**31),
)
def test_gate_heads(dtype, rows, heads, dim, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, heads * dim, generator=generator).to(dtype)
    gates = (torch.randn(rows, heads + 3, generator=generator) * 9).to(dtype)[:, 3:]
    before, twin = x.clone(), x.clone()
    ops.gate_heads(x, gates)
    gate_heads(twin, gates)
    expected = before.double().unflatten(1, (heads, dim)) * gates.double().sigmoid()[..., None]
    if rows:
        assert_close(x, expected.flatten(1), dtype)
        assert_close(twin, expected.flatten(1), dtype)
        ops.gate_heads(before[-1:], gates[-1:])
        assert torch.equal(before[-1:], x[-1:]), "a row does not depend on the others"


def test_gates_that_do_not_fit_are_refused():
    for x, gates, message in [
        (torch.zeros(2, 6), torch.zeros(2, 4), "x must have whole heads, got 6 numbers for 4 gates"),
        (torch.zeros(2, 6), torch.zeros(1, 3), r"gates must have shape \[2, 3\]"),
        (torch.zeros(2, 6), torch.zeros(3, 2).t(), "rows of gates must be contiguous"),
        (torch.zeros(2, 6), torch.zeros(2, 3).double(), "gates must be Float"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            ops.gate_heads(x, gates)


@settings(max_examples=60)
@given(dtype=st.sampled_from(DTYPES), rows=st.integers(0, 90), n=st.integers(1, 700), seed=st.integers(0, 2**31))
def test_add_rms_norm(dtype, rows, n, seed):
    generator = torch.Generator().manual_seed(seed)
    x, residual = torch.randn(2, rows, n, generator=generator).to(dtype)
    weight, before = torch.randn(n, generator=generator), residual.clone()
    ops.add_rms_norm(x, residual, weight, 1e-5)
    if rows:
        assert_close(residual, before.double() + F.rms_norm(x.double(), (n,), weight.double(), 1e-5), dtype)
        ops.add_rms_norm(x[-1:].clone(), before[-1:], weight, 1e-5)
        assert torch.equal(before[-1:], residual[-1:]), "a row does not depend on the others"


@settings(max_examples=60)
@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(0, 90),
    n=st.integers(1, 700),
    gated=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_add_gated(dtype, rows, n, gated, seed):
    generator = torch.Generator().manual_seed(seed)
    x, out = torch.randn(2, rows, n, generator=generator).to(dtype)
    gates, before = torch.randn(rows, 1, generator=generator) * 9 if gated else None, out.clone()
    ops.add_gated(out, x, gates)
    if rows:
        expected = x.double() * (1 if gates is None else gates.double().sigmoid())
        assert_close(out, before.double() + expected, dtype)
        ops.add_gated(before[-1:], x[-1:].clone(), None if gates is None else gates[-1:])
        assert torch.equal(before[-1:], out[-1:]), "a row does not depend on the others"


@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 1000, 49152])
def test_argmax(vocab):
    x = torch.randint(0, 50, (9, vocab)).float()  # ties
    expected = torch.from_numpy(x.numpy().argmax(-1))
    x[1], expected[1] = -math.inf, -1
    x[2, vocab // 2], expected[2] = math.nan, -1
    x[3, -1], expected[3] = math.nan, -1
    x[4, -1], expected[4] = math.inf, vocab - 1
    assert torch.equal(ops.argmax(x), expected)


@pytest.mark.parametrize(("dtype", "weight_dtype"), TYPES)
def test_embedding_out_of_a_packed_head(dtype, weight_dtype):
    weight = torch.randn(75, 38).to(weight_dtype)
    head = layers().CpuLinear(weight)
    embedding = layers().PackedEmbedding(head, dtype)
    ids = torch.randint(0, 75, (300,))
    found = embedding(ids)
    assert found.dtype == dtype and torch.equal(found, weight[ids].to(dtype))
    for wrong in (-1, head.packed.shape[0] * head.packed.shape[2]):
        with pytest.raises(RuntimeError, match=f"no vector for id {wrong}"):
            embedding(torch.tensor([3, wrong]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
def test_embedding_of_plain_rows(dtype, weight_dtype):
    weight = torch.randn(75, 38).to(weight_dtype)
    weight[3, 5] = torch.finfo(weight_dtype).tiny / 4  # denormal
    ids = torch.cat((torch.tensor([3]), torch.randint(0, 75, (300,))))
    found = layers().CpuEmbedding(weight, dtype)(ids)
    assert found.dtype == dtype and torch.equal(found, weight[ids].to(dtype))
    for wrong in (-1, 75):
        with pytest.raises(RuntimeError, match=f"no vector for id {wrong}"):
            layers().CpuEmbedding(weight, dtype)(torch.tensor([3, wrong]))


def test_newest_tokens_are_stored():
    newest = torch.arange(100, 107)
    ops.store_newest(torch.tensor([7, -1, 9]), torch.tensor([6, 2, 1]), newest)
    assert newest.tolist() == [100, 9, 0, 103, 104, 105, 7]
    for wrong in (-1, 7):
        with pytest.raises(RuntimeError, match=f"rows must be rows of newest, got {wrong}"):
            ops.store_newest(torch.tensor([7]), torch.tensor([wrong]), newest)


def decode_memory(num_rows=4, context_len=9, max_tokens=6, max_requests=3):
    """Newest tokens, table, of_tokens, of_requests and starts, as `set_decode_inputs` takes them."""
    table = torch.full((num_rows, context_len), -7, dtype=torch.int32)
    sizes = (3, max_tokens), (4, max_requests), (max_requests + 1,)
    return torch.arange(10, 10 + num_rows), table, *(torch.full(size, -7) for size in sizes)


def test_the_inputs_of_a_decode_step_are_set():
    newest, table, of_tokens, of_requests, starts = memory = decode_memory()
    rows, lens, slots = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([3, 1], [9, 2], [50, 60]))
    assert ops.set_decode_inputs(rows, lens, slots, *memory) == 9
    assert newest.tolist() == [10, 11, 12, 13]
    assert table[3, 8] == 50 and table[1, 1] == 60 and (table == -7).sum() == 34
    unused = [-7] * 4
    assert of_tokens.tolist() == [[13, 11, *unused], [50, 60, *unused], [8, 1, *unused]]
    assert of_requests.tolist() == [[3, 1, -7], [9, 2, -7], [0, 1, -7], [3, 1, -7]]
    assert starts.tolist() == [0, 1, 2, -7]


@pytest.mark.parametrize(
    ("rows", "lens", "error"),
    [
        ([4], [1], "rows must be rows of slot_table, got 4"),
        ([-1], [1], "rows must be rows of slot_table, got -1"),
        ([1], [0], "seq_lens must be in .1, 9., got 0"),
        ([1], [10], "seq_lens must be in .1, 9., got 10"),
        ([1, 2, 3, 0], [1] * 4, "no room for 4 requests"),
        ([1, 2], [1], "seq_lens must have shape"),
    ],
)
def test_wrong_inputs_of_a_decode_step_are_refused(rows, lens, error):
    rows, lens = torch.tensor(rows, dtype=torch.int32), torch.tensor(lens, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=error):
        ops.set_decode_inputs(rows, lens, torch.ones_like(rows), *decode_memory())


def test_wrong_shapes_are_refused():
    x, weight = torch.randn(3, 64), torch.randn(40, 64)
    packed = layers().CpuLinear(weight).packed
    for bad_x, bad_packed, n in ((x[:, :32].contiguous(), packed, 40), (x.t(), packed, 40), (x, packed, 4000)):
        with pytest.raises(RuntimeError, match="must"):
            ops.linear(bad_x, bad_packed, None, n)
    with pytest.raises(RuntimeError, match="must have"):
        ops.rms_norm(x, x[:1].contiguous(), torch.ones(64), 1e-5)
    with pytest.raises(RuntimeError, match=r"x must be a matrix .* whose rows are contiguous"):
        ops.rms_norm(torch.randn(3, 5, 64).transpose(1, 2), None, torch.ones(64), 1e-5)
    with pytest.raises(RuntimeError, match="residual must have"):
        ops.add_rms_norm(x, x[:1].contiguous(), torch.ones(64), 1e-5)
    with pytest.raises(RuntimeError, match=r"gates must have shape \[3, 1\]"):
        ops.add_gated(x, x.clone(), torch.ones(2))
    none, pools = torch.zeros(1, dtype=torch.int64), torch.zeros(2, 8, 1, 32)
    for sizes in ((64, 64), (32, 64), (96, 32)):  # of two query heads, and one of keys
        norms = map(torch.ones, sizes)
        with pytest.raises(RuntimeError, match="_norm must have shape"):
            ops.rotate_and_store(torch.zeros(1, 128), none, none, torch.zeros(9, 32), *norms, 1e-5, *pools)
    panel, twice = packed.shape[2], packed.reshape(packed.shape[0], 32, -1, 2)
    with pytest.raises(RuntimeError, match="packed must have shape"):
        ops.embedding(torch.tensor([3]), twice, torch.float32)
    for k, n in ((0, 40), (64, 0)):
        empty = torch.zeros(-(-n // panel), k, panel, 1)
        for linear in (ops.linear, ops.linear_argmax, ops.gated_linear):
            with pytest.raises(RuntimeError, match=f"must have columns, got {k} and"):
                linear(torch.randn(40, k), empty, None, n)
    groups = torch.zeros(0, 2, 1, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="must have columns, got 64 and 0"):
        ops.quantized_linear(x, groups, None, 0, 8)


def test_operations_take_no_rows():
    nothing, nobody = torch.zeros(0, 64), torch.zeros(0, dtype=torch.int64)
    linear, gated = layers().CpuLinear(torch.randn(40, 64)), layers().CpuGatedLinear(torch.randn(40, 64))
    shapes = linear(nothing).shape, linear.argmax(nothing).shape, gated(nothing).shape
    assert shapes == ((0, 40), (0,), (0, 20))
    assert ops.rms_norm(nothing, None, torch.ones(64), 1e-5).shape == ops.select_rows(nothing, nobody).shape == (0, 64)
    pools, table = torch.zeros(2, 8, 1, 64), torch.zeros(2, 9, dtype=torch.int32)
    ops.rotate_and_store(torch.zeros(0, 192), nobody, nobody, torch.zeros(9, 64), None, None, 0.0, *pools)
    assert ops.attention(nothing.view(0, 1, 64), *pools, table, nobody, nobody, None, None, 1.0).shape == (0, 64)
    assert ops.argmax(nothing).shape == (0,)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_any_number_of_threads_gives_the_same(threads):
    x, before = torch.randn(40, 64), torch.get_num_threads()
    linears = [layers().CpuLinear(torch.randn(n, 64)) for n in (16, 90, 250, 576, 960, 3000)]
    torch.set_num_threads(1)
    expected = [linear(x) for linear in linears]
    torch.set_num_threads(threads)
    try:
        for _ in range(50):
            for linear, values in zip(linears, expected, strict=True):
                torch.full_like(values, torch.nan)  # the next result takes this memory
                assert torch.equal(linear(x), values)
    finally:
        torch.set_num_threads(before)
