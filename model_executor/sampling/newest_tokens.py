"""The newest token of each row on the device, where the next step reads it before the host knows it."""

from __future__ import annotations

from typing import NamedTuple

import torch


class NewestTokens(NamedTuple):
    """Where the tokens of n rows are stored for the next step.

    A row with INVALID_TOKEN may run one more step before the host sees it. 0 is stored for it, because any
    valid id serves there.
    """

    tokens: torch.Tensor
    """int64 [num_rows + 1], newest token of each row"""
    rows: torch.Tensor
    """int64 [n] on the device"""

    def store(self, tokens: torch.Tensor) -> torch.Tensor:
        """Store tokens: int64 [n]. Returns them."""
        self.tokens.index_copy_(0, self.rows, tokens.clamp(min=0))
        return tokens
