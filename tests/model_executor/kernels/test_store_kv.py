from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_interpreter import examples

from tercet.model_executor.kernels.primitives import KV_FP8_NATIVE, KV_FP8_SOFT, KV_PLAIN, kv_format
from tercet.model_executor.kernels.store_kv import store_kv, store_kv_ref
from tercet.model_executor.kernels.tuning import INTERPRETER


@settings(max_examples=examples(60))
@given(
    seed=st.integers(0, 2**31),
    num_tokens=st.integers(1, 9),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([16, 64, 80, 128]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    fp8=st.booleans(),
    slot_dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_the_pool_is_the_twins_bit_by_bit(seed, num_tokens, num_kv_heads, head_dim, dtype, fp8, slot_dtype) -> None:
    g = torch.Generator().manual_seed(seed)
    fused = torch.randn(num_tokens, 3 * num_kv_heads, head_dim, generator=g)
    # From far below fp8's smallest number to far above its largest.
    fused = (fused * 2.0 ** torch.randint(-14, 14, fused.shape, generator=g)).to(dtype)
    k, v = fused[:, num_kv_heads : 2 * num_kv_heads], fused[:, 2 * num_kv_heads :]
    slots = (torch.randperm(20, generator=g)[:num_tokens] + 1).to(slot_dtype)
    pool = torch.full((21, num_kv_heads, head_dim), torch.nan).to(torch.float8_e4m3fn if fp8 else dtype)
    mine, reference = (pool.clone(), pool.clone()), (pool.clone(), pool.clone())
    scales = {"k_scale": 0.37, "v_scale": 1.9} if fp8 else {}
    store_kv(k, v, *mine, slots, **scales)
    store_kv_ref(k, v, *reference, slots, **scales)
    for a, b in zip(mine, reference, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_every_fp8_rounding_agrees_with_torch() -> None:
    """All of bf16, which holds every e4m3 number, every midpoint between two, and neighbours of both."""
    values = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    k = values.view(-1, 4, 64)
    pool = torch.zeros(k.shape[0] + 1, 4, 64).to(torch.float8_e4m3fn)
    mine, reference = (pool.clone(), pool.clone()), (pool.clone(), pool.clone())
    slots = torch.arange(k.shape[0]) + 1
    store_kv(k, k, *mine, slots)
    store_kv_ref(k, k, *reference, slots)
    # A NaN's sign is free.
    nan = reference[0].isnan()
    assert torch.equal(mine[0].isnan(), nan)
    assert torch.equal(mine[0].view(torch.uint8)[~nan], reference[0].view(torch.uint8)[~nan])


def test_padding_goes_to_the_dummy_slot_only() -> None:
    k = torch.ones(3, 1, 64)
    pool = torch.zeros(5, 1, 64)
    store_kv(k, 2 * k, pool, pool.clone(), torch.tensor([0, 2, 0]))
    assert pool[[1, 3, 4]].eq(0).all() and pool[2].eq(1).all()


@pytest.mark.parametrize("arch", ["sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121"])
def test_every_gpu_that_converts_fp8_does(arch: str) -> None:
    assert kv_format(torch.float8_e4m3fn, arch) == KV_FP8_NATIVE.value
    assert kv_format(torch.bfloat16, arch) == KV_PLAIN.value


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_87", "gfx942", "gfx950", INTERPRETER])
def test_other_devices_decode_fp8_with_shifts(arch: str) -> None:
    assert kv_format(torch.float8_e4m3fn, arch) == KV_FP8_SOFT.value
