"""The measured rates of a build's instructions. How high they are depends on the machine, so no test compares them."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tercet.model_executor import cpu_build, cpu_extension

BUILD = cpu_extension.load()
pytestmark = pytest.mark.skipif(BUILD is None, reason="no build of csrc/cpu for this processor")

HAVE_VNNI = {"avx512_bf16", "avx512_vnni", "avx2_vnni"}
ADDS_WITH = {
    "FloatRate": "vfmadd",
    "BFloat16Rate": "vdpbf16ps",
    "ByteRate": "vpdpbusd|vpaddd",
    "ShortRate": "vpaddd",
}
"""The instruction that adds to the sums of each measurement."""


def rates(dtype: torch.dtype) -> dict[str, float]:
    found: dict[str, float] = torch.ops.tercet_cpu.instruction_rates(dtype, 0.001)
    assert all(math.isfinite(rate) and rate > 0 for rate in found.values())
    return found


def test_every_instruction_of_the_build_has_a_rate() -> None:
    assert BUILD is not None
    if BUILD.name == "generic":
        assert all(len(rates(dtype)) == 1 for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.int4))
        return
    assert set(rates(torch.float32)) == {"FMA"}
    native = {"VDPBF16PS"} if torch.ops.tercet_cpu.multiplies_bfloat16() else set()
    assert set(rates(torch.bfloat16)) == {"FMA"} | native
    has_vnni = BUILD.name in HAVE_VNNI
    assert set(rates(torch.int8)) == {"VPDPBUSD" if has_vnni else "VPMADDWD + VPADDD"}
    assert set(rates(torch.int4)) == {"VPDPBUSD" if has_vnni else "VPMADDUBSW + VPADDW"}


def test_other_types_have_no_instruction() -> None:
    assert rates(torch.float16) == {}


@pytest.mark.parametrize("seconds", [0.0, float("nan"), float("inf")])
def test_a_measurement_has_an_end(seconds: float) -> None:
    with pytest.raises(RuntimeError, match="seconds must be positive and finite"):
        torch.ops.tercet_cpu.instruction_rates(torch.float32, seconds)


def built_here() -> list[Path]:
    """The builds of today's sources for x86."""
    root = Path(cpu_build.__file__).parents[1]
    files = [root / "model_executor" / cpu_build.file_name(name) for name in cpu_build.X86_BUILDS]
    stamps = {file: cpu_build.read_stamp(file) for file in files if file.exists()}
    return [file for file, stamp in stamps.items() if stamp and stamp.sources == cpu_build.sources_digest(root)]


@pytest.mark.skipif(not cpu_build.is_x86() or not shutil.which("objdump"), reason="needs objdump and an x86 build")
def test_every_chain_has_a_register_and_an_instruction() -> None:
    """A compiler that knows that two sums are equal computes only one. Then the measured rate is that of a latency."""

    def objdump(*arguments: str) -> str:
        return subprocess.run(["objdump", *arguments], check=True, capture_output=True, text=True).stdout

    assert built_here()
    for file in built_here():
        functions = re.findall(r"\S*run_chainsINS_\d+(\w+Rate)E\S*", symbols := objdump("-t", str(file)))
        assert {"FloatRate", "ByteRate"} <= set(functions) <= set(ADDS_WITH)
        for name in functions:
            (symbol,) = re.findall(rf"\S*run_chainsINS_\d+{name}E\S*", symbols)
            code = objdump("-d", "--no-show-raw-insn", f"--disassemble={symbol}", str(file))
            chains, needed = len(re.findall(r"Lm\d+E", symbol)), 4 if "vpmaddubsw" in code else 12
            added = re.findall(rf"(?:{ADDS_WITH[name]})\S*\s+\S*(%[yz]mm\d+)\s*$", code, re.MULTILINE)
            assert len(added) == len(set(added)) == chains >= needed, (file.name, name, added)
