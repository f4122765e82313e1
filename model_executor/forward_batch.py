"""A step's inputs on the device, as the model and the attention backend read them. step.py has the host's form."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from .step import ForwardMode, Int32Array


class TokenAdapters:
    """The slot of the LoRA adapter of each token, int32 [n]; 0: none."""

    def __init__(self, slots: torch.Tensor) -> None:
        self.slots = slots

    @cached_property
    def groups(self) -> list[tuple[int, torch.Tensor]]:
        """The tokens of each adapter, int64, for layers in plain torch. The first access waits for a GPU."""
        used = self.slots.unique().tolist()
        return [(slot, (self.slots == slot).nonzero().flatten()) for slot in used if slot]


class SavedStates(NamedTuple):
    """The states of recurrent layers that an EXTEND step saves in other rows of LayerStates."""

    lens: torch.Tensor
    """int64 [B], the length of each request when its state is saved, after a token of the step; 0: it is not saved"""
    rows: torch.Tensor
    """int64 [B], the row that each is saved in"""


@dataclass(slots=True)
class ForwardBatch:
    """The tensors of one step. It has T new tokens in B rows."""

    mode: ForwardMode
    rows: torch.Tensor
    """int64 [B], rows of `req_to_token`"""
    seq_lens: torch.Tensor
    """int64 [B], lengths with this step's tokens"""
    input_ids: torch.Tensor
    """int64 [T]"""
    positions: torch.Tensor
    """int64 [T]"""
    out_cache_loc: torch.Tensor
    """int64 [T], slots for K and V of the new tokens"""
    req_to_token: torch.Tensor
    """int32 [num_rows + 1, context_len], slot of each position of each row"""
    logits_indices: torch.Tensor | None
    """int64 [num_sampled], indices in [T] of the tokens whose logits are computed; None: all tokens"""
    extend_start_loc: torch.Tensor | None
    """int64 [B + 1], index in [T] of each row's first new token; None in DECODE"""
    prefix_lens: torch.Tensor | None
    """int64 [B], number of tokens before this step's; None in DECODE"""
    seq_lens_host: Int32Array
    """`seq_lens` on the host, so that planning never waits for the device"""
    extend_lens_host: Int32Array | None
    """[B], number of new tokens of each row, on the host; None in DECODE"""
    adapters: TokenAdapters | None = None
    """of the T tokens; None: the runner has no adapters"""
    sampled_adapters: TokenAdapters | None = None
    """of the tokens of `logits_indices`, if there are `adapters`"""
    saved_states: SavedStates | None = None
    """None: the step saves none"""

    def of_sampled(self) -> ForwardBatch:
        """The batch for layers that compute only the tokens of `logits_indices`."""
        return self if self.adapters is None else replace(self, adapters=self.sampled_adapters)

    @property
    def batch_size(self) -> int:
        return len(self.seq_lens_host)

    @property
    def max_seq_len(self) -> int:
        return int(self.seq_lens_host.max())
