"""The KV pool: the tensors that hold K and V. The only file of this layer that imports torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch

from ..srt.machine.huge_pages import zeroed

_SYSTEM_PAGE = 4096
"""The smallest part of memory, in bytes, that a system provides on first access."""


class StoredConvolutions(NamedTuple):
    """What a pool stores for the short convolutions of a model."""

    num_layers: int
    channels: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return self.num_layers * self.channels * self.dtype.itemsize


class TokenToKVPool:
    """The KV pool: K and V of every slot, in two tensors for each layer.

    `k_buffer[layer]`: [size + page_size, num_kv_heads, head_dim]; `v_buffer[layer]`: the same with attended_dim, which
    is latent_dim in latent attention, and head_dim elsewhere. The first page is the dummy that padded entries write to.
    All numbers start as zero: a slot that was never written must not hold a NaN, because an attention weight of zero
    times NaN is NaN.

    In latent attention (MLA, arXiv 2405.04434) the value of a token is the first `latent_dim` components of its key.
    The pool then stores keys only, and `v_buffer` has views of them.

    If `panel` is given, the pool has the panel layout of csrc/cpu/kv_panels.h: blocks of `panel` slots, with `n`
    numbers in a word of 32 bits.
    k_buffer: [blocks, num_kv_heads, head_dim / n, panel, n],
    v_buffer: [blocks, num_kv_heads, attended_dim / panel, panel / n, panel, n].
    All layers of a block are neighbours in memory, so memory use grows with the number of tokens. Keys and values have
    different orders in a panel, so the pool then stores the values of latent attention, too.

    A short convolution needs the inputs of the last tokens. The pool stores one vector of each token, as if it were a
    key, so that prefixes are shared as in attention. `conv_buffer[layer]`: [size + page_size, channels], a view. All
    layers of a slot are neighbours in memory.
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
        latent_dim: int | None = None,
        convolutions: StoredConvolutions | None = None,
    ) -> None:
        """`size`: tokens, without the dummy page. Raises ValueError unless it is a positive multiple of `page_size`.

        `page_size`, `head_dim` and `latent_dim` must be multiples of `panel`. `latent_dim`: that of latent attention,
        which has one KV head; None: values are stored beside keys. `num_layers`: those with attention. `convolutions`:
        of the others.
        """
        if page_size < 1 or size < page_size or size % page_size:
            raise ValueError(f"pool size must be a positive multiple of page size {page_size}, got {size}")
        self.size = size
        self.page_size = page_size
        self.dtype = dtype
        self._panel = panel
        self._per_word = n = max(4 // dtype.itemsize, 1)
        self._shares_keys = latent_dim is not None and panel is None
        """whether values are views of keys"""
        self._whole: torch.Tensor | None = None
        """All values of a pool in panels."""
        assert latent_dim is None or (num_kv_heads == 1 and latent_dim <= head_dim)
        attended_dim = head_dim if latent_dim is None else latent_dim
        device = torch.device(device)
        layers, slots = range(num_layers), size + page_size
        self._convolved: torch.Tensor | None = None
        self.conv_buffer: Sequence[torch.Tensor] = ()
        if convolutions is not None:
            shape = (slots, convolutions.num_layers, convolutions.channels)
            self._convolved = zeros(shape, convolutions.dtype, device)
            self.conv_buffer = self._convolved.unbind(1)
        if panel is None:
            shape = (slots, num_kv_heads, head_dim)
            self.k_buffer = [zeros(shape, dtype, device) for _ in layers]
            if self._shares_keys:
                self.v_buffer = [keys[..., :attended_dim] for keys in self.k_buffer]
            else:
                self.v_buffer = [zeros(shape, dtype, device) for _ in layers]
            return
        dims = page_size, head_dim, attended_dim
        assert not any(dim % panel for dim in dims), (*dims, panel)
        blocks = slots // panel, num_kv_heads
        of_keys, of_values = (num_kv_heads * panel * dim for dim in (head_dim, attended_dim))
        both = zeros((blocks[0], num_layers, of_keys + of_values), dtype, device)
        self._whole = both
        keys, values = both[..., :of_keys], both[..., of_keys:]
        self.k_buffer = [keys[:, layer].view(*blocks, head_dim // n, panel, n) for layer in layers]
        self.v_buffer = [
            values[:, layer].view(*blocks, attended_dim // panel, panel // n, panel, n) for layer in layers
        ]

    @staticmethod
    def bytes_per_token(
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        panel: int | None = None,
        latent_dim: int | None = None,
    ) -> int:
        """The size of the K and V of a slot in bytes. The arguments are those of the pool."""
        attended_dim = head_dim if latent_dim is None else latent_dim if panel is not None else 0
        return num_layers * num_kv_heads * (head_dim + attended_dim) * dtype.itemsize

    def set_kv(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k [T, num_kv_heads, head_dim] and v [T, num_kv_heads, attended_dim] at slots: int64 [T], cast to the
        pool's dtype.

        The slots are distinct, except the dummy slot, which keeps the last write. In latent attention v is the first
        components of k. Where the values of two slots share words, the first slot gets its value before the second.
        """
        k, v = k.to(self.dtype), v.to(self.dtype)
        if self._panel is None:
            self.k_buffer[layer][slots] = k
            if not self._shares_keys:
                self.v_buffer[layer][slots] = v
            return
        # The sizes are written out: torch cannot tell them from no tokens.
        heads, n, panel = k.shape[1], self._per_word, self._panel
        block, at = slots // panel, slots % panel
        self.k_buffer[layer][block, :, :, at] = k.reshape(-1, heads, k.shape[2] // n, n)
        # Attention multiplies whole words, so the slot after the last one must hold numbers (csrc/cpu/kv_panels.h).
        begins = at % n == 0
        self.v_buffer[layer][block[begins], :, :, at[begins] // n] = 0
        self.v_buffer[layer][block, :, :, at // n, :, at % n] = v.reshape(-1, heads, v.shape[2] // panel, panel)

    def get_kv(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Read k [T, num_kv_heads, head_dim] and v [T, num_kv_heads, attended_dim] of slots: int64 [T]."""
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
        values = [] if self._shares_keys else self.v_buffer
        tensors = [*self.k_buffer, *values] if self._whole is None else [self._whole]
        if self._convolved is not None:
            tensors.append(self._convolved)
        return [tensor.view(num_pages, -1).view(torch.uint8) for tensor in tensors]

    @property
    def page_bytes(self) -> int:
        """The size of a page in bytes: what is stored for all layers."""
        return sum(view.shape[1] for view in self._page_views)

    @property
    def bytes_per_slot(self) -> int:
        """The size of a slot in bytes: what is stored for all layers."""
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


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros. On a CPU they take no memory before they are written. Raises OSError if they cannot be allocated."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Memory that is mapped but not written: the pool takes memory only as it fills, and no time at the start.
    # torch.zeros would take 1.4 s for 1 GiB.
    return torch.from_numpy(zeroed(math.prod(shape) * dtype.itemsize)).view(dtype).view(shape)
