from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from patience import PATIENCE_S

from tercet.mem_cache.token_to_kv_pool import StoredConvolutions, TokenToKVPool


def make_pool(page_size: int = 4, dtype: torch.dtype = torch.bfloat16) -> TokenToKVPool:
    return TokenToKVPool(16, page_size, num_layers=2, num_kv_heads=3, head_dim=8, dtype=dtype, device="cpu")


def test_every_slot_of_the_allocator_and_the_dummy_page_have_a_place() -> None:
    pool = make_pool()
    assert [len(pool.k_buffer), len(pool.v_buffer)] == [2, 2]
    for buffer in pool.k_buffer + pool.v_buffer:
        assert buffer.shape == (20, 3, 8) and buffer.dtype == torch.bfloat16
        assert not buffer.any()


def test_set_kv_writes_one_layer_at_the_slots_and_casts() -> None:
    pool = make_pool()
    k, v = torch.randn(3, 3, 8), torch.randn(3, 3, 8)
    slots = torch.tensor([19, 4, 7])
    pool.set_kv(1, slots, k, v)
    assert torch.equal(pool.k_buffer[1][slots], k.bfloat16())
    assert torch.equal(pool.v_buffer[1][slots], v.bfloat16())
    assert pool.k_buffer[1].abs().sum((1, 2)).count_nonzero() == 3
    assert not pool.k_buffer[0].any() and not pool.v_buffer[0].any()


@pytest.mark.parametrize("panel", [None, 16])
def test_touching_writes_zeros_to_the_pages_of_these_slots_only(panel: int | None) -> None:
    pool = TokenToKVPool(
        96, 32, num_layers=2, num_kv_heads=3, head_dim=32, dtype=torch.float32, device="cpu", panel=panel
    )
    pages = torch.arange(4)
    pool.write_pages(pages, torch.full((4, pool.page_bytes), 7, dtype=torch.uint8))
    pool.touch(64, 96)
    is_written = (pool.read_pages(pages) == 0).any(dim=1)
    assert is_written.tolist() == [False, False, True, False]
    assert pool.bytes_per_slot == TokenToKVPool.bytes_per_token(2, 3, 32, torch.float32)


@pytest.mark.parametrize("panel", [None, 16])
def test_pages_hold_what_convolutions_store(panel: int | None) -> None:
    stored = StoredConvolutions(3, 40, torch.float32)
    sizes = {"num_layers": 2, "num_kv_heads": 3, "head_dim": 32, "dtype": torch.bfloat16, "device": "cpu"}
    pools = [TokenToKVPool(96, 32, **sizes, panel=panel, convolutions=stored) for _ in range(2)]
    one, other = pools
    assert [(buffer.shape, buffer.dtype) for buffer in one.conv_buffer] == [((128, 40), torch.float32)] * 3
    assert one.bytes_per_slot == TokenToKVPool.bytes_per_token(2, 3, 32, torch.bfloat16) + 3 * 40 * 4
    for layer, buffer in enumerate(one.conv_buffer):
        buffer[:] = torch.arange(128.0)[:, None] + 1000 * layer
    other.write_pages(torch.tensor([3, 1]), one.read_pages(torch.tensor([1, 2])))
    for mine, theirs in zip(one.conv_buffer, other.conv_buffer, strict=True):
        assert torch.equal(theirs[96:128], mine[32:64]) and torch.equal(theirs[32:64], mine[64:96])
        assert not theirs[:32].any() and not theirs[64:96].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_of_latent_attention_are_the_first_components_of_keys(dtype: torch.dtype) -> None:
    sizes = {"num_layers": 2, "num_kv_heads": 1, "head_dim": 48, "dtype": dtype, "latent_dim": 32}
    plain, panels = TokenToKVPool(64, 32, **sizes, device="cpu"), TokenToKVPool(64, 32, **sizes, device="cpu", panel=16)
    k = torch.randn(5, 1, 48).to(dtype)
    slots = torch.tensor([32, 95, 70, 71, 49])
    for pool in (plain, panels):
        pool.set_kv(1, slots, k, k[..., :32])
        read_k, read_v = pool.get_kv(1, slots)
        assert torch.equal(read_k, k) and torch.equal(read_v, k[..., :32])
        assert not pool.k_buffer[0].any() and not pool.v_buffer[0].any()
        # a page that is copied takes keys and values along
        pool.write_pages(torch.tensor([1]), pool.read_pages(torch.tensor([2])))
        read_k, read_v = pool.get_kv(1, slots[1:4] - 32)
        assert torch.equal(read_k, k[1:4]) and torch.equal(read_v, k[1:4, :, :32])
    assert plain.bytes_per_slot == TokenToKVPool.bytes_per_token(**sizes) == 2 * 48 * dtype.itemsize
    assert panels.bytes_per_slot == TokenToKVPool.bytes_per_token(**sizes, panel=16) == 2 * 80 * dtype.itemsize


def test_the_slot_after_the_last_value_holds_numbers() -> None:
    """Attention multiplies words of two values, and zero times what is not a number is not a number."""
    pool = TokenToKVPool(64, 32, 1, 2, 32, torch.bfloat16, "cpu", panel=16)
    pool.v_buffer[0].fill_(torch.nan)
    kv = torch.ones(3, 2, 32)
    pool.set_kv(0, torch.tensor([32, 33, 34]), kv, kv)
    values = pool.get_kv(0, torch.tensor([32, 33, 34, 35, 36]))[1][:, 0, 0]
    assert values[:4].tolist() == [1, 1, 1, 0] and values[4].isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pool_in_panels_holds_the_same(dtype: torch.dtype) -> None:
    sizes = {"num_layers": 2, "num_kv_heads": 3, "head_dim": 32, "dtype": dtype, "device": "cpu"}
    plain, panels = TokenToKVPool(96, 32, **sizes), TokenToKVPool(96, 32, **sizes, panel=16)
    k, v = torch.randn(2, 5, 3, 32)
    slots = torch.tensor([32, 127, 70, 71, 49])
    for pool in (plain, panels):
        pool.set_kv(1, slots, k, v)
        pool.set_kv(1, slots[:0], k[:0], v[:0])
    everywhere = torch.arange(128)
    for layer in (0, 1):
        for ours, theirs in zip(panels.get_kv(layer, everywhere), plain.get_kv(layer, everywhere), strict=True):
            assert torch.equal(ours, theirs)
    assert sum(b.nbytes for b in panels.k_buffer + panels.v_buffer) == 128 * TokenToKVPool.bytes_per_token(
        2, 3, 32, dtype
    )
    # numbers of a key that are multiplied together lie together, next to those of the next slot; so do two values
    n = 4 // dtype.itemsize
    assert torch.equal(panels.k_buffer[1][127 // 16, 2, 3, 127 % 16], k[1, 2, 3 * n : 4 * n].to(dtype))
    assert torch.equal(panels.v_buffer[1][71 // 16, 2, 1, 71 % 16 // n, :, 71 % n], v[3, 2, 16:].to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bytes_per_token_is_what_the_buffers_take(dtype: torch.dtype) -> None:
    pool = make_pool(dtype=dtype)
    total = sum(buffer.nbytes for buffer in pool.k_buffer + pool.v_buffer)
    assert total == 20 * TokenToKVPool.bytes_per_token(2, 3, 8, dtype)


@pytest.mark.parametrize(("size", "page_size"), [(10, 4), (0, 1), (4, 0)])
def test_a_ragged_pool_is_refused(size: int, page_size: int) -> None:
    with pytest.raises(ValueError, match="multiple of page size"):
        TokenToKVPool(size, page_size, 1, 1, 8, torch.float32, "cpu")


def test_the_rest_of_the_folder_loads_without_torch() -> None:
    names = ["req_to_token_pool", "allocator", "base_prefix_cache", "radix_cache", "chunk_cache", "evict_policy"]
    program = "".join(f"import tercet.mem_cache.{name}\n" for name in names)
    program += "import sys; sys.exit('torch' in sys.modules)"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", program], env=env, check=True, timeout=PATIENCE_S)
