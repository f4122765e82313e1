"""Final hidden states of single tokens, on their way to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..device.device_buffers import ArrayCopy, Downloads
from ..step import Float32Array, HiddenRange


class ArrivingStates(NamedTuple):
    """The hidden states of a step on their way to the host."""

    copy: ArrayCopy
    """[tokens of all ranges, hidden_size], the bits of `dtype` as integers"""
    dtype: torch.dtype
    lens: list[int]

    def wait(self) -> list[Float32Array]:
        states = torch.from_numpy(self.copy.wait()).view(self.dtype).float()
        return [part.numpy().copy() for part in states.split(self.lens)]


def fetch_hidden(wanted: Sequence[HiddenRange], hidden: torch.Tensor, downloads: Downloads) -> ArrivingStates:
    """Queue the copy of hidden states. `hidden`: those of the first range first, [sum of lengths, hidden_size].

    They become float32 on the host: there a long prompt takes no memory of the device.
    """
    bits = {2: torch.int16, 4: torch.int32}[hidden.dtype.itemsize]
    copy = downloads.fetch_array(hidden.contiguous().view(bits))
    return ArrivingStates(copy, hidden.dtype, [one.length for one in wanted])
