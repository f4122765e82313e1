"""The interface of runners of recorded decode steps, and the inputs and outputs of a decode step."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from ..step import Int32Array


class DecodeInputs(NamedTuple):
    """The inputs of a decode step: int64 [B] each, on the device."""

    rows: torch.Tensor
    seq_lens: torch.Tensor
    slots: torch.Tensor


class DecodeOutputs(NamedTuple):
    """The outputs of a decode step, on the device."""

    logits: torch.Tensor
    """float32 [B, vocab], overwritten by the next step"""
    rows: torch.Tensor
    """int64 [B], overwritten by the next step"""


class DecodeRunner(Protocol):
    """Runs decode steps, from the newest token of each row to logits, and writes the new slots into the table."""

    max_rows: int
    """most requests of a step"""
    num_bytes: int
    """device memory of the recordings"""

    def run(self, rows: Int32Array, seq_lens: Int32Array, slots: Int32Array) -> DecodeOutputs:
        """Queue a step of at most `max_rows` requests. The arguments are int32 [B] each, as in StepInputs."""
