"""Paths with a slash at the end: `/v1/models/` is `/v1/models`, for every path.

A redirect would make some clients send a POST again as a GET. This wrapper is outside of the guards, so that they see
the same path as the routes.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class TrailingSlash:
    """Removes one slash at the end of a request's path."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and len(scope["path"]) > 1 and scope["path"].endswith("/"):
            scope = {**scope, "path": scope["path"][:-1]}
        await self._app(scope, receive, send)
