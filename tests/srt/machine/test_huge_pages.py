from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.srt.machine.huge_pages import HUGE_PAGE, Arena, zeroed


@pytest.mark.parametrize("num_bytes", [0, 1, HUGE_PAGE, 3 * HUGE_PAGE + 5])
def test_zeros_begin_with_a_huge_page(num_bytes: int) -> None:
    memory = zeroed(num_bytes)
    assert memory.shape == (num_bytes,) and memory.dtype == np.uint8 and not memory.any()
    assert memory.ctypes.data % HUGE_PAGE == 0
    memory += 1
    assert memory.all()


def test_the_system_is_asked_for_huge_pages() -> None:
    memory = zeroed(2 * HUGE_PAGE)
    flags = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in (address := line.split(" ", 1)[0]):
            start, end = (int(part, 16) for part in address.split("-"))
        elif line.startswith("VmFlags:"):
            flags[start, end] = line.split()[1:]
    (ours,) = (value for (start, end), value in flags.items() if start <= memory.ctypes.data < end)
    assert "hg" in ours


def _size(of: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{of}:")[2].split()[0]) * 1024


@pytest.mark.parametrize("num_bytes", [1 << 60, 1 << 80])
def test_memory_that_no_machine_has_is_an_error_of_the_system(num_bytes: int) -> None:
    with pytest.raises(OSError, match="Cannot allocate memory"):
        zeroed(num_bytes)


def test_untouched_memory_costs_nothing_and_goes_back() -> None:
    size = 1 << 30
    resident, mapped = _size("VmRSS"), _size("VmSize")
    memory = zeroed(size)
    memory[0] = 1
    assert _size("VmRSS") - resident < size // 16 and _size("VmSize") - mapped >= size
    del memory
    gc.collect()
    assert _size("VmSize") - mapped < size // 2


@given(st.lists(st.one_of(st.integers(1, 300), st.integers(1, 40 << 20)), min_size=1, max_size=8))
def test_pieces_are_apart(sizes: list[int]) -> None:
    arena = Arena()
    pieces = [arena.take(size) for size in sizes]
    for number, (piece, size) in enumerate(zip(pieces, sizes, strict=True), start=1):
        assert len(piece) == size and piece.ctypes.data % 64 == 0 and piece[0] == piece[-1] == 0
        piece[:1] = piece[-1:] = number
    assert all((piece[:1] == n).all() and (piece[-1:] == n).all() for n, piece in enumerate(pieces, start=1))
