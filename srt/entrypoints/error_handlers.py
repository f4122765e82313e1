"""Error responses: every endpoint answers errors in OpenAI's envelope.

A TercetError has a status, type, code and message. Any other exception is a defect: the client gets status 500 and a
message without details, and the log gets the traceback.
"""

from __future__ import annotations

import difflib
from typing import Annotated, ClassVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from ..errors import FatalRequest, TercetError
from .wire import doc

RETRY_AFTER_S = 1
"""Of a 503 whose error does not know when the client should try again."""
_encode = msgspec.json.Encoder().encode


class ErrorBody(msgspec.Struct, frozen=True):
    """The error itself. `param`: the field of the request that is wrong, if there is one."""

    message: Annotated[str, doc("What is wrong, for a person")]
    type: Annotated[str, doc("Kind of error")]
    param: Annotated[str | None, doc("Path of the wrong field of the request, if there is one")]
    code: Annotated[str | None, doc("Machine-readable kind of the error; see the table of statuses")]


class ErrorEnvelope(msgspec.Struct, frozen=True):
    """Body of every response that is not 2xx, and data of the error event in a stream."""

    error: Annotated[ErrorBody, doc("The error")]


class BodyTooLarge(TercetError):
    status: ClassVar[int] = 413
    err_type: ClassVar[str] = "invalid_request_error"
    code: ClassVar[str | None] = "request_too_large"


class RequestTimeout(TercetError):
    status: ClassVar[int] = 408
    err_type: ClassVar[str] = "invalid_request_error"
    code: ClassVar[str | None] = "request_timeout"


class HeadTooLarge(TercetError):
    status: ClassVar[int] = 431
    err_type: ClassVar[str] = "invalid_request_error"
    code: ClassVar[str | None] = "head_too_large"


class Forbidden(TercetError):
    status: ClassVar[int] = 403
    err_type: ClassVar[str] = "permission_error"
    code: ClassVar[str | None] = "cross_site"


class Unauthorized(TercetError):
    status: ClassVar[int] = 401
    err_type: ClassVar[str] = "authentication_error"
    code: ClassVar[str | None] = "invalid_api_key"


def envelope(error: TercetError) -> bytes:
    """The error in its envelope, as JSON."""
    return _encode(ErrorEnvelope(ErrorBody(error.message, error.err_type, error.param, error.code)))


def text_with_param(error: TercetError) -> str:
    """What is wrong and where, for an API whose errors do not name the field."""
    return error.message if error.param is None else f"{error.param}: {error.message}"


def internal_error() -> TercetError:
    """The error that a client gets for a defect. It has no details."""
    return TercetError("internal error; the server's log has the details")


def error_response(error: TercetError) -> Response:
    """The response of an error.

    429 and 503 tell the client when to retry, and 401 how to authenticate. FatalRequest tells OpenAI's clients not to
    retry. 413 closes the connection, because the rest of the body is not read.
    """
    headers = {}
    if error.status in (429, 503):
        headers["retry-after"] = str(error.retry_after_s or RETRY_AFTER_S)
    elif error.status == 401:
        headers["www-authenticate"] = "Bearer"
    elif error.status == 413:
        headers["connection"] = "close"
    elif isinstance(error, FatalRequest):
        headers["x-should-retry"] = "false"
    return Response(envelope(error), error.status, headers, "application/json")


async def http_exception(request: Request, error: Exception) -> Response:
    """Puts Starlette's own errors, such as 404 and 405, into the envelope."""
    assert isinstance(error, HTTPException)
    path = ascii(request.url.path)[1:-1][:200]
    headers = error.headers
    if error.status_code == 405:
        allowed = ", ".join(_methods_of(request))
        headers = {"Allow": allowed}
        message = f"{request.method} is not allowed on {path}; allowed: {allowed}"
        body = ErrorBody(message, "invalid_request_error", None, "method_not_allowed")
    elif error.status_code == 404:
        near = difflib.get_close_matches(path, [route.path for route in request.app.routes], n=1, cutoff=0.8)
        hint = f"did you mean {near[0]}?" if near else "/docs lists all endpoints"
        message = f"path {path} does not exist; {hint}"
        body = ErrorBody(message, "invalid_request_error", None, "not_found")
    else:
        body = ErrorBody(error.detail, "invalid_request_error", None, None)
    return Response(_encode(ErrorEnvelope(body)), error.status_code, headers, "application/json")


def _methods_of(request: Request) -> list[str]:
    """The methods of a path. It may have several routes, and Starlette's error has those of the first one only."""
    routes = [route for route in request.app.routes if route.matches(request.scope)[0] is Match.PARTIAL]
    return sorted({method for route in routes for method in route.methods})
