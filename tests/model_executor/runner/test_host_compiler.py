"""A GPU server on a machine without a C compiler says what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_accelerator import FakeAccelerator, use_fake
from toy_runner import make_toy_runner
from triton.runtime import build

from tercet.model_executor.kernels.host_compiler import needs_c_compiler


def test_a_missing_c_compiler_is_named() -> None:
    with pytest.raises(ValueError, match="install gcc or clang, or set CC"), needs_c_compiler():
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")


def test_missing_headers_of_python_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's own compilation, of a Python whose folder of headers is empty."""
    monkeypatch.setattr(build.sysconfig, "get_paths", lambda **_: {"include": str(tmp_path)})
    with pytest.raises(ValueError, match=r"headers of Python .* status 1 .* python3-dev"), needs_c_compiler():
        build._build("launcher", write_source(tmp_path), str(tmp_path), [], [], [], [])


def write_source(folder: Path) -> str:
    path = folder / "launcher.c"
    path.write_text("#include <Python.h>\n")
    return str(path)


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="out of memory"), needs_c_compiler():
        raise RuntimeError("out of memory")


class WithoutCompiler(FakeAccelerator):
    def peak_bytes(self, work, *, to_record=False):
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")


def test_a_server_that_starts_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake(monkeypatch, WithoutCompiler())
    with pytest.raises(ValueError, match="install gcc or clang, or set CC"):
        make_toy_runner()
