"""What a linear layer of few rows leaves to the norm after it. Imports no Triton."""

from __future__ import annotations

from typing import NamedTuple

import torch


class ScaledRows(NamedTuple):
    """Rows in the middle of an RMSNorm: multiplied by its weight, and not yet divided by their root mean square."""

    x: torch.Tensor
    """[T, n]"""
    squares: torch.Tensor
    """float32 [parts, MAX_ROWS]: for each part of a row, the sum of its squares before it was multiplied"""
