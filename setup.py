"""Builds csrc/cpu, once for each kind of processor. Everything else about the package is in setup.cfg.

A build that fails, or a machine without a compiler, leaves a package that works: it runs on plain torch there. torch
has to be installed already (`pip install --no-build-isolation`), since the build needs its headers.
"""

from __future__ import annotations

import os
import platform

from setuptools import setup

# Names: model_executor/cpu_extension.py.
X86_FLAGS = {
    "avx512_bf16": [
        *("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"),
        *("-mavx512bf16", "-DCPU_CAPABILITY=AVX512", "-DCPU_CAPABILITY_AVX512"),
    ],
    "avx2": ["-mavx2", "-mfma", "-mf16c", "-DCPU_CAPABILITY=AVX2", "-DCPU_CAPABILITY_AVX2"],
}
GENERIC_FLAGS = {"generic": ["-DCPU_CAPABILITY=DEFAULT"]}
COMMON_FLAGS = ["-O3", "-g0", "-std=c++20", "-fvisibility=hidden", "-Wall", "-Wno-unknown-pragmas"]


def build_arguments() -> dict[str, object]:
    try:  # inside: the package can be installed before torch, without these operations
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError:
        return {}
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    extensions = []
    for name, flags in (X86_FLAGS if is_x86 else GENERIC_FLAGS).items():
        extension = CppExtension(
            f"tercet.model_executor._cpu_{name}", ["csrc/cpu/ops.cpp"], extra_compile_args=COMMON_FLAGS + flags
        )
        extension.optional = True
        extension.depends = [f"csrc/cpu/{file}" for file in sorted(os.listdir("csrc/cpu"))]
        extensions.append(extension)
    return {"ext_modules": extensions, "cmdclass": {"build_ext": BuildExtension.with_options(use_ninja=False)}}


setup(**build_arguments())
