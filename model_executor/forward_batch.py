"""One step on the device: what a model and an attention backend see of it. step.py has the same on the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .step import ForwardMode, Int32Array


@dataclass(slots=True)
class ForwardBatch:
    """T tokens, B rows."""

    mode: ForwardMode
    rows: torch.Tensor
    """int64 [B]"""
    seq_lens: torch.Tensor
    """int64 [B], this step's tokens included"""
    input_ids: torch.Tensor
    """int64 [T]"""
    positions: torch.Tensor
    """int64 [T]"""
    out_cache_loc: torch.Tensor
    """int64 [T]"""
    req_to_token: torch.Tensor
    """int32 [num_rows + 1, context_len]: slot of each position of each row"""
    logits_indices: torch.Tensor | None
    """int64 [num_sampled] tokens whose next token is wanted; None: every token"""
    extend_start_loc: torch.Tensor | None
    """int64 [B + 1] where each row's new tokens start in [T]; None in DECODE"""
    prefix_lens: torch.Tensor | None
    """int64 [B] cached tokens before this step's; None in DECODE"""
    seq_lens_host: Int32Array
    """the same numbers on the host, so that planning never waits for the device"""
    extend_lens_host: Int32Array | None

    @property
    def batch_size(self) -> int:
        return len(self.seq_lens_host)

    @property
    def max_seq_len(self) -> int:
        return int(self.seq_lens_host.max())
