"""The HTTP API: the list of all endpoints, and the Starlette app that serves them."""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import BaseRoute, Route
from starlette.types import ExceptionHandler

from ... import __version__
from ...managers.tokenizer_manager import TokenizerManager
from . import admin, native, openapi, tokenize
from .auth import ApiKeyGuard
from .cross_site import CrossSiteGuard
from .error_handlers import http_exception
from .openai import chat, completions, models, protocol
from .routing import BoundEndpoint, Endpoint, Query, Server

ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        ("POST", "PUT"),
        "/generate",
        "Generates text: SGLang's native endpoint",
        native.generate,
        body=native.GENERATE_CODEC,
        answer=native.GenerateAnswer | list[native.GenerateAnswer],
        streams=native.GenerateAnswer,
    ),
    Endpoint(
        ("POST",),
        "/v1/completions",
        "Completes a text: OpenAI's endpoint",
        completions.completions,
        body=completions.COMPLETION_CODEC,
        answer=protocol.Completion,
        streams=protocol.Completion,
    ),
    Endpoint(
        ("POST",),
        "/v1/chat/completions",
        "Answers a conversation: OpenAI's endpoint",
        chat.chat_completions,
        body=chat.CHAT_CODEC,
        answer=protocol.ChatCompletion,
        streams=protocol.ChatChunk,
    ),
    Endpoint(("GET",), "/v1/models", "Lists the served model", models.list_models, answer=protocol.ModelList),
    Endpoint(
        ("GET",),
        "/v1/models/{model:path}",
        "Describes the served model; 404 for any other name",
        models.show_model,
        answer=protocol.ModelCard,
    ),
    Endpoint(
        ("POST",),
        "/tokenize",
        "Converts a text or a conversation to token ids",
        tokenize.tokenize,
        body=tokenize.TOKENIZE_CODEC,
        answer=tokenize.TokenizeAnswer,
        aliases=("/v1/tokenize",),
    ),
    Endpoint(
        ("POST",),
        "/detokenize",
        "Converts token ids to text",
        tokenize.detokenize,
        body=tokenize.DETOKENIZE_CODEC,
        answer=tokenize.DetokenizeAnswer,
        aliases=("/v1/detokenize",),
    ),
    Endpoint(
        ("GET",),
        "/health",
        "200 when all processes are alive and the scheduler's loop turns; 503 otherwise, and during shutdown",
        admin.health,
        answer=admin.Status,
    ),
    Endpoint(
        ("GET",),
        "/health_generate",
        "Generates one token with all three processes; 200, or 503 when that fails",
        admin.health_generate,
        answer=admin.Status,
    ),
    Endpoint(
        ("GET",), "/ready", "200 when the server accepts requests; 503 otherwise", admin.ready, answer=admin.Status
    ),
    Endpoint(
        ("GET",),
        "/model_info",
        "Describes the model and its files",
        admin.model_info,
        answer=admin.ModelInfo,
        aliases=("/get_model_info",),
    ),
    Endpoint(
        ("GET",),
        "/server_info",
        "Resolved settings, and the scheduler's state in `internal_states`",
        admin.server_info,
        answer=dict[str, Any],
        aliases=("/get_server_info",),
    ),
    Endpoint(("GET",), "/get_load", "Number of requests and of their tokens", admin.get_load, answer=list[admin.Load]),
    Endpoint(
        ("GET",),
        "/v1/loads",
        "Load in detail: requests, tokens, limits, throughput, cache hit rate",
        admin.loads,
        answer=admin.Loads,
    ),
    Endpoint(
        ("GET", "POST"),
        "/flush_cache",
        "Empties the prefix cache; 400 while requests are running or waiting",
        admin.flush_cache,
        query=(Query("timeout", "Seconds to wait until no request is running or waiting, default 0"),),
        answer=admin.FlushAnswer,
    ),
    Endpoint(
        ("POST",),
        "/abort_request",
        "Aborts one request by its exact name, or all requests",
        admin.abort_request,
        body=admin.ABORT_CODEC,
        answer=admin.AbortAnswer,
    ),
)


def create_app(
    tokenizer_manager: TokenizerManager,
    *,
    health_timeout_s: float = 20.0,
    state_timeout_s: float = 1.0,
    flush_timeout_s: float = 5.0,
) -> Starlette:
    """The app of one engine. It starts and stops no process: the caller does.

    See `Server` for the timeouts. If the manager's settings have an `api_key`, every path except /health and /ready
    requires it. Without a key, requests of other sites' web pages are refused.
    """
    server = Server(
        tokenizer_manager,
        __version__,
        health_timeout_s=health_timeout_s,
        state_timeout_s=state_timeout_s,
        flush_timeout_s=flush_timeout_s,
    )
    endpoints = (*ENDPOINTS, *openapi.endpoints(ENDPOINTS))
    routes: list[BaseRoute] = []
    for endpoint in endpoints:
        bound = BoundEndpoint(endpoint, server)
        routes += [Route(path, bound, methods=endpoint.methods) for path in (endpoint.path, *endpoint.aliases)]
    args = tokenizer_manager.server_args
    guard = Middleware(CrossSiteGuard, args.host) if args.api_key is None else Middleware(ApiKeyGuard, args.api_key)
    handlers: dict[object, ExceptionHandler] = {HTTPException: http_exception}
    app = Starlette(routes=routes, middleware=[guard], exception_handlers=handlers)
    app.router.redirect_slashes = False  # a 307 to the path without the slash would not be in the envelope
    return app
