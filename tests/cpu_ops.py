"""What the tests of the compiled operations of a CPU share."""

from __future__ import annotations

import torch

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
DTYPES = list(TOLERANCE)


def assert_close(actual, expected, dtype, typical=0.1):
    """typical: the size that results usually have; a few that happen to be near zero are not exacter than others."""
    assert actual.shape == expected.shape
    error = (actual.double() - expected).abs().max() / expected.abs().max().clamp(min=typical)
    assert error < TOLERANCE[dtype], error.item()
