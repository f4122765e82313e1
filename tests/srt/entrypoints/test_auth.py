from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_http import Site, error_of
from starlette.routing import Route

from tercet.srt.entrypoints.auth import OPEN_PATHS
from tercet.srt.server_args import ServerArgs, parse_args

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
                assert answer.headers["www-authenticate"] == "Bearer"
    assert walked > OPEN_PATHS and "/generate" in walked
    assert guarded.scheduler.received == []


@pytest.mark.parametrize("path", ["/nope", "/generate/", "/health/", "//health", "/HEALTH", "/health%2F..%2Fgenerate"])
def test_a_path_that_is_not_there_needs_it_too(guarded: Site, path: str) -> None:
    assert guarded.get(path).status_code == 401


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
    assert parse_args(["--model-path", "m"]).api_key is None


def parsed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str, key: str) -> ServerArgs:
    monkeypatch.delenv("TERCET_API_KEY", raising=False)
    if source == "flag":
        return parse_args(["--model-path", "m", "--api-key", key])
    if source == "variable":
        monkeypatch.setenv("TERCET_API_KEY", key)
        return parse_args(["--model-path", "m"])
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"model-path": "m", "api-key": key}))
    return parse_args(["--config", str(config), "--model-path", "m"])
