"""Kernel tests run under Triton's interpreter, in processes of their own; compiling ahead of time needs none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings
from triton_interpreter import INTERPRETING, InterpretedFile, let_scalars_be_indices

COMPILES = "test_compile_"
"""Files of this name compile kernels and cannot run where they are interpreted."""

# Cases drawn per test: KERNEL_CASES=2000 python -m pytest tests/model_executor/kernels draws 2000 for every one.
if "KERNEL_CASES" in os.environ:
    settings.register_profile("many", settings.get_profile("tercet"), max_examples=int(os.environ["KERNEL_CASES"]))
    settings.load_profile("many")

if INTERPRETING:
    let_scalars_be_indices()


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if not INTERPRETING and not module_path.name.startswith(COMPILES):
        return InterpretedFile.from_parent(parent, path=module_path)
    return None


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if INTERPRETING and collection_path.name.startswith(COMPILES) else None
