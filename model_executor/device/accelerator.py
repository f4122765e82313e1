"""The CUDA services that the engine uses in addition to tensors: pinned memory, events, a copy stream, and graphs.

Each service is one short method. A fake with the same methods (tests/fake_accelerator.py) replaces the class in tests,
so that the code above it is tested without a GPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ...srt.machine.huge_pages import zeroed
from .memory import Memory

_PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for every CUDA context."""


class Event(Protocol):
    """A point in a stream, such as a `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the device has reached the event. Never waits."""

    def synchronize(self) -> None:
        """Wait until the device has reached the event."""


class Graph(Protocol):
    """Recorded device work, such as a `torch.cuda.CUDAGraph`."""

    def replay(self) -> None:
        """Queue the recorded work on the current stream. It reads and writes the memory addresses of the recording."""


class Accelerator:
    """A CUDA device. The constructor makes it the calling thread's current device. Work goes to its current stream."""

    def __init__(self, device: torch.device) -> None:
        # Triton launches on the current device, whatever device its tensors are on.
        torch.cuda.set_device(torch.cuda.current_device() if device.index is None else device.index)
        self._copies = torch.cuda.Stream(device)
        self._recording = torch.cuda.Stream(device)
        self._graph_pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Allocate page-locked host memory, which the device copies without the host's help: uint8 [num_bytes].

        The allocation may wait for the device, so the hot path reuses its buffers.
        """
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def pinned_exactly(self, num_bytes: int) -> torch.Tensor:
        """Like `pinned`, for much memory: it takes no more than `num_bytes`. `pinned` takes the next power of two.

        It is released with its last view. Raises MemoryError if the system refuses.
        """
        memory = zeroed(num_bytes)
        runtime = torch.cuda.cudart()
        address = memory.ctypes.data
        error = int(runtime.cudaHostRegister(address, num_bytes, _PORTABLE))
        if error:
            raise MemoryError(f"CUDA error {error}: {num_bytes >> 20} MiB of host memory cannot be page-locked")
        # The driver itself releases what is left at the end of the process.
        weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
        return torch.from_numpy(memory)

    def record_event(self) -> Event:
        """Queue an event behind the work queued so far."""
        event = torch.cuda.Event()
        event.record()
        return event

    def fetch(self, source: torch.Tensor, target: torch.Tensor) -> Event:
        """Queue a copy of `source` to `target` (pinned) on the copy stream. Returns the event of its end.

        The copy waits for the work queued so far, but not for later work. The caller must keep `source` alive until the
        event is reached.
        """
        computed = torch.cuda.Event()
        computed.record()
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(computed)
            target.copy_(source, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        return arrived

    def wait_for(self, event: Event) -> None:
        """Make the work that is queued from now on wait for an event. The host does not wait."""
        _wait(torch.cuda.current_stream(), event)

    def bring(self, sources: Sequence[torch.Tensor], after: Event | None = None) -> torch.Tensor:
        """Queue copies of `sources` (pinned, equal but for their first dimension) to one new tensor.

        They run on the copy stream, so they wait only for earlier copies and for `after`. Work that is queued later on
        the current stream waits for them. The caller must not change `sources` until an event that is queued later is
        reached. The memory belongs to the copy stream, which may use it again at once: the caller keeps the tensor
        until it gives `after` an event behind the tensor's last use.
        """
        with torch.cuda.stream(self._copies):
            if after is not None:
                _wait(self._copies, after)
            shape = (sum(len(source) for source in sources), *sources[0].shape[1:])
            target = torch.empty(shape, dtype=sources[0].dtype, device=self._copies.device)
            start = 0
            for source in sources:
                target[start : start + len(source)].copy_(source, non_blocking=True)
                start += len(source)
            arrived = torch.cuda.Event()
            arrived.record()
        self.wait_for(arrived)
        return target

    def record(self, work: Callable[[], object]) -> Graph:
        """Run `work` once, so that kernels are compiled and libraries are warm, then record it as a graph.

        All graphs allocate from one memory pool. So two graphs must not run at the same time, and a tensor allocated in
        one graph must not be used after the replay of another. The accelerator keeps the graph, because a destroyed
        graph frees workspaces of the others on its stream (https://github.com/pytorch/pytorch/issues/193402).
        """
        self._recording.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._recording):
            work()
        torch.cuda.current_stream().wait_stream(self._recording)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_pool, stream=self._recording):
            work()
        self._graphs.append(graph)
        return graph

    def peak_bytes(self, work: Callable[[], object], *, to_record: bool = False) -> int:
        """Run `work` and return the most device memory that torch reserves for it, in bytes.

        Reserved memory counts what lies unused between tensors, too. Memory that was reserved before does not count,
        because torch first returns what it had cached. to_record: run on the stream of `record`, whose libraries take
        workspaces of their own (32 MiB for cuBLAS on Hopper).
        """
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
        if to_record:
            self._recording.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._recording):
                work()
        else:
            work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_reserved() - before

    def memory(self) -> Memory:
        """The device's memory, after torch has returned its cached memory."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        available, total = torch.cuda.mem_get_info()
        # The rest of torch's cache is holes between tensors, too small for the KV pool: it counts as used.
        return Memory(total, available)


def _wait(stream: torch.cuda.Stream, event: Any) -> None:
    stream.wait_event(event)  # torch's, which a fake of an Event is not


def make_accelerator(device: torch.device) -> Accelerator | None:
    """Make the accelerator of a GPU. Returns None for a CPU, which needs no transfers and no queue."""
    return Accelerator(device) if device.type == "cuda" else None
