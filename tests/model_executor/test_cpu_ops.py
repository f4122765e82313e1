"""The compiled operations of a CPU against the same written out in float64, in every build that runs here."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.mem_cache.token_to_kv_pool import MHATokenToKVPool
from tercet.model_executor import cpu_build, cpu_extension
from tercet.model_executor.attention.registry import PAGE_OF_PANELS
from tercet.model_executor.layers.layernorm import HeadNorm
from tercet.model_executor.layers.rotary import RotaryEmbedding, rotate
from tercet.srt.model_files.rope_config import RopeConfig

pytestmark = pytest.mark.skipif(cpu_extension.load() is None, reason="no build of csrc/cpu for this processor")

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
DTYPES = list(TOLERANCE)
TYPES = [(t, t) for t in DTYPES if cpu_extension.multiplies(t)] + [(torch.float32, torch.bfloat16)]
"""The types of x and of a weight in linear layers."""
ops = torch.ops.tercet_cpu


def layers():
    from tercet.model_executor.layers import cpu_layers  # needs the operations

    return cpu_layers


def assert_close(actual, expected, dtype, typical=0.1):
    """typical: the size that results usually have; a few that happen to be near zero are not exacter than others."""
    assert actual.shape == expected.shape
    error = (actual.double() - expected).abs().max() / expected.abs().max().clamp(min=typical)
    assert error < TOLERANCE[dtype], error.item()


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
@given(matrices())
def test_gated_linear(drawn):
    x, weight, bias = drawn
    if len(weight) % 2:
        weight, bias = torch.cat((weight, weight[:1])), None if bias is None else torch.cat((bias, bias[:1]))
    gate, up = F.linear(x.double(), weight.double(), None if bias is None else bias.double()).chunk(2, -1)
    # Both factors are sums of about this size, so the errors of one are multiplied by the other.
    assert_close(layers().CpuGatedLinear(weight, bias)(x), F.silu(gate) * up, x.dtype, typical=math.sqrt(x.shape[1]))


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
    weight = torch.randn(n, generator=generator).to(dtype)
    total = (x + residual) if summed else x
    expected = F.rms_norm(total.double(), (n,), weight.double(), 1e-5)
    out = ops.rms_norm(x, residual if summed else None, weight, 1e-5)
    assert_close(out, expected, dtype)
    if summed:
        assert torch.equal(residual, total)


@settings(max_examples=60)
@given(
    dtype=st.sampled_from(DTYPES),
    tokens=st.integers(1, 40),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    head_dim=st.sampled_from([8, 64, 80, 96, 128]),
    normed=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_rotate_and_store(dtype, tokens, kv_heads, group, head_dim, normed, seed):
    generator = torch.Generator().manual_seed(seed)
    heads, pool_size = kv_heads * group, 50
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim, generator=generator).to(dtype)
    norms = [torch.randn(head_dim, generator=generator).to(dtype) if normed else None for _ in range(2)]
    positions = torch.randint(0, 99, (tokens,), generator=generator)
    slots = torch.randperm(pool_size, generator=generator)[:tokens]
    rope = RopeConfig(theta=1e4)
    rotary = layers().CpuRotary(rope, head_dim, 99, torch.device("cpu"))
    rotary.cover(99)
    expected = qkv.double()
    qk, v = expected.split((heads + kv_heads, kv_heads), 1)
    if normed:
        qk = HeadNorm(norms[0].double(), norms[1].double(), heads, kv_heads, 1e-5)(qk)
    qk = rotate(qk, RotaryEmbedding(rope, head_dim, torch.device("cpu"))(positions))

    pools = [torch.full((pool_size, kv_heads, head_dim), 7.0, dtype=dtype) for _ in range(2)]
    ops.rotate_and_store(qkv.view(tokens, -1), positions, slots, rotary(positions).cos_sin, *norms, 1e-5, *pools)
    # angles in float32: a hundred radians are off by 1e-5
    assert ((qkv[:, :heads].double() - qk[:, :heads]).abs().max() / qk.abs().max()) < TOLERANCE[dtype] + 2e-5
    assert ((pools[0][slots].double() - qk[:, heads:]).abs().max() / qk.abs().max()) < TOLERANCE[dtype] + 2e-5
    assert torch.equal(pools[1][slots], v.to(dtype))
    untouched = torch.ones(pool_size, dtype=torch.bool).index_fill_(0, slots, False)
    assert (pools[0][untouched] == 7).all() and (pools[1][untouched] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [32, 64, 96])
def test_rotate_and_store_in_panels(dtype, head_dim):
    panel = cpu_extension.kv_panel(dtype, head_dim)
    if panel is None:
        pytest.skip("keys of this type are packed to be multiplied")
    heads, kv_heads, context = 4, 2, 200
    page = torch.randperm(9)[:, None] * PAGE_OF_PANELS + torch.arange(PAGE_OF_PANELS)
    # a prompt of some pages, single tokens at even and at odd slots, a chunk that begins at an odd slot
    slots = torch.cat((page[:3].flatten()[:75], page[4, 6:7], page[5, 7:8], page[6, :2], page[7, 3:22]))
    qkv = torch.randn(len(slots), (heads + 2 * kv_heads) * head_dim).to(dtype)
    positions = torch.arange(len(slots))
    rotary = layers().CpuRotary(RopeConfig(theta=1e4), head_dim, context, torch.device("cpu"))
    rotary.cover(len(slots))
    cos_sin = rotary(positions).cos_sin
    plain, in_panels = (
        MHATokenToKVPool(8 * PAGE_OF_PANELS, PAGE_OF_PANELS, 1, kv_heads, head_dim, dtype, "cpu", kind)
        for kind in (None, panel)
    )
    for pool in (plain, in_panels):
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer.fill_(math.nan)
        written = pool.k_buffer[0], pool.v_buffer[0]
        ops.rotate_and_store(qkv.clone(), positions, slots, cos_sin, None, None, 0.0, *written)
    for ours, theirs in zip(in_panels.get_kv(0, slots), plain.get_kv(0, slots), strict=True):
        assert torch.equal(ours, theirs)
    others = torch.ones(9 * PAGE_OF_PANELS, dtype=torch.bool).index_fill_(0, slots, False).nonzero().flatten()
    k, v = in_panels.get_kv(0, others)
    assert k.isnan().all()
    # what shares a word with the last value of a request is zero: attention multiplies it
    per_word = 4 // dtype.itemsize
    is_zero = torch.isin(others - 1, slots) & (others % per_word > 0)
    assert (v[is_zero] == 0).all() and v[~is_zero].isnan().all()


class Problem:
    """Requests with their keys and values scattered over a pool in which everything else is NaN.

    `shared`: for each request a request before it and how many of its tokens are its own first ones, too.
    """

    def __init__(self, dtype, kv_heads, group, head_dim, lens, seed, shared=None):
        generator = torch.Generator().manual_seed(seed)
        size, context = sum(lens) + 40, max(lens) + 3
        self.k, self.v = (torch.full((size, kv_heads, head_dim), math.nan).to(dtype) for _ in range(2))
        self.table = torch.zeros(len(lens) + 2, context, dtype=torch.int32)
        self.rows = torch.randperm(len(lens) + 1, generator=generator)[: len(lens)] + 1
        self.lens = lens
        free = torch.randperm(size, generator=generator)
        self.q = []
        for row, length, (parent, common) in zip(self.rows, lens, shared or [(0, 0)] * len(lens), strict=True):
            slots, free = free[: length - common], free[length - common :]
            self.table[row, :common] = self.table[self.rows[parent], :common]
            self.table[row, common:length] = slots.int()
            length -= common
            self.k[slots] = torch.randn(length, kv_heads, head_dim, generator=generator).to(dtype)
            self.v[slots] = torch.randn(length, kv_heads, head_dim, generator=generator).to(dtype)
            q = torch.randn(length + common, kv_heads * group, head_dim, generator=generator)
            self.q.append(q.mul(2).to(dtype))
        self.scale = head_dim**-0.5
        self.pools = self.k, self.v

    def in_panels(self):
        """The same requests over a pool in panels, as `rotate_and_store` leaves it."""
        problem = copy.copy(self)
        _, kv_heads, head_dim = self.k.shape
        panel = cpu_extension.kv_panel(self.k.dtype, head_dim)
        pages = -(-max(self.lens) // PAGE_OF_PANELS)
        pool = MHATokenToKVPool(
            pages * PAGE_OF_PANELS * len(self.lens), PAGE_OF_PANELS, 1, kv_heads, head_dim, self.k.dtype, "cpu", panel
        )
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer.fill_(math.nan)
        problem.table = torch.zeros(len(self.table), pages * PAGE_OF_PANELS, dtype=torch.int32)
        order = torch.randperm(pages * len(self.lens)) + 1
        page_of = {}
        for row, length in zip(self.rows, self.lens, strict=True):
            for start in range(0, length, PAGE_OF_PANELS):
                old = self.table[row, start : min(length, start + PAGE_OF_PANELS)].long()
                # whole pages that requests share stay shared
                page = page_of.setdefault(
                    tuple(old.tolist()) if len(old) == PAGE_OF_PANELS else (row, start), order[len(page_of)]
                )
                new = page * PAGE_OF_PANELS + torch.arange(PAGE_OF_PANELS)
                problem.table[row, start : start + PAGE_OF_PANELS] = new.int()
                after = new[len(old) : len(old) + len(old) % 2]
                pool.set_kv(0, after, *torch.zeros(2, len(after), kv_heads, head_dim))
                pool.set_kv(0, new[: len(old)], self.k[old], self.v[old])
        problem.pools = pool.k_buffer[0], pool.v_buffer[0]
        return problem

    def attend(self, requests, starts, ends, window=None):
        """Tokens [start, end) of some requests in one call: a list of [end - start, heads * head_dim]."""
        q = torch.cat([self.q[r][a:b] for r, a, b in zip(requests, starts, ends, strict=True)])
        counts = torch.tensor([0, *(b - a for a, b in zip(starts, ends, strict=True))])
        # queries are part of a wider projection
        wide = torch.full((len(q), q.shape[1] + 2, q.shape[2]), math.nan).to(q.dtype)
        wide[:, :-2] = q
        out = ops.attention(
            wide[:, :-2],
            *self.pools,
            self.table,
            self.rows[requests],
            torch.tensor(ends),
            None if (counts[1:] == 1).all() and counts[1:].sum() % 2 else counts.cumsum(0),
            window,
            self.scale,
        )
        return out.split(counts[1:].tolist())

    def expected(self, request, start, end, window):
        out = []
        group = self.q[0].shape[1] // self.k.shape[1]
        for position in range(start, end):
            first = 0 if window is None else max(0, position + 1 - window)
            slots = self.table[self.rows[request], first : position + 1].long()
            k, v = (pool[slots].double().repeat_interleave(group, 1) for pool in (self.k, self.v))
            scores = torch.einsum("hd,nhd->hn", self.q[request][position].double(), k) * self.scale
            out.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), v).flatten())
        return torch.stack(out)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_attention(data):
    dtype = data.draw(st.sampled_from(DTYPES))
    kv_heads, group = data.draw(st.sampled_from([(1, 1), (2, 1), (2, 3), (1, 8), (3, 17)]))
    head_dim = data.draw(st.sampled_from([8, 64, 80, 96, 128]))
    window = data.draw(st.sampled_from([None, None, 1, 33, 64, 300]))
    lens = data.draw(st.lists(st.one_of(st.integers(1, 70), st.integers(1, 900)), min_size=1, max_size=4))
    starts = [max(0, n - data.draw(st.sampled_from([1, 1, 5, 40, 150]))) for n in lens]
    problem = Problem(dtype, kv_heads, group, head_dim, lens, data.draw(st.integers(0, 2**31)))
    requests = list(range(len(lens)))
    for request, out in enumerate(problem.attend(requests, starts, lens, window)):
        assert_close(out, problem.expected(request, starts[request], lens[request], window), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 100])
def test_a_token_has_the_same_bits_in_any_step(dtype, window):
    """Alone, decoded beside others, in chunks of any size."""
    lens = [620, 1, 300, 64, 257, 513]
    problem = Problem(dtype, 3, 3, 64, lens, 3)
    whole = [problem.attend([r], [0], [n], window)[0] for r, n in enumerate(lens)]
    for request, position in ((0, 619), (0, 255), (0, 256), (2, 299), (4, 256), (5, 0)):
        alone = problem.attend([request], [position], [position + 1], window)[0]
        assert torch.equal(alone[0], whole[request][position]), (request, position)
    requests = [5, 0, 2, 4, 1, 3]
    ends = [lens[r] for r in requests]
    for out, request in zip(problem.attend(requests, [n - 1 for n in ends], ends, window), requests, strict=True):
        assert torch.equal(out[0], whole[request][-1])
    for chunk in (1, 7, 33, 100, 512):
        starts = [max(0, n - chunk) for n in ends]
        for out, request, start in zip(problem.attend(requests, starts, ends, window), requests, starts, strict=True):
            assert torch.equal(out, whole[request][start:]), (chunk, request)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_requests_that_share_keys(data):
    """Decoded together their common tiles are packed once: no bit of a result may tell."""
    dtype = data.draw(st.sampled_from(DTYPES))
    kv_heads, group = data.draw(st.sampled_from([(1, 1), (3, 3), (2, 17)]))
    lens, shared = [data.draw(st.integers(1, 700))], [(0, 0)]
    for request in range(1, data.draw(st.sampled_from([2, 5, 14]))):
        parent = data.draw(st.integers(0, request - 1))
        common = data.draw(st.one_of(st.integers(0, lens[parent]), st.just(lens[parent] // 64 * 64)))
        lens.append(max(1, common + data.draw(st.integers(0, 300))))
        shared.append((parent, common))
    window = data.draw(st.sampled_from([None, None, 200]))
    problem = Problem(dtype, kv_heads, group, 64, lens, data.draw(st.integers(0, 2**31)), shared)
    requests = data.draw(st.permutations(range(len(lens))))
    ends = [lens[r] for r in requests]
    starts = [n - data.draw(st.sampled_from([1, 1, 1, min(n, 9)])) for n in ends]
    together = problem.attend(requests, starts, ends, window)
    for out, request, start in zip(together, requests, starts, strict=True):
        assert torch.equal(out, problem.attend([request], [start], [lens[request]], window)[0])
        assert_close(out, problem.expected(request, start, lens[request], window), dtype)
    if cpu_extension.kv_panel(dtype, 64):
        in_panels = problem.in_panels().attend(requests, starts, ends, window)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(in_panels, together, strict=True))


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


def test_wrong_shapes_are_refused():
    x, weight = torch.randn(3, 64), torch.randn(40, 64)
    packed = layers().CpuLinear(weight).packed
    for bad_x, bad_packed, n in ((x[:, :32].contiguous(), packed, 40), (x.t(), packed, 40), (x, packed, 4000)):
        with pytest.raises(RuntimeError, match="must"):
            ops.linear(bad_x, bad_packed, None, n)
    with pytest.raises(RuntimeError, match="must have"):
        ops.rms_norm(x, x[:1].contiguous(), torch.ones(64), 1e-5)


@pytest.mark.parametrize("threads", [1, 3])
def test_any_number_of_threads_gives_the_same(threads):
    x, linear = torch.randn(40, 576), layers().CpuLinear(torch.randn(960, 576))
    expected, before = linear(x), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for _ in range(200):
            assert torch.equal(linear(x), expected)
    finally:
        torch.set_num_threads(before)


RUN_WITH_A_SLOWER_BUILD = """
import sys, pytest
from tercet.model_executor import cpu_extension
cpu_extension.VARIANTS = cpu_extension.VARIANTS[int(sys.argv[1]):]
assert cpu_extension.load() is not None
sys.exit(pytest.main([*sys.argv[2:], "-q", "-x", "-p", "no:cacheprovider", "-k", "not slower_build"]))
"""


def test_slower_builds_that_run_here_do_the_same():
    fastest = cpu_extension.VARIANTS.index(cpu_extension.load())
    for index, variant in enumerate(cpu_extension.VARIANTS):
        is_built = Path(cpu_extension.__file__).with_name(cpu_build.file_name(variant.name)).exists()
        if index > fastest and variant.is_supported() and is_built:
            others = (
                "sampling/test_cpu_choice.py",
                "layers/test_quantized_layers.py",
                "test_widened_weights.py",
                "test_linear_argmax.py",
                "test_linear_chunks.py",
            )
            tests = [__file__, *(str(Path(__file__).parent / name) for name in others)]
            arguments = [sys.executable, "-c", RUN_WITH_A_SLOWER_BUILD, str(index), *tests]
            done = subprocess.run(arguments, capture_output=True, text=True, timeout=250)
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
