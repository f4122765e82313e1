"""The KV pool: the tensors that hold K and V. The only file of this layer that imports torch."""

from __future__ import annotations

import math
from functools import cached_property

import torch

from ..srt.machine.huge_pages import zeroed

_SYSTEM_PAGE = 4096
"""The smallest part of memory, in bytes, that a system provides on first access."""


class MHATokenToKVPool:
    """The KV pool of MHA, GQA and MQA models: K and V of every slot, in two tensors for each layer.

    `k_buffer[layer]`, `v_buffer[layer]`: [size + page_size, num_kv_heads, head_dim]. The first page is the dummy that
    padded entries write to. All values start as zero: a slot that was never written must not hold a NaN, because an
    attention weight of zero times NaN is NaN.

    If `panel` is given, the pool has the panel layout of csrc/cpu/kv_panels.h: blocks of `panel` slots, with `n`
    numbers in a word of 32 bits.
    k_buffer: [blocks, num_kv_heads, head_dim / n, panel, n],
    v_buffer: [blocks, num_kv_heads, head_dim / panel, panel / n, panel, n].
    All layers of a block are neighbours in memory, so memory use grows with the number of tokens.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        panel: int | None = None,
    ) -> None:
        """`size`: tokens, without the dummy page. Raises ValueError unless it is a positive multiple of `page_size`.

        `page_size` and `head_dim` must be multiples of `panel`.
        """
        if page_size < 1 or size < page_size or size % page_size:
            raise ValueError(f"pool size must be a positive multiple of page size {page_size}, got {size}")
        self.size = size
        self.page_size = page_size
        self.dtype = dtype
        self._panel = panel
        self._per_word = n = max(4 // dtype.itemsize, 1)
        self._whole: torch.Tensor | None = None
        """All values of a pool in panels."""
        device = torch.device(device)
        layers, slots = range(num_layers), size + page_size
        if panel is None:
            shape = (slots, num_kv_heads, head_dim)
            self.k_buffer = [_zeros(shape, dtype, device) for _ in layers]
            self.v_buffer = [_zeros(shape, dtype, device) for _ in layers]
            return
        assert page_size % panel == head_dim % panel == 0, (page_size, head_dim, panel)
        blocks = slots // panel, num_kv_heads
        both = _zeros((blocks[0], num_layers, 2, num_kv_heads * panel * head_dim), dtype, device)
        self._whole = both
        self.k_buffer = [both[:, layer, 0].view(*blocks, head_dim // n, panel, n) for layer in layers]
        self.v_buffer = [both[:, layer, 1].view(*blocks, head_dim // panel, panel // n, panel, n) for layer in layers]

    @staticmethod
    def bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """The size of one slot in bytes: K and V of all layers."""
        return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize

    def set_kv(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k, v: [T, num_kv_heads, head_dim] at slots: int64 [T], cast to the pool's dtype.

        The slots are distinct, except the dummy slot, which keeps the last write.
        """
        k, v = k.to(self.dtype), v.to(self.dtype)
        if self._panel is None:
            self.k_buffer[layer][slots] = k
            self.v_buffer[layer][slots] = v
            return
        tokens, heads, dim = k.shape
        block, at = slots // self._panel, slots % self._panel
        self.k_buffer[layer][block, :, :, at] = k.reshape(tokens, heads, dim // self._per_word, self._per_word)
        word, half = at // self._per_word, at % self._per_word
        self.v_buffer[layer][block, :, :, word, :, half] = v.reshape(tokens, heads, dim // self._panel, self._panel)

    def get_kv(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Read k, v: [T, num_kv_heads, head_dim] of slots: int64 [T]."""
        k, v = self.k_buffer[layer], self.v_buffer[layer]
        if self._panel is None:
            return k[slots], v[slots]
        block, at = slots // self._panel, slots % self._panel
        word, half = at // self._per_word, at % self._per_word
        return k[block, :, :, at].flatten(2), v[block, :, :, word, :, half].flatten(2)

    @cached_property
    def _page_views(self) -> list[torch.Tensor]:
        """The pool as bytes: uint8 tensors [pages, n], whose rows of one page together are the page."""
        num_pages = self.size // self.page_size + 1
        tensors = [*self.k_buffer, *self.v_buffer] if self._whole is None else [self._whole]
        return [tensor.view(num_pages, -1).view(torch.uint8) for tensor in tensors]

    @property
    def page_bytes(self) -> int:
        """The size of a page in bytes: K and V of all layers."""
        return sum(view.shape[1] for view in self._page_views)

    @property
    def bytes_per_slot(self) -> int:
        """The size of a slot in bytes: K and V of all layers."""
        return self.page_bytes // self.page_size

    def touch(self, start: int, end: int) -> None:
        """Make the system provide the host memory of slots [start, end). No token may use their pages."""
        first_page, end_page = start // self.page_size, -(-end // self.page_size)
        for view in self._page_views:
            view[first_page:end_page].view(-1)[::_SYSTEM_PAGE].fill_(0)

    def read_pages(self, pages: torch.Tensor) -> torch.Tensor:
        """Copy pages: int64 [n], in the pool's own layout. Returns uint8 [n, page_bytes]."""
        return torch.cat([view.index_select(0, pages) for view in self._page_views], dim=1)

    def write_pages(self, pages: torch.Tensor, data: torch.Tensor) -> None:
        """Overwrite pages: int64 [n] with data: uint8 [n, page_bytes] from `read_pages` of such a pool."""
        start = 0
        for view in self._page_views:
            view.index_copy_(0, pages, data[:, start : start + view.shape[1]])
            start += view.shape[1]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Memory that is mapped but not written: the pool takes memory only as it fills, and no time at the start.
    # torch.zeros would take 1.4 s for 1 GiB.
    return torch.from_numpy(zeroed(math.prod(shape) * dtype.itemsize)).view(dtype).view(shape)
