"""The interface of runners of recorded steps, and the inputs and outputs of such steps on the device."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from ..step import StepInputs


class DecodeInputs(NamedTuple):
    """The inputs of a decode step: int64 [B] each, on the device."""

    rows: torch.Tensor
    seq_lens: torch.Tensor
    slots: torch.Tensor


class StepLogits(NamedTuple):
    """The outputs of a step's forward pass, on the device, for its R sampled rows."""

    logits: torch.Tensor
    """float32 [R, vocab]; that of a recorded step is overwritten by the next one"""
    rows: torch.Tensor
    """int64 [R]; that of a recorded step is overwritten by the next one"""


class RecordedSteps(Protocol):
    """Runs steps that were recorded, from tokens to logits, and writes the slots of new tokens into the table."""

    num_bytes: int
    """device memory of the recordings"""

    def can_run(self, step: StepInputs) -> bool:
        """Whether the step is of a recorded kind and size."""

    def run(self, step: StepInputs) -> StepLogits:
        """Queue a step that `can_run` accepts. The caller has applied its `table_updates`."""
