"""Endpoints that ask or change the whole server. Any HTTP worker can be asked, and the parent answers.

The parent knows the engine and the requests of all workers. A worker checks the key and the size of a request, and
sends it on as it is. So the answer is the one that a server with one process gives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Scope

from ..worker_messages import EndpointCall, EndpointReply
from .routing import BoundEndpoint, Endpoint, Server

WHOLE_SERVER = frozenset(
    {
        "/health",
        "/health_generate",
        "/ready",
        "/load",
        "/model_info",
        "/server_info",
        "/get_load",
        "/v1/loads",
        "/metrics",
        "/flush_cache",
        "/abort_request",
        "/pause_generation",
        "/continue_generation",
        "/update_weights_from_disk",
        "/load_lora_adapter",
        "/unload_lora_adapter",
        "/start_profile",
        "/stop_profile",
        "/engine_view",
    }
)
"""Their paths. A worker answers all others itself."""


class Forward(Protocol):
    """The way to the parent."""

    async def __call__(self, question: Callable[[int], EndpointCall], *, is_read: bool) -> EndpointReply:
        """Sends a call, with the number that it is given, and waits for the reply.

        `is_read`: it changes nothing. Then it raises EngineDead when the parent is silent.
        """


class ForwardedEndpoint(BoundEndpoint):
    """An endpoint of a worker that the parent answers."""

    def __init__(self, endpoint: Endpoint, server: Server, forward: Forward) -> None:
        async def handler(server: Server, request: Request, body: bytes) -> ASGIApp:
            query = request.url.query.encode()
            reply = await forward(
                lambda number: EndpointCall(number, request.method, endpoint.path, query, body),
                is_read="POST" not in endpoint.methods,  # what takes a POST also changes something by GET
            )
            response = Response(reply.body, reply.status)
            response.raw_headers = reply.headers
            return response

        super().__init__(dataclasses.replace(endpoint, handler=handler), server)

    async def _decoded(self, request: Request, data: bytearray) -> Any:
        return bytes(data)


class ParentEndpoints:
    """The endpoints that the parent answers, without HTTP."""

    def __init__(self, server: Server, endpoints: Iterable[Endpoint]) -> None:
        self._by_path: Mapping[str, BoundEndpoint] = {one.path: BoundEndpoint(one, server) for one in endpoints}

    async def answer(self, call: EndpointCall) -> EndpointReply:
        """The response of the endpoint. An error is a response, too."""
        head: Message = {}
        parts: list[bytes] = []
        requests = [{"type": "http.request", "body": call.body, "more_body": False}]

        async def receive() -> Message:
            return requests.pop() if requests else {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                head.update(message)
            else:
                parts.append(message.get("body", b""))

        scope: Scope = {
            "type": "http",
            "method": call.method,
            "path": call.path,
            "query_string": call.query,
            "headers": [],
        }
        await self._by_path[call.path](scope, receive, send)
        return EndpointReply(call.call_id, head["status"], list(head["headers"]), b"".join(parts))
