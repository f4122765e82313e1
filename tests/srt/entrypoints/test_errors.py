"""What goes wrong before or besides the handlers: routes, bodies, defects."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fake_http import Site, error_of, events_of

from tercet.srt.entrypoints import admin, routing
from tercet.srt.errors import BY_TYPE, FatalRequest, TercetError
from tercet.srt.io_struct import AbortFinish

BOM = b"\xef\xbb\xbf"
POSTS = ["/generate", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/abort_request"]


@pytest.mark.parametrize("path", ["/nope", "/v1", "/generate//", "/x%0Ay", "/" + "x" * 5000])
def test_an_unknown_route(site: Site, path: str) -> None:
    answer = site.get(path)
    assert answer.status_code == 404
    error = error_of(answer)
    assert error["code"] in ("not_found", "model_not_found") and len(error["message"]) < 300
    assert "\n" not in error["message"]


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/v1/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("/nope", "/docs lists all endpoints"),
    ],
)
def test_an_unknown_route_names_a_similar_one(site: Site, path: str, hint: str) -> None:
    assert error_of(site.post(path))["message"] == f"path {path} does not exist; {hint}"


@pytest.mark.parametrize(("method", "path"), [("GET", "/generate"), ("DELETE", "/health"), ("PATCH", "/v1/models")])
def test_a_method_that_is_not_allowed(site: Site, method: str, path: str) -> None:
    answer = site.request(method, path)
    assert answer.status_code == 405
    assert error_of(answer)["code"] == "method_not_allowed"
    assert answer.headers["allow"] in error_of(answer)["message"]


def test_the_allowed_methods_of_a_path_with_several_endpoints(site: Site) -> None:
    assert site.post("/v1/responses/resp_1").headers["allow"] == "DELETE, GET, HEAD"


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "the body is empty"),
        (b"{", "not valid JSON"),
        (b"\x00\xff", "not valid JSON"),
        (b'{"text": "\xff"}', "not valid UTF-8"),
        (b"[]", "expected object, got array"),
        (b'{"logprobs": ' + b"[" * 50_000, "nested too deeply"),
        ('{"text": "a"}'.encode("utf-16"), "not valid JSON"),
        (BOM, "the body is empty"),
        (BOM + BOM + b"{}", "not valid JSON"),
    ],
)
def test_a_body_that_is_none(site: Site, path: str, body: bytes, says: str) -> None:
    error = site.refused(path, body)
    assert error["type"] == "invalid_request_error"
    if b"text" not in body and b"logprobs" not in body:
        assert says in error["message"]


def test_a_byte_order_mark_before_the_body_is_ignored(site: Site) -> None:
    answer = site.good("/v1/completions", BOM + b'{"prompt": "' + BOM + b'a", "max_tokens": 1}')
    assert answer["usage"]["prompt_tokens"] == len(BOM) + 1
    assert site.good("/abort_request", BOM + b'{"rid": "a"}') == {"aborted": False}


def test_the_last_one_of_two_values_counts(site: Site) -> None:
    answer = site.good("/v1/completions", b'{"prompt": "a", "max_tokens": 2, "max_tokens": 3}')
    assert answer["usage"]["completion_tokens"] == 3


def test_nesting_and_utf8_are_named(site: Site) -> None:
    assert "nested too deeply" in site.refused("/v1/completions", b'{"best_of": ' + b"[" * 50_000)["message"]
    assert "not valid UTF-8" in site.refused("/generate", b'{"text": "\xff"}')["message"]


@pytest.mark.parametrize(("name", "coding"), [("content-encoding", "gzip"), ("transfer-encoding", "gzip, chunked")])
def test_a_compressed_body_is_refused(site: Site, name: str, coding: str) -> None:
    answer = site.post("/tokenize", b'{"prompt": "a"}', headers={name: coding})
    assert answer.status_code == 400 and f"{name} '{coding}' is not supported" in answer.text


def test_a_body_over_the_cap_is_413_without_reading_it(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "MAX_BODY_BYTES", 1000)
    read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal read
        while True:
            read += 1
            yield b" " * 100

    for answer in (
        site.post("/generate", endless()),
        site.post("/generate", b" " * 1001),
        site.post("/generate", b"{}", headers={"content-length": "9" * 30}),
    ):
        assert answer.status_code == 413
        assert error_of(answer)["code"] == "request_too_large" and "1000 bytes" in answer.text
        assert answer.headers["connection"] == "close"
    assert read <= 12
    assert site.post("/generate", b" " * 1000).status_code == 400


def test_a_defect_is_a_500_that_tells_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("secret at 0x7fff")

    monkeypatch.setattr(site.manager.inputs, "make_sampling", broken)
    with caplog.at_level(logging.ERROR, logger="tercet"):
        answer = site.post("/generate", {"text": "a"})
    assert answer.status_code == 500
    assert error_of(answer)["type"] == "internal_server_error"
    assert "secret" not in answer.text and "0x7fff" not in answer.text and "Traceback" not in answer.text
    assert "secret at 0x7fff" in caplog.text and "/generate" in caplog.text
    monkeypatch.undo()
    assert site.post("/generate", {"text": "a"}).status_code == 200


@pytest.mark.parametrize("n", [1, 2])
def test_a_defect_in_a_stream_is_an_event_that_tells_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, n: int
) -> None:
    seen = 0

    def broken(out: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == 4:
            raise RuntimeError("secret at 0x7fff")

    monkeypatch.setattr("tercet.srt.entrypoints.job.error_of", broken)
    with caplog.at_level(logging.ERROR, logger="tercet"):
        answer = site.post("/generate", {"text": "a", "stream": True, "sampling_params": {"n": n}})
    events = events_of(answer.content)
    assert events[-1]["error"]["type"] == "internal_server_error"
    assert "secret" not in answer.text
    assert "secret at 0x7fff" in caplog.text
    assert site.idle()


def test_a_defect_while_an_output_is_awaited_reaches_the_client(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: object) -> Any:
        raise RuntimeError("secret")

    monkeypatch.setattr("tercet.managers.generation.Generation.take", broken)
    for n in (1, 2):
        assert site.post("/generate", {"text": "a", "sampling_params": {"n": n}}).status_code == 500


@pytest.mark.parametrize("cls", [one for one in BY_TYPE.values() if one.status != 499], ids=lambda one: one.__name__)
def test_every_failure_of_the_engine_has_its_status(site: Site, cls: type[TercetError]) -> None:
    site.scheduler.fail = (0, AbortFinish("so it is", cls.status, cls.__name__))
    for path, body in (
        ("/generate", {"text": "a"}),
        ("/v1/completions", {"prompt": ["a", "b"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "stream": True}),
    ):
        error = site.refused(path, body, cls.status)
        assert error == {"message": "so it is", "type": cls.err_type, "param": None, "code": cls.code}


def test_a_dead_engine_answers_503(site: Site) -> None:
    site.manager.fail("the scheduler process is gone")
    for stream in (False, True):
        answer = site.post("/generate", {"text": "a", "stream": stream})
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        assert error_of(answer)["message"] == "the scheduler process is gone"


def test_a_client_shall_not_send_a_fatal_request_again(site: Site) -> None:
    """OpenAI's SDKs send a request again after a 500, unless this header is "false"."""
    site.scheduler.fail = (0, AbortFinish.of(FatalRequest("the engine died twice")))
    answer = site.post("/v1/completions", {"prompt": "a"})
    assert (answer.status_code, answer.headers["x-should-retry"]) == (500, "false")


def test_query_parameters_are_declared(site: Site) -> None:
    answer = site.get("/health?verbose=1")
    assert answer.status_code == 400 and error_of(answer)["param"] == "verbose"
    answer = site.get("/flush_cache?time=1")
    assert "unknown query parameter 'time'; known: timeout" in error_of(answer)["message"]


@pytest.mark.parametrize("query", ["timeout=0&timeout=5", "timeout=5&api-version=1&timeout=5"])
def test_a_query_parameter_that_is_given_twice_is_refused(site: Site, query: str) -> None:
    answer = site.get(f"/flush_cache?{query}")
    assert answer.status_code == 400 and error_of(answer)["param"] == "timeout"
    assert error_of(answer)["message"] == "query parameter 'timeout' must be given once, got 2 values"


def test_health_of_a_defect(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "check_up", lambda server: 1 / 0)
    assert site.get("/health").status_code == 500
