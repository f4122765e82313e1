"""Runs test files under TRITON_INTERPRET=1, each in a process of its own.

Triton reads the variable when it is imported and when a kernel is defined, so one process can either interpret or
compile. A conftest.py hands its folder's files to `InterpretedFile`; the process that it starts collects as usual.

One test by itself:           TRITON_INTERPRET=1 python -m pytest FILE -k NAME
2000 cases in every test:     TERCET_KERNEL_CASES=2000 python -m pytest --timeout=0 tests/model_executor/kernels
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


def examples(usual: int) -> int:
    """How many cases a test draws: `usual`, or what the environment asks for."""
    return int(os.environ.get("TERCET_KERNEL_CASES", usual))


class InterpretedRun(pytest.Item):
    def runtest(self) -> None:
        # No time limit in there: this process has one, and kills that one at it.
        options = ["-q", "-p", "no:cacheprovider", "--timeout=0", f"--rootdir={self.config.rootpath}"]
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", *options, self.path],
            env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
            cwd=self.config.rootpath,
            capture_output=True,
            text=True,
        )
        if ran.returncode:
            raise AssertionError(ran.stdout[-20_000:] + ran.stderr[-5_000:])

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> str:
        return str(excinfo.value)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, f"{self.path.name} under TRITON_INTERPRET=1"


class InterpretedFile(pytest.File):
    def collect(self) -> Iterator[pytest.Item]:
        yield InterpretedRun.from_parent(self, name="interpreted")


def let_scalars_be_indices() -> None:
    """Triton 3.6 makes loop bounds of one-element arrays with int(), which numpy 2.4 refuses; 3.9 squeezes first."""
    from triton.runtime import interpreter  # only here: the outer process never imports Triton

    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())

    interpreter._patch_lang_tensor = patched


def poison_new_tensors() -> None:
    """What torch.empty gives holds NaN, or the largest integer: a kernel that leaves some of its output out is seen."""
    import torch  # only here: the outer process need not wait for it

    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory


@contextmanager
def dots_by_rows() -> Iterator[None]:
    """Within, a row of a dot product has the same bits wherever it stands in its tile, as on a GPU's matrix units.

    numpy's BLAS gives a row other bits at another place in the matrix.
    """
    from triton.runtime import interpreter  # only here: the outer process never imports Triton

    builder = interpreter.InterpreterBuilder
    blas = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        left, right = a.data.astype(d.data.dtype), b.data.astype(d.data.dtype)
        return interpreter.TensorHandle(np.einsum("mk,kn->mn", left, right) + d.data, d.dtype.scalar)

    builder.create_dot = create_dot
    try:
        yield
    finally:
        builder.create_dot = blas
