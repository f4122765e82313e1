"""A step's contract: what the scheduler sends to a runner, and what comes back.

Everything here is numpy and plain values, without torch: a step can be encoded (`encode_step`), sent to a worker in
another process, and run there on a table and a pool of its own.

The newest token of every row stays with the runner, so a decode step needs no token from the host: the scheduler can
plan step N+1 while the tokens of step N are on their way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from ..mem_cache.req_to_token_pool import TableUpdate
from ..srt.sampling_params import SamplingParams

__all__ = [
    "FROM_DEVICE",
    "ForwardMode",
    "Int32Array",
    "LaunchedStep",
    "NewRow",
    "Runner",
    "StepInputs",
    "StepOutput",
    "TableUpdate",
    "decode_step",
    "encode_step",
]

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
    """A row of ReqToTokenPool that has a new owner: everything that sampling has to know about the request."""

    row: int
    sampling: SamplingParams
    seed: int
    """`sampling.sampling_seed`, or what the engine drew."""
    prompt_ids: Int32Array
    output_ids: Int32Array
    """Not empty after a retraction."""
    stop_ids: tuple[int, ...]
    """EOS and stop tokens; not to be chosen before `min_new_tokens`."""


@dataclass(slots=True)
class StepInputs:
    """One step. B rows, T new tokens in all (T == B in DECODE)."""

    mode: ForwardMode
    rows: Int32Array
    """[B] row of each request in ReqToTokenPool, never 0."""
    seq_lens: Int32Array
    """[B] tokens of the request whose KV is in the pool after this step."""
    out_cache_loc: Int32Array
    """[T] slots that the new tokens' KV goes to. The runner writes them into its table."""
    new_rows: list[NewRow] = field(default_factory=list)
    table_updates: list[TableUpdate] = field(default_factory=list)
    """Every other change of the table since the step before, to be made before the step runs."""
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
        """Rows whose next token is wanted."""
        return len(self.rows) if self.sampled is None else int(self.sampled.sum())


@dataclass(slots=True, frozen=True)
class StepOutput:
    """What a step produced, row by row in the order of the sampled rows; R = `StepInputs.num_sampled`."""

    tokens: Int32Array
    """[sum(num_tokens)] new tokens of every row, one row after the other; -1 for invalid logits, as a row's last."""
    num_tokens: Int32Array | None = None
    """[R] new tokens of each row, >= 1: more than one where drafts were accepted. None: one each."""

    def rows(self) -> list[list[int]]:
        """[R] the new tokens of each row."""
        tokens = self.tokens.tolist()
        if self.num_tokens is None:
            return [[token] for token in tokens]
        ends = np.cumsum(self.num_tokens).tolist()
        return [tokens[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


class LaunchedStep(Protocol):
    """A step whose forward pass is queued."""

    def sample(self) -> None:
        """Queues the choice of the next tokens: once, before the next `launch`. It is a call of its own because the
        choice may depend on the tokens of the step before (the mask of a grammar), which the forward pass does not."""

    def wait(self) -> StepOutput:
        """Blocks until the chosen tokens are on the host."""


class Runner(Protocol):
    """What the scheduler asks of the execution layer; `ModelRunner` and the tests' fake both satisfy it."""

    def launch(self, step: StepInputs) -> LaunchedStep:
        """Queues one step's forward pass and returns without waiting for it (a CPU has computed it on return)."""


def encode_step(step: StepInputs) -> bytes:
    """The step as msgpack; arrays travel as their dtype and their bytes."""
    return _encoder.encode(step)


def decode_step(data: bytes) -> StepInputs:
    """Raises msgspec.ValidationError for bytes that are no step. The arrays are views of `data`, read-only."""
    return _decoder.decode(data)


def _pack_array(array: Any) -> tuple[str, bytes]:
    assert isinstance(array, np.ndarray) and array.ndim == 1
    return array.dtype.str, array.tobytes()


def _unpack_array(kind: Any, packed: Any) -> npt.NDArray[Any]:
    dtype, data = packed
    return np.frombuffer(data, dtype)


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack_array)
_decoder = msgspec.msgpack.Decoder(StepInputs, dec_hook=_unpack_array)
