"""The compiled operation that rotates queries and keys, and stores keys and values, in every build that runs here."""

from __future__ import annotations

import math

import pytest
import torch
from cpu_ops import DTYPES, TOLERANCE
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.mem_cache.token_to_kv_pool import TokenToKVPool
from tercet.model_executor import cpu_extension
from tercet.model_executor.attention.registry import PAGE_OF_PANELS
from tercet.model_executor.layers.layernorm import HeadNorm, RowNorm
from tercet.model_executor.layers.rotary import RotaryEmbedding, rotate
from tercet.srt.model_files.rope_config import QueryScale, RopeConfig

pytestmark = pytest.mark.skipif(cpu_extension.load() is None, reason="no build of csrc/cpu for this processor")

ops = torch.ops.tercet_cpu


def make_rotary(rope, head_dim, context_len):
    from tercet.model_executor.layers.cpu_layers import CpuRotary  # needs the operations

    rotary = CpuRotary(rope, head_dim, context_len, torch.device("cpu"))
    rotary.cover(context_len)
    return rotary


@settings(max_examples=60)
@given(
    dtype=st.sampled_from(DTYPES),
    tokens=st.integers(1, 40),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    head_dim=st.sampled_from([8, 64, 80, 96, 128]),
    normed=st.sampled_from([None, "heads", "rows", "rotated_heads"]),
    scaled=st.booleans(),
    room=st.sampled_from([0, 3]),
    seed=st.integers(0, 2**31),
)
def test_rotate_and_store(dtype, tokens, kv_heads, group, head_dim, normed, scaled, room, seed):
    """`room`: numbers after the values of a token, such as gates of heads."""
    generator = torch.Generator().manual_seed(seed)
    heads, pool_size = kv_heads * group, 50
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim, generator=generator).to(dtype)
    sizes = (heads, kv_heads) if normed == "rows" else (1, 1)
    norms = [torch.randn(size * head_dim, generator=generator) if normed else None for size in sizes]
    positions = torch.randint(0, 99, (tokens,), generator=generator)
    slots = torch.randperm(pool_size, generator=generator)[:tokens]
    scaled = scaled and normed != "rotated_heads"  # the norm would cancel the factor
    rope = RopeConfig(theta=1e4, query_scale=QueryScale(0.7, 8) if scaled else None)
    rotary = make_rotary(rope, head_dim, 99)
    expected = qkv.double()
    qk, v = expected.split((heads + kv_heads, kv_heads), 1)
    if normed in ("heads", "rotated_heads"):
        of_heads = HeadNorm(norms[0].double(), norms[1].double(), heads, kv_heads, 1e-5)
    if normed == "rows":
        qk = RowNorm(norms[0].double(), norms[1].double(), 1e-5)(qk)
    elif normed == "heads":
        qk = of_heads(qk)
    cos_sin = RotaryEmbedding(rope, head_dim, torch.device("cpu"))(positions)
    qk = rotate(qk, cos_sin)
    if normed == "rotated_heads":
        qk = of_heads(qk)
    if scaled:
        assert cos_sin.q_scales is not None
        qk[:, :heads] *= cos_sin.q_scales[:, None, None]

    pools = [torch.full((pool_size, kv_heads, head_dim), 7.0, dtype=dtype) for _ in range(2)]
    table, _, q_scales = rotary(positions)
    options = q_scales, normed == "rotated_heads"
    wide = torch.cat((qkv.view(tokens, -1), torch.full((tokens, room), 7.0, dtype=dtype)), 1)
    view = wide[:, : wide.shape[1] - room]
    qkv = view.view_as(qkv)
    ops.rotate_and_store(view, positions, slots, table, *norms, 1e-5, *pools, *options)
    # angles in float32: a hundred radians are off by 1e-5
    assert ((qkv[:, :heads].double() - qk[:, :heads]).abs().max() / qk.abs().max()) < TOLERANCE[dtype] + 2e-5
    assert ((pools[0][slots].double() - qk[:, heads:]).abs().max() / qk.abs().max()) < TOLERANCE[dtype] + 2e-5
    assert torch.equal(pools[1][slots], v.to(dtype)) and (wide[:, wide.shape[1] - room :] == 7).all()
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
    cos_sin = make_rotary(RopeConfig(theta=1e4), head_dim, context)(positions).cos_sin
    plain, in_panels = (
        TokenToKVPool(8 * PAGE_OF_PANELS, PAGE_OF_PANELS, 1, kv_heads, head_dim, dtype, "cpu", kind)
        for kind in (None, panel)
    )
    for pool in (plain, in_panels):
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer.fill_(math.nan)
        written = pool.k_buffer[0], pool.v_buffer[0]
        # Gates of heads may be after the values of a token.
        view = torch.cat((qkv, torch.full((len(qkv), 5), math.nan, dtype=dtype)), 1)[:, :-5]
        ops.rotate_and_store(view, positions, slots, cos_sin, None, None, 0.0, *written)
    for ours, theirs in zip(in_panels.get_kv(0, slots), plain.get_kv(0, slots), strict=True):
        assert torch.equal(ours, theirs)
    others = torch.ones(9 * PAGE_OF_PANELS, dtype=torch.bool).index_fill_(0, slots, False).nonzero().flatten()
    k, v = in_panels.get_kv(0, others)
    assert k.isnan().all()
    # what shares a word with the last value of a request is zero: attention multiplies it
    per_word = 4 // dtype.itemsize
    is_zero = torch.isin(others - 1, slots) & (others % per_word > 0)
    assert (v[is_zero] == 0).all() and v[~is_zero].isnan().all()


@pytest.mark.parametrize(
    ("position", "slot", "error"),
    [
        (9, 0, r"positions must be in \[0, 9\), got 9"),
        (-1, 0, "positions must be in .*, got -1"),
        (0, 64, r"slots must be in \[0, 64\), got 64"),
        (0, -1, "slots must be in .*, got -1"),
    ],
)
def test_keys_are_stored_only_inside_the_pool(position, slot, error):
    panel = 2 * cpu_extension.lanes()
    plain, table = torch.zeros(64, 1, 32), torch.zeros(9, 32)
    panels = plain.view(-1, 1, 32, panel, 1), plain.view(-1, 1, 32 // panel, panel, panel, 1)
    for pools in (plain, plain), panels:

        def store(position, slot, pools=pools):
            positions, slots = torch.tensor([8, position]), torch.tensor([63, slot])
            ops.rotate_and_store(torch.randn(2, 96), positions, slots, table, None, None, 0.0, *pools)

        store(0, 0)
        with pytest.raises(RuntimeError, match=error):
            store(position, slot)


def test_a_pool_without_heads_is_refused():
    nothing, indices = torch.zeros(64, 1, 0), torch.tensor([0, 1])
    with pytest.raises(RuntimeError, match="must have heads with components"):
        ops.rotate_and_store(torch.zeros(2, 0), indices, indices, torch.zeros(9, 0), None, None, 0.0, nothing, nothing)


def test_options_that_do_not_fit_are_refused():
    qkv, none, pools = torch.zeros(1, 128), torch.zeros(1, dtype=torch.int64), torch.zeros(2, 8, 1, 32)
    table, norms, scales = torch.zeros(9, 32), torch.ones(2, 32), torch.ones(9)
    for weights, options in (((None, None), (None, True)), (norms, (scales, True))):
        with pytest.raises(RuntimeError, match="norm_after needs norms, and excludes q_scales"):
            ops.rotate_and_store(qkv, none, none, table, *weights, 1e-5, *pools, *options)
    with pytest.raises(RuntimeError, match=r"q_scales must have shape \[9\]"):
        ops.rotate_and_store(qkv, none, none, table, *norms, 1e-5, *pools, scales[:8])
