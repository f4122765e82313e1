"""Tests of the Triton backend run under Triton's interpreter, each file in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from triton_interpreter import INTERPRETING, InterpretedFile, is_interpreted, let_scalars_be_indices

if INTERPRETING:
    from cheap_interpreter import make_cheaper  # only here: the outer process never imports Triton

    let_scalars_be_indices()
    make_cheaper()


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if not INTERPRETING and is_interpreted(module_path):
        return InterpretedFile.from_parent(parent, path=module_path)
    return None
