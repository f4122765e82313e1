"""The messages between the three processes: one union per link, frozen, tagged, typed; nothing else crosses.

    TokenizerManager --ToScheduler--> Scheduler --ToDetokenizer--> DetokenizerManager --ToTokenizer--> TokenizerManager
                     <----------------ToTokenizer (replies, heartbeats)---- Scheduler

Everything that a client sees about a request, its failure included, takes the road through the detokenizer, so that
nothing overtakes a token. Prompts travel as raw int32 buffers inside the msgpack frame, because the scheduler wants
them as numpy arrays (1,000 ids, encode to array: 23 us raw, 65 us as a list); outputs of a few ids travel as lists
(one id, there and back: 0.3 us as a list, 0.9 us raw).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from .request_options import RequestOptions


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token ids as the bytes that travel."""
    return array("i", ids).tobytes()


def unpack_ids(data: bytes) -> npt.NDArray[np.int32]:
    """A view of those bytes as int32 [n], read-only."""
    return np.frombuffer(data, dtype=np.int32)


# How a request ended. The field names are those of `meta_info.finish_reason` on the wire.


class StopFinish(msgspec.Struct, frozen=True, tag="stop", tag_field="type"):
    """`matched`: the stop token's id, or the stop string."""

    matched: int | str


class LengthFinish(msgspec.Struct, frozen=True, tag="length", tag_field="type"):
    """`length`: the number of tokens generated."""

    length: int


class AbortFinish(msgspec.Struct, frozen=True, tag="abort", tag_field="type"):
    """`status_code` None: the client asked for it, which is not an error. `err_type`: a class of `errors.BY_TYPE`."""

    message: str
    status_code: int | None = None
    err_type: str | None = None


FinishReason = StopFinish | LengthFinish | AbortFinish


# TokenizerManager -> Scheduler


class GenerateReq(msgspec.Struct, frozen=True, tag="generate"):
    """One prompt, one sample; validated and tokenised. `n` is unfolded before this."""

    rid: str
    input_ids: bytes
    options: RequestOptions


class AbortReq(msgspec.Struct, frozen=True, tag="abort"):
    """`rid` None: every request there is."""

    rid: str | None


class FlushCacheReq(msgspec.Struct, frozen=True, tag="flush"):
    call_id: int


class StateReq(msgspec.Struct, frozen=True, tag="state"):
    call_id: int


ToScheduler = GenerateReq | AbortReq | FlushCacheReq | StateReq


# Scheduler -> DetokenizerManager


class DecodeOptions(msgspec.Struct, frozen=True, array_like=True):
    """What the detokenizer must know about a request; sent with its first output."""

    skip_special_tokens: bool
    no_stop_trim: bool
    stop_strings: list[str]


class TokenOut(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one request since its last TokenOut. Counts are totals."""

    rid: str
    token_ids: list[int]
    finish: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV was found in the prefix cache at first admission."""
    num_retractions: int
    options: DecodeOptions | None = None
    """Set on the first TokenOut of the request."""


class BatchTokenOut(msgspec.Struct, frozen=True, tag="tokens"):
    outs: list[TokenOut]


ToDetokenizer = BatchTokenOut


# DetokenizerManager, Scheduler -> TokenizerManager


class TextOut(msgspec.Struct, frozen=True, array_like=True):
    """A TokenOut with its text. `text` is what became certain since the last one: never half a character, never part
    of a stop string; together with `finish` comes all the rest. `token_ids` may run ahead of `text`."""

    rid: str
    text: str
    token_ids: list[int]
    finish: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    num_retractions: int


class BatchTextOut(msgspec.Struct, frozen=True, tag="texts"):
    outs: list[TextOut]


class FlushCacheReply(msgspec.Struct, frozen=True, tag="flushed"):
    call_id: int
    ok: bool
    """False: requests were running or waiting, nothing was flushed."""
    num_busy: int


class SchedulerState(msgspec.Struct, frozen=True):
    """A look at the scheduler, for /server_info, /get_load and tests. Tokens are KV slots."""

    num_running: int
    """Requests that hold KV: those that decode, and the prompt of which a part is computed."""
    num_waiting: int
    num_free_tokens: int
    num_evictable_tokens: int
    num_protected_tokens: int
    num_private_tokens: int
    max_total_num_tokens: int
    last_gen_throughput: float
    """Tokens a second over the last decode log interval. Time in which nothing ran does not count."""
    cache_hit_rate: float
    """Cached share of all prompt tokens admitted since the start."""
    num_retractions: int
    num_aborted: int
    num_finished: int
    num_kv_repairs: int
    """Times the idle audit found a mistake in the KV books and rebuilt the pool."""
    new_token_ratio: float


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """The scheduler's loop has turned. Sent at least twice a second while it is not inside a step."""

    state: SchedulerState


class StateReply(msgspec.Struct, frozen=True, tag="state"):
    call_id: int
    state: SchedulerState


ToTokenizer = BatchTextOut | Heartbeat | FlushCacheReply | StateReply


# In place of a message, within the process that received it


class BrokenMessage(msgspec.Struct, frozen=True):
    """What arrived and could not be decoded or handled; the log has the details."""

    rids: list[str]
    """The requests that the message names. They end with an error."""
    reason: str
    """What their clients are told."""


def request_ids(message: Any) -> list[str]:
    """The ids of the requests that a message names. `message`: built-in types, as a msgpack frame holds them.

    Nothing is assumed of it, so that it may be broken anywhere.
    """
    if not isinstance(message, dict):
        return []
    outs = message.get("outs")
    named = [message.get("rid")]
    named += [out[0] for out in outs if isinstance(out, list) and out] if isinstance(outs, list) else []
    return [rid for rid in named if isinstance(rid, str)]


# Child process -> its parent, once, over a pipe


class SchedulerReady(msgspec.Struct, frozen=True, tag="scheduler_ready"):
    """The facts that only the scheduler's process knows, once the model is loaded."""

    max_total_num_tokens: int
    max_running_requests: int
    max_req_input_len: int
    """Tokens of the longest prompt that can be served (context and KV pool considered)."""
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
    """Device memory of CUDA graphs; 0 where there are none."""


class DetokenizerReady(msgspec.Struct, frozen=True, tag="detokenizer_ready"):
    pass


class StartFailed(msgspec.Struct, frozen=True, tag="start_failed"):
    """`user_error`: the message alone tells what to change; otherwise the log has the traceback."""

    message: str
    user_error: bool


ToParent = SchedulerReady | DetokenizerReady | StartFailed
