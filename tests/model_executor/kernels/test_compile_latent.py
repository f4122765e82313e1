"""Latent attention of DeepSeek-V2-Lite and V3, compiled for GPUs that need not be here."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from functools import cache

import pytest
from compiled_latent import HEADS, SPLITS, assert_is_latent, latent_decode_launches, latent_extend_launches
from some_cases import covering
from triton_aot import Resources, compile_each

pytestmark = pytest.mark.timeout(900)  # the first test of a GPU compiles all of its cases

ARCHES = ("sm_80", "sm_89", "sm_90", "sm_100", "gfx942")
Case = tuple[str, int, int, str]
"""`decode`, or one of SPLITS; query heads; the page size; the GPU."""


def every_case() -> Iterator[Case]:
    for arch in ARCHES:
        for page_size in (1, 64) if arch == "sm_90" else (1,):
            yield from (("decode", heads, page_size, arch) for heads in HEADS)
            yield from ((splits, heads, page_size, arch) for splits in SPLITS for heads in (16, 128))


def aspects(case: Case) -> Iterable[Hashable]:
    kind, heads, page_size, arch = case
    yield arch, kind == "decode"
    yield kind
    if arch == "sm_90":
        yield page_size, kind == "decode"
        if kind == "decode" and page_size == 64:
            yield heads


CASES = covering(list(every_case()), aspects)


@cache
def compiled(arch: str) -> dict[Case, list[Resources]]:
    """The kernels of all cases for a GPU. They are disassembled at once, because the disassembler starts slowly."""
    launches = {}
    for case in CASES:
        kind, heads, page_size, own = case
        if own == arch and kind == "decode":
            launches[case] = latent_decode_launches(heads, arch, page_size=page_size)
        elif own == arch:
            launches[case] = latent_extend_launches(heads, arch, kind, page_size=page_size)
    return compile_each(launches, arch)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tiles_fit_and_have_matrix_products(case: Case) -> None:
    found = compiled(case[3])[case]
    assert len(found) == (2 if case[0] in ("decode", "splits as units") else 1)
    for resources in found:
        assert_is_latent(resources, case[3])
