"""Lets a build of torch for CUDA run on a machine without CUDA's libraries (scripts/arm64).

PyPI's torch for arm64 is a CUDA build. Its operations of the CPU need nothing from CUDA, but its libraries are linked
with several gigabytes of CUDA's. This program replaces those by empty libraries and removes torch's own code for GPUs.
torch then finds no GPU, and its `distributed` package is not available. A build of torch for CPUs is left alone.

Arguments: the folder of torch, and the folder of the system that has Python for arm64.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

COMPILER = "aarch64-linux-gnu-gcc"
GPU_CODE = ("libtorch_cuda.so", "libtorch_cuda_linalg.so", "libtorch_nvshmem.so", "libcaffe2_nvrtc.so")
STAYS = ("libtorch_python.so", "libtorch_cpu.so", "libc10_cuda.so", "libtorch_global_deps.so", "libtorch.so")
IMPORT = "    from torch._C import *  # noqa: F403\n"
WITHOUT_DISTRIBUTED = "    del sys.modules['torch._C']._c10d_init, sys.modules['torch._C']._rpc_init\n"


class Symbol(NamedTuple):
    name: str
    is_undefined: bool
    is_weak: bool


def symbols(library: Path) -> Iterator[Symbol]:
    for words in readelf("--dyn-syms", library):
        if len(words) >= 8 and words[0].rstrip(":").isdigit():
            yield Symbol(words[7].partition("@")[0], words[6] == "UND", words[4] == "WEAK")


def needed(library: Path) -> set[str]:
    """The names of the libraries that a library is linked with."""
    return {words[-1].strip("[]") for words in readelf("--dynamic", library) if "(NEEDED)" in words}


def readelf(option: str, library: Path) -> Iterator[list[str]]:
    done = subprocess.run(["readelf", "--wide", option, str(library)], capture_output=True, text=True, check=True)
    return (line.split() for line in done.stdout.splitlines())


def stand_ins(names: set[str]) -> str:
    """Assembly that defines these symbols, so that the loader finds them.

    Importing torch calls some of the functions. A C function returns cudaErrorNoDevice. A C++ function returns the
    address of memory that is zero, whose lowest byte is zero, too: nothing, false or an empty object. Type information
    has a name.
    """
    lines = [".local zeros", ".comm zeros, 4096, 4096"]
    for name in sorted(names):
        if name.startswith(("_ZTI", "_ZTV")):
            lines += [".data", f".globl {name}", f"{name}: .quad 0, 1f, 0, 0, 0, 0, 0, 0", f'1: .asciz "{name}"']
            lines += [".balign 8"]
        else:
            result = "adrp x0, zeros" if name.startswith("_Z") else "mov w0, #100"
            lines += [".text", f".globl {name}", f".type {name}, %function", f"{name}: {result}", "ret"]
    return "\n".join(lines) + "\n"


def main(torch: Path, system: Path) -> int:
    lib = torch / "lib"
    if not (lib / "libtorch_cuda.so").exists():
        return 0
    for name in GPU_CODE:
        (lib / name).unlink(missing_ok=True)
    users = [lib / name for name in STAYS]
    installed = [*lib.glob("*.so*"), *system.glob("lib/*/lib*.so*"), *system.glob("usr/lib/*/lib*.so*")]
    installed += [*system.glob("lib/*/ld-*.so*"), *system.glob("usr/bin/python3.*")]
    names = {path.name for path in installed} | {"ld-linux-aarch64.so.1"}
    missing = set.union(*map(needed, users)) - names
    found = {symbol.name for path in installed for symbol in symbols(path) if not symbol.is_undefined}
    wanted = {symbol.name for path in users for symbol in symbols(path) if symbol.is_undefined and not symbol.is_weak}
    for name in missing:
        # All definitions are in one library. The loader looks for a symbol in all of them.
        source = stand_ins(wanted - found) if name == "libtorch_cuda.so" else "\n"
        link = [COMPILER, "-shared", "-nostdlib", "-x", "assembler", "-", f"-Wl,-soname,{name}", "-o", str(lib / name)]
        subprocess.run(link, input=source, text=True, check=True)
    start = torch / "__init__.py"
    text = start.read_text(encoding="utf-8")
    if IMPORT not in text:
        sys.stderr.write(f"{start} does not import torch._C as expected\n")
        return 1
    # These two register classes of the removed code with Python, which needs more of them than names.
    start.write_text(text.replace(IMPORT, IMPORT + WITHOUT_DISTRIBUTED), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
