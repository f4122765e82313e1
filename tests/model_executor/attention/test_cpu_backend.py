"""Sinks, soft caps and latent attention on a CPU: the compiled backend against torch's, and layers whose sinks are
overwritten."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from backend_steps import (
    CONTEXT,
    NUM_SLOTS,
    Row,
    attend,
    config,
    error_of,
    make_batch,
    random_sinks,
    with_caps,
    with_sinks,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.mem_cache.token_to_kv_pool import TokenToKVPool
from tercet.model_executor import cpu_extension
from tercet.model_executor.attention.base import AttentionSpec
from tercet.model_executor.attention.registry import create_attention_backend, kv_panel
from tercet.model_executor.layers.kinds import layers_for
from tercet.model_executor.models.family import family_of
from tercet.srt.model_files.rope_config import RopeConfig

needs_build = pytest.mark.skipif(cpu_extension.load() is None, reason="no build of csrc/cpu for this processor")


def table_of(num_rows: int, g: torch.Generator) -> torch.Tensor:
    return (torch.randperm(NUM_SLOTS, generator=g)[: num_rows * CONTEXT].view(num_rows, CONTEXT) + 1).int()


def pool(dtype: torch.dtype, seed: int) -> TokenToKVPool:
    """A pool whose tokens all have K and V."""
    made = TokenToKVPool(NUM_SLOTS, 1, 2, 2, 16, dtype, "cpu")
    g = torch.Generator().manual_seed(seed)
    for buffer in (*made.k_buffer, *made.v_buffer):
        buffer.copy_(torch.randn(buffer.shape, generator=g))
    return made


@needs_build
@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**31),
    group=st.sampled_from([1, 3, 8]),
    window=st.sampled_from([None, 1, 40]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    lens=st.lists(st.integers(12, CONTEXT), min_size=1, max_size=3),
    decode=st.booleans(),
    caps=st.tuples(*[st.sampled_from([None, 0.5, 4.0])] * 2),
)
def test_the_outputs_are_the_torch_backends(seed, group, window, dtype, lens, decode, caps):
    g = torch.Generator().manual_seed(seed)
    cfg = config(group, window)
    sinks = [random_sinks(cfg.num_heads, seed), random_sinks(cfg.num_heads, seed + 1)]
    specs = with_caps(with_sinks(family_of(cfg).attention(cfg), sinks), caps)
    rows, extend_lens = (
        [Row(i, n) for i, n in enumerate(lens)],
        [1 if decode or i % 2 else 12 for i in range(len(lens))],
    )
    batch = make_batch(rows, extend_lens, table_of(len(lens), g), decode)
    fused = torch.randn(len(batch.positions), cfg.num_heads + 4, 16, generator=g).to(dtype)
    ours, reference = (
        attend(create_attention_backend(name, specs, pool(dtype, seed)), batch, fused, cfg.num_heads, sinks)
        for name in ("cpu", "torch")
    )
    for out, want in zip(ours, reference, strict=True):
        assert error_of(out, want) < (1e-5 if dtype == torch.float32 else 1.5e-2)


@needs_build
@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**31),
    heads=st.sampled_from([1, 16, 40]),
    page_size=st.sampled_from([1, 32]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    lens=st.lists(st.integers(12, CONTEXT), min_size=1, max_size=3),
    decode=st.booleans(),
)
def test_latent_attention_is_the_torch_backends(seed, heads, page_size, dtype, lens, decode):
    head_dim, latent_dim = 96, 64
    g = torch.Generator().manual_seed(seed)
    layer = AttentionSpec(
        num_heads=heads, num_kv_heads=1, head_dim=head_dim, scale=0.1, rope=RopeConfig(), latent_dim=latent_dim
    )
    specs = [layer, replace(layer, window=20)]
    pages = torch.randperm(len(lens) * 4, generator=g).view(len(lens), 4) + 1  # of 32 tokens
    table = (pages[:, :, None] * 32 + torch.arange(32)).flatten(1).int()
    rows = [Row(i, n) for i, n in enumerate(lens)]
    batch = make_batch(rows, [1 if decode or i % 2 else 12 for i in range(len(lens))], table, decode)
    past = torch.randn(table.numel(), 1, head_dim, generator=g).to(dtype)
    q, k = (torch.randn(len(batch.positions), n, head_dim, generator=g).to(dtype) for n in (heads, 1))
    outs = {}
    for name in ("cpu", "torch"):
        panel = kv_panel(name, page_size, head_dim, dtype, latent_dim)
        assert (panel is not None) == (name == "cpu" and page_size == 32)
        pool = TokenToKVPool(table.numel() + 32, page_size, 2, 1, head_dim, dtype, "cpu", panel, latent_dim)
        for layer_id in range(2):
            pool.set_kv(layer_id, table.flatten().long(), past, past[..., :latent_dim])
        backend = create_attention_backend(name, specs, pool)
        backend.plan(batch)
        outs[name] = [backend.forward(q, k, k[..., :latent_dim], layer_id, batch) for layer_id in range(2)]
    for ours, wanted in zip(*outs.values(), strict=True):
        assert ours.shape == (len(q), heads * latent_dim)
        assert error_of(ours, wanted) < (1e-5 if dtype == torch.float32 else 1.5e-2)


@pytest.mark.parametrize("name", ["torch", pytest.param("cpu", marks=needs_build)])
def test_a_layer_reads_sinks_that_an_update_has_overwritten(name):
    g = torch.Generator().manual_seed(1)
    cfg = config(3, None)
    layers = layers_for(name, torch.float32)
    old, new = (torch.randn(cfg.num_heads, generator=g) for _ in range(2))
    batch = make_batch([Row(0, 50), Row(1, 20)], [1, 3], table_of(2, g), decode=False)
    qkv = torch.randn(4, (cfg.num_heads + 4) * 16, generator=g)
    (rotation,) = layers.rotary([RopeConfig()], 16, CONTEXT, torch.device("cpu"))(batch.positions)

    def layer(sinks):
        specs = with_sinks(family_of(cfg).attention(cfg), [None, sinks])
        backend = create_attention_backend(name, specs, pool(torch.float32, 2))
        backend.plan(batch)
        return layers.attention(1, backend, None, sinks)

    updated = layer(old)
    before = updated(qkv.clone(), rotation, batch)
    wanted = layer(new.clone())(qkv.clone(), rotation, batch)
    assert not torch.allclose(before, wanted)
    old.copy_(new)
    assert torch.equal(updated(qkv.clone(), rotation, batch), wanted)
