"""Pages of allowed origins may use the server and read its answers; by default there are none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fake_http import Site

from tercet.srt.server_args import ServerArgs

PAGE = "https://ui.example"
ASKS = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, content-type"}
BODY = {"text": "a", "sampling_params": {"max_new_tokens": 1}}


def site_for(settings: dict[str, Any]) -> Iterator[Site]:
    site = Site(**settings)
    yield site
    site.close()


@pytest.fixture(params=[PAGE, f"http://other.example, {PAGE}/", f'["{PAGE}"]', "*", '["*"]'])
def open_site(request: pytest.FixtureRequest) -> Iterator[Site]:
    yield from site_for({"allowed_origins": request.param, "host": "127.0.0.1"})


@pytest.fixture
def keyed() -> Iterator[Site]:
    yield from site_for({"allowed_origins": PAGE, "api_key": "k"})


def test_an_allowed_page_may_send_and_read(open_site: Site) -> None:
    asked = open_site.request("OPTIONS", "/generate", headers={"origin": PAGE, **ASKS})
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] in (PAGE, "*")
    assert set(asked.headers["access-control-allow-methods"].split(", ")) == {"GET", "POST", "PUT", "DELETE"}
    assert asked.headers["access-control-allow-headers"] == ASKS["access-control-request-headers"]
    for headers in ({"origin": PAGE}, {"origin": PAGE, "sec-fetch-site": "cross-site"}):
        for answer in (open_site.post("/generate", BODY, headers=headers), open_site.get("/health", headers=headers)):
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] in (PAGE, "*")
            assert "access-control-allow-credentials" not in answer.headers


def test_an_allowed_page_of_the_internet_may_use_a_server_on_a_private_address(open_site: Site) -> None:
    """Versions of Chrome ask this in their question about the request itself. Without a yes, they send no request."""
    asks = {"origin": PAGE, **ASKS, "access-control-request-private-network": "true"}
    asked = open_site.request("OPTIONS", "/generate", headers=asks)
    assert asked.status_code == 200 and asked.headers["access-control-allow-private-network"] == "true"


def test_an_allowed_page_may_read_every_header_of_an_answer() -> None:
    for site in site_for({"allowed_origins": PAGE, "requests_per_minute_per_key": 9, "resume_grace": 5.0}):
        answer = site.post("/generate", {**BODY, "stream": True}, headers={"origin": PAGE})
        ours = {name for name in answer.headers if name.startswith("x-")} - {"x-accel-buffering"}  # of proxies
        assert {"x-request-id", "x-stream-id", "x-ratelimit-limit-requests"} <= ours
        assert ours | {"Retry-After"} <= set(answer.headers["access-control-expose-headers"].split(", "))


def test_another_page_may_not(keyed: Site) -> None:
    site = Site(allowed_origins=PAGE)
    headers = {"origin": "https://evil.example"}
    for one in (site, keyed):
        assert (
            "access-control-allow-origin"
            not in one.request("OPTIONS", "/generate", headers={**headers, **ASKS}).headers
        )
        answer = one.post("/generate", BODY, headers=headers)
        assert answer.status_code in (401, 403) and "access-control-allow-origin" not in answer.headers
    assert site.scheduler.received == []
    site.close()


@pytest.mark.parametrize(("page", "method"), [("https://evil.example", "POST"), ("null", "POST"), (PAGE, "PATCH")])
def test_a_question_about_another_page_or_method_gets_an_error_of_the_api(keyed: Site, page: str, method: str) -> None:
    headers = {"origin": page, "access-control-request-method": method}
    answer = keyed.request("OPTIONS", "/generate", headers=headers)
    assert (answer.status_code, answer.headers["content-type"]) == (403, "application/json")
    error = answer.json()["error"]
    assert error["code"] == "cross_site" and page in error["message"] and method in error["message"]
    assert "Origin" in answer.headers["vary"] and "access-control-allow-origin" not in answer.headers


def test_by_default_no_page_may(site: Site) -> None:
    asked = site.request("OPTIONS", "/generate", headers={"origin": PAGE, **ASKS})
    assert asked.status_code == 405 and "access-control-allow-origin" not in asked.headers
    assert "access-control-allow-origin" not in site.get("/v1/models", headers={"origin": PAGE}).headers


def test_a_page_asks_without_the_key_and_sends_with_it(keyed: Site) -> None:
    assert keyed.request("OPTIONS", "/generate", headers={"origin": PAGE, **ASKS}).status_code == 200
    refused = keyed.post("/generate", BODY, headers={"origin": PAGE})
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == PAGE  # so it can say why
    assert keyed.post("/generate", BODY, headers={"origin": PAGE, "authorization": "Bearer k"}).status_code == 200


@pytest.mark.parametrize(
    ("given", "origins"),
    [
        (None, ()),
        ("", ()),
        ("[]", ()),
        (" HTTPS://UI.example/ ,http://[::1]:3000", ("https://ui.example", "http://[::1]:3000")),
        ("tauri://localhost", ("tauri://localhost",)),
    ],
)
def test_the_flag(given: str | None, origins: tuple[str, ...]) -> None:
    assert ServerArgs(model_path="m", allowed_origins=given).origins == origins


@pytest.mark.parametrize(
    "given", ["ui.example", "https://ui.example/path", "https://", "null", "[1]", '["a"', "a b://c"]
)
def test_what_is_no_origin_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match="--allowed-origins must be"):
        ServerArgs(model_path="m", allowed_origins=given)
