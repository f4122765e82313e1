"""The states of recurrent layers: what a request has in place of the K and V of its tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch


class LayerStates(NamedTuple):
    """The states of a recurrent layer, by row of ReqToTokenPool."""

    matrices: torch.Tensor
    """float32 [num_rows + 1, heads, key_dim, value_dim]"""
    recent: torch.Tensor
    """[num_rows + 1, width - 1, channels], the last inputs of the convolution; that of position p is at
    p % (width - 1)"""


class RowStates:
    """The states of all recurrent layers: one of each row of ReqToTokenPool, which has the row's number.

    A step changes the states of its rows in place. A request that begins at position 0 begins with a state of zeros,
    whatever its row holds. So a row needs no cleaning when it is freed, and nobody but the layers touches the states.
    Row 0 serves padded batch entries.

    The state of an earlier position is lost. So requests cannot share prefixes, and drafts cannot be taken back.
    """

    def __init__(
        self,
        num_rows: int,
        num_layers: int,
        state_shape: tuple[int, int, int],
        recent_shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """`state_shape`: heads, key_dim and value_dim. `recent_shape`: width - 1 and channels. `dtype`: that of
        activations."""
        self.layers = [
            LayerStates(
                torch.zeros((num_rows + 1, *state_shape), dtype=torch.float32, device=device),
                torch.zeros((num_rows + 1, *recent_shape), dtype=dtype, device=device),
            )
            for _ in range(num_layers)
        ]

    @property
    def num_bytes(self) -> int:
        """The size of all states in bytes."""
        return sum(tensor.nbytes for layer in self.layers for tensor in layer)
