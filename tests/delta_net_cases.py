"""Requests with a Gated DeltaNet, whose rows have states of NaN at first."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mixer_cases import MixerCase

from tercet.model_executor.layers.delta_net import DeltaNetWeights
from tercet.model_executor.row_states import LayerStates
from tercet.srt.model_files.delta_net_config import DeltaNetConfig

EPS = 1e-6


class DeltaNetCase(MixerCase):
    """The inputs of requests and the weights of a layer."""

    def __init__(
        self, seed: int, dtype: torch.dtype, sizes: DeltaNetConfig, lens: Sequence[int], *, device: str = "cpu"
    ) -> None:
        super().__init__(seed, dtype, sum(sizes.projected_sizes), lens, whole_numbers=False, device=device)
        self.sizes = sizes
        heads = sizes.num_value_heads
        self.weights = DeltaNetWeights(
            convolution=self.draw(sizes.channels, 1, sizes.width),
            decay_log=self.draw(heads).float(),
            decay_bias=self.draw(heads).float(),
            norm=self.draw(sizes.value_dim),
        )

    def states(self) -> LayerStates:
        """The states of rows that other requests had before."""
        num_rows, sizes = self.num_rows + 1, self.sizes
        states = LayerStates(
            torch.empty((num_rows, *sizes.state_shape), device=self.device),
            torch.empty((num_rows, sizes.width - 1, sizes.channels), dtype=self.dtype, device=self.device),
        )
        for tensor in states:
            tensor.fill_(torch.nan)
        return states
