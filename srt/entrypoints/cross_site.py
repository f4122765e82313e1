"""Protects a server without an API key from the web pages of other sites.

Any web page in a browser could use a server on the same machine or network, in three ways:

- A POST request. The browser permits it as long as the page does not read the response.
- A GET request to one of the few paths where a GET has an effect.
- DNS rebinding: the page's host name is made to resolve to a local address, so that the browser takes this server for
  the page's own server.

The rules of Go's http.CrossOriginProtection refuse the first two: they check headers that only browsers send. A check
of the Host header refuses the third.
"""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from .auth import OPEN_PATHS
from .error_handlers import Forbidden, error_response
from .wire import shown

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_GETS_WITH_EFFECT = frozenset({"/flush_cache", "/health_generate"})


class CrossSiteGuard:
    """Refuses requests of other sites' web pages with 403. `host`: the address that the server listens on."""

    def __init__(self, app: ASGIApp, host: str) -> None:
        self._app = app
        self._is_local = _is_loopback(host)
        self._own_names = frozenset({"localhost", host.lower(), socket.gethostname().lower()})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            problem = self._problem(scope)
            if problem is not None:
                refused = Forbidden(f"{problem} (docs/api.md, Web pages)")
                await error_response(refused)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _problem(self, scope: Scope) -> str | None:
        origin = site = host = None
        for name, value in scope["headers"]:
            if name == b"host":
                host = value.decode("latin-1")
            elif name == b"origin":
                origin = value.decode("latin-1")
            elif name == b"sec-fetch-site":
                site = value
        if self._is_local and host is not None and not self._is_own(host):
            return f"a server on a loopback address without an API key refuses the host name {shown(host)}"
        if scope["method"] in _SAFE_METHODS and scope["path"] not in _GETS_WITH_EFFECT:
            return None
        if site is not None:
            return None if site in (b"same-origin", b"none") else "web pages of other sites must not send this request"
        if origin is not None and origin.partition("://")[2].lower() != (host or "").lower():
            return f"web pages of {shown(origin)} must not send this request"
        return None

    def _is_own(self, host: str) -> bool:
        """Whether the Host header names this machine.

        A numeric address is safe. The owner of any other domain name can make it resolve to this machine.
        """
        name = _name_of(host)
        return name in self._own_names or name.endswith(".localhost") or _is_address(name)


def _name_of(host: str) -> str:
    """The host name in a Host header, without the port and without the brackets of an IPv6 address."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host.lower() == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)
