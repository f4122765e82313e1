"""Compiles kernels for GPUs that this machine does not have, and reads the resources that the machine code uses.

A test calls a kernel wrapper as serving does, on meta tensors. `recorded` stores the launches instead of running them.
`compile_launch` compiles a launch with Triton's own specialisation for a target. No device is needed.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import triton
from sass import InstructionCounts, code_of, count_instructions, divide
from serving_shapes import Shape
from some_cases import ALL_CASES, crossed
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction, create_function_from_signature

from tercet.model_executor.kernels.tuning import decode_tile, programs_that_fit

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_OF_FEW_KERNELS = {"sm_89": GPUTarget("cuda", 89, 32), "sm_100": GPUTarget("cuda", 100, 32)}
"""Only the largest tiles (test_compile_less_memory.py) and latent attention are compiled for them."""
SHARED_LIMIT = {
    "sm_80": 163 * 1024,
    "sm_89": 99 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "gfx942": 64 * 1024,
}
"""Maximum shared memory of a block in bytes. Sources: CUDA C++ programming guide, compute capabilities; CDNA3 ISA."""
SHARED_OF_ALL = 228 * 1024
"""Shared memory of a multiprocessor of sm_90. Each block takes 1 KB more than it asks for. Source as above."""
_ASSEMBLY = {"cuda": "ptx", "hip": "amdgcn"}
_binders: dict[tuple[str, str, str], Callable[..., Any]] = {}
"""Triton's functions that specialise a launch, by kernel and target."""
_PROGRAMS = Path(triton.__file__).parent / "backends/nvidia/bin"


_Case = TypeVar("_Case")


def on_targets(cases: Iterable[_Case]) -> list[tuple[_Case, str]]:
    """Every case for sm_90, and for the other targets. A usual run takes every third case, for one of those."""
    listed = list(cases)
    others = crossed(listed if ALL_CASES else listed[::3], ["sm_80", "gfx942"], each=1)
    return [*((case, "sm_90") for case in listed), *others]


@dataclass(frozen=True)
class Launch:
    kernel: JITFunction
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grid: tuple[int, ...]


@dataclass(frozen=True)
class Resources:
    """The resources of one kernel: bytes of shared memory per block, registers per thread, and spilled registers."""

    kernel: str
    shared: int
    registers: int
    spilled: int
    threads: int
    assembly: str = field(repr=False)
    """PTX or amdgcn assembly."""
    layouts: str = field(repr=False)
    """Triton's GPU dialect, which says which elements of a tensor a thread has."""
    cubin: bytes | None = field(repr=False)
    """NVIDIA's machine code. None on AMD, and where it has been counted."""
    other_counts: InstructionCounts | None = field(default=None, repr=False)
    """Instead of those of the machine code."""

    @property
    def counts(self) -> InstructionCounts | None:
        """None on AMD. Read when a test asks for them, because the disassembler takes half as long as the compiler."""
        if self.other_counts is None and self.cubin is not None:
            return _counts_of(self.cubin)
        return self.other_counts

    def with_counts(self, **changed: Any) -> Resources:
        assert self.counts is not None
        return replace(self, other_counts=replace(self.counts, **changed))


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """A context in which kernel launches are recorded and not run."""
    launches: list[Launch] = []
    run = JITFunction.run

    def note(self: JITFunction, *args: Any, grid: tuple[int, ...], warmup: bool, **kwargs: Any) -> None:
        assert all(isinstance(n, int) and n > 0 for n in grid), f"{self.fn.__name__}: grid {grid}"
        launches.append(Launch(self, args, kwargs, grid))

    JITFunction.run = note
    try:
        yield launches
    finally:
        JITFunction.run = run


def what_is_compiled(launch: Launch, arch: str) -> tuple[str, str, str]:
    """The key of a launch's machine code. Launches with equal keys share it; a launch with a new key is compiled."""
    _, specialization, options = _bind(launch, arch)
    return launch.kernel.fn.__name__, str(specialization), str(options)


def _bind(launch: Launch, arch: str) -> tuple[dict[str, Any], list[Any], dict[str, Any]]:
    """Arguments by name; Triton's specialisation (types, constants, multiples of 16); options such as num_warps."""
    key = launch.kernel.fn.__module__, launch.kernel.fn.__qualname__, arch
    if key not in _binders:
        backend = make_backend(_target(arch))
        _binders[key] = create_function_from_signature(launch.kernel.signature, launch.kernel.params, backend)
    return _binders[key](*launch.args, **launch.kwargs)


def _target(arch: str) -> GPUTarget:
    return (TARGETS | _OF_FEW_KERNELS)[arch]


def compile_launch(launch: Launch, arch: str) -> Resources:
    """Compiles a launch for a target. Raises the compiler's exceptions."""
    target = _target(arch)
    backend = make_backend(target)
    kernel = launch.kernel
    bound, specialization, options = _bind(launch, arch)
    parsed, signature, constexprs, attrs = kernel._pack_args(
        backend, dict(launch.kwargs), bound, specialization, options
    )
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    compiled = triton.compile(source(kernel, signature, constexprs, attrs), target=target, options=parsed.__dict__)
    cubin: bytes | None = compiled.asm["cubin"] if target.backend == "cuda" else None
    registers, spilled = _amd(compiled.asm["amdgcn"]) if cubin is None else _nvidia(cubin)
    return Resources(
        kernel.fn.__name__,
        compiled.metadata.shared,
        registers,
        spilled,
        compiled.metadata.num_warps * target.warp_size,
        compiled.asm[_ASSEMBLY[target.backend]],
        compiled.asm["ttgir"],
        cubin,
    )


_WAITING = {"extend_kernel": 64, "_decode_split_kernel": 48, "_fused_decode_kernel": 128, "_skinny_linear_kernel": 8}
"""Most bytes of a thread that a kernel for sm_90 spills outside its loops."""


def assert_fits(resources: Resources, arch: str) -> None:
    assert resources.shared <= SHARED_LIMIT[arch], resources
    # What the loops over the KV do not need may wait in memory while they run, but those loops spill nothing.
    waiting = _WAITING if arch == "sm_90" else {"_fused_decode_kernel": 24, "_decode_split_kernel": 8}
    assert resources.spilled <= waiting.get(resources.kernel, 0), resources
    if resources.spilled and resources.counts is not None:
        assert resources.counts.spills_in_loops == 0, resources


def assert_overlaps(resources: Resources) -> None:
    """Checks that attention for sm_90 waits neither for each product nor for each element of a KV tile."""
    counts = resources.counts
    assert counts is not None
    # 128 bits a thread for K and V, or for partial results. Narrow copies are those of slots and sums.
    assert counts.wide_copies > 0, resources
    if resources.kernel in ("_decode_merge_kernel", "extend_merge_kernel"):
        return
    # V of fp8 is transposed on its way to the registers, in pairs of bytes.
    assert counts.byte_loads == 0 or resources.kernel == "extend_kernel", resources
    if not counts.wgmma:
        # Decode attention has too few rows. So has extend attention with the tile of four warps, for wide heads in fp8.
        assert counts.mma > 0 and (resources.kernel != "extend_kernel" or resources.threads == 128), resources
        return
    # Two loops with two products each: q @ K and p @ V, of several instructions.
    assert counts.wgmma_batches == counts.wgmma_waits == 4, resources


def assert_one_look_up(resources: Resources) -> None:
    """Checks that attention in pages for NVIDIA copies K and V to shared memory, and no slots."""
    counts = resources.counts
    assert counts is None or counts.copies == counts.wide_copies, resources


def assert_plan_holds(resources: Resources, shape: Shape, page_size: int = 1) -> None:
    """Checks that registers and shared memory suffice for the planned programs of decode attention.

    The fused kernel holds more, and serves few requests: two programs are enough to overlap.
    """
    if resources.kernel == "_decode_split_kernel":
        planned = decode_tile("sm_90", shape.head_dim, fp8=shape.fp8, page_size=page_size).programs
        fit = programs_that_fit(planned, resources.registers, resources.threads)
        assert fit == planned and planned * (resources.shared + 1024) <= SHARED_OF_ALL, resources
    if resources.kernel == "_fused_decode_kernel":
        assert programs_that_fit(2, resources.registers, resources.threads) == 2, resources


@cache
def _counts_of(cubin: bytes) -> InstructionCounts:
    """Several shapes have the same kernel that merges."""
    return count_instructions(_run("cuobjdump", "-sass", cubin))


def compile_all(launches: Iterable[Launch], arch: str) -> list[Resources]:
    """Compiles launches for a target, and for sm_90 counts their instructions."""
    compiled = [compile_launch(launch, arch) for launch in launches]
    return counted_together(compiled) if arch == "sm_90" else compiled


def compile_each(launches: Mapping[_Case, Sequence[Launch]], arch: str) -> dict[_Case, list[Resources]]:
    """Compiles the launches of several cases, and for sm_90 counts all their instructions at once."""
    compiled = iter(compile_all((launch for each in launches.values() for launch in each), arch))
    return {case: list(islice(compiled, len(each))) for case, each in launches.items()}


def counted_together(compiled: Sequence[Resources]) -> list[Resources]:
    """The same kernels for sm_90 with counts instead of machine code. The disassembler runs once: it starts slowly."""
    codes = [code_of(resources.cubin) for resources in compiled if resources.cubin is not None]
    kernels = divide(_run("nvdisasm", "--binary=SM90a", b"".join(codes)), [len(code) for code in codes])
    return [
        replace(resources, cubin=None, other_counts=count_instructions(kernel))
        for resources, kernel in zip(compiled, kernels, strict=True)
    ]


def _nvidia(cubin: bytes) -> tuple[int, int]:
    """Registers and spills. Our kernels have no arrays or calls, so stack and local memory hold only spills."""
    text = _run("cuobjdump", "-res-usage", cubin)
    use = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return use["REG"], use["STACK"] + use["LOCAL"]


def _run(program: str, option: str, code: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        arguments = [_PROGRAMS / program, option, file.name]
        return subprocess.run(arguments, check=True, capture_output=True, text=True).stdout


def _amd(text: str) -> tuple[int, int]:
    """Registers and spills. Scalar registers spill to lanes of vector registers, which does not count."""
    use = {name: int(value) for name, value in re.findall(r"\.(vgpr_count|vgpr_spill_count):\s*(\d+)", text)}
    return use["vgpr_count"], use["vgpr_spill_count"]
