"""Transfers between host and device: step inputs to the device, tokens to the host.

On a GPU both use pinned buffers. Buffers are kept, because an allocation could wait for the device. A buffer is reused
when an event says that its copy is done. On a CPU there are no transfers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..step import Int32Array
from .accelerator import Accelerator, Event

Array = npt.NDArray[Any]

_ALIGNMENT = 16
"""Each array of a transfer starts at a multiple of this number of bytes."""
_NUM_INITIAL_BUFFERS = 64
"""More than the transfers of two sampled steps of 256 rows. Another buffer would wait for the device."""
_MIN_BUFFER_BYTES = 1 << 16


@dataclass(slots=True)
class _Staging:
    """A pinned buffer for uploads."""

    tensor: torch.Tensor
    """uint8, pinned"""
    view: npt.NDArray[np.uint8]
    """the memory of `tensor`"""
    copied: Event | None = None
    """reached when the device has copied the buffer's present contents"""


class Uploads:
    """Sends arrays to the device. Each call queues one transfer on the current stream and does not wait for it."""

    def __init__(self, device: torch.device, accelerator: Accelerator | None) -> None:
        """accelerator: None if device memory is host memory."""
        self._device = device
        self._accelerator = accelerator
        self._buffers: dict[int, deque[_Staging]] = {}
        """By their size in bytes, the one that was used first in front."""
        if accelerator is not None:
            first = (self._allocate(_MIN_BUFFER_BYTES) for _ in range(_NUM_INITIAL_BUFFERS))
            self._buffers[_MIN_BUFFER_BYTES] = deque(first)

    def send(self, *arrays: Array) -> tuple[torch.Tensor, ...]:
        """Send arrays to the device. Returns one tensor for each array, with its dtype and shape.

        The caller must not use the arrays afterwards: on a CPU the tensors share their memory. On a GPU the tensors are
        views of one tensor.
        """
        if self._accelerator is None:
            return tuple(torch.from_numpy(array).to(self._device) for array in arrays)
        starts, num_bytes = _layout(arrays)
        staging = self._stage(arrays, starts, num_bytes)
        sent = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        sent.copy_(staging.tensor[:num_bytes], non_blocking=True)
        staging.copied = self._accelerator.record_event()
        return tuple(
            sent[start : start + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
            for start, array in zip(starts, arrays, strict=True)
        )

    def send_to(self, target: torch.Tensor, array: Array) -> None:
        """Copy `array` to `target`, which has the same dtype and size and is contiguous."""
        if self._accelerator is None:
            target.copy_(torch.from_numpy(array))
            return
        staging = self._stage((array,), [0], array.nbytes)
        source = staging.tensor[: array.nbytes].view(target.dtype).view(target.shape)
        target.copy_(source, non_blocking=True)
        staging.copied = self._accelerator.record_event()

    def _stage(self, arrays: tuple[Array, ...], starts: list[int], num_bytes: int) -> _Staging:
        """Copy arrays into a free pinned buffer. The caller sets the buffer's `copied`."""
        size = max(_MIN_BUFFER_BYTES, 1 << (num_bytes - 1).bit_length())
        buffers = self._buffers.setdefault(size, deque())
        if buffers and (buffers[0].copied is None or buffers[0].copied.query()):
            staging = buffers.popleft()
        else:  # all buffers of this size are in transfer
            staging = self._allocate(size)
        buffers.append(staging)
        for start, array in zip(starts, arrays, strict=True):
            staging.view[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return staging

    def _allocate(self, size: int) -> _Staging:
        assert self._accelerator is not None
        tensor = self._accelerator.pinned(size)
        return _Staging(tensor, tensor.numpy())


class _Copy(NamedTuple):
    """A copy to the host that may not be done yet."""

    source: torch.Tensor
    """kept alive until the copy is done"""
    done: Event
    give_back: Callable[[], None]
    """called when the host's buffer has been read"""


class TokenCopy:
    """A step's tokens during their transfer to the host. On a CPU they are already there."""

    def __init__(self, tokens: torch.Tensor | Int32Array, copy: _Copy | None = None) -> None:
        """tokens: int64 or, in an array, int32 [n], on the host, valid when `copy` is done; copy None: valid now."""
        self._tokens = tokens
        self._copy = copy
        self._read = tokens if isinstance(tokens, np.ndarray) else None

    def wait(self) -> Int32Array:
        """Wait for the transfer and return the tokens: int32 [n]."""
        if self._read is None:
            if self._copy is not None:
                self._copy.done.synchronize()
            assert isinstance(self._tokens, torch.Tensor)
            self._read = self._tokens.numpy().astype(np.int32)
            if self._copy is not None:
                self._copy.give_back()
                self._copy = None
        return self._read


class ArrayCopy:
    """An array during its transfer to the host. On a CPU it is already there."""

    def __init__(self, tensor: torch.Tensor, copy: _Copy | None = None) -> None:
        """tensor: on the host, valid when `copy` is done; copy None: valid now."""
        self._array: Array = tensor.numpy()
        self._copy = copy

    def wait(self) -> Array:
        """Wait for the transfer and return the array."""
        if self._copy is not None:
            self._copy.done.synchronize()
            self._array = self._array.copy()
            self._copy.give_back()
            self._copy = None
        return self._array


class Downloads:
    """Copies tokens and other results to the host while the device computes the next step."""

    def __init__(self, max_tokens: int, accelerator: Accelerator | None) -> None:
        """max_tokens: most tokens of one step"""
        self._accelerator = accelerator
        self._num_bytes = 8 * max_tokens
        self._free = [] if accelerator is None else [accelerator.pinned(self._num_bytes) for _ in range(4)]
        self._spare: dict[int, list[torch.Tensor]] = {}
        """Free buffers for other results, by their size in bytes."""

    def fetch(self, tokens: torch.Tensor) -> TokenCopy:
        """Start the copy of tokens: int64 [n]."""
        if self._accelerator is None:
            return TokenCopy(tokens)
        # No free buffer: the caller launches steps without reading their tokens, as a benchmark does.
        buffer = self._free.pop() if self._free else self._accelerator.pinned(self._num_bytes)
        target = buffer[: tokens.nbytes].view(torch.int64)
        arrived = self._accelerator.fetch(tokens, target)
        return TokenCopy(target, _Copy(tokens, arrived, lambda: self._free.append(buffer)))

    def fetch_array(self, source: torch.Tensor) -> ArrayCopy:
        """Start the copy of a contiguous tensor of any size."""
        if self._accelerator is None:
            return ArrayCopy(source)
        size = max(_MIN_BUFFER_BYTES, 1 << max(source.nbytes - 1, 0).bit_length())
        spare = self._spare.setdefault(size, [])
        buffer = spare.pop() if spare else self._accelerator.pinned(size)
        target = buffer[: source.nbytes].view(source.dtype).view(source.shape)
        arrived = self._accelerator.fetch(source, target)
        return ArrayCopy(target, _Copy(source, arrived, lambda: spare.append(buffer)))


def _layout(arrays: tuple[Array, ...]) -> tuple[list[int], int]:
    """The offset of each array in bytes, and the total number of bytes."""
    starts = []
    end = 0
    for array in arrays:
        starts.append(end)
        end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    return starts, end
