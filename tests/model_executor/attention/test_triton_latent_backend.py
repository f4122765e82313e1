"""The Triton backend of latent attention against the torch backend, over random steps of random requests."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
from backend_steps import CONTEXT, NUM_SLOTS, Row, error_of, make_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_interpreter import examples

from tercet.mem_cache.token_to_kv_pool import TokenToKVPool
from tercet.model_executor.attention.base import AttentionBackend, AttentionSpec
from tercet.model_executor.attention.latent_backend import LatentAttentionBackend
from tercet.model_executor.attention.registry import create_attention_backend
from tercet.model_executor.attention.torch_backend import TorchAttentionBackend
from tercet.model_executor.forward_batch import ForwardBatch
from tercet.model_executor.kernels import extend_attention
from tercet.srt.errors import ModelNotSupported
from tercet.srt.model_files.rope_config import RopeConfig

LATENT_DIM, HEAD_DIM, HEADS = 32, 48, 5
SPECS = [
    AttentionSpec(
        num_heads=HEADS, num_kv_heads=1, head_dim=HEAD_DIM, scale=scale, rope=RopeConfig(), latent_dim=LATENT_DIM
    )
    for scale in (0.1, 0.2)
]


def pool(dtype: torch.dtype = torch.float32, page_size: int = 1, size: int = NUM_SLOTS) -> TokenToKVPool:
    return TokenToKVPool(size, page_size, 2, 1, HEAD_DIM, dtype, "cpu", latent_dim=LATENT_DIM)


def forward(backend: AttentionBackend, batch: ForwardBatch, fused: torch.Tensor) -> list[torch.Tensor]:
    """The outputs of two layers. fused: queries and keys [T, HEADS + 1, HEAD_DIM], the same for both."""
    backend.plan(batch)
    k = fused[:, HEADS:]
    return [backend.forward(fused[:, :HEADS], k, k[..., :LATENT_DIM], layer, batch) for layer in range(2)]


@settings(max_examples=examples(8))
@given(
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    prompts=st.lists(st.integers(1, 45), min_size=1, max_size=3),
    steps=st.lists(st.sampled_from(["decode", "mixed"]), max_size=2),
    multiprocessors=st.sampled_from([1, 8, 1000]),
    page_size=st.sampled_from([1, 16]),  # one look-up for each slot, or for each KV tile
)
def test_the_outputs_are_the_torch_backends(
    seed: int, dtype: torch.dtype, prompts: list[int], steps: list[str], multiprocessors: int, page_size: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    made = create_attention_backend("triton", SPECS, pool(dtype, page_size))
    assert isinstance(made, LatentAttentionBackend)
    reference = TorchAttentionBackend(SPECS, pool(dtype, page_size))
    pages = torch.randperm(NUM_SLOTS // page_size, generator=g)[:, None] + 1
    slots = (pages * page_size + torch.arange(page_size)).flatten().int()
    table = torch.zeros(len(prompts) + 1, CONTEXT, dtype=torch.int32)
    for i in range(len(prompts)):
        table[i + 1, :64] = slots[i * 64 : (i + 1) * 64]
    rows = [Row(i + 1, n) for i, n in enumerate(prompts)]
    for step, kind in enumerate(["prefill", *steps]):
        extend_lens = [row.length for row in rows]
        if step:
            extend_lens = [1 if kind == "decode" or i % 2 else 5 for i in range(len(rows))]
            for row, n in zip(rows, extend_lens, strict=True):
                row.length += n
        batch = make_batch(rows, extend_lens, table, decode=kind == "decode")
        assert not made.can_fuse(batch, dtype)
        fused = torch.randn(len(batch.positions), HEADS + 1, HEAD_DIM, generator=g).to(dtype)
        with mock.patch.object(extend_attention, "num_multiprocessors", lambda device: multiprocessors):
            outs = forward(made, batch, fused)
        for out, want in zip(outs, forward(reference, batch, fused), strict=True):
            assert out.shape == want.shape == (len(fused), HEADS * LATENT_DIM)
            assert error_of(out, want) < (1e-5 if dtype == torch.float32 else 1.5e-2), (step, kind)
    for mine, wanted in zip(made.kv_pool.k_buffer, reference.kv_pool.k_buffer, strict=True):
        assert torch.equal(mine, wanted)


def test_a_decoding_row_has_the_same_bits_beside_a_prompt() -> None:
    g = torch.Generator().manual_seed(1)
    backend = LatentAttentionBackend(SPECS, pool())
    for buffer in backend.kv_pool.k_buffer:
        buffer.copy_(torch.randn(buffer.shape, generator=g))
    table = (torch.randperm(NUM_SLOTS, generator=g)[: 3 * CONTEXT].reshape(3, CONTEXT) + 1).int()
    decoding, prompt = Row(1, 50), Row(2, 20)
    fused = torch.randn(13, HEADS + 1, HEAD_DIM, generator=g)
    alone = forward(backend, make_batch([decoding], [1], table, decode=True), fused[:1])
    mixed = forward(backend, make_batch([decoding, prompt], [1, 12], table, decode=False), fused)
    assert all(torch.equal(mine[0], wanted[0]) for mine, wanted in zip(mixed, alone, strict=True))


def test_requests_with_more_splits_than_the_pool_are_divided_among_launches() -> None:
    """17 requests share 90 tokens in a pool of 128. A launch has room for 32 of their 51 splits."""
    g = torch.Generator().manual_seed(2)
    rows, shared = [Row(i + 1, 91) for i in range(17)], torch.randperm(128, generator=g)[:120] + 1
    table = shared.repeat(18, 1).int()
    table[1:, 90] = shared[90:107]
    batch = make_batch(rows, [1] * 17, table, decode=True)
    fused = torch.randn(17, HEADS + 1, HEAD_DIM, generator=g)
    divided, whole = (LatentAttentionBackend(SPECS, pool(size=128)) for _ in range(2))
    for backend in (divided, whole):
        for buffer in backend.kv_pool.k_buffer:
            buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(3)))
    assert divided.num_splits(batch.seq_lens_host) == 51
    mine = forward(divided, batch, fused)
    with mock.patch.object(LatentAttentionBackend, "_room", lambda *_: 1000):
        wanted = forward(whole, batch, fused)
    assert all(map(torch.equal, mine, wanted))


def test_partial_results_have_the_components_of_values() -> None:
    backend = LatentAttentionBackend(SPECS, pool(size=128))
    assert backend.decode_part_bytes(2, 64, 128) == 4 * HEADS * (LATENT_DIM + 1) * 4, "4 splits of 32 tokens"
    with mock.patch.object(extend_attention, "num_multiprocessors", lambda device: 8):
        assert backend.max_part_bytes(64) == 4 * 2 * 16 * (64 + 2) * 4, "4 tiles of 16 rows with 2 splits each"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 9}, "sliding windows"),
        ({"has_sinks": True}, "attention sinks"),
        ({"soft_cap": 5.0}, "soft caps"),
    ],
)
def test_what_has_no_kernel_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelNotSupported, match=f"latent attention has no kernel for {message}"):
        create_attention_backend("triton", [SPECS[0], dataclasses.replace(SPECS[1], **change)], pool())
