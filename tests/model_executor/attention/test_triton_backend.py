"""The Triton backend against the torch backend, over random steps of random requests; the layer that stores itself."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

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
from hypothesis import example, given, settings
from hypothesis import strategies as st
from triton_interpreter import examples

from tercet.mem_cache.token_to_kv_pool import TokenToKVPool
from tercet.model_executor.attention import triton_backend
from tercet.model_executor.attention.base import AttentionBackend
from tercet.model_executor.attention.torch_backend import TorchAttentionBackend
from tercet.model_executor.attention.triton_backend import TritonAttentionBackend
from tercet.model_executor.kernels import extend_attention
from tercet.model_executor.kernels.decode_attention import decode_attention
from tercet.model_executor.kernels.rmsnorm import qk_rmsnorm
from tercet.model_executor.kernels.rotary import rotary
from tercet.model_executor.layers.attention import Attention, QKNorm
from tercet.model_executor.layers.fused_layers import FusedTritonAttention
from tercet.model_executor.layers.rotary import RotaryEmbedding
from tercet.model_executor.layers.triton_layers import RotaryTable, TritonAttention
from tercet.model_executor.models.family import family_of
from tercet.srt.model_files.rope_config import RopeConfig


def pool(dtype: torch.dtype, page_size: int = 1) -> TokenToKVPool:
    return TokenToKVPool(NUM_SLOTS, page_size, 2, 2, 16, dtype, "cpu")


@settings(max_examples=examples(10))
@given(
    seed=st.integers(0, 2**31),
    group=st.sampled_from([1, 3, 4]),
    window=st.sampled_from([None, 1, 9, 40]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    prompts=st.lists(st.integers(1, 45), min_size=1, max_size=3),
    steps=st.lists(st.sampled_from(["decode", "mixed"]), max_size=2),
    multiprocessors=st.sampled_from([1, 8, 1000]),
    page_size=st.sampled_from([1, 16]),  # one look-up for each slot, or for each KV tile
    have_sinks=st.tuples(st.booleans(), st.booleans()),
    caps=st.tuples(*[st.sampled_from([None, 0.5, 4.0])] * 2),
)
def test_the_outputs_are_the_torch_backends(
    seed, group, window, dtype, prompts, steps, multiprocessors, page_size, have_sinks, caps
) -> None:
    with mock.patch.object(extend_attention, "num_multiprocessors", lambda device: multiprocessors):
        check_outputs(seed, group, window, dtype, prompts, steps, page_size, have_sinks, caps)


def check_outputs(seed, group, window, dtype, prompts, steps, page_size, have_sinks, caps) -> None:
    g = torch.Generator().manual_seed(seed)
    cfg = config(group, window)
    sinks = [random_sinks(cfg.num_heads, seed + layer) if has else None for layer, has in enumerate(have_sinks)]
    specs = with_caps(with_sinks(family_of(cfg).attention(cfg), sinks), caps)
    triton, reference = (cls(specs, pool(dtype, page_size)) for cls in (TritonAttentionBackend, TorchAttentionBackend))
    pages = torch.randperm(NUM_SLOTS // page_size, generator=g)[:, None] + 1
    slots = (pages * page_size + torch.arange(page_size)).flatten().int()
    table = torch.zeros(len(prompts) + 1, CONTEXT, dtype=torch.int32)
    for i in range(len(prompts)):
        table[i + 1, :64] = slots[i * 64 : (i + 1) * 64]
    rows = [Row(i + 1, n) for i, n in enumerate(prompts)]
    for step, kind in enumerate(["prefill", *steps]):
        if kind == "prefill":
            extend_lens = [row.length for row in rows]
        else:
            extend_lens = [1 if kind == "decode" or i % 2 else 5 for i in range(len(rows))]
            for row, n in zip(rows, extend_lens, strict=True):
                row.length += n
        batch = make_batch(rows, extend_lens, table, decode=kind == "decode")
        fused = torch.randn(len(batch.positions), cfg.num_heads + 4, 16, generator=g).to(dtype)
        outs = attend(triton, batch, fused, cfg.num_heads, sinks)
        wanted = attend(reference, batch, fused, cfg.num_heads, sinks)
        for out, want in zip(outs, wanted, strict=True):
            error = error_of(out, want)
            assert error < (1e-5 if dtype == torch.float32 else 1.5e-2), (step, kind, error)
    for layer in range(2):
        assert torch.equal(triton.kv_pool.k_buffer[layer], reference.kv_pool.k_buffer[layer])
        assert torch.equal(triton.kv_pool.v_buffer[layer], reference.kv_pool.v_buffer[layer])


def test_a_decoding_row_has_the_same_bits_beside_a_prompt() -> None:
    g = torch.Generator().manual_seed(1)
    cfg = config(3, 9)
    sinks = [None, torch.randn(cfg.num_heads, generator=g)]
    backend = TritonAttentionBackend(with_sinks(family_of(cfg).attention(cfg), sinks), pool(torch.float32))
    for buffer in (*backend.kv_pool.k_buffer, *backend.kv_pool.v_buffer):
        buffer.copy_(torch.randn(buffer.shape, generator=g))
    table = (torch.randperm(NUM_SLOTS, generator=g)[: 3 * CONTEXT].reshape(3, CONTEXT) + 1).int()
    decoding, prompt = Row(1, 50), Row(2, 20)
    fused = torch.randn(13, cfg.num_heads + 4, 16, generator=g)
    alone = attend(backend, make_batch([decoding], [1], table, decode=True), fused[:1], cfg.num_heads, sinks)
    first = attend(backend, make_batch([decoding, prompt], [1, 12], table, decode=False), fused, cfg.num_heads, sinks)
    last = attend(
        backend, make_batch([prompt, decoding], [12, 1], table, decode=False), fused.roll(-1, 0), cfg.num_heads, sinks
    )  # fmt: skip
    for layer in range(2):
        assert torch.equal(first[layer][0], alone[layer][0])
        assert torch.equal(last[layer][12], alone[layer][0])


@pytest.mark.parametrize("prompts", [[], [3, 12]])
def test_requests_with_more_splits_than_the_pool_are_divided_among_launches(prompts: list[int]) -> None:
    """17 requests share 90 tokens in a pool of 128. A launch has room for 32 of their 51 splits."""
    g = torch.Generator().manual_seed(2)
    cfg = config(2, None)
    sinks = [None, torch.randn(cfg.num_heads, generator=g)]
    specs = with_caps(with_sinks(family_of(cfg).attention(cfg), sinks), [0.5, None])
    rows, shared = [Row(i + 1, 91) for i in range(17)], torch.randperm(128, generator=g)[:120] + 1
    table = shared.repeat(18, 1).int()
    table[1:, 90] = shared[90:107]
    extend_lens = [1] * 17
    for at in prompts:  # requests with several new tokens among them
        extend_lens[at] = 2
    batch = make_batch(rows, extend_lens, table, decode=not prompts)
    fused = torch.randn(len(batch.positions), cfg.num_heads + 4, 16, generator=g)
    past = torch.randn(129, 2, 16, generator=g)
    launches: list[object] = []

    def attention(*arguments: object, **options: object) -> None:
        launches.append(arguments[6])
        decode_attention(*arguments, **options)

    def outs(backend: Callable[..., AttentionBackend]) -> list[torch.Tensor]:
        made = backend(specs, TokenToKVPool(128, 1, 2, 2, 16, torch.float32, "cpu"))
        for buffer in (*made.kv_pool.k_buffer, *made.kv_pool.v_buffer):
            buffer.copy_(past)
        launches.clear()
        with mock.patch.object(triton_backend, "decode_attention", attention):
            return attend(made, batch, fused, cfg.num_heads, sinks)

    divided = outs(TritonAttentionBackend)
    assert len(launches) == 2 * 2, "each of two layers has two launches"
    assert all(work.capacity <= 32 for work in launches)
    with mock.patch.object(TritonAttentionBackend, "_room", lambda *_: 1000):
        whole = outs(TritonAttentionBackend)
    assert len(launches) == 2
    for mine, undivided, wanted in zip(divided, whole, outs(TorchAttentionBackend), strict=True):
        assert torch.equal(mine, undivided)
        assert (mine - wanted).norm() / wanted.norm() < 1e-5


@settings(max_examples=examples(10))
@given(
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    pool_dtype=st.sampled_from([None, torch.float8_e4m3fn]),
    norm=st.sampled_from([None, "heads", "rows"]),
    has_sinks=st.booleans(),
    cap=st.sampled_from([None, 0.5]),
    extend_lens=st.sampled_from([[1, 1], [5, 1], [4, 7]]),
    layer=st.sampled_from([TritonAttention, FusedTritonAttention]),
)
@example(
    seed=1, dtype=torch.float32, pool_dtype=None, norm=None, has_sinks=True, cap=0.5, extend_lens=[1, 1],
    layer=FusedTritonAttention,
)  # fmt: skip
def test_the_layer_leaves_the_bits_of_rotating_and_storing_apart(
    seed, dtype, pool_dtype, norm, has_sinks, cap, extend_lens, layer
) -> None:
    g = torch.Generator().manual_seed(seed)
    cfg, device = config(3, None), torch.device("cpu")
    table = (torch.randperm(NUM_SLOTS, generator=g)[: 3 * CONTEXT].reshape(3, CONTEXT) + 1).int()
    batch = make_batch([Row(1, 33), Row(2, 7)], extend_lens, table, decode=extend_lens == [1, 1])
    num_tokens = len(batch.positions)
    qkv = torch.randn(num_tokens, (cfg.num_heads + 4) * 16, generator=g).to(dtype)
    old = [torch.randn(NUM_SLOTS + 1, 2, 16, generator=g).to(pool_dtype or dtype) for _ in range(2)]
    sizes = (16 * cfg.num_heads, 32) if norm == "rows" else (16, 16)
    qk_norm = QKNorm(*(torch.randn(size, generator=g).to(dtype) for size in sizes), 1e-6) if norm else None
    sinks = random_sinks(cfg.num_heads, seed) if has_sinks else None

    def backend(kind: type[AttentionBackend]) -> AttentionBackend:
        specs = with_caps(with_sinks(family_of(cfg).attention(cfg), [None, sinks]), [None, cap])
        made = kind(specs, pool(pool_dtype or dtype))
        for buffer, kept in zip((made.kv_pool.k_buffer[1], made.kv_pool.v_buffer[1]), old, strict=True):
            buffer.copy_(kept)
        made.plan(batch)
        return made

    fused, apart, reference = map(backend, (TritonAttentionBackend, TritonAttentionBackend, TorchAttentionBackend))
    cos_sin = RotaryTable([RopeConfig()], 16, CONTEXT, device)(batch.positions)[0]
    out = layer(1, fused, qk_norm, sinks)(qkv.clone(), cos_sin, batch)
    apart_qkv = qkv.clone()
    if qk_norm is not None and norm == "rows":
        qk_rmsnorm(apart_qkv, *qk_norm[:3])
    heads = apart_qkv.view(num_tokens, -1, 16)
    rotary(heads, cfg.num_heads, 2, *cos_sin, **(qk_norm._asdict() if qk_norm is not None and norm == "heads" else {}))
    assert torch.equal(out, apart.forward(*heads.split((cfg.num_heads, 2, 2), 1), 1, batch, sinks))
    for name in ("k_buffer", "v_buffer"):
        pools = [getattr(b.kv_pool, name)[1].view(torch.uint8) for b in (fused, apart)]
        assert torch.equal(*pools)
    rotated = RotaryEmbedding(RopeConfig(), 16, device)(batch.positions)
    want = Attention(1, reference, qk_norm, sinks)(qkv, rotated, batch)
    # One step of fp8 is an eighth, and the two round different last bits of bf16 to it.
    limit = 5e-2 if pool_dtype else {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}[dtype]
    assert error_of(out, want) < limit
