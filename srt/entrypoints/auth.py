"""The API key guard: every path requires the key, except the two probes of the server's health."""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from .error_handlers import Unauthorized, error_response

OPEN_PATHS = frozenset({"/health", "/ready"})
"""The paths that need no key. They run no request and return only a status."""


class ApiKeyGuard:
    """Refuses every request without the key, on unknown routes, too. The comparison takes constant time."""

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
