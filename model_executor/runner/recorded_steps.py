"""The interface of runners of recorded steps, and the inputs and outputs of such steps on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from ..device.device_buffers import TokenCopy
from ..step import Choices, StepInputs


class DecodeInputs(NamedTuple):
    """The inputs of a decode step: int64 [B] each, on the device."""

    rows: torch.Tensor
    seq_lens: torch.Tensor
    slots: torch.Tensor


class StepHead(NamedTuple):
    """The output head of a step, for its N choices. The caller takes either the logits or the greedy tokens.

    All tensors are on the device. Those of a recorded step are overwritten by the next one.
    """

    rows: torch.Tensor
    """int64 [N], row of each; with drafts, a row more than once"""
    logits: Callable[[], torch.Tensor]
    """gives the logits, float32 [N, vocab]"""
    greedy: Callable[[], TokenCopy] | None = None
    """gives the first most probable token of each row, without logits: -1 if they have a NaN or are all -inf. It also
    stores them as the rows' newest tokens. None: not possible"""


class RecordedSteps(Protocol):
    """Runs recorded steps, from tokens to the output head, and writes the slots of new tokens into the table."""

    num_bytes: int
    """device memory of the recordings"""

    def can_run(self, step: StepInputs) -> bool:
        """Whether the step is of a recorded kind and size."""

    def run(self, step: StepInputs, choices: Choices | None) -> StepHead:
        """Queue a step that `can_run` accepts. `choices`: those of an EXTEND step. The caller has applied the step's
        `table_updates`."""
