"""How csrc/cpu is compiled, and the stamp that each compiled file carries.

`setup.py` runs this file by its path before the package exists, so it imports neither torch nor Tercet.
"""

from __future__ import annotations

import hashlib
import mmap
import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

COMMON_FLAGS = (
    *("-O3", "-g0", "-std=c++20", "-fvisibility=hidden", "-Wall", "-Wno-unknown-pragmas"),
    *("-Wno-uninitialized", "-Wno-maybe-uninitialized"),  # GCC 12 finds hundreds in its own headers
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_USES_AVX2 = ("-DCPU_CAPABILITY=AVX2", "-DCPU_CAPABILITY_AVX2")  # what torch's headers use
_USES_AVX512 = ("-DCPU_CAPABILITY=AVX512", "-DCPU_CAPABILITY_AVX512")
_HAS_AVX2 = frozenset({"avx2", "fma3", "f16c"})
_HAS_AVX512 = _HAS_AVX2 | {"avx512_f", "avx512_bw", "avx512_vl", "avx512_dq"}


class Build(NamedTuple):
    """A build of csrc/cpu."""

    flags: tuple[str, ...]
    """for the compiler"""
    needs: frozenset[str]
    """what the processor must have, by the names of torch.cpu.get_capabilities()"""

    def runs_with(self, capabilities: Mapping[str, object]) -> bool:
        return all(capabilities.get(name) for name in self.needs)


X86_BUILDS = {
    "avx512_bf16": Build(
        (*_AVX512, "-mavx512vnni", "-mavx512bf16", *_USES_AVX512), _HAS_AVX512 | {"avx512_vnni", "avx512_bf16"}
    ),
    "avx512_vnni": Build((*_AVX512, "-mavx512vnni", *_USES_AVX512), _HAS_AVX512 | {"avx512_vnni"}),
    "avx512": Build((*_AVX512, *_USES_AVX512), _HAS_AVX512),
    "avx2_vnni": Build((*_AVX2, "-mavxvnni", *_USES_AVX2), _HAS_AVX2 | {"avx_vnni"}),
    "avx2": Build((*_AVX2, *_USES_AVX2), _HAS_AVX2),
}
OTHER_BUILDS = {"generic": Build(("-DCPU_CAPABILITY=DEFAULT", "-Wno-psabi"), frozenset())}
"""Builds by name, the fastest first."""

_MARK = b"tercet build: "


def is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


def builds() -> dict[str, Build]:
    """The builds for this kind of processor, by name, the fastest first."""
    return X86_BUILDS if is_x86() else OTHER_BUILDS


def usable_builds(capabilities: Mapping[str, object]) -> list[str]:
    """The names of the builds that run on a processor with these capabilities, the fastest first."""
    return [name for name, build in builds().items() if build.runs_with(capabilities)]


def local_builds(capabilities: Mapping[str, object]) -> set[str]:
    """What is built in a checkout, for this machine alone: the fastest build that runs, and the slowest as a spare."""
    usable = usable_builds(capabilities)
    return {*usable[:1], *usable[-1:]}


def find_compiler(cxx: str | None) -> str | None:
    """The path of the C++ compiler, or None if it does not exist.

    The compiler is `cxx` (the environment variable CXX), or else the one that built Python.
    """
    command = cxx or sysconfig.get_config_var("CXX") or "c++"
    return shutil.which(command.split()[0])


def file_name(variant: str) -> str:
    """The file name of a build for this interpreter. Each version of Python has its own suffix."""
    return f"_cpu_{variant}{sysconfig.get_config_var('EXT_SUFFIX')}"


def sources(root: Path) -> list[Path]:
    """The C++ files of the checkout at `root`. An installed package has none."""
    return sorted(path for path in (root / "csrc/cpu").glob("*") if path.suffix in (".h", ".cpp"))


def sources_digest(root: Path) -> str | None:
    """A digest of the C++ files; None if there are none."""
    digest, files = hashlib.sha256(), sources(root)
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16] if files else None


class BuildStamp(NamedTuple):
    """The versions that a compiled file was built from. The file itself contains them (csrc/cpu/ops.cpp)."""

    torch: str
    sources: str

    def macro(self) -> tuple[str, str]:
        return ("TERCET_BUILD", f'"{_MARK.decode()}{self.torch} {self.sources}"')


def read_stamp(path: Path) -> BuildStamp | None:
    """Read the stamp of a compiled file without loading the file. Returns None for a file without a stamp.

    Raises OSError if the file cannot be read.
    """
    if path.stat().st_size == 0:
        return None
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        start = content.find(_MARK)
        if start < 0:
            return None
        words = content[start + len(_MARK) : start + 256].split(b"\0")[0].decode(errors="replace").split()
    return BuildStamp(*words) if len(words) == 2 else None


def build_hint(root: Path) -> str:
    """Instructions for building the operations of the package at `root` so that compiler errors are shown."""
    if sources(root):
        return f"To build them: cd {root} && {sys.executable} setup.py build_ext --inplace"
    return (
        "To build them: install torch and a C++ compiler, then install Tercet again from its sources with "
        "pip install -v --no-build-isolation --no-deps --force-reinstall"
    )


def other_builds(folder: Path, variant: str) -> Iterator[Path]:
    """The builds of a variant for other versions of Python."""
    return (path for path in sorted(folder.glob(f"_cpu_{variant}.*")) if path.name != file_name(variant))
