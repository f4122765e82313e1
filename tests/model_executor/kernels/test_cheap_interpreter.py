"""The interpreter's operations have the values and types of Triton's own, which remember nothing (CheapSemantic).

test_narrow_integers.py tests its check for overflows, which is stricter than Triton's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from cheap_interpreter import CheapSemantic
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from triton.language.semantic import IncompatibleTypeErrorImpl
from triton.runtime import interpreter
from triton_interpreter import examples

CHEAP = CheapSemantic(interpreter.interpreter_builder)
"""One for all examples, so that it remembers the types of earlier ones."""
OWN = interpreter.TritonSemantic(interpreter.interpreter_builder)
TYPES = {
    tl.int1: np.bool_, tl.int8: np.int8, tl.int32: np.int32, tl.int64: np.int64, tl.uint8: np.uint8,
    tl.float16: np.float16, tl.float32: np.float32, tl.float64: np.float64,
}  # fmt: skip
SHAPES = [None, (1,), (8,), (1, 8), (4, 1), (4, 8), (2, 1, 8)]
"""None: a scalar."""
NUMBERS = [0, 1, -1, 127, 128, 2**31, -(2**31), 2**40, True, False, 0.0, -0.0, 1.5, float("inf"), float("nan"), 1e300]
OPERATIONS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "add": lambda semantic, x, y: semantic.add(x, y, False),
    "sub": lambda semantic, x, y: semantic.sub(x, y, False),
    "mul": lambda semantic, x, y: semantic.mul(x, y, False),
    "truediv": lambda semantic, x, y: semantic.truediv(x, y),
    "less_than": lambda semantic, x, y: semantic.less_than(x, y),
    "minimum": lambda semantic, x, y: semantic.minimum(x, y, tl.PropagateNan.NONE),
    "and": lambda semantic, x, y: semantic.and_(x, y),
    "where": lambda semantic, x, y: semantic.where(semantic.less_than(x, y), x, y),
}


@st.composite
def tensors(draw) -> tl.tensor:
    kind, shape = draw(st.sampled_from([*TYPES, tl.pointer_type(tl.float32)])), draw(st.sampled_from(SHAPES))
    values = np.random.default_rng(draw(st.integers(0, 9))).integers(0, 2, shape or (1,))
    if draw(st.booleans()):
        values = values * -3
    data = values.astype(np.uint64 if kind.is_ptr() else TYPES[kind])
    return tl.tensor(interpreter.TensorHandle(data, kind), kind if shape is None else tl.block_type(kind, list(shape)))


def found(operation: str, semantic: Any, x: Any, y: Any) -> Any:
    """Type, shape and bytes of the result; or the type of the error."""
    try:
        with np.errstate(all="ignore"):
            result = OPERATIONS[operation](semantic, x, y)
    except (TypeError, ValueError, AttributeError, AssertionError, IncompatibleTypeErrorImpl) as error:
        return type(error)
    data = result.handle.data
    return str(result.type), str(result.handle.dtype), data.dtype, data.shape, data.tobytes()


@settings(max_examples=examples(150))
@given(st.sampled_from(sorted(OPERATIONS)), tensors(), st.one_of(tensors(), st.sampled_from(NUMBERS)), st.booleans())
def test_operations_have_tritons_values_and_types(operation: str, x: tl.tensor, y: Any, is_swapped: bool) -> None:
    operands = (y, x) if is_swapped else (x, y)
    # A negated offset is checked for an overflow.
    assume(operation != "sub" or not (isinstance(operands[0], tl.tensor) and operands[0].dtype.is_ptr()))
    expected = found(operation, OWN, *operands)
    assert [found(operation, CHEAP, *operands) for _ in range(2)] == [expected] * 2


def test_zeros_keep_their_sign() -> None:
    x = tl.tensor(interpreter.TensorHandle(np.full(8, -0.0, np.float32), tl.float32), tl.block_type(tl.float32, [8]))
    signs = [np.signbit(CHEAP.add(x, zero, False).handle.data).all() for zero in (0.0, -0.0, 0.0, -0.0)]
    assert signs == [False, True, False, True]


def test_nothing_writes_to_a_number_that_is_remembered() -> None:
    x = tl.tensor(interpreter.TensorHandle(np.ones(8, np.int32), tl.int32), tl.block_type(tl.int32, [8]))
    for _ in range(2):
        number = CHEAP.binary_op_type_checking_impl(x, 5)[1]
        with pytest.raises(ValueError, match="read-only"):
            number.handle.data[0] = 6
