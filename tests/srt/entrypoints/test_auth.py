from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_http import Site, error_of
from server_flags import parse_flags
from starlette.routing import Route

from tercet.srt.entrypoints import auth
from tercet.srt.entrypoints.auth import OPEN_PATHS
from tercet.srt.server_args import ServerArgs

KEY = "sesame-ö-4711"


@pytest.fixture
def guarded() -> Iterator[Site]:
    site = Site(api_key=KEY)
    yield site
    site.close()


def test_every_route_but_the_open_ones_needs_the_key(guarded: Site) -> None:
    """Walks what the app really has, so that a new route cannot be forgotten."""
    walked = set()
    for route in guarded.app.routes:
        assert isinstance(route, Route) and route.methods
        path = route.path.replace("{model:path}", "tiny")
        walked.add(path)
        for method in route.methods:
            answer = guarded.request(method, path)
            if path in OPEN_PATHS:
                assert answer.status_code == 200
            else:
                assert answer.status_code == 401
                if method != "HEAD":
                    assert error_of(answer)["code"] == "invalid_api_key"
                asked_for = answer.headers["www-authenticate"].split()[0]
                assert asked_for == ("Basic" if path == "/" else "Bearer")
    assert walked > OPEN_PATHS and "/generate" in walked
    assert guarded.scheduler.received == []


METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND")


def every_path(site: Site) -> list[str]:
    """Each route's path and its neighbours: with a slash, doubled, in capitals, escaped; and paths without a route."""
    paths = {"/nope", "/", "//", "/v1", "/docs/oauth2-redirect", "/health%2F..%2Fgenerate", "/health/../generate", "*"}
    for route in site.app.routes:
        assert isinstance(route, Route)
        path = route.path.replace("{model:path}", "tiny")
        paths |= {path, f"{path}/", f"/{path}", path.upper(), f"{path}%00", f"{path};x", f"{path}?a=b"}
    return sorted(paths)


@pytest.mark.parametrize("key", [None, "Bearer wrong", f"Bearer {KEY} x"])
def test_without_the_key_every_method_of_every_path_is_closed(guarded: Site, key: str | None) -> None:
    headers = {} if key is None else {b"authorization": key.encode()}
    for path in every_path(guarded):
        for method in METHODS:
            answer = guarded.request(method, path, headers=headers)
            if path.partition("?")[0].removesuffix("/") in OPEN_PATHS:
                assert answer.status_code in (200, 400, 405, 503)  # 503: the walk took longer than a heartbeat may
            else:
                assert answer.status_code == 401, (method, path)
    assert guarded.scheduler.received == [] and guarded.scheduler.aborted == []


def test_with_the_key_every_path_is_open(guarded: Site) -> None:
    headers = {b"authorization": f"Bearer {KEY}".encode()}
    for path in every_path(guarded):
        for method in METHODS:
            assert guarded.request(method, path, headers=headers).status_code != 401, (method, path)


def test_each_of_several_keys_opens() -> None:
    site = Site(api_key=[KEY, "second"])
    for key, status in ((KEY, 200), ("second", 200), ("third", 401), (f"{KEY},second", 401), ("", 401)):
        answer = site.get("/v1/models", headers={b"authorization": f"Bearer {key}".encode()})
        assert answer.status_code == status
    info = site.get("/server_info", headers={"authorization": "Bearer second"})
    assert info.status_code == 200 and "second" not in info.text
    site.close()


def test_every_key_is_compared(monkeypatch: pytest.MonkeyPatch, guarded: Site) -> None:
    """A guard that stops at the first key that fits tells by its time which one that was."""
    compared: list[tuple[bytes, bytes]] = []

    def compare(given: bytes, known: bytes) -> bool:
        compared.append((given, known))
        return given == known

    site = Site(api_key=["first", "x" * 100, "last"])
    monkeypatch.setattr(auth.hmac, "compare_digest", compare)
    for key in ("first", "last", "y"):
        compared.clear()
        site.get("/v1/models", headers={"authorization": f"Bearer {key}"})
        assert len(compared) == 3 and len({len(one) for pair in compared for one in pair}) == 1
    site.close()


@pytest.mark.parametrize("source", ["flags", "file"])
def test_several_keys_from_the_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str) -> None:
    monkeypatch.setenv("TERCET_API_KEY", "not this one")
    if source == "flags":
        args = parse_flags(["--model-path", "m", "--api-key", "a", "--api-key", "b"])
    else:
        config = tmp_path / "config.yaml"
        config.write_text("api-key: [a, b]")
        args = parse_flags(["--config", str(config), "--model-path", "m"])
    assert args.api_keys == ("a", "b")


@pytest.mark.parametrize("keys", [[], ["a", ""], ["a", "b c"]])
def test_every_one_of_several_keys_is_checked(keys: list[str]) -> None:
    with pytest.raises(ValueError, match="--api-key"):
        ServerArgs(model_path="m", api_key=keys)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        f"Basic {KEY}",
        KEY,
        f"Bearer {KEY}x",
        f"Bearer {KEY[:-1]}",
        "Bearer \xff",
    ],
)
def test_a_wrong_key_opens_nothing(guarded: Site, header: str) -> None:
    raw = header.encode("latin-1") if header == "Bearer \xff" else header.encode()
    answer = guarded.get("/v1/models", headers={b"authorization": raw})
    assert answer.status_code == 401
    assert KEY not in answer.text


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER "])
def test_the_key_opens(guarded: Site, scheme: str) -> None:
    headers = {b"authorization": f"{scheme} {KEY}".encode()}
    assert guarded.get("/v1/models", headers=headers).status_code == 200
    assert guarded.get("/nope", headers=headers).status_code == 404


def test_without_a_key_everything_is_open(site: Site) -> None:
    assert site.get("/v1/models").status_code == 200
    assert site.get("/v1/models", headers={"authorization": "Bearer whatever"}).status_code == 200


@pytest.mark.parametrize("given", ["sesame", "sesame\n", "  sesame\r\n"])
@pytest.mark.parametrize("source", ["flag", "variable", "file"])
def test_line_breaks_around_a_key_do_not_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str, given: str
) -> None:
    assert parsed(monkeypatch, tmp_path, source, given).api_key == "sesame"


@pytest.mark.parametrize("given", ["", "\n", "  "])
@pytest.mark.parametrize("source", ["flag", "variable", "file"])
def test_an_empty_key_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str, given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed(monkeypatch, tmp_path, source, given)
    assert "--api-key (or TERCET_API_KEY) must not be empty" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["", " ", "a b", "a\nb", "a\x00", "a\n"])
def test_settings_take_no_key_that_a_header_cannot_carry(key: str) -> None:
    with pytest.raises(ValueError, match="--api-key") as caught:
        ServerArgs(model_path="m", api_key=key)
    assert not key.strip() or repr(key) not in str(caught.value)


def test_no_key_is_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TERCET_API_KEY", raising=False)
    assert parse_flags(["--model-path", "m"]).api_key is None


def parsed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str, key: str) -> ServerArgs:
    monkeypatch.delenv("TERCET_API_KEY", raising=False)
    if source == "flag":
        return parse_flags(["--model-path", "m", "--api-key", key])
    if source == "variable":
        monkeypatch.setenv("TERCET_API_KEY", key)
        return parse_flags(["--model-path", "m"])
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"model-path": "m", "api-key": key}))
    return parse_flags(["--config", str(config), "--model-path", "m"])


# Browsers


def basic(key: str) -> dict[str, str]:
    return {"authorization": "Basic " + base64.b64encode(f"me:{key}".encode()).decode()}


def test_a_browser_that_opens_the_page_asks_for_the_key(guarded: Site) -> None:
    assert guarded.get("/").headers["www-authenticate"].startswith("Basic ")
    assert guarded.get("/engine_view").headers["www-authenticate"] == "Bearer"
    for path in ("/", "/web/chat.js", "/engine_view"):
        assert guarded.get(path, headers=basic(KEY)).status_code == 200
        assert guarded.get(path, headers=basic("wrong")).status_code == 401


@pytest.mark.parametrize("given", ["Basic", "Basic !", "Basic bWU=", "Basic " + "A" * 5000, "Basic OnNlc2FtZQ==="])
def test_a_malformed_password_opens_nothing(guarded: Site, given: str) -> None:
    assert guarded.get("/v1/models", headers={"authorization": given}).status_code == 401


def test_a_password_that_a_foreign_page_makes_the_browser_send_is_refused(guarded: Site) -> None:
    body = {"rid": "x"}
    foreign = {**basic(KEY), "sec-fetch-site": "cross-site", "origin": "https://evil.example"}
    assert guarded.post("/abort_request", body, headers=foreign).status_code == 403
    own = {**basic(KEY), "sec-fetch-site": "same-origin", "host": "tercet.example"}
    assert guarded.post("/abort_request", body, headers=own).status_code == 200
    bearer = {**foreign, "authorization": f"Bearer {KEY}".encode()}
    assert guarded.post("/abort_request", body, headers=bearer).status_code == 200
