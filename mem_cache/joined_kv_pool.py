"""A KV pool for a model whose layers have heads of several kinds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from .token_to_kv_pool import TokenToKVPool

if TYPE_CHECKING:
    import torch


class JoinedKVPool(TokenToKVPool):
    """Pools of the same slots as one pool. Each of them has the layers of one kind of heads."""

    def __init__(self, pools: Sequence[TokenToKVPool], places: Sequence[tuple[int, int]]) -> None:
        """`places`: for each layer, the index of its pool and its number among the layers of that pool."""
        first = pools[0]
        assert {(pool.size, pool.page_size, pool.dtype) for pool in pools} == {
            (first.size, first.page_size, first.dtype)
        }
        self.size, self.page_size, self.dtype = first.size, first.page_size, first.dtype
        self.pools = pools
        self.places = places
        self.k_buffer = [pools[pool].k_buffer[layer] for pool, layer in places]
        self.v_buffer = [pools[pool].v_buffer[layer] for pool, layer in places]
        self.conv_buffer = ()

    def set_kv(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        pool, number = self.places[layer]
        self.pools[pool].set_kv(number, slots, k, v)

    def get_kv(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pool, number = self.places[layer]
        return self.pools[pool].get_kv(number, slots)

    @cached_property
    def _page_views(self) -> list[torch.Tensor]:
        return [view for pool in self.pools for view in pool._page_views]
