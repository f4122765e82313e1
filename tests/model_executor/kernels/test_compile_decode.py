"""Decode attention in the shapes that serving uses, compiled for GPUs that need not be here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from compiled_attention import decode_launches, fused_launches, launch_decode
from serving_shapes import SHAPES, Shape
from some_cases import crossed
from triton.runtime.jit import JITFunction
from triton_aot import (
    assert_fits,
    assert_one_look_up,
    assert_overlaps,
    assert_plan_holds,
    compile_launch,
    on_targets,
)

from tercet.model_executor.kernels import decode_attention
from tercet.model_executor.kernels.tuning import decode_tile, programs_that_fit

MIXED = [shape for shape in SHAPES if shape.head_dim == 128 and (shape.window or shape.num_heads == 32)]
IN_PAGES = [
    shape
    for shape in SHAPES
    if decode_tile("sm_90", shape.head_dim, fp32=shape.fp32, fp8=shape.fp8, page_size=64).paged
]


def check(arch: str, shape: Shape, *, mixed: bool) -> None:
    launches = decode_launches(shape, arch, mixed=mixed)
    assert [launch.kernel.fn.__name__ for launch in launches] == ["_decode_split_kernel", "_decode_merge_kernel"]
    for launch in launches:
        resources = compile_launch(launch, arch)
        assert_fits(resources, arch)
        if arch == "sm_90" and not shape.fp32:
            assert_overlaps(resources)
            assert_plan_holds(resources, shape)


# Backwards, because usual runs compile extend attention for the other targets in every other shape from the first on.
@pytest.mark.parametrize(("shape", "arch"), on_targets(SHAPES[::-1]), ids=str)
def test_decode(shape: Shape, arch: str) -> None:
    check(arch, shape, mixed=False)


@pytest.mark.parametrize(("shape", "arch"), on_targets(MIXED), ids=str)
def test_decode_in_a_step_with_prompts(shape: Shape, arch: str) -> None:
    check(arch, shape, mixed=True)


PAGED_KERNELS = {
    "decode": lambda shape: decode_launches(shape, "sm_90", mixed=False, page_size=64),
    "decode in a step with prompts": lambda shape: decode_launches(shape, "sm_90", mixed=True, page_size=64),
    "one kernel": lambda shape: fused_launches(shape, "sm_90", norm=False, page_size=64),
    "one kernel with a norm": lambda shape: fused_launches(shape, "sm_90", norm=True, page_size=64),
}


@pytest.mark.parametrize(("shape", "kernel"), crossed(IN_PAGES, list(PAGED_KERNELS), each=1), ids=str)
def test_in_pages(shape: Shape, kernel: str) -> None:
    launch, *_ = PAGED_KERNELS[kernel](shape)
    resources = compile_launch(launch, "sm_90")
    assert_fits(resources, "sm_90")
    assert_overlaps(resources)
    assert_plan_holds(resources, shape, page_size=64)
    assert_one_look_up(resources)


@pytest.mark.parametrize("name", ["32x8x64-bfloat16", "32x8x128-bfloat16", "32x8x192-bfloat16"])
def test_the_merge_reads_several_partial_results_at_a_time(name: str) -> None:
    """Copies of 4 rounds are queued before the loop, and one in it. Loads into registers waited for each round."""
    shape = next(shape for shape in SHAPES if str(shape) == name)
    _, merge = decode_launches(shape, "sm_90", mixed=False)
    resources = compile_launch(merge, "sm_90")
    assert resources.counts is not None
    round_bytes = merge.kwargs["CHAINS"] * merge.kwargs["BLOCK_D"] * 4
    assert resources.counts.wide_copies == 5 * round_bytes // (16 * resources.threads)
    assert resources.shared >= 4 * round_bytes


FUSED = {
    "9x3x64-bfloat16": False,
    "16x8x128-bfloat16": True,
    "40x8x128-bfloat16-window": False,
    "64x8x64-bfloat16-window-sinks": False,
    "32x32x80-bfloat16": True,
    "32x8x128-fp8": True,
    "9x3x64-float32": False,
}
"""Shapes of decode attention in one kernel, with a norm of heads or without."""


@pytest.mark.parametrize(("name", "arch"), on_targets(FUSED))
def test_decode_in_one_kernel(name: str, arch: str) -> None:
    shape = next(shape for shape in SHAPES if str(shape) == name)
    (launch,) = fused_launches(shape, arch, norm=FUSED[name])
    resources = compile_launch(launch, arch)
    assert_fits(resources, arch)
    if arch == "sm_90" and not shape.fp32:
        assert_overlaps(resources)
        assert_plan_holds(resources, shape)


@pytest.mark.parametrize("page_size", [1, 64])
def test_one_kernel_orders_what_its_threads_and_programs_share(page_size: int) -> None:
    shape = next(shape for shape in SHAPES if str(shape) == "32x8x128-bfloat16")
    (launch,) = fused_launches(shape, "sm_90", norm=False, page_size=page_size)
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
    fp8 = next(shape for shape in SHAPES if shape.fp8 and shape.head_dim == 64)
    for _ in range(2):
        launch_decode(fp8, "sm_80", mixed=False)
    first, _, second, _ = [grid for grid in grids if len(grid) == 2]
    assert (first[1], second[1]) == (132 * 4 // 8, 132 * 2 // 8)


@pytest.mark.parametrize(
    ("registers", "threads", "programs"), [(168, 128, 3), (169, 128, 2), (196, 128, 2), (255, 256, 1), (255, 512, 1)]
)
def test_registers_limit_programs(registers: int, threads: int, programs: int) -> None:
    assert programs_that_fit(3, registers, threads) == programs
