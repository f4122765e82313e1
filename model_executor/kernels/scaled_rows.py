"""What a linear layer of few rows leaves to the norm after it. Imports no Triton."""

from __future__ import annotations

from typing import NamedTuple

import torch


class ScaledRows(NamedTuple):
    """Rows on their way through an RMSNorm: multiplied by its weight, but not yet by the reciprocal of their norm."""

    x: torch.Tensor
    """[T, n]"""
    squares: torch.Tensor
    """float32 [parts, MAX_ROWS]: the sums of the squares of parts of each row, before it was multiplied"""
