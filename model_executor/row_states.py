"""The states of recurrent layers: what a request has in place of the K and V of its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..mem_cache.token_to_kv_pool import zeros
from ..srt.arrays import Int32Array
from ..srt.model_files.delta_net_config import DeltaNetConfig


class LayerStates(NamedTuple):
    """The states of a recurrent layer: those of the rows of ReqToTokenPool, and then the saved ones."""

    matrices: torch.Tensor
    """float32 [rows, heads, key_dim, value_dim]"""
    recent: torch.Tensor
    """[rows, width - 1, channels], the last inputs of the convolution; that of position p is at
    p % (width - 1)"""


def make_row_states(
    num_rows: int, sizes: DeltaNetConfig, dtype: torch.dtype, device: torch.device
) -> tuple[LayerStates, ...]:
    """Make the states of all recurrent layers, of rows 0..num_rows. `dtype`: that of activations.

    A request has the state whose number is that of its row in ReqToTokenPool. A step changes the states of its rows in
    place. A request that begins at position 0 begins with a state of zeros, whatever its row holds. So a row needs no
    cleaning when it is freed. Row 0 serves padded batch entries.

    The state of an earlier position is lost, unless a step has saved it in another row. So drafts cannot be taken back.

    Raises OSError or torch.OutOfMemoryError if the memory cannot be allocated. On a CPU, a row that no request has had
    takes none.
    """
    rows = num_rows + 1
    return tuple(
        LayerStates(
            zeros((rows, *sizes.state_shape), torch.float32, device),
            zeros((rows, sizes.width - 1, sizes.channels), dtype, device),
        )
        for _ in sizes.layers
    )


def copy_states(states: Iterable[LayerStates], sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copy rows of all layers to others: those of `independent_copies`. `sources`, `targets`: int64 [n]."""
    for layer in states:
        for tensor in layer:
            if tensor.is_cpu:  # row by row, because memory for all of them at once would take longer than the copies
                for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
                    tensor[target].copy_(tensor[source])
            else:
                tensor.index_copy_(0, targets, tensor.index_select(0, sources))


def independent_copies(
    sources: Int32Array, targets: Int32Array
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Divide copies of rows, which are made one after another, into groups that may be made at once."""
    start = 0
    written: set[int] = set()
    for index, (source, target) in enumerate(zip(sources.tolist(), targets.tolist(), strict=True)):
        if source in written or target in written:
            yield sources[start:index].astype(np.int64), targets[start:index].astype(np.int64)
            start, written = index, set()
        written.add(target)
    yield sources[start:].astype(np.int64), targets[start:].astype(np.int64)


def state_bytes(sizes: DeltaNetConfig, dtype_bytes: int) -> int:
    """The size of a request's states in all layers, in bytes. `dtype_bytes`: of a number of the activations."""
    heads, key_dim, value_dim = sizes.state_shape
    recent = (sizes.width - 1) * sizes.channels * dtype_bytes
    return len(sizes.layers) * (heads * key_dim * value_dim * torch.float32.itemsize + recent)
