"""How a decode step runs: launched operation by operation, or recorded once and replayed."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from ..step import Int32Array


class DecodeInputs(NamedTuple):
    """What a decode step brings: int64 [B] each, on the device."""

    rows: torch.Tensor
    seq_lens: torch.Tensor
    slots: torch.Tensor


class DecodeOutputs(NamedTuple):
    logits: torch.Tensor
    """float32 [B, vocab], overwritten by the next step"""
    rows: torch.Tensor
    """int64 [B], overwritten by the next step"""


class DecodeRunner(Protocol):
    """Runs decode steps from the newest tokens of their rows to logits, and writes their slots into the table."""

    max_rows: int
    """requests of the largest step that it runs"""
    num_bytes: int
    """device memory that its recordings take"""

    def run(self, rows: Int32Array, seq_lens: Int32Array, slots: Int32Array) -> DecodeOutputs:
        """Queues a step of at most `max_rows` requests; int32 [B] each, as in StepInputs."""
