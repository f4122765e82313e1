"""Requests with a Gated DeltaNet, whose rows have states of NaN at first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from mixer_cases import Layer, MixerCase

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


def check_saved_states(
    case: DeltaNetCase, make_layer: Callable[[LayerStates], Layer], seed: int, longest: int = 4
) -> None:
    """Runs random extend steps that save states, and checks these and all outputs, bit by bit. `longest`: most tokens
    of a chunk."""
    rng = np.random.default_rng(seed)
    wholes, states = case.states(), case.states()
    outputs = case.run(make_layer(wholes), [(k, 0, length) for k, length in enumerate(case.lens)])
    rows = case.rows.tolist()
    spare = next(row for row in range(1, case.num_rows + 1) if row not in rows)
    layer = make_layer(states)
    for chunks, _ in case.random_steps(seed, longest):
        saved = [(0, 0)] * len(chunks)
        index = int(rng.integers(len(chunks)))
        k, start, end = chunks[index]
        length = int(rng.integers(start, end)) + 1
        saved[index] = length, spare
        for tensor in states:
            tensor[spare] = torch.nan
        for (of, first, last), out in zip(chunks, case.run(layer, chunks, saved=saved), strict=True):
            assert torch.equal(out, outputs[of][first:last]), "saving changes no output"
        alone = case.states()
        case.run(make_layer(alone), [(k, 0, length)])
        for found, expected in zip(states, alone, strict=True):
            assert torch.equal(found[spare].nan_to_num(nan=9), expected[rows[k]].nan_to_num(nan=9))
