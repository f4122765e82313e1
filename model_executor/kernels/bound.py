"""Launches of Triton kernels that cost a few microseconds of the host: `@bound` above `@triton.jit`.

Triton compiles a kernel anew for other types of its arguments, other constants and options, pointers that are or are
not aligned to 16 bytes, integers that are 1, multiples of 16, or neither, and descriptors of other boxes. Before each
launch, it finds the compiled kernel in 10 to 40 us of Python. A bound kernel finds it in one dictionary, by a key of
all these, and calls the function that Triton would call, with the same arguments.

Triton itself launches in all other cases: for the first launch with a key, while a profiler watches launches, for
kernels that need scratch memory or a cooperative grid, and for devices and Tritons whose C function is not known here.
Triton's other settings (TRITON_DEBUG and the like) are read at the first launch with a key.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cache
from types import MethodType
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver as drivers
from triton.runtime.jit import JITFunction

logger = logging.getLogger(__name__)

_SOURCE = """
def launch(grid, {params}, num_warps=None, num_stages=None, **options):
    try:
        device = current_device()
        key = ({key}, num_warps, num_stages, tuple(options.items()) if options else None)
        found = launches.get(key)
        x, y, z = (*grid, 1, 1)[:3]
        is_watched = runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls
    except (AttributeError, KeyError, TypeError):
        # Arguments of other kinds than at the first launch, a function as the grid, or hooks of another kind.
        key = found = None
    if found is None or is_watched:
        return by_triton(key, grid, {arguments}, num_warps=num_warps, num_stages=num_stages, **options)
    compiled, c_launch, head = found
    c_launch(x, y, z, current_stream(device), *head, {c_arguments})
    return compiled
"""


class _Convention(NamedTuple):
    """How a Triton calls its C function: (x, y, z, stream, *head, ...)."""

    head: Callable[[CompiledKernel, Any], tuple[Any, ...]]
    """What follows the stream, for a compiled kernel and its launcher. No hook is called, and no scratch is given."""
    c_arguments: str
    """How the kernel's arguments are passed."""


def _flat_head(compiled: CompiledKernel, launcher: Any) -> tuple[Any, ...]:
    return compiled.function, False, launcher.launch_pdl, None, None, compiled.packed_metadata, None, None, None


def _tuple_head(compiled: CompiledKernel, launcher: Any) -> tuple[Any, ...]:
    types = launcher.arg_annotations, launcher.kernel_signature
    return compiled.function, False, launcher.launch_pdl, compiled.packed_metadata, None, None, None, None, None, *types


_FLAT, _TUPLE = _Convention(_flat_head, "{}"), _Convention(_tuple_head, "({},)")
_CONVENTIONS = {"3.6.0": _FLAT, "3.7.1": _TUPLE, "3.9.0": _TUPLE}
"""By version. Source: `CudaLauncher` in triton/backends/nvidia/driver.py of each."""


class Bound:
    """A Triton kernel that is launched as Triton's own: `kernel[grid](...)`. The call returns the compiled kernel."""

    def __init__(self, kernel: JITFunction) -> None:
        self.jit = kernel
        self._launch: Callable[..., Any] = self._first_launch
        self._launches: dict[Any, tuple[CompiledKernel, Callable[..., None], tuple[Any, ...]]] = {}

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return MethodType(self._launch, grid)

    def _first_launch(self, grid: Any, *args: Any, **kwargs: Any) -> Any:
        convention = _convention()
        source = convention and _source(
            self.jit, dict(zip(self.jit.arg_names, args, strict=False)) | kwargs, convention
        )
        if not source:
            return self.jit[grid](*args, **kwargs)
        namespace = {
            "launches": self._launches,
            "by_triton": self._by_triton,
            "integers": {int: 0},  # not bool
            "floats": {float: 0},
            "runtime": knobs.runtime,
            "current_device": drivers.active.get_current_device,
            "current_stream": drivers.active.get_current_stream,
        }
        exec(compile(source, f"<launch of {self.jit.__name__}>", "exec"), namespace)
        self._launch = namespace["launch"]
        return self._launch(grid, *args, **kwargs)

    def _by_triton(self, key: Any, grid: Any, *args: Any, **kwargs: Any) -> Any:
        compiled = self.jit[grid](*args, **{name: value for name, value in kwargs.items() if value is not None})
        convention = _convention()
        if key is not None and convention and type(compiled) is CompiledKernel and not self.jit.pre_run_hooks:
            launcher = compiled.run
            if _needs_no_memory(launcher):
                self._launches[key] = compiled, launcher.launch, convention.head(compiled, launcher)
        return compiled


def bound(kernel: Any) -> Any:
    """Bind a kernel that `triton.jit` has made. Under TRITON_INTERPRET=1 it stays as it is."""
    return Bound(kernel) if isinstance(kernel, JITFunction) else kernel


def _convention() -> _Convention | None:
    """The convention of the active driver's launcher. None: only Triton knows it, or there is no device."""
    try:
        return _convention_of(triton.__version__, drivers.active.launcher_cls)
    except RuntimeError:
        return None


@cache
def _convention_of(version: str, launcher_class: type) -> _Convention | None:
    convention = _CONVENTIONS.get(version) if launcher_class.__name__ == "CudaLauncher" else None
    if convention is None:
        logger.warning(
            "Each launch of a kernel takes longer: Triton %s on this device (%s) has no bound launches, which need an "
            "NVIDIA device and Triton %s",
            version, launcher_class.__name__, ", ".join(_CONVENTIONS),
        )  # fmt: skip
    return convention


def _source(kernel: JITFunction, arguments: Mapping[str, Any], convention: _Convention) -> str | None:
    """The source of a kernel's `launch`, for arguments of the kinds of these. None: there is a kind without a key.

    Launches with equal keys have equal specialisations in Triton (`native_specialize_impl` in its specialize.cc).
    """
    key, aligned, passed = ["device"], [], []
    by_name = False
    for param in kernel.params:
        name, value = param.name, arguments.get(param.name)
        if param.has_default or (param.annotation and not param.is_constexpr):
            return None
        by_name |= param.is_constexpr
        passed.append(f"{name}={name}" if by_name else name)
        if param.is_constexpr:
            key.append(name)
        elif isinstance(value, torch.Tensor):
            key.append(f"{name}.dtype")
            if not param.do_not_specialize_on_alignment:
                aligned.append(f"{name}.data_ptr()")
        elif type(value) is int:
            # The high bits tell 32 from 64 bits.
            key += [f"integers[type({name})]", f"{name} >> 31"]
            if not param.do_not_specialize:
                key.append(f"2 if {name} == 1 else {name} & 15 == 0")
        elif type(value) is float:
            key.append(f"floats[type({name})]")
        elif type(value).__name__ == "TensorDescriptor":  # of Gluon, whose import takes 0.1 s
            key += [f"{name}.base.dtype", f"(*{name}.block_shape,)", f"{name}.layout", f"{name}.padding"]
        else:
            return None
    if aligned:
        # Nearly all launches have only aligned pointers. So one test of all comes first.
        each = ", ".join(f"{address} & 15 == 0" for address in aligned)
        key.append(f"({' | '.join(aligned)}) & 15 and ({each},)")
    names = ", ".join(kernel.arg_names)
    return _SOURCE.format(
        params=names,
        key=", ".join(key),
        arguments=", ".join(passed),
        c_arguments=convention.c_arguments.format(names),
    )


def _needs_no_memory(launcher: Any) -> bool:
    """Whether a launcher passes no scratch memory, and starts no cooperative grid."""
    return not (
        launcher.global_scratch_size
        or launcher.profile_scratch_size
        or launcher.launch_cooperative_grid
        or getattr(launcher, "gsan_enabled", False)
    )
