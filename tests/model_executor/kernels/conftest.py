"""Kernel tests run under Triton's interpreter, in processes of their own; compiling ahead of time needs none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


@pytest.fixture(autouse=True)
def programs_keep_to_their_memory() -> Iterator[None]:
    """Every launch of every test is watched. Kernels reach the weights of experts by their addresses."""
    if not INTERPRETING:
        yield
        return
    from watched_memory import span_of, watched_memory  # only here: other processes need neither torch nor Triton

    from tercet.model_executor.kernels import experts

    weights: list[tuple[int, int]] = []
    make_table = experts._table

    def table_of(*tensors: Any) -> Any:
        weights.extend(span_of(tensor) for several in tensors for tensor in several)
        return make_table(*tensors)

    # Not the fixture monkeypatch, so that what a test patches is restored before.
    with pytest.MonkeyPatch.context() as patch, watched_memory(weights):
        patch.setattr(experts, "_table", table_of)
        yield
