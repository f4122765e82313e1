"""The tensors that hold K and V. The only file of this layer that imports torch."""

from __future__ import annotations

import math

import numpy as np
import torch


class MHATokenToKVPool:
    """K and V of every slot, a pair of tensors for each layer; for MHA, GQA and MQA.

    `k_buffer[layer]`, `v_buffer[layer]`: [size + page_size, num_kv_heads, head_dim]; the first page is the
    dummy that padded entries write to. Everything starts as zeros: memory that was never written must not
    hold a NaN, since zero attention weight times NaN is NaN.
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
    ) -> None:
        """`size`: tokens without the dummy page. Raises ValueError when it is no multiple of the page."""
        if page_size < 1 or size < page_size or size % page_size:
            raise ValueError(f"pool size must be a positive multiple of page size {page_size}, got {size}")
        self.size = size
        self.page_size = page_size
        self.dtype = dtype
        shape = (size + page_size, num_kv_heads, head_dim)
        self.k_buffer = [_zeros(shape, dtype, torch.device(device)) for _ in range(num_layers)]
        self.v_buffer = [_zeros(shape, dtype, torch.device(device)) for _ in range(num_layers)]

    @staticmethod
    def bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes that one slot costs over all layers, K and V together."""
        return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize

    def set_kv(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k, v: [T, num_kv_heads, head_dim] at slots: int64 [T], cast to the pool's dtype.

        Slots are distinct but for the dummy, where whichever write comes last stays.
        """
        self.k_buffer[layer][slots] = k.to(self.dtype)
        self.v_buffer[layer][slots] = v.to(self.dtype)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy asks the kernel for zeroed pages and touches none of them: a pool costs memory only as it fills up, and no
    # time at the start (1 GiB: 1.4 s with torch.zeros).
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
