"""Runs test files under TRITON_INTERPRET=1, each in its own process.

Triton reads this variable when it is imported and when a kernel is defined, so one process can either interpret or
compile kernels. The conftest.py of a folder collects its files as `InterpretedFile`, which starts that process: a fork
of one that has loaded torch and Triton, because that takes seconds.

A single test:                TRITON_INTERPRET=1 python -m pytest FILE -k NAME
2000 cases in every test:     TERCET_KERNEL_CASES=2000 python -m pytest --timeout=0 tests/model_executor/kernels
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

_TIMEOUT_S = 1200
"""Many tests are one item, so the limit of one test is too short."""
_LONGEST = "test_runner_on_triton.py"
"""Its limit is a second longer, because files with larger limits start earlier (longest_first.py)."""
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
COMPILES = "test_compile_"
"""Files of this name compile kernels and cannot run where they are interpreted."""


def is_interpreted(file: Path) -> bool:
    """Whether the tests of a file run under the interpreter."""
    if file.parent.name == "kernels":
        return not file.name.startswith(COMPILES)
    return file.parent.name == "attention" and file.name.startswith("test_triton_")


def examples(usual: int) -> int:
    """Number of cases that a test draws: TERCET_KERNEL_CASES, or `usual` if that is not set."""
    return int(os.environ.get("TERCET_KERNEL_CASES", usual))


class Forks:
    """A process that has loaded torch and Triton, and is forked for each file (interpreted_forks.py)."""

    def __init__(self, folder: Path) -> None:
        """`folder`: of the process."""
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("interpreted_forks.py"))],
            env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, arguments: Sequence[str], output: Path) -> int:
        """Runs pytest, which writes to `output`. Returns its exit code."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps([*arguments, str(output)]) + "\n")
            self._process.stdin.flush()
            return int(self._process.stdout.readline() or -1)
        except BaseException:  # the time limit of the outer test
            os.killpg(self._process.pid, signal.SIGKILL)
            the_forks.cache_clear()
            raise


@functools.cache
def the_forks(folder: Path) -> Forks:
    """One for this process. It ends with this process, because its input is closed."""
    return Forks(folder)


class InterpretedRun(pytest.Item):
    def runtest(self) -> None:
        # The inner process has no time limit: this process has one, and kills the inner process when it is exceeded.
        root = self.config.rootpath
        options = ["-q", "-p", "no:cacheprovider", "--timeout=0", f"--rootdir={root}", str(self.path)]
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "output"
            if the_forks(root).run(options, output):
                raise AssertionError(output.read_text(errors="replace")[-25_000:])

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> str:
        return str(excinfo.value)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, f"{self.path.name} under TRITON_INTERPRET=1"


class InterpretedFile(pytest.File):
    def collect(self) -> Iterator[pytest.Item]:
        item = InterpretedRun.from_parent(self, name="interpreted")
        item.add_marker(pytest.mark.timeout(_TIMEOUT_S + (self.path.name == _LONGEST)))
        yield item


def let_scalars_be_indices() -> None:
    """Fixes loop bounds: numpy 2.4 refuses int() of a one-element array. Triton 3.6 needs this, 3.9 does not."""
    from triton.runtime import interpreter  # only here: the outer process never imports Triton

    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())

    interpreter._patch_lang_tensor = patched


def poison_new_tensors() -> None:
    """Fills new tensors of torch.empty with NaN or the largest integer, so that a test notices missing output."""
    import torch  # imported here, because the outer process does not need it

    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory


@contextmanager
def used_memory(seed: int) -> Iterator[None]:
    """A context in which new tensors of torch.empty have any bytes, as an earlier launch may have left them."""
    import torch  # imported here, because the outer process does not need it

    rng = np.random.default_rng(seed)
    fills = (lambda n: torch.from_numpy(rng.integers(0, 256, n, np.uint8)), lambda n: 0, lambda n: 255)
    fill = fills[seed % 3]
    makers = torch.empty, torch.empty_like

    def filled(make: Any) -> Any:
        def made(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            tensor.view(-1).view(torch.uint8)[:] = fill(tensor.nbytes)
            return tensor

        return made

    torch.empty, torch.empty_like = map(filled, makers)
    try:
        yield
    finally:
        torch.empty, torch.empty_like = makers


@contextmanager
def permuted_programs(seed: int) -> Iterator[None]:
    """A context in which the programs of a launch run in a random order."""
    from triton.runtime import interpreter  # only here: the outer process never imports Triton

    builder = interpreter.InterpreterBuilder
    in_order, set_dim = builder.set_grid_idx, builder.set_grid_dim
    rng = np.random.default_rng(seed)

    def set_grid_dim(self: Any, x: int, y: int, z: int) -> None:
        self.order = rng.permutation(x * y * z)
        set_dim(self, x, y, z)

    def set_grid_idx(self: Any, x: int, y: int, z: int) -> None:
        _, num_y, num_z = self.grid_dim
        index = int(self.order[(x * num_y + y) * num_z + z])
        in_order(self, index // (num_y * num_z), index // num_z % num_y, index % num_z)

    builder.set_grid_idx, builder.set_grid_dim = set_grid_idx, set_grid_dim
    try:
        yield
    finally:
        builder.set_grid_idx, builder.set_grid_dim = in_order, set_dim


@contextmanager
def dots_by_rows() -> Iterator[None]:
    """A context in which a row of a dot product has the same bits at every position in its tile, as on a GPU.

    With numpy's BLAS, the bits of a row depend on its position in the matrix.
    """
    from triton.runtime import interpreter  # only here: the outer process never imports Triton

    builder = interpreter.InterpreterBuilder
    blas = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        left, right = a.data.astype(d.data.dtype), b.data.astype(d.data.dtype)
        return interpreter.TensorHandle(np.einsum("...mk,...kn->...mn", left, right) + d.data, d.dtype.scalar)

    builder.create_dot = create_dot
    try:
        yield
    finally:
        builder.create_dot = blas
