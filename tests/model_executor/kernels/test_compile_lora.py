"""The kernels of LoRA adapters, compiled for GPUs that need not be here."""

from __future__ import annotations

import re
from functools import cache
from unittest.mock import patch

import pytest
import torch
from compiled_lora import CASES, LAYERS, ROWS, assert_adds_adapters, lora_launches
from triton_aot import Resources, assert_fits, compile_each, compile_launch, on_targets, what_is_compiled

from tercet.model_executor.kernels import lora

_PRODUCT = re.compile(r"\b(?:mma|wgmma|v_mfma)[._]\S+")


@cache
def compiled(layer: str, rows: str, rank: int, arch: str, dtype: torch.dtype = torch.bfloat16) -> list[Resources]:
    return [compile_launch(launch, arch) for launch in lora_launches(layer, ROWS[rows], rank, arch, dtype)]


COMPILED = [
    ("qkv-4096", 16, torch.bfloat16),
    ("gate_up-4096", 64, torch.bfloat16),
    ("down-14336", 128, torch.bfloat16),
    ("qkv-576", 8, torch.float16),
    ("qkv-576", 20, torch.bfloat16),
    ("gate_up-4096", 64, torch.float32),
]
"""Layers, ranks and types of numbers."""


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("layer", "arch"), on_targets(COMPILED), ids=str)
def test_compiles_and_fits(layer: tuple[str, int, torch.dtype], arch: str, rows: str) -> None:
    name, rank, dtype = layer
    for resources in compiled(name, rows, rank, arch, dtype):
        assert_fits(resources, arch)
        assert not resources.spilled


@cache
def compiled_cases() -> dict[str, list[Resources]]:
    """The kernels of all cases. They are disassembled at once, because the disassembler starts slowly."""
    return compile_each({case: launches() for case, launches in CASES.items()}, "sm_90")


@pytest.mark.parametrize("case", CASES)
def test_computes_as_meant(case: str) -> None:
    for resources in compiled_cases()[case]:
        assert_adds_adapters(resources)


@pytest.mark.parametrize(("layer", "rank"), [("qkv-4096", 16), ("gate_up-4096", 64)])
@pytest.mark.parametrize(
    ("arch", "shrink", "expand"),
    [
        ("sm_80", "m16n8k16.row.col.f32.bf16.bf16.f32", "m16n8k8.row.col.f32.tf32.tf32.f32"),
        ("sm_90", "m16n8k16.row.col.f32.bf16.bf16.f32", "m16n8k8.row.col.f32.tf32.tf32.f32"),
        ("gfx942", "f32_16x16x16_bf16", "f32_16x16x4_f32"),
    ],
)
def test_few_and_many_rows_have_the_same_instructions(
    arch: str, shrink: str, expand: str, layer: str, rank: int
) -> None:
    """A row is a column of each. So equal instructions mean equal sums."""
    for rows in ROWS:
        for resources, instruction in zip(compiled(layer, rows, rank, arch), (shrink, expand), strict=True):
            found = set(_PRODUCT.findall(resources.assembly))
            assert len(found) == 1 and found.pop().endswith(instruction)


def test_numbers_without_16_bits_are_multiplied_without_tf32() -> None:
    for rows in ROWS:
        for resources in compiled("gate_up-4096", rows, 64, "sm_90", torch.float32):
            assert "tf32" not in resources.assembly and not _PRODUCT.findall(resources.assembly)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("rows", [1, 100, 5000])
def test_a_layer_has_two_launches(layer: str, rows: int) -> None:
    names = [launch.kernel.fn.__name__ for launch in lora_launches(layer, rows, 16, "sm_90")]
    assert names == ["_shrink_kernel", "_expand_kernel"]


def test_programs_share_inputs_and_adapters_of_few_rows() -> None:
    """Of 48 hidden numbers, a program has 32, and of 4,096 inputs 512. Of 8 adapters each has a program, and of 20 at
    most 16 have. In a large step, the tiles are enough."""
    grids = {
        (rows, slots): [launch.grid for launch in lora_launches("qkv-4096", rows, 16, "sm_90", slots=slots)]
        for rows, slots in ((1, 8), (16, 20), (100, 8), (1024, 8), (1025, 8))
    }
    assert grids == {
        (1, 8): [(16, 1, 8), (192, 1, 8)],
        (16, 20): [(16, 1, 16), (192, 1, 16)],
        (100, 8): [(16, 4, 4), (192, 7, 2)],
        (1024, 8): [(16, 32, 1), (192, 64, 1)],
        (1025, 8): [(2, 33, 1), (192, 33, 1)],
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_numbers_of_rows_share_kernels(dtype: torch.dtype) -> None:
    """All between two of those that it names. The first launches of a server can so compile every kernel."""

    def keys(rows: int) -> list[tuple[str, str, str]]:
        return [what_is_compiled(launch, "sm_90") for launch in lora_launches("qkv-4096", rows, 16, "sm_90", dtype)]

    with patch.object(lora, "arch_of", lambda device: "sm_90"):
        first, second = lora.lora_row_counts(dtype, torch.device("meta"))
    assert first == 1
    assert all(keys(rows) == keys(1) for rows in (2, 4, 16, 17, 33, second - 1))
    assert all(keys(rows) == keys(second) for rows in (second + 4, second + 7, 4096))
    assert not set(keys(1)) & set(keys(second))
