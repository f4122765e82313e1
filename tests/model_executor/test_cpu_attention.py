"""Attention of the compiled operations of a CPU against the same written out in float64."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from backend_steps import random_sinks
from cpu_ops import DTYPES, assert_close
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.mem_cache.token_to_kv_pool import TokenToKVPool
from tercet.model_executor import cpu_extension
from tercet.model_executor.attention.registry import PAGE_OF_PANELS

pytestmark = pytest.mark.skipif(cpu_extension.load() is None, reason="no build of csrc/cpu for this processor")

ops = torch.ops.tercet_cpu


class Problem:
    """Requests with their keys and values scattered over a pool in which everything else is NaN.

    `shared`: for each request a request before it and how many of its tokens are its own first ones, too. `latent_dim`:
    values are that many components of keys.
    """

    def __init__(
        self, dtype, kv_heads, group, head_dim, lens, seed, shared=None, sinks=None, soft_cap=None, latent_dim=None
    ):
        generator = torch.Generator().manual_seed(seed)
        size, context = sum(lens) + 40, max(lens) + 3
        self.k, self.v = (torch.full((size, kv_heads, head_dim), math.nan).to(dtype) for _ in range(2))
        self.latent_dim = latent_dim
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
        if latent_dim is not None:
            self.v = self.k[..., :latent_dim]
        self.scale = head_dim**-0.5
        self.sinks = sinks
        self.soft_cap = soft_cap
        self.pools = self.k, self.v

    def in_panels(self):
        """The same requests over a pool in panels, as `rotate_and_store` leaves it."""
        problem = copy.copy(self)
        _, kv_heads, head_dim = self.k.shape
        panel = cpu_extension.kv_panel(self.k.dtype, head_dim, self.latent_dim)
        pages = -(-max(self.lens) // PAGE_OF_PANELS)
        num_tokens = pages * PAGE_OF_PANELS * len(self.lens)
        sizes = num_tokens, PAGE_OF_PANELS, 1, kv_heads, head_dim
        pool = TokenToKVPool(*sizes, self.k.dtype, "cpu", panel, self.latent_dim)
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
                zeros = (torch.zeros(len(after), kv_heads, dim) for dim in (head_dim, self.v.shape[2]))
                pool.set_kv(0, after, *zeros)
                pool.set_kv(0, new[: len(old)], self.k[old], self.v[old])
        problem.pools = pool.k_buffer[0], pool.v_buffer[0]
        return problem

    def attend(self, requests, starts, ends, window=None):
        """Tokens [start, end) of some requests in one call: a list of [end - start, heads * value_dim]."""
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
            self.sinks,
            self.soft_cap,
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
            if self.soft_cap is not None:
                scores = self.soft_cap * (scores / self.soft_cap).tanh()
            logits = scores if self.sinks is None else torch.cat([scores, self.sinks.double()[:, None]], 1)
            out.append(torch.einsum("hn,nhd->hd", logits.softmax(-1)[:, : len(slots)], v).flatten())
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
    seed = data.draw(st.integers(0, 2**31))
    sinks = random_sinks(kv_heads * group, seed) if data.draw(st.booleans()) else None
    soft_cap = data.draw(st.sampled_from([None, 0.5, 3.0, 50.0]))
    problem = Problem(dtype, kv_heads, group, head_dim, lens, seed, sinks=sinks, soft_cap=soft_cap)
    requests = list(range(len(lens)))
    for request, out in enumerate(problem.attend(requests, starts, lens, window)):
        assert_close(out, problem.expected(request, starts[request], lens[request], window), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("window", "sinks", "soft_cap"), [(None, None, None), (100, None, 3.0), (100, random_sinks(9, 1), None)]
)
def test_a_token_has_the_same_bits_in_any_step(dtype, window, sinks, soft_cap):
    """Alone, decoded beside others, in chunks of any size."""
    lens = [620, 1, 300, 64, 257, 513]
    problem = Problem(dtype, 3, 3, 64, lens, 3, sinks=sinks, soft_cap=soft_cap)
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_may_rise_in_any_tile(dtype):
    """Later keys give far larger scores. So the sum of earlier values is scaled after each tile."""
    length = 600
    problem = Problem(dtype, 2, 3, 64, [length], 5)
    slots = problem.table[problem.rows[0], :length].long()
    problem.k[slots] = (problem.k[slots].float() * (1 + torch.arange(length) / 40)[:, None, None]).to(dtype)
    for each in (problem, problem.in_panels()) if cpu_extension.kv_panel(dtype, 64) else (problem,):
        whole = each.attend([0], [0], [length])[0]
        assert_close(whole, problem.expected(0, 0, length, None), dtype)
        for position in (63, 64, 200, 257, 511, 599):
            assert torch.equal(each.attend([0], [position], [position + 1])[0][0], whole[position])


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_latent_attention(data):
    """Values are components of keys, in a plain pool and in panels, whatever parts the query heads are divided into."""
    dtype = data.draw(st.sampled_from(DTYPES))
    group = data.draw(st.sampled_from([1, 16, 20, 33, 64, 128]))
    head_dim, latent_dim = data.draw(st.sampled_from([(24, 10), (80, 64), (96, 64), (96, 32), (576, 512)]))
    window = data.draw(st.sampled_from([None, None, 33, 300]))
    lens = data.draw(st.lists(st.one_of(st.integers(1, 70), st.integers(1, 600)), min_size=1, max_size=3))
    shared = [(0, 0), *((0, data.draw(st.sampled_from([0, min(lens[0], n - 1)]))) for n in lens[1:])]
    starts = [max(0, n - data.draw(st.sampled_from([1, 1, 5, 20]))) for n in lens]
    seed = data.draw(st.integers(0, 2**31))
    sinks = random_sinks(group, seed) if data.draw(st.booleans()) else None
    soft_cap = data.draw(st.sampled_from([None, 3.0]))
    problem = Problem(dtype, 1, group, head_dim, lens, seed, shared, sinks, soft_cap, latent_dim)
    if data.draw(st.booleans()):  # values have their own memory
        problem.pools = problem.k, problem.v.contiguous()
    requests = list(range(len(lens)))
    together = problem.attend(requests, starts, lens, window)
    for request, out in enumerate(together):
        assert_close(out, problem.expected(request, starts[request], lens[request], window), dtype)
        alone = problem.attend([request], [lens[request] - 1], [lens[request]], window)[0]
        assert torch.equal(alone[0], out[-1])
    has_panels = cpu_extension.kv_panel(dtype, head_dim, latent_dim) is not None
    for each in (problem, problem.in_panels()) if has_panels else (problem,):
        for threads in (1, 6):
            ops.set_num_threads(threads)
            try:
                again = each.attend(requests, starts, lens, window)
            finally:
                ops.set_num_threads(0)
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(again, together, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_latent_attention_has_the_same_bits_in_any_step(dtype):
    lens = [620, 1, 257]
    problem = Problem(dtype, 1, 40, 96, lens, 3, latent_dim=64)
    for each in (problem, problem.in_panels()) if cpu_extension.kv_panel(dtype, 96, 64) else (problem,):
        whole = [each.attend([r], [0], [n])[0] for r, n in enumerate(lens)]
        for chunk in (1, 2, 7, 100):
            starts = [max(0, n - chunk) for n in lens]
            for out, all_of_request, start in zip(each.attend([0, 1, 2], starts, lens), whole, starts, strict=True):
                assert torch.equal(out, all_of_request[start:]), chunk


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
    seed = data.draw(st.integers(0, 2**31))
    sinks = random_sinks(kv_heads * group, seed) if data.draw(st.booleans()) else None
    problem = Problem(dtype, kv_heads, group, 64, lens, seed, shared, sinks, data.draw(st.sampled_from([None, 3.0])))
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sink_of_minus_infinity_is_none(dtype):
    lens = [300, 70]
    problem = Problem(dtype, 2, 3, 64, lens, 3)
    expected = problem.attend([0, 1], [299, 0], lens)
    problem.sinks = torch.full((6,), -math.inf)
    assert all(torch.equal(*pair) for pair in zip(problem.attend([0, 1], [299, 0], lens), expected, strict=True))


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"rows": [1, 3]}, r"rows must be in \[0, 3\), got 3"),
        ({"rows": [1, -1]}, "rows must be in .*, got -1"),
        ({"lens": [9, 13]}, r"seq_lens must be in \[3, 12\], got 13"),
        ({"lens": [9, 2]}, r"seq_lens must be in \[3, 12\], got 2"),
        ({"starts": [0, 1, 5]}, r"starts must be in \[0, 4\]"),
        ({"starts": [-1, 1, 4]}, r"starts must be in \[0, 4\]"),
        ({"starts": [0, 5, 4]}, "starts must not fall"),
        ({"window": 0}, "a window must be positive, got 0"),
        ({"sinks": torch.zeros(2)}, r"sinks must have shape \[1\], got \[2\]"),
        ({"sinks": torch.zeros(1, dtype=torch.float64)}, "sinks must be Float, got Double"),
        ({"soft_cap": 0.0}, "a soft cap must be positive, got 0"),
    ],
)
def test_attention_refuses_what_is_not_in_its_tensors(wrong, error):
    pools, table = torch.randn(2, 40, 1, 32), torch.randint(0, 40, (3, 12), dtype=torch.int32)

    def attend(rows=(1, 2), lens=(9, 12), starts=(0, 1, 4), window=None, sinks=None, soft_cap=None):
        numbers = (torch.tensor(given) for given in (rows, lens, starts))
        return ops.attention(torch.randn(4, 1, 32), *pools, table, *numbers, window, 1.0, sinks, soft_cap)

    assert attend().shape == (4, 32)
    with pytest.raises(RuntimeError, match=error):
        attend(**wrong)


@pytest.mark.parametrize("slot", [64, 2**31 - 1, -1])
@pytest.mark.parametrize("in_panels", [False, True])
def test_attention_reads_only_inside_the_pool(in_panels, slot):
    """The slots of all tiles that a new token sees are checked; others may hold anything."""
    panel = 2 * cpu_extension.lanes()
    keys, values = torch.randn(2, 64, 1, 32)
    pools = keys, values
    if in_panels:
        pools = keys.view(-1, 1, 32, panel, 1), values.view(-1, 1, 32 // panel, panel, panel, 1)
    table = (torch.arange(300, dtype=torch.int32) % 64).expand(2, -1).contiguous()

    def attend(position, window=None):
        wrong = table.clone()
        wrong[1, position] = slot
        return ops.attention(
            torch.ones(3, 1, 32), *pools, wrong, torch.tensor([0, 1]), torch.tensor([9, 290]), starts, window, 1.0
        )

    starts = torch.tensor([0, 1, 3])
    for position in (0, 130, 289):
        with pytest.raises(RuntimeError, match=rf"slots must be in \[0, 64\), got {slot}"):
            attend(position)
    attend(290)
    attend(191, window=33)  # the first of the new tokens sees positions from 256 on
    with pytest.raises(RuntimeError, match="slots must be in"):
        attend(256, window=33)
    starts = torch.tensor([0, 3, 3])  # no new token of this request
    attend(0)


def test_pools_that_do_not_fit_each_other_are_refused():
    panel = 2 * cpu_extension.lanes()
    keys, two_heads = torch.zeros(64, 1, 96), torch.zeros(64, 2, 32)
    in_panels = keys.view(-1, 1, 96, panel, 1)
    table, one = torch.zeros(3, 12, dtype=torch.int32), torch.tensor([1])
    for k, v, error in (
        (keys, in_panels, "v_pool must be plain or in panels like k_pool"),
        (keys, keys[::2], "must be their first components"),
        (keys, keys[..., ::2], "must be their first components"),
        (keys, keys.view(-1, 1, 192), "must be their first components"),
        (keys, keys[..., 32:], "v_pool must be contiguous"),
        (two_heads, two_heads[..., :16], "v_pool must be contiguous"),
        (keys, keys[..., :0], "must have heads with components"),
        (in_panels, keys[:32].clone().view(-1, 1, 96 // panel, panel, panel, 1), "v_pool must have shape"),
    ):
        with pytest.raises(RuntimeError, match=error):
            ops.attention(torch.randn(1, k.shape[1], k.shape[2]), k, v, table, one, one, None, None, 1.0)


def test_queries_of_a_wrong_shape_are_refused():
    pools, table, one = torch.randn(2, 40, 1, 32), torch.zeros(3, 12, dtype=torch.int32), torch.tensor([1])
    for q, slots, error in (
        (torch.randn(1, 0, 32), table, "heads must be a multiple of 1, got 0"),
        (torch.randn(1, 1, 32, 0), table, "q must have heads as large as those of the pool"),
        (torch.randn(1, 1, 32), torch.zeros(3, 12, 0, dtype=torch.int32), "slot_table must have shape"),
    ):
        with pytest.raises(RuntimeError, match=error):
            ops.attention(q, *pools, slots, one, one, None, None, 1.0)
