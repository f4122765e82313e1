"""The torch backend against attention written out token by token in float64."""

from __future__ import annotations

import dataclasses
from unittest import mock

import numpy as np
import pytest
import torch
from backend_steps import random_sinks, with_caps, with_sinks
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.mem_cache.token_to_kv_pool import TokenToKVPool
from tercet.model_executor import cpu_extension
from tercet.model_executor.attention import torch_backend
from tercet.model_executor.attention.registry import (
    BACKEND_NAMES,
    create_attention_backend,
    resolve_attention_backend,
)
from tercet.model_executor.attention.torch_backend import _similar_lengths
from tercet.model_executor.forward_batch import ForwardBatch
from tercet.model_executor.models.family import family_of
from tercet.model_executor.step import ForwardMode
from tercet.srt.errors import ModelNotSupported
from tercet.srt.model_files.model_config import ModelConfig

POOL = 600
CONTEXT = 64


def make_config(num_heads, num_kv_heads, windows):
    return ModelConfig(
        architecture="LlamaForCausalLM",
        hidden_size=8,
        intermediate_size=8,
        num_layers=len(windows),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=8,
        vocab_size=8,
        context_len=CONTEXT,
        sliding_windows=tuple(windows),
    )


def make_batch(mode, seq_lens, extend_lens, rng):
    """Rows in random order of the table; slots all over the pool."""
    seq_lens, extend_lens = np.array(seq_lens, np.int32), np.array(extend_lens, np.int32)
    num = len(seq_lens)
    rows = rng.permutation(np.arange(1, num + 4))[:num]
    table = np.zeros((num + 5, CONTEXT), np.int32)
    free = rng.permutation(np.arange(1, POOL + 1))
    slots = []
    for row, seq_len, extend_len in zip(rows, seq_lens, extend_lens, strict=True):
        table[row, :seq_len], free = free[:seq_len], free[seq_len:]
        slots.append(table[row, seq_len - extend_len : seq_len])
    prefix = seq_lens - extend_lens
    extend = mode is ForwardMode.EXTEND
    return ForwardBatch(
        mode=mode,
        rows=torch.from_numpy(rows),
        seq_lens=torch.from_numpy(seq_lens).long(),
        input_ids=torch.zeros(int(extend_lens.sum()), dtype=torch.int64),
        positions=torch.cat([torch.arange(int(p), int(s)) for p, s in zip(prefix, seq_lens, strict=True)]),
        out_cache_loc=torch.from_numpy(np.concatenate(slots)).long(),
        req_to_token=torch.from_numpy(table),
        logits_indices=None,
        extend_start_loc=torch.from_numpy(np.concatenate(([0], np.cumsum(extend_lens)))) if extend else None,
        prefix_lens=torch.from_numpy(prefix).long() if extend else None,
        seq_lens_host=seq_lens,
        extend_lens_host=extend_lens if extend else None,
    )


def naive(q, batch, pool, layer, window, extend_lens, sinks, cap):
    """One softmax per token and head. sinks: None, or a logit for each head. cap: None, or the soft cap of scores."""
    out = []
    token = 0
    group = q.shape[1] // pool.k_buffer[layer].shape[1]
    for row, seq_len, extend_len in zip(batch.rows, batch.seq_lens_host, extend_lens, strict=True):
        for position in range(int(seq_len - extend_len), int(seq_len)):
            first = 0 if window is None else max(0, position - window + 1)
            slots = batch.req_to_token[row, first : position + 1].long()
            k = pool.k_buffer[layer][slots].double().repeat_interleave(group, 1)
            v = pool.v_buffer[layer][slots].double().repeat_interleave(group, 1)
            scores = torch.einsum("hd,shd->hs", q[token].double(), k) / q.shape[-1] ** 0.5
            if cap is not None:
                scores = cap * (scores / cap).tanh()
            logits = scores if sinks is None else torch.cat([scores, sinks.double()[:, None]], 1)
            weights = logits.softmax(-1)[:, : len(slots)]
            out.append(torch.einsum("hs,shd->hd", weights, v).flatten())
            token += 1
    return torch.stack(out)


@settings(max_examples=60)
@given(data=st.data())
def test_equals_attention_written_out(data):
    num_kv_heads, group = data.draw(st.sampled_from([(1, 1), (2, 1), (2, 3), (1, 4)]))
    windows = data.draw(st.lists(st.sampled_from([None, 1, 3, 17]), min_size=1, max_size=3))
    mode = data.draw(st.sampled_from(list(ForwardMode)))
    seq_lens = data.draw(st.lists(st.integers(1, CONTEXT), min_size=1, max_size=7))
    extend_lens = [
        1 if mode is ForwardMode.DECODE or data.draw(st.booleans()) else data.draw(st.integers(1, seq_len))
        for seq_len in seq_lens
    ]
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    generator = torch.Generator().manual_seed(int(rng.integers(2**31)))

    config = make_config(num_kv_heads * group, num_kv_heads, windows)
    latent_dim = data.draw(st.sampled_from([None, 6])) if num_kv_heads == 1 else None
    pool = TokenToKVPool(POOL, 1, len(windows), num_kv_heads, 8, torch.float32, "cpu", latent_dim=latent_dim)
    batch = make_batch(mode, seq_lens, extend_lens, rng)
    used = torch.cat([batch.req_to_token[r, :n] for r, n in zip(batch.rows, seq_lens, strict=True)]).long()
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer[1:] = float("nan")  # what belongs to nobody must not be touched
        buffer[used] = torch.randn(len(used), *buffer.shape[1:], generator=generator)
    have_sinks = data.draw(st.lists(st.booleans(), min_size=len(windows), max_size=len(windows)))
    sinks = [random_sinks(config.num_heads, layer) if has else None for layer, has in enumerate(have_sinks)]
    caps = data.draw(st.lists(st.sampled_from([None, 0.5, 4.0]), min_size=len(windows), max_size=len(windows)))
    specs = with_caps(with_sinks(family_of(config).attention(config), sinks), caps)
    specs = [dataclasses.replace(spec, latent_dim=latent_dim) for spec in specs]
    backend = create_attention_backend("torch", specs, pool)
    backend.plan(batch)
    for layer, window in enumerate(windows):
        num_tokens = len(batch.out_cache_loc)
        # views of one fused projection, as the model has them
        qkv = torch.randn(num_tokens, num_kv_heads * (group + 2), 8, generator=generator) * 2
        q, k, v = qkv.split([num_kv_heads * group, num_kv_heads, num_kv_heads], 1)
        if latent_dim is not None:
            v = k[..., :latent_dim]
        with mock.patch.object(torch_backend, "_MAX_SCORES", data.draw(st.sampled_from([1, 1000, 1 << 22]))):
            out = backend.forward(q, k, v, layer, batch, sinks[layer])
        assert torch.equal(pool.k_buffer[layer][batch.out_cache_loc], k)
        assert torch.equal(pool.v_buffer[layer][batch.out_cache_loc], v)
        expected = naive(q, batch, pool, layer, window, extend_lens, sinks[layer], caps[layer])
        assert out.shape == expected.shape
        assert torch.allclose(out.double(), expected, rtol=1e-4, atol=1e-5)


def test_a_layer_that_lacks_its_sinks_is_an_error():
    config = make_config(2, 1, [None])
    specs = [dataclasses.replace(spec, has_sinks=True) for spec in family_of(config).attention(config)]
    pool = TokenToKVPool(16, 1, 1, 1, 8, torch.float32, "cpu")
    batch = make_batch(ForwardMode.DECODE, [3], [1], np.random.default_rng(0))
    backend = create_attention_backend("torch", specs, pool)
    backend.plan(batch)
    with pytest.raises(AssertionError, match="layer 0"):
        backend.attend(torch.zeros(1, 2, 8), 0, batch)


@given(st.lists(st.integers(1, 5000), max_size=40))
def test_groups_hold_similar_lengths_and_everybody_once(lengths):
    lengths = np.array(lengths, np.int32)
    groups = _similar_lengths(lengths)
    assert sorted(np.concatenate(groups).tolist() if groups else []) == list(range(len(lengths)))
    for group in groups:
        assert lengths[group].max() <= 2 * lengths[group].min()


def test_names():
    assert resolve_attention_backend("auto", torch.device("cuda")) == "triton"
    assert resolve_attention_backend("auto", torch.device("cuda"), 256) == "triton"
    assert resolve_attention_backend("auto", torch.device("cuda"), 512) == "torch"  # too wide for Triton's kernels
    for name in BACKEND_NAMES:
        if name != "cpu" or cpu_extension.load():
            assert resolve_attention_backend(name, torch.device("cpu")) == name
    assert resolve_attention_backend("auto", torch.device("cpu")) == ("cpu" if cpu_extension.load() else "torch")
    with pytest.raises(ValueError, match=r"compiled C\+\+ kernels"):
        resolve_attention_backend("cpu", torch.device("cuda"))
    with pytest.raises(ValueError, match=r"cpu, triton.*flash"):
        resolve_attention_backend("flash", torch.device("cpu"))


def test_layers_with_other_heads_are_refused():
    config = make_config(2, 1, [None, None])
    first, second = family_of(config).attention(config)
    pool = TokenToKVPool(16, 1, 2, 1, 8, torch.float32, "cpu")
    with pytest.raises(ModelNotSupported, match="torch needs the same kind of heads"):
        create_attention_backend("torch", [first, dataclasses.replace(second, head_dim=16)], pool)
