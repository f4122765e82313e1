"""The errors that Tercet raises on purpose.

    TercetError                      500  internal_server_error
    |-- InvalidRequest               400  invalid_request_error   (also a ValueError)
    |   |-- UnsupportedField         400  a field of a feature that is not implemented
    |   |-- PromptTooLong            400  context_length_exceeded
    |   `-- PreviousNotFound         400  previous_response_not_found: of previous_response_id
    |-- NotAllowed                   403  a flag is missing, or a path is outside the folder that the operator allows
    |-- ModelNotFound                404  model_not_found
    |-- RequestAborted               499  the client aborted the request or closed the connection
    |-- QueueFull                    503  the waiting queue is full, or the wait would be too long: try again later
    |-- WaitingTimeout               503  the request has waited too long for its first step
    |-- GrammarNotChecked            503  the grammar could not be compiled, and it need not be the cause
    |-- EnginePaused                 503  the probe needs an engine that is not paused
    |-- EngineBusy                   400  the call (flush) needs an idle engine
    |-- MetricsOff                   404  the server runs without --enable-metrics
    |-- ResponseStoreOff             404  the server runs without --response-store-mib
    |-- ResponseNotFound             404  no such stored response, or another client's
    |-- ResumeOff                    404  the server runs without --resume-grace
    |-- StreamNotFound               404  no such stream, or another key's, or its grace time is over
    |-- StreamGone                   410  the stream no longer has the wanted events
    |-- StreamChanged                409  the stream began on a server with another model or other settings
    |-- InvalidLogits                500  the model produced NaN for this request
    |-- EngineDead                   503  a process of the engine has died
    |   `-- EngineRestarting         503  the engine is being restarted: try again in a moment
    |-- FatalRequest                 500  the engine died twice while it worked on this request
    `-- ModelNotSupported            (start-up) ValueError that names the supported architectures

Each class has its HTTP status and its OpenAI `type` and `code`, so that handlers need no tables.
"""

from __future__ import annotations

from typing import ClassVar

MAX_RETRY_AFTER_S = 60
"""The longest Retry-After. Many clients ignore a longer one. With a longer backlog, a client may be refused again."""


class TercetError(Exception):
    """The base class of all errors. `param`: the request field that is wrong, if there is one."""

    status: ClassVar[int] = 500
    err_type: ClassVar[str] = "internal_server_error"
    code: ClassVar[str | None] = None
    retry_after_s: int | None = None
    """When the client should try again, if that is known."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(TercetError, ValueError):
    status = 400
    err_type = "invalid_request_error"


class UnsupportedField(InvalidRequest):
    code = "unsupported_field"


class PromptTooLong(InvalidRequest):
    code = "context_length_exceeded"

    @classmethod
    def of(cls, context_len: int, problem: str, *, param: str = "prompt") -> PromptTooLong:
        """The error in the words that litellm and LangChain look for before they fall back to another model."""
        return cls(
            f"This model's maximum context length is {context_len} tokens, but {problem} ({cls.code})", param=param
        )


class PreviousNotFound(InvalidRequest):
    code = "previous_response_not_found"


class NotAllowed(TercetError):
    status = 403
    err_type = "permission_error"
    code = "not_allowed"


class ModelNotFound(TercetError):
    status = 404
    err_type = "invalid_request_error"
    code = "model_not_found"


class RequestAborted(TercetError):
    status = 499
    err_type = "request_aborted"


class QueueFull(TercetError):
    status = 503
    err_type = "service_unavailable"
    code = "queue_full"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s

    @classmethod
    def of(cls, num_waiting: int, retry_after_s: int | None) -> QueueFull:
        """`num_waiting`: how many requests wait, as many as may."""
        return cls(f"the waiting queue is full ({num_waiting} requests); try again later", retry_after_s=retry_after_s)


class WaitingTimeout(TercetError):
    status = 503
    err_type = "service_unavailable"
    code = "waiting_timeout"

    @classmethod
    def of(cls, limit_s: float) -> WaitingTimeout:
        """The error of a request that may wait for `limit_s` seconds."""
        return cls(f"the request has waited for {limit_s:g} s without a first step")


class GrammarNotChecked(TercetError):
    status = 503
    err_type = "service_unavailable"
    code = "grammar_not_checked"


class EnginePaused(TercetError):
    status = 503
    err_type = "service_unavailable"
    code = "engine_paused"


class EngineBusy(TercetError):
    status = 400
    err_type = "engine_busy"


class MetricsOff(TercetError):
    status = 404
    err_type = "invalid_request_error"
    code = "metrics_off"


class ResponseStoreOff(TercetError):
    status = 404
    err_type = "invalid_request_error"
    code = "response_store_off"


class ResponseNotFound(TercetError):
    status = 404
    err_type = "invalid_request_error"
    code = "response_not_found"


class ResumeOff(TercetError):
    status = 404
    err_type = "invalid_request_error"
    code = "resume_off"


class StreamNotFound(TercetError):
    status = 404
    err_type = "invalid_request_error"
    code = "stream_not_found"


class StreamGone(TercetError):
    status = 410
    err_type = "invalid_request_error"
    code = "stream_gone"


class StreamChanged(TercetError):
    status = 409
    err_type = "invalid_request_error"
    code = "stream_changed"


class InvalidLogits(TercetError):
    err_type = "invalid_logits"


class EngineDead(TercetError):
    status = 503
    err_type = "service_unavailable"
    code = "engine_dead"


class EngineRestarting(EngineDead):
    code = "engine_restarting"


class FatalRequest(TercetError):
    code = "fatal_request"


class ModelNotSupported(TercetError, ValueError):
    err_type = "model_not_supported"


BY_TYPE: dict[str, type[TercetError]] = {
    cls.__name__: cls
    for cls in (
        TercetError,
        InvalidRequest,
        PromptTooLong,
        RequestAborted,
        QueueFull,
        StreamChanged,
        WaitingTimeout,
        GrammarNotChecked,
        InvalidLogits,
        EngineDead,
        FatalRequest,
    )
}
"""The errors that are sent between processes, by the name in `io_struct.AbortFinish.err_type`."""
