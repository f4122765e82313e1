"""The start of a decode step: from the inputs of the step to those of its first layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch


class DecodeStart(NamedTuple):
    """What a decode step of B requests begins with."""

    input_ids: torch.Tensor
    """int64 [B], the newest token of each request"""
    positions: torch.Tensor
    """int64 [B], their positions"""
    x: torch.Tensor
    """[B, hidden], the embedded tokens"""
    rotations: Sequence[Any]
    """of the positions, one for each rotary embedding of the model"""


class StartDecode(Protocol):
    """The operation that starts a decode step. May be recorded in a graph."""

    def __call__(
        self,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        slots: torch.Tensor,
        newest_tokens: torch.Tensor,
        req_to_token: torch.Tensor,
        /,
    ) -> DecodeStart:
        """Write the slot of each new token into the table, and look up what the first layer needs.

        rows, seq_lens, slots: int64 [B]. Padding may repeat a row with the same length and slot. newest_tokens: int64
        [num_rows + 1]. req_to_token: int32 [num_rows + 1, context_len].
        """


class TorchStart:
    """The StartDecode in plain torch, for any kind of embedding and rotations."""

    def __init__(
        self, embedding: Callable[[torch.Tensor], torch.Tensor], rotary: Callable[[torch.Tensor], Sequence[Any]]
    ) -> None:
        self._embedding = embedding
        self._rotary = rotary

    def __call__(
        self,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        slots: torch.Tensor,
        newest_tokens: torch.Tensor,
        req_to_token: torch.Tensor,
    ) -> DecodeStart:
        positions = seq_lens - 1
        req_to_token.index_put_((rows, positions), slots.int())
        ids = newest_tokens.index_select(0, rows)
        return DecodeStart(ids, positions, self._embedding(ids), self._rotary(positions))
