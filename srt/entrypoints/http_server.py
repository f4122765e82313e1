"""The Starlette app that serves the HTTP API."""

from __future__ import annotations

import time
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import BaseRoute, Route
from starlette.types import ExceptionHandler

from ... import __version__
from ...managers.tokenizer_manager import TokenizerManager
from ..server_args import ServerArgs
from . import openapi
from .auth import ApiKeyGuard
from .cross_site import Cors, CrossSiteGuard, cors_settings
from .endpoints import ENDPOINTS
from .error_handlers import http_exception
from .forwarded import WHOLE_SERVER, Forward, ForwardedEndpoint
from .key_limits import KeyLimits
from .paths import TrailingSlash
from .request_log import RequestLog
from .response_store import ResponseStore
from .resumable import ResumableStreams
from .routing import BoundEndpoint, MetricsSource, Server
from .saved_streams import SavedStreams
from .tracing import RequestTracer


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
    responses = ResponseStore(args.response_store_mib << 20) if args.response_store_mib else None
    return Server(
        manager,
        __version__,
        health_timeout_s=health_timeout_s,
        state_timeout_s=state_timeout_s,
        flush_timeout_s=flush_timeout_s,
        metrics=_metrics_page(manager, responses),
        key_limits=KeyLimits.of(args, time.monotonic),
        streams=streams if saved is None else saved.streams,
        saved=saved,
        responses=responses,
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


def _metrics_page(manager: TokenizerManager, responses: ResponseStore | None) -> MetricsSource | None:
    if manager.metrics is None:
        return None
    # Imported here: prometheus_client takes 50 ms, and most servers do not need it.
    from .metrics import MetricsPage

    return MetricsPage(manager, manager.metrics, responses)
