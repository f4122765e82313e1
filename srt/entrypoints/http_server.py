"""The HTTP API: the list of all endpoints, and the Starlette app that serves them."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import BaseRoute, Route
from starlette.types import ExceptionHandler

from ... import __version__
from ...managers.tokenizer_manager import TokenizerManager
from ..server_args import ServerArgs
from . import (
    admin,
    info,
    load,
    lora,
    native,
    native_protocol,
    openapi,
    page,
    pausing,
    profiling,
    rerank,
    score,
    streams,
    tokenize,
    weights,
)
from .auth import ApiKeyGuard
from .cross_site import Cors, CrossSiteGuard, cors_settings
from .error_handlers import http_exception
from .forwarded import WHOLE_SERVER, Forward, ForwardedEndpoint
from .key_limits import KeyLimits
from .openai import (
    chat,
    chat_protocol,
    completion_protocol,
    completions,
    embedding_protocol,
    embeddings,
    models,
    protocol,
    responses,
    responses_answer,
)
from .paths import TrailingSlash
from .request_log import RequestLog
from .resumable import ResumableStreams
from .routing import BoundEndpoint, Endpoint, MetricsSource, Query, Server
from .saved_streams import SavedStreams
from .tracing import RequestTracer

ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        ("POST", "PUT"),
        "/generate",
        "Generates text: SGLang's native endpoint",
        native.generate,
        body=native.GENERATE_CODEC,
        runs_model=True,
        answer=native_protocol.GenerateAnswer | list[native_protocol.GenerateAnswer],
        streams=native_protocol.GenerateAnswer,
    ),
    Endpoint(
        ("POST",),
        "/v1/completions",
        "Completes a text: OpenAI's endpoint",
        completions.completions,
        body=completions.COMPLETION_CODEC,
        runs_model=True,
        answer=completion_protocol.Completion,
        streams=completion_protocol.Completion,
    ),
    Endpoint(
        ("POST",),
        "/v1/chat/completions",
        "Answers a conversation: OpenAI's endpoint",
        chat.chat_completions,
        body=chat.CHAT_CODEC,
        runs_model=True,
        answer=chat_protocol.ChatCompletion,
        streams=chat_protocol.ChatChunk,
    ),
    Endpoint(
        ("POST",),
        "/v1/responses",
        "Answers a conversation of items: OpenAI's endpoint, without storage",
        responses.responses,
        body=responses.RESPONSES_CODEC,
        runs_model=True,
        answer=responses_answer.Response,
        streams=responses_answer.ResponseEvent,
    ),
    Endpoint(
        ("POST",),
        "/v1/embeddings",
        "Converts texts to vectors: OpenAI's endpoint",
        embeddings.embeddings,
        body=embeddings.EMBEDDING_CODEC,
        runs_model=True,
        answer=embedding_protocol.EmbeddingList,
    ),
    Endpoint(
        ("POST",),
        "/v1/score",
        "Returns the probabilities of given tokens after each prompt: SGLang's endpoint",
        score.score,
        body=score.SCORE_CODEC,
        runs_model=True,
        answer=score.Scores,
    ),
    Endpoint(
        ("GET",),
        "/v1/streams",
        "Continues a stream after the header Last-Event-ID; 404 without --resume-grace",
        streams.continue_stream,
        media_type="text/event-stream",
    ),
    Endpoint(
        ("POST",),
        "/v1/rerank",
        "Orders documents by their similarity to a query: Jina's and Cohere's endpoint",
        rerank.rerank,
        body=rerank.RERANK_CODEC,
        runs_model=True,
        answer=rerank.Ranking,
    ),
    Endpoint(
        ("GET",),
        "/v1/models",
        "Lists the served model and its LoRA adapters",
        models.list_models,
        answer=protocol.ModelList,
    ),
    Endpoint(
        ("GET",),
        "/v1/models/{model:path}",
        "Describes the served model or one of its LoRA adapters; 404 for any other name",
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
        "200 when the engine runs or restarts; 503 when a process hangs, when it failed, and during shutdown",
        admin.health,
        answer=admin.Status,
        aliases=("/ping",),
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
    Endpoint(("GET",), "/version", "Returns Tercet's version", info.version, answer=info.Version),
    Endpoint(
        ("GET",),
        "/tokenizer_info",
        "Describes the tokenizer, with the chat template",
        info.tokenizer_info,
        answer=info.TokenizerInfo,
    ),
    Endpoint(
        ("GET",),
        "/load",
        "Number of samples that have not ended, without asking the scheduler",
        info.load,
        answer=info.ServerLoad,
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
    Endpoint(("GET",), "/get_load", "Number of requests and of their tokens", load.get_load, answer=list[load.Load]),
    Endpoint(
        ("GET",),
        "/v1/loads",
        "Load in detail: requests, tokens, limits, throughput, cache hit rate",
        load.loads,
        query=(
            Query("include", f"Sections separated by commas, of {', '.join(load.SECTIONS)}; default all", "string"),
        ),
        answer=load.Loads,
    ),
    Endpoint(
        ("GET",),
        "/metrics",
        "State and counts in Prometheus' text format; 404 without --enable-metrics",
        load.metrics,
        media_type="text/plain",
    ),
    Endpoint(
        ("GET", "POST"),
        "/flush_cache",
        "Empties the prefix cache; 400 while requests are running or waiting",
        admin.flush_cache,
        query=(Query("timeout", "Seconds to wait until no request is running or waiting, 0 (default) to 3600"),),
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
    Endpoint(
        ("POST",),
        "/pause_generation",
        "Stops generation between two steps; requests end, wait again or keep their KV",
        pausing.pause_generation,
        body=pausing.PAUSE_CODEC,
        body_may_be_empty=True,
        answer=pausing.PauseAnswer,
    ),
    Endpoint(
        ("POST",),
        "/continue_generation",
        "Continues generation after /pause_generation",
        pausing.continue_generation,
        body=pausing.CONTINUE_CODEC,
        body_may_be_empty=True,
        answer=pausing.PauseAnswer,
    ),
    Endpoint(
        ("POST",),
        "/update_weights_from_disk",
        "Loads other weights of the same model; 403 without --update-weights-dir",
        weights.update_weights_from_disk,
        body=weights.UPDATE_WEIGHTS_CODEC,
        answer=weights.UpdateWeightsAnswer,
    ),
    Endpoint(
        ("POST",),
        "/load_lora_adapter",
        "Loads a LoRA adapter; 403 without --lora-dir",
        lora.load_lora_adapter,
        body=lora.LOAD_CODEC,
        answer=lora.AdapterAnswer,
        aliases=("/v1/load_lora_adapter",),
    ),
    Endpoint(
        ("POST",),
        "/unload_lora_adapter",
        "Unloads a LoRA adapter when its requests have ended",
        lora.unload_lora_adapter,
        body=lora.UNLOAD_CODEC,
        answer=lora.AdapterAnswer,
        aliases=("/v1/unload_lora_adapter",),
    ),
    Endpoint(
        ("GET", "POST"),
        "/start_profile",
        "Records the next steps with torch's profiler; 403 without --profile-dir",
        profiling.start_profile,
        body=profiling.START_PROFILE_CODEC,
        body_may_be_empty=True,
        answer=profiling.ProfileAnswer,
    ),
    Endpoint(
        ("GET", "POST"),
        "/stop_profile",
        "Ends the profile and writes its trace",
        profiling.stop_profile,
        answer=profiling.ProfileAnswer,
    ),
    Endpoint(("GET",), "/", "Shows a page with a chat and a live view of the engine", page.show_file),
    Endpoint(("GET",), "/web/style.css", "The style of the page", page.show_file, media_type="text/css"),
    Endpoint(
        ("GET",),
        page.SCRIPT_PATHS[0],
        "The scripts of the page",
        page.show_file,
        media_type="text/javascript",
        aliases=page.SCRIPT_PATHS[1:],
    ),
    Endpoint(
        ("GET",),
        "/engine_view",
        "Last steps, unfinished requests and hottest prefixes, for the page",
        page.engine_view,
        query=(Query("after_step", "Leave out this step and all steps before it, default 0"),),
        answer=page.EngineViewAnswer,
    ),
)


def _middleware(args: ServerArgs, tracer: RequestTracer | None) -> list[Middleware]:
    """What a request passes before it reaches its route, in this order."""
    origins = args.origins
    outer = [Middleware(RequestLog, args, tracer), Middleware(TrailingSlash)]
    if origins:
        outer.append(Middleware(Cors, **cors_settings(origins)))
    if not args.api_keys:
        return [*outer, Middleware(CrossSiteGuard, args.host, origins)]
    guard_browsers = partial(CrossSiteGuard, host=args.host, allowed_origins=origins, any_host_name=True)
    return [*outer, Middleware(ApiKeyGuard, args.api_keys, guard_browsers)]


def make_server(
    manager: TokenizerManager,
    *,
    health_timeout_s: float = 20.0,
    state_timeout_s: float = 1.0,
    flush_timeout_s: float = 5.0,
    saved: SavedStreams | None = None,
) -> Server:
    """The state that the handlers of one engine share. `saved`: the streams of `--resume-file`."""
    args = manager.server_args
    streams = ResumableStreams(args.resume_grace) if args.resume_grace and saved is None else None
    return Server(
        manager,
        __version__,
        health_timeout_s=health_timeout_s,
        state_timeout_s=state_timeout_s,
        flush_timeout_s=flush_timeout_s,
        metrics=_metrics_page(manager),
        key_limits=KeyLimits.of(args, time.monotonic),
        streams=streams if saved is None else saved.streams,
        saved=saved,
        recorded={} if saved is None else {one.path: one for one in ENDPOINTS if one.streams is not None},
    )


def create_app(server: Server, *, tracer: RequestTracer | None = None, forward: Forward | None = None) -> Starlette:
    """The app of one engine. It starts and stops no process and no `tracer`: the caller does.

    If the settings have an `api_key`, every path except OPEN_PATHS requires it. Without a key, requests of other sites'
    web pages are refused, except those of `allowed_origins`. `forward`: answers the endpoints of WHOLE_SERVER in an
    HTTP worker.
    """
    routes: list[BaseRoute] = []
    for endpoint in (*ENDPOINTS, *openapi.endpoints(ENDPOINTS)):
        if forward is not None and endpoint.path in WHOLE_SERVER:
            bound: BoundEndpoint = ForwardedEndpoint(endpoint, server, forward)
        else:
            bound = BoundEndpoint(endpoint, server)
        routes += [Route(path, bound, methods=endpoint.methods) for path in (endpoint.path, *endpoint.aliases)]
    handlers: dict[object, ExceptionHandler] = {HTTPException: http_exception}
    middleware = _middleware(server.manager.server_args, tracer)
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
    app.router.redirect_slashes = False  # a 307 to the path without the slash would not be in the envelope
    return app


def _metrics_page(manager: TokenizerManager) -> MetricsSource | None:
    if manager.metrics is None:
        return None
    # Imported here: prometheus_client takes 50 ms, and most servers do not need it.
    from .metrics import MetricsPage

    return MetricsPage(manager, manager.metrics)
