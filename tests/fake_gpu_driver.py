"""A driver for Triton without a GPU: it records each launch where Triton calls C.

Triton's own Python runs: binder, keys, `CompiledKernel` and `CudaLauncher`. Only what needs a device is replaced: the
functions of `driver.c`, and in Triton 3.6 the launcher that is compiled for each signature. Kernels are made up and not
compiled, unless a test wants machine code: their specialisation and options are real.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler import CompiledKernel
from triton.runtime import driver as drivers

from tercet.model_executor import kernels
from tercet.model_executor.kernels.bound import Bound

REGISTERS = 168
_HAS_FLAT_ARGUMENTS = triton.__version__.startswith("3.6.")
_SHARED_BYTES = 4096


class Launched(NamedTuple):
    """What C gets for a launch. A tensor is its address. Hooks are not part of it: they are called."""

    grid: tuple[int, int, int]
    stream: int
    function: int
    """A number for each compiled kernel."""
    cooperative: bool
    dependent: bool
    packed_metadata: tuple[int, ...]
    scratch: tuple[Any, Any]
    types: tuple[str, ...]
    args: tuple[Any, ...]


class FakeDriver(nvidia.CudaDriver):
    """Two devices, each with as many streams as a test wants."""

    def __init__(self) -> None:
        self.device, self.stream = 0, 7
        self.launches: list[Launched] = []
        self._num_loaded = 0
        self.utils = SimpleNamespace(
            launch=self._launch_tuple,
            load_binary=self._load_binary,
            unload_module=lambda module: None,
            get_device_properties=lambda device: {"max_shared_mem": 232_448},
            build_signature_metadata=tuple,
        )
        self.launcher_cls = nvidia.CudaLauncher
        self.get_current_device = lambda: self.device
        self.get_current_stream = lambda device: 100 * device + self.stream
        self.get_device_capability = lambda device: (9, 0)

    def compile_module(self, src: str, **_: Any) -> SimpleNamespace:
        """Triton 3.6: the module of a signature, which `make_launcher` gives as its source."""
        return SimpleNamespace(launch=self._launch_flat(tuple(json.loads(src))))

    def _load_binary(self, *_: Any) -> tuple[int, int, int, int, int]:
        self._num_loaded += 1
        return 1, self._num_loaded, REGISTERS, 0, 1024

    def _launch_tuple(self, *given: Any) -> None:
        *start, metadata, about, enter, leave, scratch, profile, annotations, types, args = given
        assert len(annotations) == len(args) == len(types) + annotations.count("constexpr")
        self._note(start, (scratch, profile), metadata, types, args, (about, enter, leave))

    def _launch_flat(self, types: tuple[str, ...]) -> Callable[..., None]:
        def launch(*given: Any) -> None:
            start, (scratch, profile, metadata, *hooks), args = given[:7], given[7:13], given[13:]
            assert len(args) == len(types)
            self._note(start, (scratch, profile), metadata, types, args, hooks)

        return launch

    def _note(self, start: Any, scratch: Any, metadata: Any, types: Any, args: Any, hooks: Any) -> None:
        about, enter, leave = hooks
        x, y, z, *start = start
        args = tuple(arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args)
        if enter is not None:
            enter(about)
        self.launches.append(Launched((x, y, z), *start, metadata, scratch, tuple(types), args))
        if leave is not None:
            leave(about)


@contextmanager
def fake_gpu(*, compiles: bool = False, **metadata: Any) -> Iterator[FakeDriver]:
    """A context in which kernels are launched on a fake device of sm_90.

    compiles: compile kernels for it. metadata: what is said of kernels that are made up, such as global_scratch_size.
    """
    driver = FakeDriver()
    with ExitStack() as stack:
        if _HAS_FLAT_ARGUMENTS:
            stack.enter_context(patch.object(nvidia, "compile_module_from_src", driver.compile_module))
            stack.enter_context(patch.object(nvidia, "make_launcher", _signature_as_source))
            stack.enter_context(patch.object(nvidia, "library_dirs", list))
        else:
            stack.enter_context(patch.object(nvidia, "PyKernelArg", lambda nested_tuple, type: type))
            stack.enter_context(patch.object(nvidia, "ARG_CONSTEXPR", "constexpr"))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        compile = triton.compile if compiles else _compiler(folder, metadata)
        compiled = []

        def noted(src: Any, *, target: GPUTarget, options: dict[str, Any]) -> CompiledKernel:
            compiled.append(compile(src, target=target, options=options))
            return compiled[-1]

        stack.enter_context(patch("triton.compiler.compile", noted))
        stack.callback(drivers.set_active, drivers._active)
        drivers.set_active(driver)
        try:
            yield driver
        finally:
            _forget(compiled)


def bound_kernels() -> list[Bound]:
    """The bound kernels of all modules that are loaded."""
    modules = [module for name, module in sys.modules.items() if name.startswith(kernels.__name__ + ".")]
    return [value for module in modules for value in vars(module).values() if isinstance(value, Bound)]


def _forget(compiled: list[CompiledKernel]) -> None:
    """Leave nothing of the fake device in kernels that other tests launch, too."""
    for kernel in compiled:
        kernel.src.fn.device_caches.clear()
        kernel.module = None  # no device has it loaded
    for bound in bound_kernels():
        Bound.__init__(bound, bound.jit)


def _signature_as_source(constants: object, signature: dict[Any, str], *_: object) -> str:
    # Without metadata, a descriptor of two dimensions is its base and padding, and its shape and strides, twice.
    lengths = {kind: 10 if kind.startswith("tensordesc") else 1 for kind in signature.values()}
    return json.dumps([kind for kind in signature.values() for _ in range(lengths[kind])])


def _compiler(folder: Path, said: dict[str, Any]) -> Callable[..., CompiledKernel]:
    """What takes the place of `triton.compile`: the kernel's options are real, its machine code is empty."""

    def compile(src: Any, target: GPUTarget, options: dict[str, Any]) -> CompiledKernel:
        number = len(list(folder.iterdir()))
        metadata = {
            "hash": str(number),
            "name": src.fn.__name__,
            "target": target,
            "shared": _SHARED_BYTES,
            "warp_size": target.warp_size,
            "global_scratch_size": 0,
            "global_scratch_align": 1,
            "profile_scratch_size": 0,
            "profile_scratch_align": 1,
            "tensordesc_meta": [],
        }
        described, binary = folder / f"{number}.json", folder / "kernel.cubin"
        described.write_text(json.dumps(options | metadata | said, default=vars))
        binary.write_bytes(b"")
        return CompiledKernel(src, {described.name: str(described), binary.name: str(binary)}, str(number))

    return compile
