"""The watch over memory notices what programs must not do: watched_memory.py has a check of its own."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

NUM_PROGRAMS = 3


@triton.jit
def _kernel(x_ptr, out_ptr, first, end, step, KIND: tl.constexpr):
    """Program p accesses numbers p * step + first to p * step + first + 3, those before `end`."""
    at = tl.program_id(0) * step + first + tl.arange(0, 4)
    mask = at < end
    if KIND == "add":
        tl.atomic_add(out_ptr + at, 1.0, mask=mask)
    elif KIND == "reload":
        tl.store(out_ptr + at, tl.load(x_ptr + at, mask=mask), mask=mask)
        tl.store(x_ptr + at, tl.load(out_ptr + at, mask=mask), mask=mask)
    elif KIND == "neighbour":
        tl.store(out_ptr + at, tl.load(out_ptr + (at + step) % end, mask=mask), mask=mask)
    elif KIND == "follow":
        address = tl.load(x_ptr).to(tl.pointer_type(tl.float32))
        tl.store(out_ptr + at, tl.load(address + at, mask=mask), mask=mask)
    elif KIND == "read":
        tl.store(out_ptr + tl.program_id(0), tl.sum(tl.load(x_ptr + at, mask=mask), axis=0))
    else:
        tl.store(out_ptr + at, 1.0, mask=mask)


def launch(kind: str, *, first: int = 0, end: int = 12, step: int = 4, size: int = 12) -> None:
    memory = torch.zeros(2, 20)
    _kernel[(NUM_PROGRAMS,)](memory[0, 4 : 4 + size], memory[1, 4 : 4 + size], first, end, step, kind)


@pytest.mark.parametrize("kind", ["add", "reload", "read", "write"])
def test_programs_may_access_parts_of_their_own(kind: str) -> None:
    launch(kind)
    launch(kind, end=10, size=10)  # the last program has a mask


@pytest.mark.parametrize("kind", ["add", "read", "write"])
@pytest.mark.parametrize("where", [{"size": 11}, {"first": -1}, {"end": 13, "first": 1}], ids=str)
def test_an_access_outside_is_an_error(kind: str, where: dict[str, int]) -> None:
    with pytest.raises(InterpreterError, match=f"program . {kind}s outside of its tensors"):
        launch(kind, **where)


def test_programs_may_not_write_the_same_number() -> None:
    with pytest.raises(AssertionError, match="_kernel: two programs write the same number"):
        launch("write", step=3)
    launch("add", step=3)
    launch("read", step=3)


def test_programs_may_not_read_what_another_one_writes() -> None:
    with pytest.raises(AssertionError, match="_kernel: a program reads a number that another one writes"):
        launch("neighbour")


def test_memory_behind_an_address_must_be_named() -> None:
    """The tests of experts name it."""
    memory, out = torch.zeros(12), torch.empty(12)
    with pytest.raises(InterpreterError, match="reads outside"):
        _kernel[(NUM_PROGRAMS,)](torch.tensor([memory.data_ptr()]), out, 0, 12, 4, "follow")
