"""The measured rates of a build's instructions. How high they are depends on the machine, so no test compares them."""

from __future__ import annotations

import math

import pytest
import torch

from tercet.model_executor import cpu_extension

BUILD = cpu_extension.load()
pytestmark = pytest.mark.skipif(BUILD is None, reason="no build of csrc/cpu for this processor")

BYTES_AND_SHORTS = {"VPMADDUBSW + VPADDW", "VPMADDWD + VPADDD"}
INTEGERS = {
    "avx512_bf16": {"VPDPBUSD"},
    "avx512_vnni": {"VPDPBUSD"},
    "avx512": BYTES_AND_SHORTS,
    "avx2_vnni": {"VPDPBUSD"},
    "avx2": BYTES_AND_SHORTS,
}


def rates(dtype: torch.dtype) -> dict[str, float]:
    found: dict[str, float] = torch.ops.tercet_cpu.instruction_rates(dtype, 0.001)
    assert all(math.isfinite(rate) and rate > 0 for rate in found.values())
    return found


def test_every_instruction_of_the_build_has_a_rate() -> None:
    assert BUILD is not None
    if BUILD.name == "generic":
        assert len(rates(torch.float32)) == len(rates(torch.bfloat16)) == len(rates(torch.int8)) == 1
        return
    assert set(rates(torch.float32)) == {"FMA"}
    native = {"VDPBF16PS"} if torch.ops.tercet_cpu.multiplies_bfloat16() else set()
    assert set(rates(torch.bfloat16)) == {"FMA"} | native
    assert set(rates(torch.int8)) == INTEGERS[BUILD.name]


def test_other_types_have_no_instruction() -> None:
    assert rates(torch.float16) == {}


def test_no_time_is_refused() -> None:
    with pytest.raises(RuntimeError, match="seconds must be positive"):
        torch.ops.tercet_cpu.instruction_rates(torch.float32, 0.0)
