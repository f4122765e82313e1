"""The launches of LoRA adapters, for the shapes of serving, and checks of their machine code."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import torch
from serving_shapes import meta
from triton_aot import SHARED_OF_ALL, Launch, Resources, recorded

from tercet.model_executor.kernels import lora
from tercet.model_executor.kernels.tuning import programs_that_fit

LAYERS = {
    "qkv-4096": (4096, (4096, 1024, 1024)),
    "gate_up-4096": (4096, (14336, 14336)),
    "down-14336": (14336, (4096,)),
    "qkv-576": (576, (576, 192, 192)),  # of SmolLM2-135M, whose parts of a sum are unequal
}
"""Inputs, and the outputs of each stacked layer."""
ROWS = {"few": 4, "many": 4096}
"""Numbers of rows that have other kernels: low tiles, high ones, and programs that add up all parts of a sum."""


def lora_launches(
    layer: str, rows: int, rank: int, arch: str, dtype: torch.dtype = torch.bfloat16, *, slots: int = 8
) -> list[Launch]:
    """The two launches of a layer. The adapters of the rows are part of a longer tensor, and begin at any address."""
    num_in, sizes = LAYERS[layer]
    num_out = sum(sizes)
    with patch.object(lora, "arch_of", lambda device: arch), recorded() as launches:
        lora.lora_delta(
            meta(rows, num_in, dtype=dtype), meta(rows, num_out, dtype=dtype),
            meta(slots, len(sizes) * rank, num_in, dtype=dtype), meta(slots, num_out, rank, dtype=dtype),
            meta(rows + rows % 7, dtype=torch.int32)[rows % 7 :], sizes,
        )  # fmt: skip
    return launches


CASES: dict[str, Callable[[], list[Launch]]] = {
    f"lora-{layer}, rank {rank}, {rows}": partial(lora_launches, layer, ROWS[rows], rank, "sm_90")
    for layer, rank, rows in (
        ("qkv-4096", 16, "few"), ("gate_up-4096", 64, "many"), ("down-14336", 128, "few"),
    )
}  # fmt: skip
"""What each Triton compiles for sm_90."""


def assert_adds_adapters(resources: Resources) -> None:
    """Checks that weights and rows are copied ahead by 16 bytes a thread, and that products are those of a warp."""
    counts = resources.counts
    assert counts is not None and counts.mma > 0 and counts.wgmma == 0, resources
    if resources.kernel == "_shrink_kernel":
        assert counts.copies == counts.wide_copies > 0, resources
        assert programs_that_fit(3, resources.registers, resources.threads) == 3, resources
        assert 3 * (resources.shared + 1024) <= SHARED_OF_ALL, resources
