"""Kernels with a dependent launch, in the shapes of serving, and a check of what they do before they wait."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from compiled_attention import fused_launches
from compiled_others import F32, skinny
from serving_shapes import SHAPES
from triton_aot import Launch, Resources, recorded


def _skinny_launches(*args: object, **options: object) -> list[Launch]:
    with recorded() as launches:
        skinny(*args, dependent=True, **options)
    return launches


_SMALL, _LARGE = (shape for shape in SHAPES if str(shape) in ("32x8x64-bfloat16", "32x8x128-bfloat16"))

CASES: dict[str, Callable[[], list[Launch]]] = {
    "dependent linear-2048x8192-gated": partial(_skinny_launches, 2048, 8192, gated=True),
    "dependent linear-2048x3072-bias": partial(_skinny_launches, 2048, 3072, bias=True),
    "dependent linear-576x960-fp32": partial(_skinny_launches, 576, 960, F32),
    f"dependent fused-{_SMALL}": partial(fused_launches, _SMALL, "sm_90", norm=False, dependent=True),
    f"dependent fused-{_LARGE}, pages": partial(
        fused_launches, _LARGE, "sm_90", norm=False, dependent=True, page_size=64
    ),
}


def assert_waits_first(resources: Resources) -> None:
    """Before the wait a kernel touches no memory but the weights, which it prefetches. It reads its weights or its KV
    before it lets the next kernel start."""
    assert resources.counts is not None
    ahead = resources.counts.before_wait
    assert ahead is not None
    prefetches = [name for name in ahead if name.startswith("CCTL") and "PF2" in name]
    assert sorted(ahead) == sorted(prefetches), (
        f"it reads or writes, or starts the next kernel, before it waits: {ahead}"
    )
    assert bool(prefetches) == (resources.kernel == "_skinny_linear_kernel")
    assert resources.counts.copies and resources.counts.copies_after_start == 0, (
        "it lets the next kernel start before it has read its own data"
    )
