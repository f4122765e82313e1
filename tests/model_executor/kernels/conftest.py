"""Kernel tests run under Triton's interpreter, in processes of their own; compiling ahead of time needs none."""

from __future__ import annotations

from pathlib import Path

import pytest
from triton_interpreter import INTERPRETING, InterpretedFile, let_scalars_be_indices, make_cheaper, poison_new_tensors

COMPILES = "test_compile_"
"""Files of this name compile kernels and cannot run where they are interpreted."""

if INTERPRETING:
    let_scalars_be_indices()
    make_cheaper()
    poison_new_tensors()


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if not INTERPRETING and not module_path.name.startswith(COMPILES):
        return InterpretedFile.from_parent(parent, path=module_path)
    return None


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if INTERPRETING and collection_path.name.startswith(COMPILES) else None
