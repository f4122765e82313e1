"""Kernel tests run under Triton's interpreter, in processes of their own; compiling ahead of time needs none."""

from __future__ import annotations

from pathlib import Path

import pytest
from triton_interpreter import (
    COMPILES,
    INTERPRETING,
    InterpretedFile,
    is_interpreted,
    let_scalars_be_indices,
    poison_new_tensors,
)

if INTERPRETING:
    from cheap_interpreter import make_cheaper  # only here: the outer process never imports Triton

    let_scalars_be_indices()
    make_cheaper()
    poison_new_tensors()


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if not INTERPRETING and is_interpreted(module_path):
        return InterpretedFile.from_parent(parent, path=module_path)
    return None


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if INTERPRETING and collection_path.name.startswith(COMPILES) else None
