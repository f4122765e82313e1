"""The API key guard: every path requires the key, except the probes of the server's health.

Programs send the key as a bearer token, or in the header `x-api-key`, as Anthropic's libraries do. A browser asks its
user for it (HTTP Basic, RFC 7617) when it opens the page at `/`, and then sends it as a password with every request,
even with those that another site's page causes. So requests with a password also pass the guard against other sites'
pages.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Callable, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from .error_handlers import Unauthorized, error_response
from .tenants import note_key

OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})
"""The paths that need no key. They run no request and return only a status."""


class ApiKeyGuard:
    """Refuses every request without one of the keys, on unknown routes, too.

    The time of the comparison depends neither on the number of equal bytes nor on the key that fits: digests of equal
    length are compared, with every key.

    A key owns what its requests begin, and several keys are tenants (tenants.py).

    `guard_browsers`: wraps the app for requests that bear the key as a password.
    """

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], guard_browsers: Callable[[ASGIApp], ASGIApp]) -> None:
        assert api_keys and all(api_keys), "an empty key would admit a request without one"
        self._app = app
        self._app_for_browsers = guard_browsers(app)
        self._digests = [_digest(key.encode()) for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            scheme, key = _credentials(scope)
            index = self._index_of(key)
            if index is None:
                app = _refusal(is_page=scope["path"] == "/")
            elif scheme == b"basic":
                app = self._app_for_browsers
            if index is not None:
                note_key(scope, index, self._digests[index], len(self._digests))
        await app(scope, receive, send)

    def _index_of(self, key: bytes) -> int | None:
        given = _digest(key)
        # All keys are compared: a search would stop at the first key that fits.
        fits = [hmac.compare_digest(given, known) for known in self._digests]
        return fits.index(True) if True in fits else None


def _credentials(scope: Scope) -> tuple[bytes, bytes]:
    """The scheme and the key of a request. Both are empty if it has none."""
    found = b"", b""
    for name, value in scope["headers"]:
        if name == b"x-api-key":
            found = b"bearer", value.strip()
        if name != b"authorization":
            continue
        scheme, _, given = value.partition(b" ")
        scheme, given = scheme.lower(), given.strip()
        if scheme == b"bearer":
            return scheme, given
        if scheme == b"basic":
            try:
                return scheme, base64.b64decode(given, validate=True).partition(b":")[2]
            except ValueError:
                break
    return found


def _refusal(*, is_page: bool) -> ASGIApp:
    refused = error_response(
        Unauthorized(
            "a valid API key is required; send it as 'Authorization: Bearer KEY', in x-api-key, or as the password"
        )
    )
    if is_page:  # browsers ask for a password
        refused.headers["www-authenticate"] = 'Basic realm="Tercet: the password is an API key", charset="UTF-8"'
    return refused


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
