"""The compiled operations of latent attention beside attention itself: what a token stores, and layers of each head."""

from __future__ import annotations

import math

import pytest
import torch
from cpu_ops import DTYPES, TOLERANCE, assert_close
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.mem_cache.token_to_kv_pool import TokenToKVPool
from tercet.model_executor import cpu_extension
from tercet.model_executor.attention.registry import PAGE_OF_PANELS
from tercet.model_executor.layers.packing import panels_of
from tercet.model_executor.layers.rotary import RotaryEmbedding, rotate
from tercet.srt.model_files.rope_config import RopeConfig

pytestmark = pytest.mark.skipif(cpu_extension.load() is None, reason="no build of csrc/cpu for this processor")

ops = torch.ops.tercet_cpu
TYPES = [(t, t) for t in DTYPES if cpu_extension.multiplies(t)] + [(torch.float32, torch.bfloat16)]
"""The types of x and of the weights of heads."""
CONTEXT = 99
ROPE = RopeConfig(theta=1e4)
CPU = torch.device("cpu")


def table_of(rope_dim):
    from tercet.model_executor.layers.cpu_layers import CpuRotary  # needs the operations

    rotary = CpuRotary(ROPE, rope_dim, CONTEXT, CPU)
    rotary.cover(CONTEXT)
    return rotary(torch.tensor([0])).cos_sin


def nan_pool(dtype, head_dim, latent_dim, panel, num_pages=4):
    pool = TokenToKVPool(num_pages * PAGE_OF_PANELS, PAGE_OF_PANELS, 1, 1, head_dim, dtype, "cpu", panel, latent_dim)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.fill_(math.nan)
    return pool


class Tokens:
    """New tokens of latent attention, whose queries and projections are views of wider tensors."""

    def __init__(self, dtype, count, heads, latent_dim, rope_dim, seed):
        g = torch.Generator().manual_seed(seed)
        self.wide_q = torch.randn(count, heads, 10 + rope_dim, generator=g).to(dtype)
        self.wide_projected = torch.randn(count, latent_dim + rope_dim + 6, generator=g).to(dtype)
        self.q, self.projected = self.wide_q[..., 10:], self.wide_projected[:, :-6]
        self.norm = torch.randn(latent_dim, generator=g)
        self.positions = torch.randint(0, CONTEXT, (count,), generator=g)
        self.latent_dim, self.rope_dim = latent_dim, rope_dim

    def rotate_and_store(self, q_out, slots, pool):
        ops.rotate_and_store_latent(
            *(self.q, q_out, self.projected, self.positions, slots, table_of(self.rope_dim), self.norm, 1e-5),
            *(pool.k_buffer[0], pool.v_buffer[0]),
        )


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    count=st.integers(1, 40),
    heads=st.sampled_from([1, 3, 16]),
    latent_dim=st.sampled_from([8, 24, 64, 512]),
    rope_dim=st.sampled_from([2, 20, 32, 64]),
    in_place=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_rotate_and_store_latent(dtype, count, heads, latent_dim, rope_dim, in_place, seed):
    tokens = Tokens(dtype, count, heads, latent_dim, rope_dim, seed)
    head_dim = latent_dim + rope_dim
    slots = torch.randperm(4 * PAGE_OF_PANELS)[:count] + PAGE_OF_PANELS
    cos_sin = RotaryEmbedding(ROPE, rope_dim, CPU)(tokens.positions)
    latent, k_rope = tokens.projected.split((latent_dim, rope_dim), 1)
    wanted_q = rotate(tokens.q.double(), cos_sin)
    wanted_rope = rotate(k_rope[:, None].double(), cos_sin)[:, 0]
    # the bits of the norm as a layer of its own
    wanted_latent = ops.rms_norm(latent.contiguous(), None, tokens.norm, 1e-5)
    before = tokens.wide_q[..., :10].clone(), tokens.wide_projected[:, -6:].clone()
    q_before, wide_out = tokens.q.clone(), torch.full((count, heads, 5 + rope_dim), 7.0, dtype=dtype)
    q_out = tokens.q if in_place else wide_out[..., 5:]
    pool = nan_pool(dtype, head_dim, latent_dim, None)
    tokens.rotate_and_store(q_out, slots, pool)

    keys = pool.k_buffer[0][slots, 0]
    assert torch.equal(keys[:, :latent_dim], wanted_latent)
    tolerance = TOLERANCE[dtype] + 2e-5  # angles in float32: a hundred radians are off by 1e-5
    for out, wanted in ((q_out, wanted_q), (keys[:, latent_dim:], wanted_rope)):
        assert (out.double() - wanted).abs().max() / wanted.abs().max() < tolerance
    assert torch.equal(tokens.wide_q[..., :10], before[0]) and torch.equal(tokens.wide_projected[:, -6:], before[1])
    assert in_place or (torch.equal(tokens.q, q_before) and (wide_out[..., :5] == 7).all())
    others = torch.ones(len(pool.k_buffer[0]), dtype=torch.bool).index_fill_(0, slots, False)
    assert pool.k_buffer[0][others].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_pools_in_panels_get_the_same(dtype):
    latent_dim, rope_dim = 64, 32
    panel = cpu_extension.kv_panel(dtype, latent_dim + rope_dim, latent_dim)
    if panel is None:
        pytest.skip("keys of this type are packed to be multiplied")
    page = torch.randperm(9)[:, None] * PAGE_OF_PANELS + torch.arange(PAGE_OF_PANELS)
    # a prompt of some pages, single tokens at even and at odd slots, a chunk that begins at an odd slot
    slots = torch.cat((page[:3].flatten()[:75], page[4, 6:7], page[5, 7:8], page[6, :2], page[7, 3:22]))
    plain, in_panels = (nan_pool(dtype, latent_dim + rope_dim, latent_dim, kind, 8) for kind in (None, panel))
    outs = []
    for pool in (plain, in_panels):
        tokens = Tokens(dtype, len(slots), 4, latent_dim, rope_dim, 1)
        tokens.rotate_and_store(tokens.q, slots, pool)
        outs.append(tokens.q)
    assert torch.equal(*outs)
    for ours, theirs in zip(in_panels.get_kv(0, slots), plain.get_kv(0, slots), strict=True):
        assert torch.equal(ours, theirs)
    others = torch.ones(9 * PAGE_OF_PANELS, dtype=torch.bool).index_fill_(0, slots, False).nonzero().flatten()
    k, v = in_panels.get_kv(0, others)
    assert k.isnan().all()
    # what shares a word with the last value of a request is zero: attention multiplies it
    is_zero = torch.isin(others - 1, slots) & (others % (4 // dtype.itemsize) > 0)
    assert (v[is_zero] == 0).all() and v[~is_zero].isnan().all()


def test_what_does_not_fit_latent_attention_is_refused():
    tokens, slots = Tokens(torch.float32, 2, 3, 8, 4, 0), torch.tensor([40, 41])
    pool = nan_pool(torch.float32, 12, 8, None)
    k, v = pool.k_buffer[0], pool.v_buffer[0]

    def store(
        q=tokens.q, projected=tokens.projected, positions=tokens.positions, slots=slots, norm=tokens.norm, pools=(k, v)
    ):
        ops.rotate_and_store_latent(q, q, projected, positions, slots, table_of(4), norm, 1e-5, *pools)

    store()
    for wrong, error in (
        ({"q": tokens.wide_q}, r"q must have shape \[2, 3, 4\], got \[2, 3, 14\]"),
        ({"q": tokens.q.double()}, "q must be Float"),
        ({"q": tokens.wide_q[..., 2:10:2]}, "the last dimension of q must be contiguous"),
        ({"projected": tokens.wide_projected}, r"projected must have shape \[2, 1, 12\]"),
        ({"norm": torch.ones(9)}, r"norm must have shape \[8\]"),
        ({"positions": torch.tensor([0, CONTEXT])}, rf"positions must be in \[0, {CONTEXT}\), got {CONTEXT}"),
        ({"slots": torch.tensor([0, len(k)])}, rf"slots must be in \[0, {len(k)}\), got {len(k)}"),
        ({"slots": torch.tensor([-1, 0])}, "slots must be in .*, got -1"),
        ({"pools": (k, v.contiguous())}, "values of a plain pool must be components of keys"),
        ({"pools": (k, k)}, "an even number of rotated components after the latent, got 12"),
        ({"pools": (k, k[..., :7])}, "an even number of rotated components"),
        ({"pools": torch.zeros(2, 8, 2, 12)}, "latent attention has one KV head, got 2"),
    ):
        with pytest.raises(RuntimeError, match=error):
            store(**wrong)


def packed_heads(weight):
    """weight: [heads, n, k]"""
    return torch.stack([panels_of(one) for one in weight])


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_a_layer_of_each_head(data):
    dtype, weight_dtype = data.draw(st.sampled_from(TYPES))
    rows = data.draw(st.one_of(st.integers(0, 5), st.integers(0, 150)))
    heads = data.draw(st.sampled_from([1, 2, 5, 16]))
    n, k = data.draw(st.integers(1, 150)), 2 * data.draw(st.integers(1, 100))
    room = data.draw(st.sampled_from([0, 3, 64]))
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    x = torch.randn(rows, heads, k + 7, generator=g).to(dtype)[..., 5:-2]
    if data.draw(st.booleans()):  # heads before tokens
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    weight = torch.randn(heads, n, k, generator=g).to(weight_dtype)
    out = ops.head_linear(x, packed_heads(weight), n, room)
    assert out.shape == (rows, heads, n + room) and out.dtype == dtype
    if rows == 0:
        return
    expected = torch.einsum("thk,hnk->thn", x.double(), weight.double())
    assert_close(out[..., :n], expected, dtype, typical=math.sqrt(k))
    for head in range(heads):  # the bits of a linear layer
        alone = ops.linear(x[:, head].contiguous(), panels_of(weight[head]).contiguous(), None, n)
        assert torch.equal(out[:, head, :n], alone)


@pytest.mark.parametrize(("dtype", "weight_dtype"), TYPES)
def test_a_row_of_a_head_has_the_same_bits_whatever_is_beside_it(dtype, weight_dtype):
    heads, n, k = 6, 100, 576
    x = torch.randn(300, heads, k).to(dtype)
    packed = packed_heads(torch.randn(heads, n, k).to(weight_dtype))
    everything = ops.head_linear(x, packed, n)
    for threads in (1, 5):
        ops.set_num_threads(threads)
        try:
            for rows in (*range(1, 30), 100, 255, 300):
                assert torch.equal(ops.head_linear(x[-rows:], packed, n), everything[-rows:]), rows
        finally:
            ops.set_num_threads(0)


def test_layers_that_do_not_fit_their_heads_are_refused():
    x, packed = torch.randn(3, 2, 64), packed_heads(torch.randn(2, 40, 64))
    for bad_x, bad_packed, n, room, error in (
        (x, packed[:1], 40, 0, "packed must have shape"),
        (x, packed, 400, 0, "packed must have shape"),
        (x[..., :32], packed, 40, 0, "packed must have shape"),
        (x, packed.double(), 40, 0, "packed must be Float, got Double"),
        (x[..., ::2], packed, 40, 0, "the last dimension of x must be contiguous"),
        (x[0], packed, 40, 0, r"x must be \[tokens, heads, numbers\]"),
        (x, packed, 0, 0, "must have heads with numbers, got x of"),
        (x, packed, 40, -1, "n 40 and room -1"),
    ):
        with pytest.raises(RuntimeError, match=error):
            ops.head_linear(bad_x, bad_packed, n, room)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_of_latent_attention_is_recorded(dtype):
    """All its operations are in a graph, which also runs with fewer tokens than it has room for."""
    heads, nope, latent_dim, rope_dim, n, room = 16, 24, 64, 32, 20, 5
    g = torch.Generator().manual_seed(1)
    q = torch.randn(room, heads, nope + rope_dim, generator=g).to(dtype)
    projected, past = (torch.randn(count, 1, latent_dim + rope_dim, generator=g).to(dtype) for count in (room, 50))
    shapes = (latent_dim, nope), (n, latent_dim)
    inner, outer = (packed_heads(torch.randn(heads, *shape, generator=g).to(dtype)) for shape in shapes)
    norm, cos_sin = torch.randn(latent_dim, generator=g), table_of(rope_dim)
    positions, rows = torch.tensor([0, 3, 9, 4, 1]), torch.arange(room)
    lens, table = positions + 1, (torch.arange(50, dtype=torch.int32) + PAGE_OF_PANELS).view(room, 10)
    slots = table[rows, positions].long()
    panel = cpu_extension.kv_panel(dtype, latent_dim + rope_dim, latent_dim)

    def make_pool():
        pool = nan_pool(dtype, latent_dim + rope_dim, latent_dim, panel)
        pool.set_kv(0, table.flatten().long(), past, past[..., :latent_dim])
        return pool.k_buffer[0], pool.v_buffer[0]

    def step(keys, pool):
        own = slice(0, len(keys))
        absorbed = ops.head_linear(q[own, :, :nope], inner, latent_dim, rope_dim)
        parts = q[own, :, nope:], absorbed[..., latent_dim:], keys
        ops.rotate_and_store_latent(*parts, positions[own], slots[own], cos_sin, norm, 1e-5, *pool)
        out = ops.attention(absorbed, *pool, table, rows[own], lens[own], None, None, 0.1)
        return ops.head_linear(out.view(len(keys), heads, latent_dim), outer, n)

    keys, graph, pool = projected[:, 0].clone(), torch.classes.tercet_cpu.Graph(), make_pool()
    graph.record(room, room, room)
    out = step(keys, pool)
    graph.finish()
    for count in (room, 2):
        keys.copy_(projected[:, 0])
        out.fill_(7)
        graph.run(count, count, count)
        assert torch.equal(out[:count], step(projected[:count, 0].clone(), make_pool())) and (out[count:] == 7).all()


@pytest.mark.parametrize(("dtype", "weight_dtype"), TYPES)
@pytest.mark.parametrize("n", [20, 33, 64])
def test_what_is_behind_a_result_stays_as_it_is(dtype, weight_dtype, n):
    """The room of a head, whose queries another operation writes, and rows that a smaller step does not have."""
    rows, heads, room, k = 30, 3, 5, 64
    x, weight = torch.randn(rows, heads, k).to(dtype), torch.randn(heads, n, k).to(weight_dtype)
    packed, graph = packed_heads(weight), torch.classes.tercet_cpu.Graph()
    graph.record(rows, 1, 1)
    out = ops.head_linear(x, packed, n, room)
    graph.finish()
    for count in (1, 7, rows):
        out.fill_(7)
        graph.run(count, 1, 1)
        assert torch.equal(out[:count, :, :n], ops.head_linear(x[:count], packed, n))
        assert (out[:, :, n:] == 7).all() and (out[count:] == 7).all()
