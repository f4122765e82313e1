"""Protects a server without an API key from the web pages of other sites.

Any web page in a browser could use a server on the same machine or network, in three ways:

- A POST request. The browser permits it as long as the page does not read the response.
- A GET request to one of the few paths where a GET has an effect. Over plain HTTP to an address other than a loopback
  address, it carries no header that names the page's site. There such a GET is refused to every browser.
- DNS rebinding: the page's host name is made to resolve to a local address, so that the browser takes this server for
  the page's own server.

`--allowed-origins` names pages that may do all this. The rules of Go's http.CrossOriginProtection refuse the first two:
they check headers that only browsers send. A check of the Host header refuses the third.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from .auth import OPEN_PATHS
from .error_handlers import Forbidden, error_response
from .limited_requests import LIMIT_HEADERS
from .wire import shown

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_BROWSER = b"Mozilla/"
"""How the user agent of every browser begins. A page cannot change it without asking the server (CORS) first."""
_GETS_WITH_EFFECT = frozenset({"/flush_cache", "/health_generate", "/start_profile", "/stop_profile"})


class CrossSiteGuard:
    """Refuses requests of other sites' web pages with 403.

    `host`: the address that the server listens on. `allowed_origins`: origins of pages that are not refused; "*": all.
    `any_host_name`: no check of the Host header. With passwords it is needless: a browser sends none to another name.
    """

    def __init__(
        self, app: ASGIApp, host: str, allowed_origins: Sequence[str] = (), *, any_host_name: bool = False
    ) -> None:
        self._app = app
        self._allowed = frozenset(allowed_origins)
        self._is_local = not any_host_name and _is_loopback(host)
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
        origin = site = host = agent = None
        for name, value in scope["headers"]:
            if name == b"host":
                host = value.decode("latin-1")
            elif name == b"origin":
                origin = value.decode("latin-1")
            elif name == b"sec-fetch-site":
                site = value
            elif name == b"user-agent":
                agent = value
        if self._is_local and host is not None and not self._is_own(host):
            return f"a server on a loopback address without an API key refuses the host name {shown(host)}"
        if scope["method"] in _SAFE_METHODS and scope["path"] not in _GETS_WITH_EFFECT:
            return None
        if origin is not None and not self._allowed.isdisjoint(("*", origin.lower())):
            return None
        if site is not None:
            return None if site in (b"same-origin", b"none") else "web pages of other sites must not send this request"
        if origin is not None and origin.partition("://")[2].lower() != (host or "").lower():
            return f"web pages of {shown(origin)} must not send this request"
        if origin is None and scope["method"] in _SAFE_METHODS and agent is not None and agent.startswith(_BROWSER):
            return (
                "a browser must not send this GET request, because a foreign page may have made it; "
                "send it with another program, such as curl"
            )
        return None

    def _is_own(self, host: str) -> bool:
        """Whether the Host header names this machine.

        A numeric address is safe. The owner of any other domain name can make it resolve to this machine.
        """
        name = _name_of(host)
        return name in self._own_names or name.endswith(".localhost") or _is_address(name)


class Cors(CORSMiddleware):
    """Tells browsers what pages of the allowed origins may do. A browser's question about another page gets 403."""

    def preflight_response(self, request_headers: Headers) -> Response:
        answer = super().preflight_response(request_headers)
        if answer.status_code == 200:
            return answer
        page, method = request_headers["origin"], request_headers["access-control-request-method"]
        refused = error_response(
            Forbidden(f"web pages of {shown(page)} must not send {shown(method)} requests (docs/api.md, Web pages)")
        )
        refused.headers["vary"] = answer.headers["vary"]
        return refused


def cors_settings(allowed_origins: Sequence[str]) -> dict[str, Any]:
    """Arguments of `Cors` for pages of these origins.

    Pages may send any header, such as `Authorization`, but never the user's cookies. Some browsers ask whether a page
    of the internet may use a private address.
    """
    return {
        "allow_origins": list(allowed_origins),
        "allow_methods": ["GET", "POST", "PUT", "DELETE"],
        "allow_headers": ["*"],
        "allow_private_network": True,
        "expose_headers": ["Retry-After", "x-request-id", "x-stream-id", *LIMIT_HEADERS],
    }


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
