"""The API key: without it nothing answers but the probes that say whether the server is up."""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from .error_handlers import Unauthorized, error_response

OPEN_PATHS = frozenset({"/health", "/ready"})
"""Paths that need no key: they run nothing and tell nothing but a status."""


class ApiKeyGuard:
    """Refuses every request, known route or not, that does not bear the key, compared in constant time."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        assert api_key, "an empty key would admit a request without one"
        self._app = app
        self._key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._bears_key(scope):
            refused = Unauthorized("a valid API key is required; send it as 'Authorization: Bearer KEY'")
            await error_response(refused)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _bears_key(self, scope: Scope) -> bool:
        for name, value in scope["headers"]:
            if name == b"authorization":
                scheme, _, key = value.partition(b" ")
                return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key)
        return False
