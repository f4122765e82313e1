"""The few things that the engine asks of CUDA beside tensors: pinned memory, events, a stream for copies, graphs.

One short method each, so that what is built on them can be tested without a GPU by a stand-in of the same methods
(tests/fake_accelerator.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from .memory import Memory


class Event(Protocol):
    """A place in a stream. `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Whether the device has passed it. Never waits."""

    def synchronize(self) -> None:
        """Waits until the device has passed it."""


class Graph(Protocol):
    """Recorded device work. `torch.cuda.CUDAGraph` is one."""

    def replay(self) -> None:
        """Queues the work again on the current stream, on the very memory it was recorded with."""


class Accelerator:
    """One CUDA device, which becomes the current one of the calling thread. Work is queued on its current stream."""

    def __init__(self, device: torch.device) -> None:
        # Triton launches on the current device, whatever device its tensors are on.
        torch.cuda.set_device(torch.cuda.current_device() if device.index is None else device.index)
        self._copies = torch.cuda.Stream(device)
        self._recording = torch.cuda.Stream(device)
        self._graph_pool = torch.cuda.graph_pool_handle()

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Host memory that the device copies from and to without the host's help: uint8 [num_bytes].

        Allocating may wait for the device, so hot paths keep what they have.
        """
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def mark(self) -> Event:
        """An event behind all that was queued so far."""
        event = torch.cuda.Event()
        event.record()
        return event

    def fetch(self, source: torch.Tensor, target: torch.Tensor) -> Event:
        """Queues target (pinned) = source, beside what will be queued from now on; the event passes when it is done.

        The caller keeps `source` alive until then.
        """
        computed = torch.cuda.Event()
        computed.record()
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(computed)
            target.copy_(source, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        return arrived

    def record(self, work: Callable[[], object]) -> Graph:
        """Does `work` once for real, which compiles kernels and warms libraries up, then records it.

        All graphs use one pool of memory for what is allocated within: nothing allocated in one may be used after
        another was replayed, and they must not run beside each other.
        """
        self._recording.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._recording):
            work()
        torch.cuda.current_stream().wait_stream(self._recording)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_pool, stream=self._recording):
            work()
        return graph

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Device memory that `work` takes at its height beyond what was allocated before."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def memory(self) -> Memory:
        """What the device has now, when torch has given back what it only cached."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        available, total = torch.cuda.mem_get_info()
        # What is left of torch's cache are holes between tensors: small ones still fit there, the pool does not.
        return Memory(total, available)


def make_accelerator(device: torch.device) -> Accelerator | None:
    """None for anything but a GPU: memory that needs no transfers, work that needs no queue."""
    return Accelerator(device) if device.type == "cuda" else None
