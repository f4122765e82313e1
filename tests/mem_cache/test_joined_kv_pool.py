"""The pool of layers with several kinds of heads."""

from __future__ import annotations

import pytest
import torch

from tercet.mem_cache.joined_kv_pool import JoinedKVPool
from tercet.mem_cache.token_to_kv_pool import TokenToKVPool

SIZE, PAGE = 24, 8
HEADS = [(2, 8), (1, 16)]
PLACES = [(0, 0), (1, 0), (0, 1)]


def make_pool(panel: int | None = None) -> JoinedKVPool:
    layers = [1 + max(layer for pool, layer in PLACES if pool == index) for index in range(len(HEADS))]
    pools = [
        TokenToKVPool(SIZE, PAGE, count, *heads, torch.float32, "cpu", panel)
        for count, heads in zip(layers, HEADS, strict=True)
    ]
    return JoinedKVPool(pools, PLACES)


def fill(pool: JoinedKVPool, slots: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Store random K and V in every layer."""
    generator = torch.Generator().manual_seed(0)
    stored = []
    for layer, (of_pool, _) in enumerate(PLACES):
        k, v = (torch.randn(len(slots), *HEADS[of_pool], generator=generator) for _ in range(2))
        pool.set_kv(layer, slots, k, v)
        stored.append((k, v))
    return stored


def assert_has(pool: JoinedKVPool, slots: torch.Tensor, stored: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for layer, expected in enumerate(stored):
        for found, numbers in zip(pool.get_kv(layer, slots), expected, strict=True):
            assert torch.equal(found, numbers)


@pytest.mark.parametrize("panel", [None, 8])
def test_each_layer_has_its_own_k_and_v(panel: int | None) -> None:
    pool, slots = make_pool(panel), torch.tensor([8, 9, 31, 17])
    assert_has(pool, slots, fill(pool, slots))


@pytest.mark.parametrize("panel", [None, 8])
def test_pages_have_all_layers(panel: int | None) -> None:
    pool, slots = make_pool(panel), torch.arange(PAGE, SIZE + PAGE)
    stored = fill(pool, slots)
    pages = pool.read_pages(torch.tensor([1, 2, 3]))
    of_token = sum(2 * HEADS[of_pool][0] * HEADS[of_pool][1] for of_pool, _ in PLACES) * 4
    assert pool.bytes_per_slot == of_token and pages.shape == (3, PAGE * of_token)
    assert pool.bytes_per_slot == sum(own.bytes_per_slot for own in pool.pools)
    other = make_pool(panel)
    other.write_pages(torch.tensor([3, 1, 2]), pages)
    moved = torch.cat([slots[2 * PAGE :], slots[: 2 * PAGE]])
    assert_has(other, moved, stored)
