"""Settings for all tests: no network, no hypothesis deadlines, and GPU tests only on a machine with a GPU."""

from __future__ import annotations

import gc
import logging
import os
import signal
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import settings
from longest_first import sort_files

# Test servers inherit this. A missing model then fails the test instead of being downloaded.
os.environ["HF_HUB_OFFLINE"] = "1"

# The servers' caches on disk are removed after the tests.
_caches = tempfile.TemporaryDirectory(prefix="tercet-tests-", ignore_cleanup_errors=True)
os.environ["XDG_CACHE_HOME"] = _caches.name

# Tests run in parallel. Compute threads that wait for each other at every operation would also wait for other tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell makes background tests ignore SIGINT, and their child processes would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# So does nohup with SIGHUP. With a handler, these tests go on, and programs that they start end at the signal.
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

# A slow machine must not fail a test. A failing example is printed, so that anyone can replay it.
settings.register_profile("tercet", deadline=None, print_blob=True)
# Continuous integration draws the same examples for the same tests. So its result depends on the commit alone.
settings.register_profile("tercet-ci", settings.get_profile("tercet"), derandomize=True, database=None)
settings.load_profile("tercet-ci" if os.environ.get("CI") else "tercet")


@pytest.fixture(autouse=True)
def _logger_as_it_was() -> Iterator[None]:
    """Restores the logger after each test. A command in a test configures it, and later tests could miss log lines."""
    logger = logging.getLogger("tercet")
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = handlers, level, propagate


# The tests that were collected stay until the end. The garbage collector need not visit them again and again.
def pytest_sessionstart() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    # At its exit Triton names what was not collected. A worker keeps all of that, and need not look for more.
    if not hasattr(session.config, "workerinput"):
        gc.unfreeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # one of pytest-xdist's workers
        sort_files(items)
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch  # imported here, because most runs select no GPU test and need not wait for torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
