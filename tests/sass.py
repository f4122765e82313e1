"""Counts the instructions of an NVIDIA GPU's machine code (SASS), as `cuobjdump -sass` or `nvdisasm` prints it."""

from __future__ import annotations

import re
import struct
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)


_ADDRESSED = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*)", re.MULTILINE)

_TARGET = re.compile(r"0x([0-9a-f]+)")


@dataclass(frozen=True)
class InstructionCounts:
    """Counts of the instructions that tests compare: in the code, not in an execution."""

    wgmma: int
    """Products of a warp group (HGMMA, QGMMA of fp8), which run asynchronously."""
    wgmma_batches: int
    """WARPGROUP.ARRIVE: before each batch of products. One for each product means that products are serialised."""
    wgmma_waits: int
    """WARPGROUP.DEPBAR"""
    mma: int
    """Products of a warp (HMMA), which are synchronous."""
    wide_copies: int
    """Asynchronous copies to shared memory (LDGSTS) of 128 bits a thread."""
    bulk_copies: int
    """Copies of whole boxes to shared memory by TMA (UTMALDG)."""
    byte_loads: int
    """Loads of single bytes from shared memory (LDS.U8)."""
    copies: int
    """All asynchronous copies to shared memory."""
    wide_loads: int
    """Loads of global memory (LDG) of 128 bits a thread."""
    spills_in_loops: int
    """Accesses to spilled registers (STL, LDL) in the innermost loops with products."""
    before_wait: list[str] | None
    """The accesses to global memory, and PREEXIT, before a dependent launch waits (ACQBULK). None: it does not wait."""
    copies_after_start: int | None
    """The asynchronous copies behind the place where the next dependent launch may start (PREEXIT). None: there is no
    such place."""


def code_of(cubin: bytes) -> bytes:
    """The machine code in an ELF file with one kernel."""
    (table,), (size, number, names) = struct.unpack_from("<Q", cubin, 0x28), struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + index * size) for index in range(number)]
    found = [each for each in sections if cubin.startswith(b".text.", sections[names][4] + each[0])]
    ((*_, start, length),) = found
    return cubin[start : start + length]


def divide(sass: str, sizes: Sequence[int]) -> list[str]:
    """The instructions of each of several kernels, whose code is one behind the other and has these sizes."""
    ends = list(accumulate(sizes))
    lines: list[list[str]] = [[] for _ in sizes]
    for match in _ADDRESSED.finditer(sass):
        lines[bisect_right(ends, int(match.group(1), 16))].append(match.group())
    return ["\n".join(each) for each in lines]


def count_instructions(sass: str) -> InstructionCounts:
    found = Counter(match.group(1) for match in _INSTRUCTION.finditer(sass))

    def number(prefix: str) -> int:
        return sum(count for name, count in found.items() if name.startswith(prefix))

    def wide(operation: str) -> int:
        return sum(count for name, count in found.items() if re.match(rf"{operation}\..*\.128", name))

    return InstructionCounts(
        number("HGMMA") + number("QGMMA"),
        number("WARPGROUP.ARRIVE"),
        number("WARPGROUP.DEPBAR"),
        number("HMMA"),
        wide("LDGSTS"),
        number("UTMALDG"),
        number("LDS.U8") + number("LDS.S8"),
        number("LDGSTS"),
        wide("LDG"),
        _spills_in_loops(sass),
        _before_wait(sass),
        _copies_after_start(sass),
    )


def _before_wait(sass: str) -> list[str] | None:
    names = _INSTRUCTION.findall(sass)
    if "ACQBULK" not in names:
        return None
    ahead = names[: names.index("ACQBULK")]
    return [name for name in ahead if name.startswith(("LDG", "STG", "CCTL", "ATOM", "RED", "UTMA", "PREEXIT"))]


def _copies_after_start(sass: str) -> int | None:
    names = _INSTRUCTION.findall(sass)
    if "PREEXIT" not in names:
        return None
    return sum(name.startswith("LDGSTS") for name in names[names.index("PREEXIT") :])


def _spills_in_loops(sass: str) -> int:
    addressed = [(int(at, 16), condition, name, rest) for at, condition, name, rest in _ADDRESSED.findall(sass)]
    found = [(at, name) for at, _, name, _ in addressed]
    products = [at for at, name in found if name.startswith(("HGMMA", "QGMMA", "HMMA"))]
    # A loop ends with a conditional jump. Unconditional ones lead back from code that waits for a barrier.
    jumps = [(_TARGET.search(rest), at) for at, condition, name, rest in addressed if name == "BRA" and condition]
    jumps_back = [(int(to.group(1), 16), at) for to, at in jumps if to and int(to.group(1), 16) < at]
    loops = [(first, last) for first, last in jumps_back if any(first <= at <= last for at in products)]
    innermost = [
        (first, last)
        for first, last in loops
        if not any((a, b) != (first, last) and first <= a <= b <= last for a, b in loops)
    ]
    return sum(
        name.startswith(("STL", "LDL")) and any(first <= at <= last for first, last in innermost) for at, name in found
    )
