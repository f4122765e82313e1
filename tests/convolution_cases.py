"""Requests with short convolutions, whose tokens have scattered slots in a pool of NaN."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mixer_cases import MixerCase

from tercet.mem_cache.token_to_kv_pool import StoredConvolutions, TokenToKVPool
from tercet.model_executor.layers.short_convolution import ConvolutionWeights

LAYER, NUM_LAYERS = 1, 3
"""The layer that tests compute, of those that a slot has beside each other."""


class ConvolutionCase(MixerCase):
    """The inputs of requests and the weights of a layer."""

    def __init__(
        self,
        seed: int,
        dtype: torch.dtype,
        channels: int,
        width: int,
        lens: Sequence[int],
        *,
        has_bias: bool,
        whole_numbers: bool = False,
        device: str = "cpu",
    ) -> None:
        """`whole_numbers`: all numbers are so small and whole that every type has the results exactly."""
        super().__init__(seed, dtype, 3 * channels, lens, whole_numbers=whole_numbers, device=device)
        self.channels = channels
        self.weights = ConvolutionWeights(self.draw(channels, 1, width), self.draw(channels) if has_bias else None)

    def pool(self) -> TokenToKVPool:
        """A pool that nothing has been stored in."""
        convolutions = StoredConvolutions(NUM_LAYERS, self.channels, self.dtype)
        pool = TokenToKVPool(self.num_slots, 1, 1, 1, 2, self.dtype, self.device, convolutions=convolutions)
        for buffer in pool.conv_buffer:
            buffer.fill_(torch.nan)
        return pool
