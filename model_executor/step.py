"""The contract of a step: the inputs that the scheduler sends to a runner, and the outputs that the runner returns.

Both are numpy arrays and plain values, without torch. So a step can be encoded (`encode_step`), sent to a worker in
another process, and run there with the worker's own table and KV pool.

The runner keeps the newest token of each row, so a decode step needs no token from the host: the scheduler can plan
step N+1 before the host has the tokens of step N.
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
"""In `StepInputs.input_ids`: the row's newest token, which the runner keeps on the device."""


class ForwardMode(Enum):
    """The kind of a step."""

    EXTEND = "extend"
    """Each row has one or more new tokens after its cached prefix: prefills, chunks, and decodes mixed in."""
    DECODE = "decode"
    """Each row has exactly one new token, its newest, which is on the device."""


@dataclass(slots=True, frozen=True)
class NewRow:
    """The new owner of a row of ReqToTokenPool: the facts about the request that sampling needs."""

    row: int
    sampling: SamplingParams
    seed: int
    """`sampling.sampling_seed`, or a seed drawn by the engine."""
    prompt_ids: Int32Array
    output_ids: Int32Array
    """The tokens generated before a retraction; empty for a new request."""
    stop_ids: tuple[int, ...]
    """EOS and stop tokens, which are not sampled before `min_new_tokens`."""


@dataclass(slots=True)
class StepInputs:
    """The inputs of a step with B rows and T new tokens (T == B in DECODE)."""

    mode: ForwardMode
    rows: Int32Array
    """[B], row of each request in ReqToTokenPool, never 0."""
    seq_lens: Int32Array
    """[B], number of tokens of each request whose KV is in the pool after this step."""
    out_cache_loc: Int32Array
    """[T], slots for the KV of the new tokens. The runner also writes them into its table."""
    new_rows: list[NewRow] = field(default_factory=list)
    table_updates: list[TableUpdate] = field(default_factory=list)
    """All other changes of the table since the previous step. The runner applies them before the step."""
    # The next fields are for EXTEND. In DECODE they are None: each row has one token, on the device, and is sampled.
    extend_lens: Int32Array | None = None
    """[B], number of new tokens of each row, >= 1. The cached prefix has seq_lens - extend_lens tokens."""
    input_ids: Int32Array | None = None
    """[T], the new tokens; FROM_DEVICE for a decoding row of a mixed batch."""
    sampled: npt.NDArray[np.bool_] | None = None
    """[B], whether the row's next token is sampled; False for a chunk that is not the last of its prompt."""

    @property
    def num_tokens(self) -> int:
        return len(self.out_cache_loc)

    @property
    def num_sampled(self) -> int:
        """The number of rows whose next token is sampled."""
        return len(self.rows) if self.sampled is None else int(self.sampled.sum())


@dataclass(slots=True, frozen=True)
class StepOutput:
    """The outputs of a step, for its R sampled rows in their order (R is `StepInputs.num_sampled`)."""

    tokens: Int32Array
    """[sum(num_tokens)], new tokens, one row after the other. A row with invalid logits ends with -1."""
    num_tokens: Int32Array | None = None
    """[R], number of new tokens of each row, >= 1, and more than 1 for accepted drafts. None: 1 for all rows."""

    def rows(self) -> list[list[int]]:
        """The new tokens of each row: R lists."""
        tokens = self.tokens.tolist()
        if self.num_tokens is None:
            return [[token] for token in tokens]
        ends = np.cumsum(self.num_tokens).tolist()
        return [tokens[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


class LaunchedStep(Protocol):
    """A step whose forward pass is queued."""

    def sample(self) -> None:
        """Queue the choice of the next tokens. Must be called once, before the next `launch`.

        It is a separate call because, unlike the forward pass, it may depend on the host's view of earlier tokens (the
        mask of a grammar).
        """

    def wait(self) -> StepOutput:
        """Wait until the tokens are on the host, and return them."""


class Runner(Protocol):
    """The scheduler's interface to the execution layer. `ModelRunner` implements it, and so does the tests' fake."""

    def launch(self, step: StepInputs) -> LaunchedStep:
        """Queue the forward pass of a step. Returns without waiting on a GPU, and after the pass on a CPU."""


def encode_step(step: StepInputs) -> bytes:
    """Encode a step as msgpack. An array becomes its dtype and its bytes."""
    return _encoder.encode(step)


def decode_step(data: bytes) -> StepInputs:
    """Decode a step. Its arrays are read-only views of `data`. Raises msgspec.ValidationError for invalid data."""
    return _decoder.decode(data)


def _pack_array(array: Any) -> tuple[str, bytes]:
    assert isinstance(array, np.ndarray) and array.ndim == 1
    return array.dtype.str, array.tobytes()


def _unpack_array(kind: Any, packed: Any) -> npt.NDArray[Any]:
    dtype, data = packed
    return np.frombuffer(data, dtype)


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack_array)
_decoder = msgspec.msgpack.Decoder(StepInputs, dec_hook=_unpack_array)
