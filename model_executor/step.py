"""The contract of a step: the inputs that the scheduler sends to a runner, and the outputs that the runner returns.

Both are numpy arrays and plain values, without torch. So a step can be encoded (`encode_step`), sent to a worker in
another process, and run there with the worker's own table and KV pool.

The runner keeps the newest token of each row, so a decode step needs no token from the host: the scheduler can plan
step N+1 before the host has the tokens of step N.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from ..mem_cache.req_to_token_pool import TableUpdate
from ..srt.arrays import Float32Array, Int32Array
from ..srt.logprobs import LogprobOptions, Logprobs
from ..srt.sampling_params import SamplingParams

__all__ = [
    "FROM_DEVICE",
    "HIDDEN_UNIT",
    "INVALID_TOKEN",
    "NO_DRAFT",
    "Choices",
    "Float32Array",
    "ForwardMode",
    "HiddenRange",
    "HiddenSum",
    "Int32Array",
    "KVCopies",
    "LaunchedStep",
    "NewRow",
    "PromptScore",
    "Runner",
    "StateCopies",
    "StateSaves",
    "StepInputs",
    "StepOutput",
    "TableUpdate",
    "TokenMasks",
    "decode_step",
    "encode_step",
    "num_mask_words",
]

FROM_DEVICE = -1
"""In `StepInputs.input_ids`: the row's newest token, which the runner keeps on the device."""
INVALID_TOKEN = -1
"""The choice from logits that have a NaN or are all -inf."""
NO_DRAFT = -2
"""In `Choices.drafts`: no draft follows. It differs from every choice, also from INVALID_TOKEN."""
HIDDEN_UNIT = 2.0**-28
"""The unit of StepOutput.hidden_sums. Sums of integers are exact, so they do not depend on chunks.

A prompt of 2**20 tokens may have hidden states up to 2**15 on average.
"""


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
    logprobs: LogprobOptions | None = None
    """The log probabilities that every step returns for the row's new tokens; None: none."""
    adapter: int = 0
    """The adapter slot whose weights are added to the model's for this row; 0: none."""


@dataclass(slots=True, frozen=True)
class PromptScore:
    """Prompt tokens of a row whose log probabilities an extend step returns. They follow one another."""

    row: int
    start: int
    """Index in [T] of the token before the first of them, whose logits are needed."""
    targets: Int32Array
    """[n], the prompt tokens themselves. The last one may be outside the step."""


@dataclass(slots=True, frozen=True)
class HiddenSum:
    """Successive prompt tokens whose hidden states, after the final norm, an extend step sums."""

    start: int
    """Index in [T] of the first of them."""
    length: int


@dataclass(slots=True, frozen=True)
class HiddenRange:
    """Successive tokens of a row whose hidden states, after the final norm, an extend step returns."""

    start: int
    """Index in [T] of the first of them."""
    length: int


@dataclass(slots=True, frozen=True)
class KVCopies:
    """Copies of whole pages of KV between the KV pool and the host's KV memory. All arrays have page numbers.

    The runner makes them before the forward pass: first all copies out, and then all copies in.
    """

    out_pages: Int32Array
    """[N], pages of the pool, whose slots this step or a later one may overwrite."""
    out_host: Int32Array
    """[N], the page of the host's memory that each is copied to."""
    in_host: Int32Array
    """[M], pages of the host's memory."""
    in_pages: Int32Array
    """[M], the page of the pool that each is copied to."""


@dataclass(slots=True, frozen=True)
class StateCopies:
    """Copies of states of recurrent layers. The runner makes them one after another before the forward pass."""

    sources: Int32Array
    """[N], rows of LayerStates"""
    targets: Int32Array
    """[N], the row that each is copied to"""


@dataclass(slots=True, frozen=True)
class StateSaves:
    """The states of recurrent layers that an EXTEND step saves while it computes its tokens."""

    lens: Int32Array
    """[B], the length of each request when its state is saved, after a token of the step; 0: it is not saved"""
    rows: Int32Array
    """[B], the row of LayerStates that each is saved in"""


class Choices(NamedTuple):
    """The N tokens of a step after which a token is chosen: the last known one of each sampled row, and each draft."""

    at: npt.NDArray[np.int64]
    """[N], index of each in [T]"""
    rows: Int32Array
    """[N], row of each"""
    lens: Int32Array
    """[N], length of the request up to each, which is the position of the chosen token"""
    starts: npt.NDArray[np.int64]
    """[R], index in [N] of each sampled row's first"""
    drafts: Int32Array | None = None
    """[N], the draft after each, or NO_DRAFT after the last one of a row. If the choice is another token, the row's
    later choices follow a wrong token. None: the step has no drafts."""


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
    """[T], the new tokens. A decoding row of a mixed batch has FROM_DEVICE."""
    sampled: npt.NDArray[np.bool_] | None = None
    """[B], whether the row's next token is sampled; False for a chunk that is not the last of its prompt."""
    prompt_scores: list[PromptScore] = field(default_factory=list)
    """The prompt tokens whose log probabilities are wanted. Only for rows with `NewRow.logprobs`."""
    hidden_sums: list[HiddenSum] = field(default_factory=list)
    """The prompt tokens whose hidden states are summed."""
    hidden_states: list[HiddenRange] = field(default_factory=list)
    """The tokens whose hidden states are wanted."""
    num_drafts: Int32Array | None = None
    """[B], how many of the last new tokens of each row are drafts, which the step verifies. All rows are sampled, and
    have at least one token before the drafts. None: the step has no drafts."""
    state_saves: StateSaves | None = None
    """Only for a model with recurrent layers."""
    # For both modes.
    state_copies: StateCopies | None = None
    """Only for a model with recurrent layers."""
    kv_copies: KVCopies | None = None
    """Copies between the KV pool and host memory. A step with copies may have no rows: a DECODE step with B = 0."""

    @property
    def num_tokens(self) -> int:
        return len(self.out_cache_loc)

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """[B + 1], index in [T] of each row's first new token."""
        if self.extend_lens is None:
            return np.arange(len(self.rows) + 1)
        return np.concatenate(([0], np.cumsum(self.extend_lens, dtype=np.int64)))

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """[T], positions of the new tokens."""
        if self.extend_lens is None:
            return self.seq_lens.astype(np.int64) - 1
        ends = np.cumsum(self.extend_lens, dtype=np.int64)
        return np.arange(ends[-1]) + np.repeat(self.seq_lens - ends, self.extend_lens)

    @property
    def has_extras(self) -> bool:
        """Whether log probabilities of prompt tokens or hidden states are wanted."""
        return bool(self.prompt_scores or self.hidden_sums or self.hidden_states)

    @property
    def num_sampled(self) -> int:
        """The number of rows whose next token is sampled."""
        return len(self.rows) if self.sampled is None else int(self.sampled.sum())

    @property
    def num_choices(self) -> int:
        """The number of tokens that are chosen, also after drafts."""
        return self.num_sampled + (0 if self.num_drafts is None else int(self.num_drafts.sum()))

    @property
    def first_choices(self) -> npt.NDArray[np.int64]:
        """[R], index of each sampled row's first choice among all choices."""
        if self.num_drafts is None:
            return np.arange(self.num_sampled)
        return np.concatenate(([0], np.cumsum(self.num_drafts[:-1] + 1, dtype=np.int64)))

    def choices(self) -> Choices:
        """The tokens of an EXTEND step after which a token is chosen."""
        assert self.input_ids is not None and self.sampled is not None and self.extend_lens is not None
        starts, firsts = self.starts, self.first_choices
        if self.num_drafts is None:
            rows = self.rows[self.sampled]
            return Choices((starts[1:] - 1)[self.sampled], rows, self.seq_lens[self.sampled], firsts)
        counts = self.num_drafts + 1
        at = np.arange(counts.sum()) + np.repeat(starts[1:] - counts - firsts, counts)
        drafts = np.append(self.input_ids, np.int32(NO_DRAFT))[at + 1]
        drafts[firsts + self.num_drafts] = NO_DRAFT
        lens = (self.positions[at] + 1).astype(np.int32)
        return Choices(at, np.repeat(self.rows, counts), lens, firsts, drafts)


@dataclass(slots=True, frozen=True)
class StepOutput:
    """The outputs of a step, for its R sampled rows in their order (R is `StepInputs.num_sampled`)."""

    tokens: Int32Array
    """[sum(num_tokens)], new tokens, one row after the other. A row with invalid logits ends with INVALID_TOKEN."""
    num_tokens: Int32Array | None = None
    """[R], number of new tokens of each row, >= 1, and more than 1 for accepted drafts. None: 1 for all rows."""
    logprobs: dict[int, Logprobs] = field(default_factory=dict)
    """The log probabilities of a row's new tokens, by the row's index in [R], for the rows that want them."""
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    """One for each of `StepInputs.prompt_scores`."""
    hidden_sums: list[npt.NDArray[np.int64]] = field(default_factory=list)
    """One for each of `StepInputs.hidden_sums`: [hidden_size], in units of HIDDEN_UNIT."""
    hidden_states: list[Float32Array] = field(default_factory=list)
    """One for each of `StepInputs.hidden_states`: [length, hidden_size]."""

    def rows(self) -> list[tuple[int, ...]]:
        """The new tokens of each of the R rows."""
        tokens = self.tokens.tolist()
        if self.num_tokens is None:
            return list(zip(tokens, strict=True))
        ends = np.cumsum(self.num_tokens).tolist()
        return [tuple(tokens[start:end]) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


@dataclass(slots=True, frozen=True)
class TokenMasks:
    """The tokens that grammars allow next, for M of the N choices of a step."""

    lines: Int32Array
    """[M], indices among the choices, each once, in rising order. Without drafts, a sampled row has one choice."""
    bits: Int32Array
    """[M, num_mask_words(vocab_size)]. Bit i of word w: token 32 * w + i may come next. At least one token may."""


def num_mask_words(vocab_size: int) -> int:
    """The words of a token mask."""
    return -(-vocab_size // 32)


class LaunchedStep(Protocol):
    """A step whose forward pass is queued."""

    def sample(self, masks: TokenMasks | None = None) -> None:
        """Queue the choice of the next tokens. Must be called once, before the next `launch`.

        It is a separate call because, unlike the forward pass, it may depend on the host's view of earlier tokens:
        `masks`, the tokens that grammars allow. The caller must not use their arrays afterwards.
        """

    def wait(self) -> StepOutput:
        """Wait until the tokens are on the host, and return them."""


class Runner(Protocol):
    """The scheduler's interface to the execution layer. `ModelRunner` implements it, and so does the tests' fake."""

    def launch(self, step: StepInputs) -> LaunchedStep:
        """Queue the forward pass of a step. Returns without waiting on a GPU, and after the pass on a CPU."""

    def load_adapter(self, slot: int, path: str) -> str:
        """Reads the LoRA adapter in the folder `path` into an adapter slot, counted from 1. Returns its fingerprint: a
        hex digest of its config and its weights.

        No row in flight may use the slot. Raises ValueError for an adapter that cannot be used; then the slot is empty.
        """

    def unload_adapter(self, slot: int) -> None:
        """Makes an adapter slot empty: its rows compute as without an adapter. No row in flight may use it."""


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
