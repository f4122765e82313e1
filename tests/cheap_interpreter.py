"""Removes work of Triton's interpreter that depends on no data. It was most of the interpreter's time.

The results stay those of Triton (model_executor/kernels/test_cheap_interpreter.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from triton import language as tl
from triton.runtime import interpreter

_core = tl.core
_OPERATIONS = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def make_cheaper() -> None:
    """Changes the interpreter of this process, which compiles no kernel. Call it once."""
    _call_builtins_directly()
    _patch_the_language_once()
    _make_types_once()
    _unwrap_tensors_at_once()
    _know_numpy_types()
    interpreter.interpreter_semantic = CheapSemantic(interpreter.interpreter_builder)


def _know_numpy_types() -> None:
    numpy_dtype, found = interpreter._get_np_dtype, {}

    def known_dtype(kind: Any) -> Any:
        if kind.name not in found:
            found[kind.name] = numpy_dtype(kind)
        return found[kind.name]

    interpreter._get_np_dtype = known_dtype


def _call_builtins_directly() -> None:
    """Calls a function of the language without the wrapper that checks for an argument that the interpreter adds."""

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(obj, name, call)

    interpreter._patch_attr = patch_attr


def _patch_the_language_once() -> None:
    """Leaves Triton's language as the interpreter needs it, because this process compiles no kernel.

    The interpreter patches the language at each launch and each call of a device function.
    """
    patch_lang, languages = interpreter._patch_lang, (tl, _core)
    patched: set[tuple[bool, ...]] = set()
    kinds: dict[int, tuple[bool, ...]] = {}

    def patch_once(fn: Any) -> Any:
        space = fn.__globals__  # of a module, which is never unloaded
        if id(space) not in kinds:
            seen = {id(value) for value in space.values()}
            kinds[id(space)] = tuple(id(language) in seen for language in languages)
        if kinds[id(space)] not in patched:
            patched.add(kinds[id(space)])
            patch_lang(fn)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once


def _make_types_once() -> None:
    """Makes one object of each block type, and computes the shape of a tensor once for each type.

    Triton computes both anew for each operation. Nothing changes a type.
    """
    new_type, new_tensor = _core.block_type.__init__, _core.tensor.__init__
    types: dict[tuple[Any, ...], Any] = {}
    pointers: dict[tuple[Any, ...], Any] = {}

    def one_of_its_kind(kind: Any, element_ty: Any, shape: Any) -> Any:
        key = id(element_ty), *(getattr(size, "value", size) for size in shape)
        if key not in types:
            types[key] = object.__new__(kind)
        return types[key]  # it refers to its element type, whose id so stays its own

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        if not vars(self):
            new_type(self, element_ty, shape)

    def one_pointer(kind: Any, element_ty: Any, *options: Any, **named: Any) -> Any:
        return pointers.setdefault((id(element_ty), *options, *named.items()), object.__new__(kind))

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        fields = vars(type).get("fields_of_tensors")
        if fields is None:
            new_tensor(self, handle, type)
            fields = {name: value for name, value in vars(self).items() if name != "handle"}
            type.fields_of_tensors = fields
        own = vars(self)
        own.update(fields)
        own["handle"] = handle

    _core.block_type.__new__, _core.block_type.__init__ = one_of_its_kind, init_type
    _core.pointer_type.__new__, _core.tensor.__init__ = one_pointer, init_tensor


def _unwrap_tensors_at_once() -> None:
    """Recognises what is no constant without four checks of its type."""
    unwrap, constant = _core._unwrap_if_constexpr, _core.constexpr
    plain = {_core.tensor, int, bool, float, str, type(None), _core.dtype, _core.block_type, _core.pointer_type}

    def unwrapped(value: Any) -> Any:
        kind = type(value)
        if kind in plain:
            return value
        return value.value if kind is constant else unwrap(value)

    _core._unwrap_if_constexpr = unwrapped


class CheapSemantic(interpreter.TritonSemantic):
    """The meaning of operations. It remembers by the types of operands to what they are cast and broadcast.

    What it remembers has the types themselves, so that no other types get their ids.
    """

    def __init__(self, builder: Any) -> None:
        super().__init__(builder)
        self._computation_types: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._need_no_cast: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._broadcast: dict[tuple[int, int], tuple[Any, ...]] = {}
        self._numbers: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def computation_type_impl(self, *types: Any) -> Any:
        key = (*map(id, types),)  # also of True and False
        if key not in self._computation_types:
            self._computation_types[key] = super().computation_type_impl(*types), types
        return self._computation_types[key][0]

    def binary_op_type_checking_impl(self, lhs: Any, rhs: Any, *options: Any, **named: Any) -> tuple[Any, Any]:
        if isinstance(lhs, int | float):
            return super().binary_op_type_checking_impl(lhs, rhs, *options, **named)
        if isinstance(rhs, int | float):
            return self._with_number(lhs, rhs, *options, **named)
        key = id(lhs.type), id(rhs.type), *options, *named.items()
        if key in self._need_no_cast:
            return self.broadcast_impl_value(lhs, rhs)
        left, right = super().binary_op_type_checking_impl(lhs, rhs, *options, **named)
        if left.dtype is lhs.dtype and right.dtype is rhs.dtype:
            self._need_no_cast[key] = lhs.type, rhs.type
        return left, right

    def _with_number(self, lhs: Any, number: float, *options: Any, **named: Any) -> tuple[Any, Any]:
        """The second operand as a tensor. It has the bits of the number: 0.0 is not -0.0."""
        value = number.hex() if isinstance(number, float) else number
        key = id(lhs.type), type(number), value, *options, *named.items()
        if key in self._numbers:
            return lhs, self._numbers[key][0]
        left, right = super().binary_op_type_checking_impl(lhs, number, *options, **named)
        if left is lhs:
            right.handle.data.flags.writeable = False
            if len(self._numbers) == 1000:
                self._numbers.clear()
            self._numbers[key] = right, lhs.type
        return left, right

    def broadcast_impl_value(self, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        left, right = lhs.type, rhs.type
        if left is right:
            return lhs, rhs
        key = id(left), id(right)
        if key not in self._broadcast:
            both = super().broadcast_impl_value(lhs, rhs)
            self._broadcast[key] = *(new.type for new in both), both[0].handle.data.shape, left, right
            return both
        new_left, new_right, shape, *_ = self._broadcast[key]
        return _spread(lhs, new_left, shape), _spread(rhs, new_right, shape)

    def binary_op_sanitize_overflow_impl(self, lhs: Any, rhs: Any, binary_op: Any) -> None:
        """Asserts that narrow integers do not overflow by one numpy operation. Triton takes a dozen of its own."""
        kind = lhs.type.scalar
        if kind.int_bitwidth < 64:
            assert kind == rhs.type.scalar and kind.is_int()
            wide = _OPERATIONS[binary_op.__name__](lhs.handle.data.astype(np.int64), rhs.handle.data.astype(np.int64))
            low, high = kind.get_int_min_value(), kind.get_int_max_value()
            assert ((wide >= low) & (wide <= high)).all(), f"{kind} overflows in {binary_op.__name__}"


def _spread(value: Any, kind: Any, shape: tuple[int, ...]) -> Any:
    """A tensor as one of another type and shape."""
    if value.type is kind:
        return value
    data = np.empty(shape, value.handle.data.dtype)
    data[...] = value.handle.data
    return _core.tensor(interpreter.TensorHandle(data, value.handle.dtype.scalar), kind)
