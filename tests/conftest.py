"""What every test runs under: no network, no deadline, and a GPU test only where there is a GPU."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Inherited by the servers that tests start: a model that is not on disk is a failure, not a download.
os.environ["HF_HUB_OFFLINE"] = "1"

# What the servers keep on disk goes with the tests.
_caches = tempfile.TemporaryDirectory(prefix="tercet-tests-", ignore_cleanup_errors=True)
os.environ["XDG_CACHE_HOME"] = _caches.name

# Tests run beside each other: threads that wait for one another at every operation would wait for the other tests too.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that starts the tests in the background has them ignore Ctrl-C, and with them every process they start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A slow machine is not a failing test; the example that failed is printed so that anybody can replay it.
settings.register_profile("tercet", deadline=None, print_blob=True)
settings.load_profile("tercet")


@pytest.fixture(autouse=True)
def _logger_as_it_was() -> Iterator[None]:
    """A command run within a test sets up this process's logger: undone, or later tests would not see their lines."""
    logger = logging.getLogger("tercet")
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = handlers, level, propagate


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch  # only here: most runs select no GPU test and need not wait for torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
