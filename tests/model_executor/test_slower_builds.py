"""The builds of csrc/cpu that run here, but are not the fastest, pass the tests of operations and layers, too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tercet.model_executor import cpu_build, cpu_extension

RUN = """
import sys, pytest
from tercet.model_executor import cpu_extension
index = int(sys.argv[1])
cpu_extension.VARIANTS = cpu_extension.VARIANTS[index:]
assert cpu_extension.load() is not None
class Some:
    def pytest_collection_modifyitems(self, items):
        from some_cases import ALL_CASES
        items[:] = items if ALL_CASES else items[index % 4 :: 4]
chosen = "not slower_builds and not test_cpu_extension and not thread_pool"  # these depend on no build
sys.exit(pytest.main([*sys.argv[2:], "-q", "-x", "-p", "no:cacheprovider", "-k", chosen], plugins=[Some()]))
"""
"""A usual run takes every fourth test."""


@pytest.mark.timeout(600)
@pytest.mark.skipif(cpu_extension.load() is None, reason="no build of csrc/cpu")
def test_slower_builds_that_run_here_do_the_same() -> None:
    folders = [Path(__file__).parent / name for name in (".", "layers", "sampling")]
    files = [path for folder in folders for path in sorted(folder.glob("test_*.py"))]
    tests = [str(path) for path in files if "no build of csrc/cpu" in path.read_text() and path != Path(__file__)]
    assert str(Path(__file__).with_name("test_cpu_ops.py")) in tests
    fastest = cpu_extension.VARIANTS.index(cpu_extension.load())
    for index, variant in enumerate(cpu_extension.VARIANTS):
        is_built = Path(cpu_extension.__file__).with_name(cpu_build.file_name(variant.name)).exists()
        if index > fastest and variant.is_supported() and is_built:
            arguments = [sys.executable, "-c", RUN, str(index), *tests]
            done = subprocess.run(arguments, capture_output=True, text=True, timeout=250)
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
