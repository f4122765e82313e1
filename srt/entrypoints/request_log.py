"""The name of each HTTP request, and its log lines: `--access-log` and `--log-requests`.

A request is named by its header `x-request-id`, or else by a random name. The response has the name in the same header,
and each line of the log about the request has it, too.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...managers.request_registry import Prompt
from ...managers.tokenizer_manager import TokenizerManager
from .. import log
from ..server_args import ServerArgs
from .auth import OPEN_PATHS
from .job import Sample
from .tracing import RequestTracer

access_logger = logging.getLogger("tercet.access")
request_logger = logging.getLogger("tercet.requests")

HEADER = b"x-request-id"
PARTIAL_CHARS = 2048
"""How much of a text the log has at level 2."""
_VALID_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_RECORD = "tercet.record"
_RELEASE = "tercet.release_record"


class RequestRecord:
    """What is known of one HTTP request."""

    def __init__(self, scope: Scope) -> None:
        self.id = _given_id(scope) or uuid.uuid4().hex.encode()
        self.status = 0
        """Of the response; 0 while there is none."""
        self.samples: Sequence[Sample] = ()
        self.started = time.monotonic()
        self.num_holders = 1
        """Its connection, and its stream if that outlives the connection. The last one to leave ends the request."""


def _given_id(scope: Scope) -> bytes | None:
    """The client's name for the request; None if there is none, or if it has forbidden characters."""
    for name, value in scope["headers"]:
        if name == HEADER:
            return value if _VALID_ID.fullmatch(value) else None
    return None


class RequestLog:
    """The ASGI middleware that names requests, and logs and traces their ends."""

    def __init__(self, app: ASGIApp, args: ServerArgs, tracer: RequestTracer | None = None) -> None:
        self._app = app
        self._tracer = tracer
        self._is_access_logged = args.access_log or args.log_level == "debug"
        self._log_level = args.log_requests_level if args.log_requests else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = scope[_RECORD] = RequestRecord(scope)
        scope[_RELEASE] = partial(self._release, scope, record)

        def named_send(message: Message) -> Awaitable[None]:
            # Not a coroutine function: a stream calls this for each event.
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), (HEADER, record.id)]}
            return send(message)

        try:
            await self._app(scope, receive, named_send)
        finally:
            if self._is_access_logged:
                _log_access(scope, record)
            self._release(scope, record)

    def _release(self, scope: Scope, record: RequestRecord) -> None:
        record.num_holders -= 1
        if record.num_holders:
            return
        if self._log_level is not None:
            _log_finish(record, self._log_level)
        if self._tracer is not None:
            self._tracer.record(scope, record)


def _log_access(scope: Scope, record: RequestRecord) -> None:
    fields: dict[str, Any] = {
        "request_id": record.id.decode(),
        "method": scope["method"],
        "path": scope["path"][:200],
        "status": record.status,
        "duration_s": round(time.monotonic() - record.started, 4),
    }
    if record.samples:
        prompts = {sample.prompt_index: sample.prompt_tokens for sample in record.samples}
        fields["prompt_tokens"] = sum(prompts.values())
        fields["completion_tokens"] = sum(sample.counts.completion_tokens for sample in record.samples)
    is_probe = scope["path"] in OPEN_PATHS and record.status == 200
    log.event(access_logger, logging.DEBUG if is_probe else logging.INFO, "Access", fields)


def log_received(
    manager: TokenizerManager, request: Request, prompts: Sequence[Prompt], samples: Sequence[Sample]
) -> None:
    """Connects the samples with their HTTP request, and logs the request's prompts if `--log-requests` is on."""
    record = request.scope.get(_RECORD)
    if record is None:
        return
    record.samples = samples
    args = manager.server_args
    if not args.log_requests:
        return
    for sample in samples:
        if sample.generation.index:
            continue  # the samples of one prompt share a line
        options = prompts[sample.prompt_index].options
        fields: dict[str, Any] = {
            "request_id": record.id.decode(),
            "rid": sample.generation.rid,
            "path": request.scope["path"],
            "stream": options.stream,
            "prompt_tokens": sample.prompt_tokens,
        }
        if options.adapter is not None:
            fields["lora_name"] = options.adapter.name
        if args.log_requests_level >= 1:
            fields["sampling_params"] = msgspec.to_builtins(options.sampling)
        if args.log_requests_level >= 2:
            text = _prompt_text(manager, prompts[sample.prompt_index], sample)
            fields["text"] = _cut(text, args.log_requests_level)
        log.event(request_logger, logging.INFO, "Receive", fields)


def hold_record(scope: Scope) -> Callable[[], None]:
    """Delays the `Finish` lines and the span of a request until the returned function is called, once."""
    record = scope.get(_RECORD)
    if record is None:
        return lambda: None
    record.num_holders += 1
    release: Callable[[], None] = scope[_RELEASE]
    return release


def _log_finish(record: RequestRecord, level: int) -> None:
    for sample in record.samples:
        fields: dict[str, Any] = {
            "request_id": record.id.decode(),
            "rid": sample.generation.rid,
            "sample": sample.generation.key,
            "index": sample.generation.index,
            "status": record.status,
            "finish_reason": msgspec.to_builtins(sample.finish),
            "prompt_tokens": sample.prompt_tokens,
            "completion_tokens": sample.counts.completion_tokens,
            "cached_tokens": sample.counts.cached_tokens,
            "first_token_s": sample.generation.first_token_s,
            "e2e_s": sample.generation.finished_s,
        }
        if level >= 2:
            fields["text"] = _cut(sample.collected_text, level)
        log.event(request_logger, logging.INFO, "Finish", fields)


def keeps_text(args: ServerArgs) -> bool:
    """Whether the log shows the text of answers, so that streams must keep it."""
    return args.log_requests and args.log_requests_level >= 2


def _prompt_text(manager: TokenizerManager, prompt: Prompt, sample: Sample) -> str | list[int]:
    if isinstance(prompt.content, str):
        return prompt.content
    if callable(prompt.content) and manager.inputs.tokenizer is not None:
        return manager.inputs.tokenizer.decode(sample.prompt_ids, skip_special_tokens=False)
    return sample.prompt_ids


def _cut(text: str | list[int], level: int) -> str | list[int]:
    return text if level >= 3 else text[:PARTIAL_CHARS]
