"""The messages between the three processes. Each link has one union of frozen, tagged, typed messages.

    TokenizerManager --ToScheduler--> Scheduler --ToDetokenizer--> DetokenizerManager --ToTokenizer--> TokenizerManager
                     <----------------ToTokenizer (replies, heartbeats)---- Scheduler

All outputs of a request, also its failure, go through the detokenizer, so that they arrive in order.

A prompt is sent as raw int32 bytes in the msgpack frame, because the scheduler needs a numpy array: 1,000 ids take
23 us raw and 65 us as a list. Outputs have few ids and are sent as lists: one id takes 0.3 us as a list, 0.9 us raw.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from .errors import TercetError
from .request_options import RequestOptions


def pack_ids(ids: Iterable[int]) -> bytes:
    """Encode token ids as int32 bytes."""
    return array("i", ids).tobytes()


def unpack_ids(data: bytes) -> npt.NDArray[np.int32]:
    """Decode the bytes of `pack_ids`: a read-only view, int32 [n]."""
    return np.frombuffer(data, dtype=np.int32)


# The reason why a request ended. The field names are those of `meta_info.finish_reason` in the API.


class StopFinish(msgspec.Struct, frozen=True, tag="stop", tag_field="type"):
    """The request ended at a stop. `matched`: the stop token's id, or the stop string."""

    matched: Annotated[int | str, Meta(description="The stop token's id, or the stop string")]


class LengthFinish(msgspec.Struct, frozen=True, tag="length", tag_field="type"):
    """The request reached its maximum length. `length`: the number of generated tokens."""

    length: Annotated[int, Meta(description="Number of tokens generated")]


class AbortFinish(msgspec.Struct, frozen=True, tag="abort", tag_field="type"):
    """The request was aborted. `status_code` None: by its client, no error. `err_type`: a key of `errors.BY_TYPE`."""

    message: Annotated[str, Meta(description="Why it was aborted, for a person")]
    status_code: Annotated[int | None, Meta(description="Null. A request that fails is answered with the error")] = None
    err_type: Annotated[str | None, Meta(description="Null, as status_code")] = None

    @classmethod
    def of(cls, error: TercetError) -> AbortFinish:
        """The end of a request that this error ends."""
        return cls(error.message, error.status, type(error).__name__)


FinishReason = StopFinish | LengthFinish | AbortFinish


# TokenizerManager -> Scheduler


class GenerateReq(msgspec.Struct, frozen=True, tag="generate"):
    """A validated and tokenised request for one sample of one prompt. A request with `n` > 1 becomes several."""

    rid: str
    input_ids: bytes
    options: RequestOptions


class AbortReq(msgspec.Struct, frozen=True, tag="abort"):
    """Abort a request. `rid` None: all requests."""

    rid: str | None


class FlushCacheReq(msgspec.Struct, frozen=True, tag="flush"):
    """Empty the prefix cache. The answer is a FlushCacheReply."""

    call_id: int


class StateReq(msgspec.Struct, frozen=True, tag="state"):
    """Send the scheduler's state. The answer is a StateReply."""

    call_id: int


ToScheduler = GenerateReq | AbortReq | FlushCacheReq | StateReq


# Scheduler -> DetokenizerManager


class DecodeOptions(msgspec.Struct, frozen=True, array_like=True):
    """The detokenizer's options of a request, sent with its first output."""

    skip_special_tokens: bool
    no_stop_trim: bool
    stop_strings: list[str]


class Counts(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Totals of a request since its arrival."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose KV was in the prefix cache at the first admission."""
    num_retractions: int = 0


class TokenOut(msgspec.Struct, frozen=True, array_like=True, kw_only=True, gc=False):
    """The new tokens of a request since its last TokenOut. `gc=False` here and below: no cycle can form."""

    rid: str
    token_ids: list[int]
    finish: FinishReason | None
    counts: Counts
    options: DecodeOptions | None = None
    """Set in the first TokenOut of the request."""


class BatchTokenOut(msgspec.Struct, frozen=True, tag="tokens"):
    """The TokenOuts of one turn of the scheduler."""

    outs: list[TokenOut]


ToDetokenizer = BatchTokenOut


# DetokenizerManager, Scheduler -> TokenizerManager


class TextOut(msgspec.Struct, frozen=True, array_like=True, kw_only=True, gc=False):
    """A TokenOut with its text. `text`: the text that has become certain since the last TextOut.

    It never ends inside a character or inside a possible stop string, so `token_ids` may be ahead of it. The TextOut
    with `finish` has the rest of the text.
    """

    rid: str
    text: str
    token_ids: list[int]
    finish: FinishReason | None
    counts: Counts


class BatchTextOut(msgspec.Struct, frozen=True, tag="texts"):
    """The TextOuts of the messages that the detokenizer has handled in one turn."""

    outs: list[TextOut]


class FlushCacheReply(msgspec.Struct, frozen=True, tag="flushed"):
    """The answer to a FlushCacheReq."""

    call_id: int
    ok: bool
    """False: requests were running or waiting, so the cache was not emptied."""
    num_busy: int


class SchedulerState(msgspec.Struct, frozen=True, kw_only=True):
    """The scheduler's state, for /server_info, /get_load and tests. Tokens are KV slots."""

    num_running: int
    """Requests that hold KV: the decoding ones, and the one whose prompt is computed in chunks."""
    num_waiting: int
    num_free_tokens: int
    num_evictable_tokens: int
    num_protected_tokens: int
    num_private_tokens: int
    max_total_num_tokens: int
    last_gen_throughput: float
    """Generated tokens per second in the last interval between decode log lines, without idle time."""
    cache_hit_rate: float
    """Share of prompt tokens that were in the prefix cache, over all requests admitted since the start."""
    num_retractions: int
    num_aborted: int
    num_finished: int
    num_kv_repairs: int
    """Number of times that the idle audit found an error in the KV accounting and rebuilt the pool."""
    new_token_ratio: float


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """The sign that the scheduler's loop runs. Sent at least twice a second, except during a step."""

    state: SchedulerState


class StateReply(msgspec.Struct, frozen=True, tag="state"):
    """The answer to a StateReq."""

    call_id: int
    state: SchedulerState


ToTokenizer = BatchTextOut | Heartbeat | FlushCacheReply | StateReply


# Within the process that receives a message


class BrokenMessage(msgspec.Struct, frozen=True):
    """The replacement for a message that could not be decoded or handled. The log has the details."""

    rids: list[str]
    """The requests that the message names. They end with an error."""
    reason: str
    """The error message for their clients."""


def request_ids(message: Any) -> list[str]:
    """The ids of the requests that a message names. `message`: the built-in types of a decoded msgpack frame.

    The message may be invalid in any way.
    """
    if not isinstance(message, dict):
        return []
    outs = message.get("outs")
    named = [message.get("rid")]
    named += [out[0] for out in outs if isinstance(out, list) and out] if isinstance(outs, list) else []
    return [rid for rid in named if isinstance(rid, str)]


# Child process -> its parent, once, over a pipe


class SchedulerReady(msgspec.Struct, frozen=True, kw_only=True, tag="scheduler_ready"):
    """The scheduler process is ready. The fields are facts that only a loaded model knows."""

    max_total_num_tokens: int
    max_running_requests: int
    max_req_input_len: int
    """Tokens of the longest prompt that fits into the context and into the KV pool."""
    context_len: int
    chunked_prefill_size: int
    max_prefill_tokens: int
    vocab_size: int
    dtype: str
    device: str
    attention_backend: str
    page_size: int
    weight_bytes: int
    kv_bytes: int
    graph_bytes: int = 0
    """Device memory of CUDA graphs; 0 without graphs."""


class DetokenizerReady(msgspec.Struct, frozen=True, tag="detokenizer_ready"):
    """The detokenizer process is ready."""


class StartFailed(msgspec.Struct, frozen=True, tag="start_failed"):
    """A child could not start. `user_error`: the message says what to change; otherwise the log has the traceback."""

    message: str
    user_error: bool


ToParent = SchedulerReady | DetokenizerReady | StartFailed
