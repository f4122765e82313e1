"""Decode attention in the shapes that serving uses, compiled for GPUs that need not be here."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import cache, partial
from types import SimpleNamespace

import pytest
from compiled_attention import decode_launches, fused_launches, launch_decode
from serving_shapes import BY_NAME, DEFAULT, SHAPES, Shape
from some_cases import covering
from triton.runtime.jit import JITFunction
from triton_aot import (
    TARGETS,
    Launch,
    Resources,
    assert_fits,
    assert_one_look_up,
    assert_overlaps,
    assert_plan_holds,
    compile_all,
    compile_each,
    compile_launch,
)

from tercet.model_executor.kernels import decode_attention
from tercet.model_executor.kernels.tuning import DecodeTile, decode_tile, programs_that_fit

pytestmark = pytest.mark.timeout(900)  # the first test of a GPU compiles all of its cases

KERNELS: dict[str, Callable[..., list[Launch]]] = {
    "two": partial(decode_launches, mixed=False),
    "two, with prompts": partial(decode_launches, mixed=True),
    "one": partial(fused_launches, norm=False),
    "one, with a norm": partial(fused_launches, norm=True),
}
"""How many kernels decode attention has, whether the step has prompts, and whether heads have a norm."""
FUSED = {
    "9x3x64-bfloat16": "one",
    "16x8x128-bfloat16": "one, with a norm",
    "40x8x128-bfloat16-window": "one",
    "64x8x64-bfloat16-window-sinks": "one",
    "32x32x80-bfloat16": "one, with a norm",
    "32x8x128-fp8": "one, with a norm",
    "9x3x64-float32": "one",
}
Case = tuple[Shape, str, int, str]
"""A shape, one of KERNELS, the page size and the GPU."""


def tile_of(shape: Shape, page_size: int, arch: str) -> DecodeTile:
    return decode_tile(arch, shape.head_dim, fp32=shape.fp32, fp8=shape.fp8, page_size=page_size)


def every_case() -> Iterator[Case]:
    for shape in SHAPES:
        kernels = ["two", FUSED.get(str(shape))]
        if shape.head_dim == 128 and (shape.window or shape.num_heads == 32):
            kernels.append("two, with prompts")
        yield from ((shape, kernel, 1, arch) for kernel in kernels if kernel for arch in TARGETS)
        if tile_of(shape, 64, "sm_90").paged:
            yield from ((shape, kernel, 64, "sm_90") for kernel in KERNELS)


def aspects(case: Case) -> Iterable[Hashable]:
    shape, kernel, page_size, arch = case
    yield arch, kernel, page_size
    if arch == "sm_90":
        yield tile_of(shape, page_size, arch)
        yield "kind", shape.kind, page_size
        yield "width", shape.head_dim
        yield "options", shape.soft_cap, shape.window, shape.has_sinks
        if shape == DEFAULT:
            yield case


CASES = covering(list(every_case()), aspects)


def chosen(*kernels: str, page_size: int = 1) -> list[Case]:
    return [case for case in CASES if case[1] in kernels and case[2] == page_size]


@cache
def compiled(arch: str) -> dict[Case, list[Resources]]:
    """The kernels of all cases for a GPU. They are disassembled at once, because the disassembler starts slowly."""
    cases = [case for case in CASES if case[3] == arch]
    return compile_each({case: KERNELS[case[1]](case[0], arch, page_size=case[2]) for case in cases}, arch)


def check(shape: Shape, kernel: str, arch: str) -> None:
    found = compiled(arch)[shape, kernel, 1, arch]
    names = ["_decode_split_kernel", "_decode_merge_kernel"] if "two" in kernel else ["_fused_decode_kernel"]
    assert [resources.kernel for resources in found] == names
    for resources in found:
        assert_fits(resources, arch)
        if arch == "sm_90" and not shape.fp32:
            assert_overlaps(resources)
            assert_plan_holds(resources, shape)


@pytest.mark.parametrize(("shape", "kernel", "page_size", "arch"), chosen("two"), ids=str)
def test_decode(shape: Shape, kernel: str, page_size: int, arch: str) -> None:
    check(shape, kernel, arch)


@pytest.mark.parametrize(("shape", "kernel", "page_size", "arch"), chosen("two, with prompts"), ids=str)
def test_decode_in_a_step_with_prompts(shape: Shape, kernel: str, page_size: int, arch: str) -> None:
    check(shape, kernel, arch)


@pytest.mark.parametrize(("shape", "kernel", "page_size", "arch"), chosen("one", "one, with a norm"), ids=str)
def test_decode_in_one_kernel(shape: Shape, kernel: str, page_size: int, arch: str) -> None:
    check(shape, kernel, arch)


@pytest.mark.parametrize(("shape", "kernel", "page_size", "arch"), chosen(*KERNELS, page_size=64), ids=str)
def test_in_pages(shape: Shape, kernel: str, page_size: int, arch: str) -> None:
    resources, *_ = compiled(arch)[shape, kernel, page_size, arch]
    assert_fits(resources, arch)
    assert_overlaps(resources)
    assert_plan_holds(resources, shape, page_size)
    assert_one_look_up(resources)


def test_the_merge_reads_several_partial_results_at_a_time() -> None:
    """Copies of 4 rounds are queued before the loop, and one in it. Loads into registers waited for each round."""
    names = ["32x8x64-bfloat16", "32x8x128-bfloat16", "32x8x192-bfloat16"]
    merges = [decode_launches(BY_NAME[name], "sm_90", mixed=False)[1] for name in names]
    for merge, resources in zip(merges, compile_all(merges, "sm_90"), strict=True):
        assert resources.counts is not None
        round_bytes = merge.kwargs["CHAINS"] * merge.kwargs["BLOCK_D"] * 4
        assert resources.counts.wide_copies == 5 * round_bytes // (16 * resources.threads), merge.kwargs
        assert resources.shared >= 4 * round_bytes, merge.kwargs


@pytest.mark.parametrize("page_size", [1, 64])
def test_one_kernel_orders_what_its_threads_and_programs_share(page_size: int) -> None:
    (launch,) = fused_launches(DEFAULT, "sm_90", norm=False, page_size=page_size)
    assembly = compile_launch(launch, "sm_90").assembly
    read, counted = assembly.index("cp.async.cg"), assembly.index("atom.global.gpu.acq_rel")
    # Threads wait for the stores of the new K and V before they go on to the queries and the pool.
    stored = assembly.rindex("st.global", 0, read)
    assert "ld.global" not in assembly[stored : assembly.index("bar.sync", stored)]
    # They wait for the stores of the partial result before they are counted: our barrier, and Triton's for the count.
    part = assembly.rindex("st.global", 0, counted)
    assert read < part and assembly[part:counted].count("bar.sync") == 2
    assert "ld.global" in assembly[assembly.index("bar.sync", counted) :]


def test_the_programs_of_a_multiprocessor_follow_from_the_compiled_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four programs were planned, and 196 registers leave room for two. The first launch says so."""
    grids = []

    def run(self: JITFunction, *args: object, grid: tuple[int, ...], **kwargs: object) -> object:
        grids.append(grid)
        return SimpleNamespace(n_regs=196)

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(decode_attention, "num_multiprocessors", lambda device: 132)
    monkeypatch.setattr(decode_attention, "_programs", {})
    for _ in range(2):
        launch_decode(BY_NAME["32x8x64-fp8"], "sm_80", mixed=False)
    first, _, second, _ = [grid for grid in grids if len(grid) == 2]
    assert (first[1], second[1]) == (132 * 4 // 8, 132 * 2 // 8)


@pytest.mark.parametrize(
    ("registers", "threads", "programs"), [(168, 128, 3), (169, 128, 2), (196, 128, 2), (255, 256, 1), (255, 512, 1)]
)
def test_registers_limit_programs(registers: int, threads: int, programs: int) -> None:
    assert programs_that_fit(3, registers, threads) == programs
