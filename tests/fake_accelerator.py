"""A fake GPU that runs on the CPU, with delayed copies and strict checks.

A copy happens when its event passes. A write to pinned memory before the device has read it fails the test. A graph is
a tape of the recorded operations with their tensors. A replay runs only the tape and no other Python code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tercet.model_executor.attention.torch_backend import TorchAttentionBackend
from tercet.model_executor.device.memory import Memory


class FakeEvent:
    """An event that passes after `lag` further calls of the accelerator, or when code waits for it."""

    def __init__(self, accelerator: FakeAccelerator, on_pass: Callable[[], None]) -> None:
        self._accelerator = accelerator
        self._on_pass: Callable[[], None] | None = on_pass
        self._at = accelerator.now + accelerator.lag
        accelerator.pending.append(self)

    @property
    def is_due(self) -> bool:
        return self._accelerator.now >= self._at

    def finish(self) -> None:
        if self._on_pass is not None:
            self._on_pass()
            self._on_pass = None

    def query(self) -> bool:
        self._accelerator.tick()
        return self._on_pass is None

    def synchronize(self) -> None:
        self._accelerator.num_waits += self._on_pass is not None
        self._accelerator.finish_until(self)


class FakeAccelerator:
    """A fake `Accelerator`. Work runs at once; copies to the host and reads of pinned memory are delayed."""

    def __init__(self, lag: int = 0, memory: Memory | None = None) -> None:
        self.lag = lag
        self.now = 0
        self.pending: list[FakeEvent] = []
        self.num_waits = 0
        self.num_replays = 0
        self.measured_to_record = False
        self.recorded: list[FakeGraph] = []
        self.uploads: list[torch.Tensor] = []
        """All pinned buffers, except the targets of copies to the host."""
        self._memory = memory or Memory(total=1 << 34, available=1 << 33)
        self._seen: dict[int, np.ndarray] = {}

    def tick(self) -> None:
        self.now += 1
        while self.pending and self.pending[0].is_due:
            self.pending.pop(0).finish()

    def finish_until(self, event: FakeEvent) -> None:
        """Passes all events up to this one, because a device passes events in order."""
        while event in self.pending:
            self.pending.pop(0).finish()

    def pinned(self, num_bytes: int) -> torch.Tensor:
        buffer = torch.full((num_bytes,), 0xEE, dtype=torch.uint8)
        self.uploads.append(buffer)
        self._seen[id(buffer)] = _content(buffer).copy()
        return buffer

    def pinned_exactly(self, num_bytes: int) -> torch.Tensor:
        return self.pinned(num_bytes)

    def record_event(self) -> FakeEvent:
        self.tick()
        staged = []
        for buffer in self.uploads:
            if not np.array_equal(self._seen[id(buffer)], _content(buffer)):
                self._seen[id(buffer)] = _content(buffer).copy()
                staged.append((buffer, self._seen[id(buffer)]))

        def check() -> None:
            for buffer, copy in staged:
                assert np.array_equal(_content(buffer), copy), (
                    "pinned memory was written to while the device still read it"
                )

        return FakeEvent(self, check)

    def fetch(self, source: torch.Tensor, target: torch.Tensor) -> FakeEvent:
        self.tick()
        self.uploads = [
            b for b in self.uploads if b.untyped_storage().data_ptr() != target.untyped_storage().data_ptr()
        ]
        target.fill_(0xB3 if target.dtype == torch.uint8 else -77)
        return FakeEvent(self, lambda: np.copyto(target.numpy(), source.numpy()))

    def wait_for(self, event: FakeEvent) -> None:
        """Work runs at once, so what it waits for must be done."""
        self.finish_until(event)

    def bring(self, sources: Sequence[torch.Tensor], after: FakeEvent | None = None) -> torch.Tensor:
        """The copy stream makes its copies in order, so those to the host that were queued before are made first."""
        self.tick()
        if self.pending:
            self.finish_until(self.pending[-1])
        return torch.cat(list(sources))

    def record(self, work: Callable[[], object]) -> FakeGraph:
        work()
        self.recorded.append(FakeGraph(self, work))
        return self.recorded[-1]

    def peak_bytes(self, work: Callable[[], object], *, to_record: bool = False) -> int:
        work()
        self.measured_to_record |= to_record
        return 1 << 20

    def memory(self) -> Memory:
        return self._memory


def _content(buffer: torch.Tensor) -> np.ndarray:
    return buffer.numpy().view(np.int64)  # compared eight bytes at a time


class FakeGraph:
    """A recorded graph.

    Recording runs the work and then overwrites all memory that it allocated, so that results come only from replays.
    """

    def __init__(self, accelerator: FakeAccelerator, work: Callable[[], object]) -> None:
        self._accelerator = accelerator
        self.tape = Tape()
        with self.tape, recorded_kernels(self.tape):
            work()
        self.tape.spoil()

    def replay(self) -> None:
        self._accelerator.num_replays += 1
        with torch.inference_mode():
            self.tape.play()


class Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], None]] = []
        self._kept: list[Any] = []
        self._own: dict[int, torch.Tensor] = {}
        """The tensors that were made during recording, by storage."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self._kept.append((args, kwargs, out))
        taken = {_storage(t) for t in _tensors((args, kwargs))}
        for tensor in _tensors(out):
            if _storage(tensor) not in taken:
                self._own.setdefault(_storage(tensor), tensor)
        if func not in (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default):
            self.calls.append(lambda: _again(func, args, kwargs, out))
        return out

    def spoil(self) -> None:
        for tensor in self._own.values():
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
            elif tensor.dtype != torch.bool:
                tensor.fill_(torch.iinfo(tensor.dtype).max // 2)

    def play(self) -> None:
        self.spoil()
        for call in self.calls:
            call()


def _again(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    for new, old in zip(_tensors(func(*args, **kwargs)), _tensors(out), strict=True):
        if new is not old and new.data_ptr() != old.data_ptr():
            old.copy_(new)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextmanager
def recorded_kernels(tape: Tape):
    """A context in which launches of interpreted Triton kernels are recorded on the tape, too."""
    import sys

    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:
        yield
        return
    call = interpreter.GridExecutor.__call__

    def recording(executor: Any, *args: Any, **kwargs: Any) -> None:
        tape.calls.append(lambda: call(executor, *args, **kwargs))
        with _disable_current_modes():  # the interpreter's own operations do not belong on the tape
            call(executor, *args, **kwargs)

    interpreter.GridExecutor.__call__ = recording
    try:
        yield
    finally:
        interpreter.GridExecutor.__call__ = call


class RecordableAttention(TorchAttentionBackend):
    """Attention in plain torch. A decode step reads no length on the host: every row has the table's full width."""

    name = "recordable"
    split = 8

    def num_splits(self, seq_lens):
        return int((-(-seq_lens // self.split)).sum())

    def plan(self, batch):
        if batch.extend_lens_host is not None:
            super().plan(batch)

    def attend(self, q, layer_id, batch, sinks=None):
        if batch.extend_lens_host is not None:
            return super().attend(q, layer_id, batch, sinks)
        self._check_sinks(layer_id, sinks)
        positions = torch.arange(batch.req_to_token.shape[1])
        seen = positions < batch.seq_lens[:, None]
        if self.sliding_windows[layer_id] is not None:
            seen &= positions >= batch.seq_lens[:, None] - self.sliding_windows[layer_id]
        slots = torch.where(seen, batch.req_to_token[batch.rows], 0).long()
        group = self.num_heads // self.num_kv_heads
        keys = self.kv_pool.k_buffer[layer_id][slots].repeat_interleave(group, 2).transpose(1, 2)
        values = self.kv_pool.v_buffer[layer_id][slots].repeat_interleave(group, 2).transpose(1, 2)
        scores = (q[:, :, None] @ keys.transpose(2, 3)).squeeze(2) * self.scales[layer_id]
        scores = scores.masked_fill(~seen[:, None], float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None].expand(len(scores), -1, 1).to(scores.dtype)], -1)
        weights = scores.softmax(-1)[..., : len(positions)]
        return (weights[:, :, None] @ values).flatten(1)


def use_fake(monkeypatch, accelerator: FakeAccelerator, attention: type | None = RecordableAttention) -> None:
    """Makes all new runners use this accelerator."""
    target = "tercet.model_executor.runner.load."
    monkeypatch.setattr(target + "make_accelerator", lambda device: accelerator)
    # A GPU has no oneDNN, and the tape cannot tell weights apart that are packed for oneDNN.
    monkeypatch.setattr("tercet.model_executor.layers.linear.can_pack", lambda weight: False, raising=False)
    if attention is not None:
        monkeypatch.setattr(target + "create_attention_backend", lambda name, specs, pool: attention(specs, pool))
