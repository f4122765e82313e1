"""The tensors that hold K and V. The only file of this layer that imports torch."""

from __future__ import annotations

import math

import torch

from ..srt.machine.huge_pages import zeroed


class MHATokenToKVPool:
    """K and V of every slot, a pair of tensors for each layer; for MHA, GQA and MQA.

    `k_buffer[layer]`, `v_buffer[layer]`: [size + page_size, num_kv_heads, head_dim]; the first page is the
    dummy that padded entries write to. Everything starts as zeros: memory that was never written must not
    hold a NaN, since zero attention weight times NaN is NaN.

    With a `panel` slots lie in blocks of so many as csrc/cpu/kv_panels.h has them, `n` numbers to a word of 32 bits:
    k_buffer [blocks, num_kv_heads, head_dim / n, panel, n],
    v_buffer [blocks, num_kv_heads, head_dim / panel, panel / n, panel, n].
    A block has all layers side by side, so that as many pages of memory are in use as there are tokens.
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
        """`size`: tokens without the dummy page. Raises ValueError when it is no multiple of the page.

        A page is whole panels, and so is a head.
        """
        if page_size < 1 or size < page_size or size % page_size:
            raise ValueError(f"pool size must be a positive multiple of page size {page_size}, got {size}")
        self.size = size
        self.page_size = page_size
        self.dtype = dtype
        self._panel = panel
        self._per_word = n = max(4 // dtype.itemsize, 1)
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
        self.k_buffer = [both[:, layer, 0].view(*blocks, head_dim // n, panel, n) for layer in layers]
        self.v_buffer = [both[:, layer, 1].view(*blocks, head_dim // panel, panel // n, panel, n) for layer in layers]

    @staticmethod
    def bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes that one slot costs over all layers, K and V together."""
        return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize

    def set_kv(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k, v: [T, num_kv_heads, head_dim] at slots: int64 [T], cast to the pool's dtype.

        Slots are distinct but for the dummy, where whichever write comes last stays.
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
        """k, v: [T, num_kv_heads, head_dim] of slots: int64 [T]."""
        k, v = self.k_buffer[layer], self.v_buffer[layer]
        if self._panel is None:
            return k[slots], v[slots]
        block, at = slots // self._panel, slots % self._panel
        word, half = at // self._per_word, at % self._per_word
        return k[block, :, :, at].flatten(2), v[block, :, :, word, :, half].flatten(2)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Pages that nobody has touched: a pool costs memory only as it fills up, and no time at the start (1 GiB: 1.4 s
    # with torch.zeros).
    return torch.from_numpy(zeroed(math.prod(shape) * dtype.itemsize)).view(dtype).view(shape)
