"""What the accelerator asks of torch.cuda, which a fake of its allocator answers."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from tercet.model_executor.device import accelerator as module
from tercet.model_executor.device.accelerator import Accelerator

SEGMENT = 1 << 20


class FakeStream:
    def __init__(self, device: object = None) -> None:
        self.workspace = False

        self.waits: list[object] = []

    def wait_stream(self, other: FakeStream) -> None:
        pass

    def wait_event(self, event: object) -> None:
        self.waits.append(event)


class FakeEvent:
    def record(self) -> None:
        pass


class FakeGraph:
    pass


class FakeCuda:
    """An allocator that reserves whole segments, and libraries that take a workspace of 32 MiB on each stream."""

    Stream = FakeStream
    Event = FakeEvent
    CUDAGraph = FakeGraph

    def __init__(self) -> None:
        self.reserved = self.peak = 0
        self.cached = 0
        self.now = FakeStream()
        self.registered: dict[int, int] = {}
        self.refuses = False

    def cudart(self) -> FakeCuda:
        return self

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        if self.refuses:
            return 2
        self.registered[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0

    def allocate(self, num_bytes: int) -> None:
        """A tensor that is freed at once: its segments stay with torch."""
        segments = -(-num_bytes // SEGMENT) * SEGMENT
        fresh = max(0, segments - self.cached)
        self.reserved += fresh
        self.cached += fresh
        self.peak = max(self.peak, self.reserved)

    def multiply(self) -> None:
        if not self.now.workspace:
            self.now.workspace = True
            self.reserved += 32 << 20
            self.peak = max(self.peak, self.reserved)

    def empty_cache(self) -> None:
        self.reserved -= self.cached
        self.cached = 0

    def stream(self, stream: FakeStream) -> object:
        outer, self.now = self.now, stream
        return _Restores(self, outer)

    def graph(self, graph: FakeGraph, pool: object, stream: FakeStream) -> object:
        return nullcontext()

    def reset_peak_memory_stats(self) -> None:
        self.peak = self.reserved

    def memory_reserved(self) -> int:
        return self.reserved

    def max_memory_reserved(self) -> int:
        return self.peak

    def current_stream(self) -> FakeStream:
        return self.now

    def synchronize(self) -> None: ...
    def set_device(self, device: object) -> None: ...
    def current_device(self) -> int:
        return 0

    def graph_pool_handle(self) -> object:
        return object()


class _Restores:
    def __init__(self, cuda: FakeCuda, outer: FakeStream) -> None:
        self._cuda, self._outer = cuda, outer

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None:
        self._cuda.now = self._outer


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(module, "torch", SimpleNamespace(cuda=fake, Tensor=torch.Tensor))
    return fake


DEVICE = torch.device("cuda")


def test_the_peak_counts_reserved_memory_and_not_what_was_cached(cuda: FakeCuda) -> None:
    accelerator = Accelerator(DEVICE)
    cuda.allocate(50 * SEGMENT)  # an earlier step; its memory would serve the next one unseen
    assert accelerator.peak_bytes(lambda: cuda.allocate(SEGMENT + 1)) == 2 * SEGMENT


def test_the_workspace_of_the_recording_stream_is_counted_once(cuda: FakeCuda) -> None:
    accelerator = Accelerator(DEVICE)
    assert accelerator.peak_bytes(cuda.multiply) == 32 << 20
    assert accelerator.peak_bytes(cuda.multiply) == 0
    assert accelerator.peak_bytes(cuda.multiply, to_record=True) == 32 << 20
    before = cuda.reserved
    accelerator.record(cuda.multiply)
    assert cuda.reserved == before


def test_a_graph_lives_as_long_as_the_accelerator(cuda: FakeCuda) -> None:
    accelerator = Accelerator(DEVICE)
    graph = weakref.ref(accelerator.record(lambda: None))
    gc.collect()
    assert graph() is not None


def test_memory_of_copies_is_not_used_again_before_an_event(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[object]] = []

    def empty(shape: tuple[int, ...], *, dtype: torch.dtype, device: object) -> torch.Tensor:
        seen.append(list(cuda.now.waits))
        return torch.zeros(shape, dtype=dtype)

    monkeypatch.setattr(FakeStream, "device", "cuda", raising=False)
    monkeypatch.setattr(module.torch, "empty", empty, raising=False)
    accelerator, written = Accelerator(DEVICE), FakeEvent()
    brought = accelerator.bring([torch.ones(2, 3), torch.full((1, 3), 2.0)])
    accelerator.bring([torch.ones(1, 3)], written)
    assert brought.tolist() == [[1.0] * 3, [1.0] * 3, [2.0] * 3]
    assert seen == [[], [written]] and len(cuda.now.waits) == 2, "what is queued later waits for both copies"


def test_much_pinned_memory_has_the_size_that_was_asked_for(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own pinned memory would have the next power of two: 64 MiB instead of 33."""
    monkeypatch.setattr(module.torch, "from_numpy", torch.from_numpy, raising=False)
    memory = Accelerator(DEVICE).pinned_exactly(33 << 20)
    assert cuda.registered == {memory.data_ptr(): 33 << 20} and memory.nbytes == 33 << 20
    view = memory.view(33, 1 << 20)[1:]
    del memory
    assert len(cuda.registered) == 1, "a view is still in use"
    del view
    assert cuda.registered == {}


def test_memory_that_cannot_be_pinned_is_an_error(cuda: FakeCuda) -> None:
    cuda.refuses = True
    with pytest.raises(MemoryError, match="CUDA error 2: 33 MiB"):
        Accelerator(DEVICE).pinned_exactly(33 << 20)
    assert cuda.registered == {}
