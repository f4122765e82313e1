"""The interpreter notices offsets that do not fit their integers: triton_interpreter.py has its own check."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError


@triton.jit
def _kernel(x_ptr, KIND: tl.constexpr):
    at = tl.arange(0, 2)
    x = tl.load(x_ptr + at)
    if KIND == "mul":
        x = x * x
    elif KIND == "add":
        x = x + x
    else:
        x = -x - x
    tl.store(x_ptr + at, x)


@pytest.mark.parametrize(
    ("kind", "fits", "over"), [("mul", 46340, 46341), ("add", 2**30 - 1, 2**30), ("sub", 5, 2**30 + 1)]
)
def test_an_overflow_of_int32_is_an_error(kind: str, fits: int, over: int) -> None:
    _kernel[(1,)](torch.tensor([0, fits], dtype=torch.int32), kind)
    _kernel[(1,)](torch.tensor([0, over]), kind)  # int64
    with pytest.raises(InterpreterError, match=f"overflows in {kind}"):
        _kernel[(1,)](torch.tensor([0, over], dtype=torch.int32), kind)
