"""Pages in a browser of the user's must not use his server, as long as no key keeps them out."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from fake_http import Site, error_of
from starlette.routing import Route

from tercet.srt.entrypoints.auth import OPEN_PATHS

FOREIGN = [
    {"origin": "http://evil.example"},
    {"origin": "http://evil.example", "sec-fetch-site": "cross-site"},
    {"origin": "null"},
    {"origin": "http://localhost:3000", "sec-fetch-site": "same-site"},
    {"origin": "http://localhost:3000"},
    {"origin": "https://localhost.evil.example"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "whatever"},
    {"origin": "chrome-extension://abcdef"},
    {"origin": ""},
]
OWN = [
    {},
    {"origin": "http://localhost", "sec-fetch-site": "same-origin"},
    {"origin": "http://localhost"},
    {"origin": "https://proxy.example", "sec-fetch-site": "same-origin"},
    {"sec-fetch-site": "none"},
]
FORMS = ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]


@pytest.mark.parametrize("headers", FOREIGN)
def test_a_foreign_page_changes_nothing(site: Site, headers: dict[str, str]) -> None:
    """On every route that there is, so that a new one cannot be forgotten."""
    walked = set()
    for route in site.app.routes:
        assert isinstance(route, Route) and route.methods
        if route.methods <= {"GET", "HEAD"} and route.path != "/health_generate":
            continue
        for method in route.methods:  # what takes a POST also changes something by GET
            answer = site.request(method, route.path, b'{"abort_all": true}', headers=headers)
            assert answer.status_code == 403
            assert method == "HEAD" or error_of(answer)["code"] == "cross_site"
        walked.add(route.path)
    assert {"/generate", "/abort_request", "/flush_cache", "/start_profile", "/health_generate"} <= walked
    assert site.scheduler.received == [] and site.scheduler.aborted == []


@pytest.mark.parametrize("headers", OWN)
@pytest.mark.parametrize("kind", [*FORMS, "application/json"])
def test_programs_and_own_pages_are_not_affected(site: Site, headers: dict[str, str], kind: str) -> None:
    headers = {**headers, "content-type": kind}
    assert site.post("/abort_request", b'{"abort_all": true}', headers=headers).status_code == 200
    assert site.get("/flush_cache", headers=headers).status_code == 200


def test_a_link_to_a_page_that_only_tells_works(site: Site) -> None:
    for path in ("/docs", "/v1/models", "/health"):
        assert site.get(path, headers={"sec-fetch-site": "cross-site"}).status_code == 200


BROWSER = "Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0"


@pytest.mark.parametrize("path", ["/flush_cache", "/flush_cache/", "/health_generate"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_get_with_an_effect_is_refused_to_a_browser_that_names_no_site(path: str, method: str) -> None:
    """Over plain HTTP to another machine, a browser sends no header that tells a foreign page from the address bar."""
    site = Site(host="0.0.0.0")
    headers = {"host": "192.168.1.2:30000", "user-agent": BROWSER}
    refused = site.request(method, path, headers=headers)
    assert refused.status_code == 403 and site.scheduler.received == []
    assert method == "HEAD" or "such as curl" in error_of(refused)["message"]
    assert site.get("/v1/models", headers=headers).status_code == 200
    assert site.get(path, headers={**headers, "user-agent": "python-requests/2.32"}).status_code == 200
    assert site.post("/flush_cache", headers=headers).status_code == 200, "a program that calls itself a browser"
    own = {**headers, "origin": "http://192.168.1.2:30000"}
    assert site.get(path, headers=own).status_code == site.post("/flush_cache", headers=own).status_code == 200
    del site.client.headers["user-agent"]
    assert site.get(path).status_code == 200
    site.close()


@pytest.fixture(params=["127.0.0.1", "::1", "LocalHost"])
def local(request: pytest.FixtureRequest) -> Iterator[Site]:
    site = Site(host=request.param)
    yield site
    site.close()


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:30000", "localhost.evil.example", "1.2.3.4.evil.example", "", "["]
)
def test_a_foreign_name_that_points_here_is_refused(local: Site, host: str) -> None:
    for path in ("/v1/models", "/server_info", "/flush_cache", "/docs"):
        answer = local.get(path, headers={"host": host})
        assert answer.status_code == 403 and "loopback" in error_of(answer)["message"]
    for path in OPEN_PATHS:
        assert local.get(path, headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "localhost:30000",
        "127.0.0.1:30000",
        "LOCALHOST",
        "[::1]:30000",
        "192.168.1.2",
        "api.localhost",
        "localhost.:1",
        socket.gethostname(),
    ],
)
def test_own_names_and_addresses_are_not(local: Site, host: str) -> None:
    assert local.get("/v1/models", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    ("settings", "host"),
    [
        ({"host": "0.0.0.0"}, "gpu-box.example"),
        ({"host": "::"}, "gpu-box.example"),
        ({"host": "gpu-box"}, "gpu-box.example"),
        ({"host": "127.0.0.1", "api_key": "k"}, "proxy.example"),
    ],
)
def test_a_server_for_others_or_with_a_key_answers_to_any_name(settings: dict[str, str], host: str) -> None:
    site = Site(**settings)
    headers = {"host": host, "authorization": "Bearer k"}
    assert site.get("/v1/models", headers=headers).status_code == 200
    assert site.get("/v1/models", headers={"host": host, "authorization": "Basic Oms="}).status_code == 200  # ":k"
    if "api_key" in settings:
        assert site.post("/flush_cache", headers={**headers, "origin": "https://ui.example"}).status_code == 200
    site.close()
