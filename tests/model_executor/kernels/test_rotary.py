from __future__ import annotations

import torch
from attention_cases import TOLERANCE
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_interpreter import examples

from tercet.model_executor.kernels.rotary import rotary, rotary_ref
from tercet.model_executor.kernels.store_kv import store_kv
from tercet.model_executor.layers.rotary import RotaryEmbedding, rotate
from tercet.srt.model_files.rope_config import RopeConfig


@settings(max_examples=examples(60))
@given(
    seed=st.integers(0, 2**31),
    num_tokens=st.integers(1, 4),
    heads=st.sampled_from([(1, 1), (6, 2), (9, 3), (16, 1)]),
    head_dim=st.sampled_from([16, 64, 80, 96]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    norm=st.sampled_from([None, "before", "after"]),
    scaled=st.booleans(),
    store=st.booleans(),
)
def test_agrees_with_the_float64_twin(seed, num_tokens, heads, head_dim, dtype, norm, scaled, store) -> None:
    g = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, generator=g).to(dtype)
    angles = torch.rand(num_tokens, head_dim // 2, generator=g) * 100
    cos, sin = angles.cos(), angles.sin()
    options = {"eps": 1e-6, "norm_after": norm == "after"}
    if scaled:
        options |= {"q_scales": 1 + torch.rand(num_tokens, generator=g)}
    if norm:
        options |= {"q_weight": torch.randn(head_dim, generator=g).to(dtype)}
        options |= {"k_weight": torch.randn(head_dim, generator=g).to(dtype)}
    wide = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    reference = qkv.double()
    k_pool = torch.full((9, num_kv_heads, head_dim), torch.nan).to(dtype)
    v_pool = k_pool.clone()
    wide_pools = k_pool.double(), v_pool.double()
    if store:
        slots = torch.randperm(8, generator=g)[:num_tokens] + 1
        options |= {"k_buffer": k_pool, "v_buffer": v_pool, "slots": slots}
        wide |= {"k_buffer": wide_pools[0], "v_buffer": wide_pools[1], "slots": slots}
    before = qkv.clone()
    rotary(qkv, num_heads, num_kv_heads, cos, sin, **options)
    rotary_ref(reference, num_heads, num_kv_heads, cos.double(), sin.double(), **wide)
    k = slice(num_heads, num_heads + num_kv_heads)
    v = slice(num_heads + num_kv_heads, None)
    assert torch.equal(qkv[:, v], before[:, v])
    pairs = [(qkv[:, :num_heads], reference[:, :num_heads])]
    if store:
        assert torch.equal(qkv[:, k], before[:, k])
        assert torch.equal(v_pool[slots], before[:, v])
        unused = torch.tensor([s for s in range(9) if s not in slots.tolist()])
        assert k_pool[unused].isnan().all() and v_pool[unused].isnan().all()
        pairs.append((k_pool[slots], wide_pools[0][slots]))
    else:
        pairs.append((qkv[:, k], reference[:, k]))
    for mine, wanted in pairs:
        error = (mine.double() - wanted).flatten(1).norm(dim=1)
        assert bool((error <= TOLERANCE[dtype] * wanted.flatten(1).norm(dim=1)).all())


def test_it_takes_the_layers_angles() -> None:
    cos_sin = RotaryEmbedding(RopeConfig(), 64, torch.device("cpu"))(torch.tensor([0, 7, 100000]))
    qkv = torch.randn(3, 4, 64)
    wanted = rotate(qkv[:, :3], cos_sin)
    rotary(qkv, 2, 1, cos_sin.cos[:, 0, :32], cos_sin.sin[:, 0, 32:])
    assert torch.allclose(qkv[:, :3], wanted, atol=1e-6)


@settings(max_examples=examples(30))
@given(
    seed=st.integers(0, 2**31),
    num_tokens=st.integers(1, 5),
    heads=st.sampled_from([(4, 2), (9, 3), (16, 1)]),
    head_dim=st.sampled_from([16, 64, 80]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    fp8=st.booleans(),
    norm=st.booleans(),
    norm_after=st.booleans(),
)
def test_the_fused_store_leaves_the_bytes_of_the_separate_one(
    seed, num_tokens, heads, head_dim, dtype, fp8, norm, norm_after
) -> None:
    """Bit by bit: the same operations in the same order, and one rounding to the activations' dtype in between."""
    g = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads
    qkv = (torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, generator=g) * 100).to(dtype)
    angles = torch.rand(num_tokens, head_dim // 2, generator=g) * 10
    slots = torch.randperm(8, generator=g)[:num_tokens] + 1
    fused = [torch.zeros(9, num_kv_heads, head_dim).to(torch.float8_e4m3fn if fp8 else dtype) for _ in range(2)]
    apart = [pool.clone() for pool in fused]
    copy = qkv.clone()
    weights = {"q_weight": torch.randn(head_dim), "k_weight": torch.randn(head_dim)}
    options = weights | {"eps": 1e-6, "norm_after": norm_after} if norm else {}
    scales = {"k_scale": 0.7, "v_scale": 0.3} if fp8 else {}
    pools = {"k_buffer": fused[0], "v_buffer": fused[1], "slots": slots}
    rotary(qkv, *heads, angles.cos(), angles.sin(), **pools, **scales, **options)
    rotary(copy, *heads, angles.cos(), angles.sin(), **options)
    store_kv(*copy[:, num_heads:].split(num_kv_heads, 1), *apart, slots, **scales)
    assert torch.equal(qkv[:, :num_heads], copy[:, :num_heads])
    for a, b in zip(fused, apart, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
