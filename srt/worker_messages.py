"""The messages between the HTTP workers of `--tokenizer-worker-num` and the process that started them, the parent.

Each worker has a link of its own in each direction, in a RunDir whose `life` is the number of the worker. To a worker,
the parent is the scheduler: it takes the same requests, and sends the same outputs.
"""

from __future__ import annotations

import msgspec

from .grammar_spec import CheckGrammarReq
from .io_struct import AbortFinish, AbortReq, BatchTextOut, GenerateReq, RetainReq
from .request_options import RequestOptions
from .start_reports import SchedulerReady

# Worker -> parent


class SampleReq(msgspec.Struct, frozen=True, tag="sample"):
    """A GenerateReq, and the client's name for the sample, which crash reports and the log use."""

    rid: str
    """The key of the sample: the `rid` of its GenerateReq."""
    input_ids: bytes
    options: RequestOptions
    name: str
    """The client's name for the prompt."""
    index: int
    """The index among the samples of the prompt."""

    @property
    def request(self) -> GenerateReq:
        return GenerateReq(self.rid, self.input_ids, self.options)


class EndpointCall(msgspec.Struct, frozen=True, tag="endpoint"):
    """A request to an endpoint that only the parent can answer. The answer is an EndpointReply."""

    call_id: int
    method: str
    path: str
    query: bytes
    """As in the URL."""
    body: bytes


class LimitCall(msgspec.Struct, frozen=True, tag="limit"):
    """Take one request from the limits of a client (key_limits.py). The answer is a LimitReply."""

    call_id: int
    client: str


class LimitRelease(msgspec.Struct, frozen=True, tag="limit_release"):
    """The request of the LimitCall with this number has ended, or the worker has not waited for the reply."""

    call_id: int


class AbortReply(msgspec.Struct, frozen=True, tag="aborted"):
    """The answer to an AbortCall. `found`: the worker had such a request."""

    call_id: int
    found: bool


class CaughtUp(msgspec.Struct, frozen=True, tag="caught_up"):
    """The answer to a CatchUpCall."""

    call_id: int


class WorkerServes(msgspec.Struct, frozen=True, tag="serves"):
    """The worker has the first EngineNews, and takes requests."""


class WorkerAlive(msgspec.Struct, frozen=True, tag="alive"):
    """A heartbeat: the worker's event loop runs. Sent twice a second from `WorkerServes` on."""


class WorkerDrained(msgspec.Struct, frozen=True, tag="drained"):
    """The worker was told to take no more requests, and all of its requests have ended."""


FromWorker = (
    SampleReq
    | AbortReq
    | RetainReq
    | CheckGrammarReq
    | EndpointCall
    | LimitCall
    | LimitRelease
    | AbortReply
    | CaughtUp
    | WorkerServes
    | WorkerAlive
    | WorkerDrained
)


# Parent -> worker


class EngineNews(msgspec.Struct, frozen=True, tag="news", kw_only=True):
    """What a worker must know of the engine. Sent when it is ready, and at each change."""

    facts: SchedulerReady
    model_path: str
    """With the next three: the weights in use."""
    load_format: str
    dtype: str
    weight_version: str
    stall: str | None
    """As `TokenizerManager.stall`."""
    failure: str | None
    """Why the engine has ended for good; None: it has not."""
    draining: bool
    """The server is shutting down: running requests may finish, and new ones are refused."""
    started: int
    """When the server started, in seconds since 1970."""


class EndpointReply(msgspec.Struct, frozen=True, tag="endpoint_reply"):
    """The answer to an EndpointCall: an HTTP response."""

    call_id: int
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class LimitReply(msgspec.Struct, frozen=True, tag="limit_reply", kw_only=True):
    """The answer to a LimitCall."""

    call_id: int
    refusal: str | None
    """Why the request is refused. It takes nothing then; None: it may run."""
    retry_after_s: int | None
    """Of a refusal."""
    per_minute: int | None
    """The limit on the client's rate."""
    full_at: float
    """When the client's bucket will be full if nothing more is taken; 0 without a limit on the rate."""


class GrammarVerdict(msgspec.Struct, frozen=True, tag="verdict"):
    """The answer to a CheckGrammarReq. `failure`: it could not be checked."""

    call_id: int
    reason: str | None
    """Why the grammar cannot be used; None if it can."""
    failure: AbortFinish | None = None


class AbortCall(msgspec.Struct, frozen=True, tag="abort_call"):
    """Abort the request or prompt of exactly this name; None: all requests. The answer is an AbortReply."""

    call_id: int
    name: str | None


class CatchUpCall(msgspec.Struct, frozen=True, tag="catch_up"):
    """Answer with CaughtUp. Then the worker knows the EngineNews that were sent before."""

    call_id: int


class ParentAlive(msgspec.Struct, frozen=True, tag="parent_alive"):
    """The parent's event loop turns. Sent about three times a second."""


class Recoveries(msgspec.Struct, frozen=True, tag="recoveries"):
    """How often the engine was restarted while it worked on each of these samples. Sent before their outputs."""

    by_key: dict[str, int]


ToWorker = (
    BatchTextOut
    | Recoveries
    | EngineNews
    | EndpointReply
    | LimitReply
    | GrammarVerdict
    | AbortCall
    | CatchUpCall
    | ParentAlive
)
