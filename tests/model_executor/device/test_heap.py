from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys

import pytest

from tercet.model_executor.device import heap

_PIECE = 64 << 10
"""bytes: less than what the allocator maps by itself"""


def resident_bytes():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(heap._trim is None, reason="only glibc keeps freed memory, and can be told to give it back")
def test_freed_memory_goes_back():
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    pieces = [libc.malloc(_PIECE) for _ in range(1024)]
    for piece in pieces:
        ctypes.memset(piece, 1, _PIECE)
    for index, piece in enumerate(pieces):
        if index % 16:  # what is left over keeps the heap from shrinking by itself
            libc.free(ctypes.c_void_p(piece))
    before = resident_bytes()
    heap.trim_heap()
    assert before - resident_bytes() > 1024 * _PIECE // 2
    for piece in pieces[::16]:
        libc.free(ctypes.c_void_p(piece))


RESIDENT_AFTER_FREEING = """
import ctypes, sys
from tercet.model_executor.device import heap
how, size = sys.argv[1], int(sys.argv[2]) << 20
if how != "leave":
    heap.keep_freed_memory(of_any_size=how == "keep any")
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
for _ in range(2):  # glibc maps what is large for the first time
    pieces = [libc.malloc(size) for _ in range((160 << 20) // size)]
    for piece in pieces:
        ctypes.memset(piece, 1, size)
    for piece in pieces:
        libc.free(ctypes.c_void_p(piece))
print(open("/proc/self/statm", encoding="ascii").read().split()[1])
"""


@pytest.mark.skipif(heap._set_option is None, reason="only glibc can be told to keep freed memory")
@pytest.mark.parametrize(("how", "mib"), [("keep", 20), ("keep any", 40)])
def test_freed_memory_stays_for_the_next_step(how, mib):
    resident = {}
    for one in (how, "leave"):
        command = [sys.executable, "-c", RESIDENT_AFTER_FREEING, one, str(mib)]
        resident[one] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) * mmap.PAGESIZE
    assert resident[how] - resident["leave"] > 100 << 20, resident


def test_another_c_library(monkeypatch):
    monkeypatch.setattr(heap, "_trim", None)
    monkeypatch.setattr(heap, "_set_option", None)
    heap.trim_heap()
    heap.keep_freed_memory()
