"""The HTTP face: every endpoint there is, and the Starlette app made of them."""

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
        "Generate, SGLang's native way",
        native.generate,
        body=native.GENERATE_CODEC,
        answer=native.GenerateAnswer | list[native.GenerateAnswer],
        streams=native.GenerateAnswer,
    ),
    Endpoint(
        ("POST",),
        "/v1/completions",
        "OpenAI's text completion",
        completions.completions,
        body=completions.COMPLETION_CODEC,
        answer=protocol.Completion,
        streams=protocol.Completion,
    ),
    Endpoint(
        ("POST",),
        "/v1/chat/completions",
        "OpenAI's chat completion",
        chat.chat_completions,
        body=chat.CHAT_CODEC,
        answer=protocol.ChatCompletion,
        streams=protocol.ChatChunk,
    ),
    Endpoint(("GET",), "/v1/models", "The model that is served", models.list_models, answer=protocol.ModelList),
    Endpoint(
        ("GET",), "/v1/models/{model:path}", "One model; 404 for others", models.show_model, answer=protocol.ModelCard
    ),
    Endpoint(
        ("POST",),
        "/tokenize",
        "Token ids of a text or a chat",
        tokenize.tokenize,
        body=tokenize.TOKENIZE_CODEC,
        answer=tokenize.TokenizeAnswer,
        also=("/v1/tokenize",),
    ),
    Endpoint(
        ("POST",),
        "/detokenize",
        "Text of token ids",
        tokenize.detokenize,
        body=tokenize.DETOKENIZE_CODEC,
        answer=tokenize.DetokenizeAnswer,
        also=("/v1/detokenize",),
    ),
    Endpoint(
        ("GET",),
        "/health",
        "200 when every process is alive and the scheduler's loop turns; 503 when not, or when shutting down",
        admin.health,
        answer=admin.Status,
    ),
    Endpoint(
        ("GET",),
        "/health_generate",
        "Runs one token through the whole pipeline; 200 or 503",
        admin.health_generate,
        answer=admin.Status,
    ),
    Endpoint(("GET",), "/ready", "200 when requests are accepted; 503 when not", admin.ready, answer=admin.Status),
    Endpoint(
        ("GET",),
        "/model_info",
        "What the model is",
        admin.model_info,
        answer=admin.ModelInfo,
        also=("/get_model_info",),
    ),
    Endpoint(
        ("GET",),
        "/server_info",
        "Settings in force, and the scheduler's state in internal_states",
        admin.server_info,
        answer=dict[str, Any],
        also=("/get_server_info",),
    ),
    Endpoint(("GET",), "/get_load", "Load, briefly", admin.get_load, answer=list[admin.Load]),
    Endpoint(("GET",), "/v1/loads", "Load", admin.loads, answer=admin.Loads),
    Endpoint(
        ("GET", "POST"),
        "/flush_cache",
        "Empties the prefix cache; 400 when requests are running",
        admin.flush_cache,
        query=(Query("timeout", "Seconds to wait for running requests to finish, default 0"),),
        answer=admin.FlushAnswer,
    ),
    Endpoint(
        ("POST",),
        "/abort_request",
        "Aborts a request by its exact name, or all",
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
    """The app of one engine. It starts nothing and stops nothing: processes are the caller's.

    The timeouts are those of `Server`. With an `api_key` in the manager's settings, every path but /health and /ready
    needs it; without one, pages of other sites are refused.
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
        routes += [Route(path, bound, methods=endpoint.methods) for path in (endpoint.path, *endpoint.also)]
    args = tokenizer_manager.server_args
    guard = Middleware(CrossSiteGuard, args.host) if args.api_key is None else Middleware(ApiKeyGuard, args.api_key)
    handlers: dict[object, ExceptionHandler] = {HTTPException: http_exception}
    app = Starlette(routes=routes, middleware=[guard], exception_handlers=handlers)
    app.router.redirect_slashes = False  # a 307 to the path without the slash would not be in the envelope
    return app
