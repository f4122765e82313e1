"""Watches the memory that the programs of an interpreted launch read and write.

A GPU would not notice most accesses outside of a tensor, and would run programs in an order that no test draws. So each
access is compared with the tensors of the launch, and with the accesses of the other programs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Addresses = npt.NDArray[np.uint64]
Span = tuple[int, int]
"""The addresses of a first byte, and of the one behind the last."""
SHARING = {
    "_fused_decode_kernel": "programs wait for the partial results of others by atomic additions",
    "_decode_start_kernel": "padding writes the same slot to the same place",
    "_store_kv_kernel": "padding writes to the dummy slot, which nothing reads",
    "_count_kernel": "a test sees that an update is lost",
}
"""The kernels whose programs may access what others write, and why."""


class _Launch:
    """The memory of a launch, and the addresses that its programs have read and written so far."""

    def __init__(self, name: str, spans: Sequence[Span]) -> None:
        self._name = name
        ordered = sorted(span for span in spans if span[0] < span[1])
        self._starts = np.array([start for start, _ in ordered], np.uint64)
        # A tensor may lie within another one, whose end then counts.
        self._ends = np.maximum.accumulate(np.array([end for _, end in ordered], np.uint64))
        self._accesses: dict[str, list[tuple[int, Addresses]]] = {"reads": [], "writes": [], "adds": []}

    def note(self, program: int, pointers: Any, mask: Any, kind: str) -> None:
        """Note an access of a program. Raises AssertionError if it is outside of the memory."""
        addresses = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)].astype(np.uint64)
        size = np.uint64(pointers.get_element_ty().primitive_bitwidth // 8)
        before = np.searchsorted(self._starts, addresses, "right")
        inside = (before > 0) & (addresses + size <= self._ends[before - 1])
        assert inside.all(), f"{self._name}: program {program} {kind} outside of its tensors"
        self._accesses[kind].append((program, addresses))

    def check(self) -> None:
        """Raises AssertionError if a program has read or written what another one has written.

        Atomic additions are not among them.
        """
        written, writers = _by_address(self._accesses["writes"])
        if self._name in SHARING or not len(written):
            return
        assert (written[1:] != written[:-1]).all(), f"{self._name}: two programs write the same number"
        read, readers = _by_address(self._accesses["reads"])
        at = np.minimum(np.searchsorted(written, read), len(written) - 1)
        shared = (written[at] == read) & (writers[at] != readers)
        assert not shared.any(), f"{self._name}: a program reads a number that another one writes"


def span_of(tensor: torch.Tensor) -> Span:
    """The memory of a tensor, with what lies between its elements."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.itemsize


def _by_address(accesses: Sequence[tuple[int, Addresses]]) -> tuple[Addresses, npt.NDArray[np.int64]]:
    """The addresses that each program has accessed, in ascending order, and these programs."""
    by_program: dict[int, list[Addresses]] = {}
    for program, some in accesses:
        by_program.setdefault(program, []).append(some)
    if not by_program:
        return np.empty(0, np.uint64), np.empty(0, np.int64)
    each = [np.unique(np.concatenate(several)) for several in by_program.values()]
    addresses, programs = np.concatenate(each), np.repeat(list(by_program), [len(some) for some in each])
    order = np.argsort(addresses, kind="stable")
    return addresses[order], programs[order]


@contextmanager
def watched_memory(reachable: Sequence[Span] = ()) -> Iterator[None]:
    """A context in which a program may access only the tensors of its launch, and none that another program writes.

    reachable: memory that a launch reaches by addresses in its tensors.
    """
    from triton.runtime import interpreter  # only here: processes that compile kernels never import it

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, add = builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw
    in_turn = executor.__call__
    launches: list[_Launch] = []

    def note(self: Any, pointers: Any, mask: Any, kind: str) -> None:
        x, y, z = self.grid_idx
        _, num_y, num_z = self.grid_dim
        launches[-1].note((x * num_y + y) * num_z + z, pointers, mask, kind)

    def noted_load(self: Any, pointers: Any, mask: Any, *args: Any) -> Any:
        note(self, pointers, mask, "reads")
        return load(self, pointers, mask, *args)

    def noted_store(self: Any, pointers: Any, value: Any, mask: Any, *args: Any) -> Any:
        note(self, pointers, mask, "writes")
        return store(self, pointers, value, mask, *args)

    def noted_add(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *args: Any) -> Any:
        note(self, pointers, mask, "adds")
        return add(self, operation, pointers, value, mask, *args)

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        launches.append(_Launch(self.fn.__name__, [*map(span_of, tensors), *reachable]))
        try:
            in_turn(self, *args, **kwargs)
            launches[-1].check()
        finally:
            launches.pop()

    builder.create_masked_load, builder.create_masked_store = noted_load, noted_store
    builder.create_atomic_rmw, executor.__call__ = noted_add, launch
    try:
        yield
    finally:
        builder.create_masked_load, builder.create_masked_store = load, store
        builder.create_atomic_rmw, executor.__call__ = add, in_turn
