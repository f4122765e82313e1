"""The messages between the three processes. Each link has one union of frozen, tagged, typed messages.

    TokenizerManager --ToScheduler--> Scheduler --ToDetokenizer--> DetokenizerManager --ToTokenizer--> TokenizerManager
                     <----------------ToTokenizer (replies, heartbeats)---- Scheduler

All outputs of a request, also its failure, go through the detokenizer, so that they arrive in order.
A prompt is sent as raw int32 bytes in the msgpack frame, because the scheduler needs a numpy array: 1,000 ids take
23 us raw and 65 us as a list. Outputs have few ids and are sent as lists: one id takes 0.3 us as a list, 0.9 us raw.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType

from .arrays import Int32Array
from .control_messages import ControlQuestion, ControlReply
from .errors import TercetError
from .logprobs import Logprobs, NewLogprobs
from .request_options import RequestOptions
from .speculation_state import SpeculationState
from .tier_state import TierState
from .view_parts import HotPrefix, RequestView, StepRecord


def pack_ids(ids: Iterable[int]) -> bytes:
    """Encode token ids as int32 bytes."""
    return array("i", ids).tobytes()


def unpack_ids(data: bytes) -> Int32Array:
    """Decode the bytes of `pack_ids`: a read-only view, int32 [n]."""
    return np.frombuffer(data, dtype=np.int32)


# The reason why a request ended. The field names are those of `meta_info.finish_reason` in the API.


class StopFinish(msgspec.Struct, frozen=True, tag="stop", tag_field="type"):
    """The request ended at a stop. `matched`: the stop token's id, or the stop string."""

    matched: Annotated[int | str, Meta(description="The stop token's id, the stop string or the text of stop_regex")]


class LengthFinish(msgspec.Struct, frozen=True, tag="length", tag_field="type"):
    """The request reached its maximum length. `length`: the number of generated tokens."""

    length: Annotated[int, Meta(description="Number of tokens generated")]


class AbortFinish(msgspec.Struct, frozen=True, tag="abort", tag_field="type"):
    """The request was aborted. `status_code` None: that is no error; its client aborted it, or it was over its running
    time. `err_type`: a key of `errors.BY_TYPE`."""

    message: Annotated[str, Meta(description="Why it was aborted, for a person")]
    status_code: Annotated[int | None, Meta(description="Null. A request that fails is answered with the error")] = None
    err_type: Annotated[str | None, Meta(description="Null, as status_code")] = None
    retry_after_s: Annotated[int | UnsetType, Meta(description="Absent, as in every answer that is no error")] = UNSET
    param: Annotated[str | UnsetType, Meta(description="Absent, as retry_after_s")] = UNSET

    @classmethod
    def of(cls, error: TercetError) -> AbortFinish:
        """The end of a request that this error ends."""
        retry_after_s = UNSET if error.retry_after_s is None else error.retry_after_s
        param = UNSET if error.param is None else error.param
        return cls(error.message, error.status, type(error).__name__, retry_after_s, param)


FinishReason = StopFinish | LengthFinish | AbortFinish


# TokenizerManager -> Scheduler


class Resumed(msgspec.Struct, frozen=True, array_like=True):
    """What the client of a sample has from an engine that has died. `cached_tokens` None: no output."""

    output_ids: list[int]
    cached_tokens: int | None
    num_retractions: int
    host_tokens: int = 0
    storage_tokens: int = 0
    ran_s: float = 0.0
    """How long it has run, from its first token on. This counts for its running timeout."""


class GenerateReq(msgspec.Struct, frozen=True, tag="generate"):
    """A validated and tokenised request for one sample of one prompt. A request with `n` > 1 becomes several."""

    rid: str
    input_ids: bytes
    options: RequestOptions
    resumed: Resumed | None = None
    """Set in a restarted engine: the sample continues after `resumed.output_ids`."""
    waited_s: float | None = 0.0
    """How long it has waited for the engine, without pauses. Set if its waiting time is limited. None: that is over."""


class AbortReq(msgspec.Struct, frozen=True, tag="abort"):
    """Abort a request. `rid` None: all requests."""

    rid: str | None


class RetainReq(msgspec.Struct, frozen=True, tag="retain"):
    """Retain the prefix of a request that has ended. Only the reader of its text knows that it ended in a tool call."""

    rid: str
    token_ids: bytes
    """Of its prompt and its output (`pack_ids`)."""
    options: RequestOptions
    seconds: float


class FlushCacheReq(msgspec.Struct, frozen=True, tag="flush"):
    """Empty the prefix cache. The answer is a FlushCacheReply."""

    call_id: int


class StateReq(msgspec.Struct, frozen=True, tag="state"):
    """Send the scheduler's state. The answer is a StateReply."""

    call_id: int


class ViewReq(msgspec.Struct, frozen=True, tag="view"):
    """Describe what the engine is doing, for the live view. The answer is a ViewReply."""

    call_id: int
    after_step: int
    """Only steps with a higher number are wanted."""


Question = ControlQuestion | FlushCacheReq | StateReq | ViewReq
"""A message that gets one Reply, with the same `call_id`."""
ToScheduler = GenerateReq | AbortReq | RetainReq | Question


# Scheduler -> DetokenizerManager


class DecodeOptions(msgspec.Struct, frozen=True, array_like=True):
    """The detokenizer's options of a request, sent with its first output."""

    skip_special_tokens: bool
    no_stop_trim: bool
    stop_strings: list[str]
    resumed_ids: list[int] = []
    """Tokens whose text the client got from an engine that has died."""
    stop_patterns: list[str] = []
    shown_tokens: list[int] = []
    """Special tokens that are not skipped."""

    @classmethod
    def of(cls, options: RequestOptions, resumed_ids: Sequence[int] = ()) -> DecodeOptions:
        """Those of a request. `resumed_ids`: the tokens that the client already has."""
        params, shown = options.sampling, options.shown_tokens
        stops, patterns = list(params.stop_strings), list(params.stop_patterns)
        return cls(params.skip_special_tokens, params.no_stop_trim, stops, list(resumed_ids), patterns, shown)


class Counts(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Totals of a request since its arrival."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose KV was in the prefix cache at the first admission."""
    num_retractions: int = 0
    queue_time_s: float | None = None
    """Seconds from the arrival at the scheduler to the first admission. Set only in the request's last output, if it
    was admitted."""
    host_tokens: int = 0
    """Of `cached_tokens`, those that were loaded from host memory."""
    storage_tokens: int = 0
    """Of `cached_tokens`, those that were read from files."""
    num_drafts: int = 0
    """Drafts that the present engine has verified, up to the last TokenOut."""
    num_accepted_drafts: int = 0


class TokenOut(msgspec.Struct, frozen=True, array_like=True, kw_only=True, gc=False):
    """The new tokens of a request since its last TokenOut. `gc=False` here and below: no cycle can form."""

    rid: str
    token_ids: list[int]
    finish: FinishReason | None
    counts: Counts
    options: DecodeOptions | None = None
    """Set in the first TokenOut of the request."""
    logprobs: NewLogprobs | None = None
    """Of `token_ids`, and of the prompt in the first TokenOut; None: the request has not asked."""
    hidden_states: bytes | None = None
    """float32 [n, hidden_size], of the positions since the last TokenOut; None: the request has not asked. Before the
    end all positions but the last have one: the newest token is the input of no step yet."""
    embedding: bytes | None = None
    """float32 [hidden_size], in the last TokenOut of a request with `pooling`."""


class NextTokens(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One more token for each of some running requests, in columns: most outputs say nothing else."""

    rids: list[str] = []
    token_ids: list[int] = []
    logprobs: list[Logprobs | None] = []
    """Of each token; None: the request has not asked. Empty if no request has."""


class BatchTokenOut(msgspec.Struct, frozen=True, tag="tokens"):
    """The outputs of one turn of the scheduler. `TokenOutReader` returns all of them as TokenOuts."""

    outs: list[TokenOut]
    next: NextTokens = NextTokens()
    """They come before `outs`."""


ToDetokenizer = BatchTokenOut


# DetokenizerManager, Scheduler -> TokenizerManager


class TextOut(msgspec.Struct, frozen=True, array_like=True, kw_only=True, gc=False):
    """A TokenOut with its text. `text`: the text that has become certain since the last TextOut.

    It never ends inside a character or inside a possible stop string, so `token_ids` may be ahead of it. The TextOut
    with `finish` has the rest of the text.
    """

    tokens: TokenOut
    """As the scheduler sent it, without `options`. A new field of TokenOut arrives here without further code."""
    text: str

    @property
    def rid(self) -> str:
        return self.tokens.rid

    @property
    def token_ids(self) -> list[int]:
        return self.tokens.token_ids

    @property
    def finish(self) -> FinishReason | None:
        return self.tokens.finish

    @property
    def counts(self) -> Counts:
        return self.tokens.counts


def joined(outs: Sequence[TextOut]) -> TextOut:
    """Successive outputs of a request as one."""
    last = outs[-1]
    if len(outs) == 1:
        return last
    logprobs = [out.tokens.logprobs for out in outs if out.tokens.logprobs is not None]
    states = [out.tokens.hidden_states for out in outs if out.tokens.hidden_states is not None]
    tokens = TokenOut(
        rid=last.rid,
        token_ids=[token for out in outs for token in out.token_ids],
        finish=last.finish,
        counts=last.counts,
        logprobs=NewLogprobs.joined(logprobs) if logprobs else None,
        hidden_states=b"".join(states) if states else None,
        embedding=last.tokens.embedding,
    )
    return TextOut(tokens=tokens, text="".join([out.text for out in outs]))


class BatchTextOut(msgspec.Struct, frozen=True, tag="texts"):
    """The TextOuts of the messages that the detokenizer has handled in one turn."""

    outs: list[TextOut]


class FlushCacheReply(msgspec.Struct, frozen=True, tag="flushed"):
    """The answer to a FlushCacheReq."""

    call_id: int
    num_busy: int
    """Requests that run or wait. If there is one, the cache was not emptied."""


class SchedulerState(msgspec.Struct, frozen=True, kw_only=True):
    """The scheduler's state, for /server_info, /get_load and tests. Tokens are KV slots."""

    num_running: int
    """Requests that hold KV: the decoding ones, and those whose prompts are computed in chunks."""
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
    num_waiting_uncached_tokens: int = 0
    """Prompt tokens that waiting and unfinished requests have yet to compute, less the cached ones that are known."""
    num_retained_tokens: int = 0
    """Cached tokens that retention keeps longer than others. They may be free to evict."""
    num_saved_states: int = 0
    """States of recurrent layers that the prefix cache keeps."""
    is_paused: bool = False
    """Generation is paused: requests wait, and no step runs."""
    tiers: TierState | None = None
    """Host memory and files. None without `--enable-hierarchical-cache`."""
    speculation: SpeculationState | None = None
    """None without `--speculative-algorithm`."""

    @property
    def num_used_tokens(self) -> int:
        """KV slots that requests hold. Those that only the prefix cache holds count as free: it can evict them."""
        return self.num_protected_tokens + self.num_private_tokens


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """The sign that the scheduler's loop runs. Sent at least twice a second, except during a step."""

    state: SchedulerState


class DetokenizerAlive(msgspec.Struct, frozen=True, tag="alive"):
    """The sign that the detokenizer's loop runs. Sent when it had nothing to do for half a second."""


class StateReply(msgspec.Struct, frozen=True, tag="state"):
    """The answer to a StateReq."""

    call_id: int
    state: SchedulerState


class EngineView(msgspec.Struct, frozen=True):
    """What the engine is doing. The lists are bounded."""

    now_s: float
    """Time on the scheduler's clock, in seconds."""
    state: SchedulerState
    generated_tokens: int
    """Since the engine's start."""
    steps: list[StepRecord]
    """The newest finished steps, oldest first."""
    requests: list[RequestView]
    """Running requests first."""
    prefixes: list[HotPrefix]


class ViewReply(msgspec.Struct, frozen=True, tag="view"):
    """The answer to a ViewReq."""

    call_id: int
    view: EngineView


Reply = ControlReply | FlushCacheReply | StateReply | ViewReply
ToTokenizer = BatchTextOut | Heartbeat | DetokenizerAlive | Reply


# Within the process that receives a message


class BrokenMessage(msgspec.Struct, frozen=True):
    """The replacement for a message that could not be decoded or handled. The log has the details."""

    rids: list[str]
    """The requests that the message names. They end with an error."""
    reason: str
    """The error message for their clients."""


def request_ids(message: Any) -> list[str]:
    """The ids of the requests that a decoded message names. It may be invalid in any way."""
    if not isinstance(message, dict):
        return []
    outs, columns = message.get("outs"), message.get("next")
    named = [message.get("rid")]
    if isinstance(columns, list) and columns and isinstance(columns[0], list):
        named += columns[0]
    named += [_rid_of(out) for out in outs] if isinstance(outs, list) else []
    return [rid for rid in named if isinstance(rid, str)]


def _rid_of(out: Any) -> Any:
    """The `rid` of a decoded TokenOut, or of a TextOut, which begins with its TokenOut."""
    first = out[0] if isinstance(out, list) and out else None
    return first[0] if isinstance(first, list) and first else first
