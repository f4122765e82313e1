"""What one step of the model takes: `StepInputs` from the scheduler (numpy, host), `ForwardBatch` on the device.

The newest token of every row stays on the device (`ModelRunner.future_tokens`), so a decode step needs no token from
the host: the scheduler can plan step N+1 while the tokens of step N are not home yet.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ..srt.sampling_params import SamplingParams

if TYPE_CHECKING:  # the scheduler and its tests use StepInputs without importing torch
    import torch

Int32Array = npt.NDArray[np.int32]
FROM_DEVICE = -1
"""In `StepInputs.input_ids`: take the row's newest token from the device."""


class ForwardMode(Enum):
    EXTEND = "extend"
    """Every row brings one or more new tokens against its cached prefix (prefill, chunks, and decodes mixed in)."""
    DECODE = "decode"
    """Every row brings exactly its newest token, which is on the device."""


@dataclass(slots=True, frozen=True)
class NewRow:
    """A row of ReqToTokenPool that got a (new) owner: all that sampling has to know about it."""

    row: int
    sampling: SamplingParams
    seed: int
    """`sampling.sampling_seed`, or what the engine drew."""
    prompt_ids: Int32Array
    output_ids: Int32Array
    """Not empty after a retraction."""
    stop_ids: tuple[int, ...]
    """EOS and stop tokens; not to be chosen before `min_new_tokens`."""


class TableUpdate(NamedTuple):
    """Positions [start, end) of one row of ReqToTokenPool."""

    row: int
    start: int
    end: int


@dataclass(slots=True)
class StepInputs:
    """One step, on the host. B rows, T new tokens in all (T == B in DECODE)."""

    mode: ForwardMode
    rows: Int32Array
    """[B] row of each request in ReqToTokenPool, never 0."""
    seq_lens: Int32Array
    """[B] tokens of the request whose KV is in the pool after this step."""
    out_cache_loc: Int32Array
    """[T] slots that the new tokens' KV goes to."""
    new_rows: list[NewRow] = field(default_factory=list)
    table_updates: list[TableUpdate] = field(default_factory=list)
    """Ranges of the host's row table that the device has not seen. A DECODE step's own slots are not among them: the
    device writes those from `out_cache_loc`. Where device and host share the table there is nothing to do."""
    # EXTEND only; None in DECODE, where each row has one token, from the device, and is sampled.
    extend_lens: Int32Array | None = None
    """[B] new tokens of each row, >= 1; the cached prefix is seq_lens - extend_lens."""
    input_ids: Int32Array | None = None
    """[T] the new tokens, FROM_DEVICE for a decoding row in a mixed batch."""
    sampled: npt.NDArray[np.bool_] | None = None
    """[B] whether a next token is wanted; False for a chunk that is not its prompt's last."""

    @property
    def num_tokens(self) -> int:
        return len(self.out_cache_loc)

    @property
    def num_sampled(self) -> int:
        return len(self.rows) if self.sampled is None else int(self.sampled.sum())


class StepResult(Protocol):
    """The tokens of a launched step, on their way home."""

    def wait(self) -> Int32Array:
        """Blocks until they are here: [num_sampled] in the order of the sampled rows; -1 for invalid logits."""


class Runner(Protocol):
    """What the scheduler asks of the execution layer; `ModelRunner` and the tests' fake both satisfy it."""

    def launch(self, step: StepInputs) -> StepResult:
        """Queues one step on the device and returns without waiting for it (a CPU has computed it on return)."""


@dataclass(slots=True)
class ForwardBatch:
    """One step, on the device: the only thing a model and an attention backend see. T tokens, B rows."""

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
