from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from breakable_http import Connection
from fake_http import Site, text_of

from tercet.srt import log

SECRET = "my secret prompt"
BODY: dict[str, Any] = {"text": SECRET, "sampling_params": {"max_new_tokens": 3, "temperature": 0.25}, "rid": "mine"}


@contextmanager
def logged_site(**settings: Any) -> Iterator[tuple[Site, list[dict[str, Any]]]]:
    """A site, and the lines of its log as the JSON formatter writes them."""
    lines: list[dict[str, Any]] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(json.loads(self.format(record)))

    handler = Keep()
    handler.setFormatter(log.JsonFormatter("http"))
    logger = logging.getLogger("tercet")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel("INFO")
    site = Site(**settings)
    try:
        yield site, lines
    finally:
        site.close()
        logger.removeHandler(handler)
        logger.setLevel(level)


@pytest.mark.parametrize("given", ["abc", "A-1_2.3:4/5+6=7@8", "x" * 128])
def test_a_request_keeps_its_name(site: Site, given: str) -> None:
    for answer in (
        site.get("/v1/models", headers={"x-request-id": given}),
        site.get("/nope", headers={"x-request-id": given}),
        site.post("/generate", {**BODY, "stream": True}, headers={"X-Request-Id": given}),
    ):
        assert answer.headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "a\tb", "é", 'a"b', "a<b"])
def test_an_unfit_name_is_replaced(site: Site, given: str) -> None:
    answer = site.get("/v1/models", headers={b"x-request-id": given.encode()})
    assert answer.headers["x-request-id"] != given and len(answer.headers["x-request-id"]) == 32


def test_every_request_has_a_name_of_its_own(site: Site) -> None:
    names = {site.get(path).headers["x-request-id"] for path in ("/health", "/health", "/nope", "/v1/models")}
    assert len(names) == 4


def test_a_refused_request_has_a_name_and_a_line() -> None:
    with logged_site(api_key="sesame", access_log=True) as (site, lines):
        answer = site.get("/v1/models", headers={"x-request-id": "me", "authorization": "Bearer guess"})
        assert answer.status_code == 401 and answer.headers["x-request-id"] == "me"
    (line,) = lines
    assert (line["message"], line["status"], line["request_id"]) == ("Access", 401, "me")
    assert "guess" not in json.dumps(lines) and "sesame" not in json.dumps(lines)


def test_a_stream_that_outlives_its_connection_is_finished_at_its_own_end() -> None:
    with logged_site(log_requests=True, access_log=True, resume_grace=60.0) as (site, lines):
        site.scheduler.gate = True

        async def run() -> None:
            body = {"prompt": "a", "max_tokens": 5, "stream": True}
            connection = Connection(site, "POST", "/v1/completions", body)
            while not site.scheduler.held:
                await asyncio.sleep(0)
            site.scheduler.release()
            ((name, _),) = await connection.break_after(1)
            assert [line["message"] for line in lines] == ["Receive", "Access"]
            site.scheduler.gate = False
            site.scheduler.release()
            await Connection(site, "GET", "/v1/streams", last_event_id=name.decode()).done

        site.run(run())
    (finish,) = (line for line in lines if line["message"] == "Finish")
    assert finish["completion_tokens"] == 5 and finish["finish_reason"]["type"] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_the_access_log(stream: bool) -> None:
    with logged_site(access_log=True) as (site, lines):
        site.post("/generate?x=secret", BODY)
        site.post("/generate", {**BODY, "text": ["abc", "de"], "stream": stream, "rid": None})
        site.get("/health")
    refused, line = lines
    assert (refused["status"], refused["path"]) == (400, "/generate") and "prompt_tokens" not in refused
    assert (line["method"], line["path"], line["status"]) == ("POST", "/generate", 200)
    assert (line["prompt_tokens"], line["completion_tokens"]) == (5, 6)
    assert line["duration_s"] >= 0 and "secret" not in json.dumps(lines)


def test_without_the_flags_nothing_is_logged() -> None:
    with logged_site() as (site, lines):
        site.good("/generate", BODY)
        site.get("/nope")
    assert lines == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
def test_the_log_shows_no_more_than_its_level(path: str, level: int, stream: bool) -> None:
    chat = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 3, "temperature": 0.25, "rid": "mine"}
    body = {**(BODY if path == "/generate" else chat), "stream": stream}
    with logged_site(log_requests=True, log_requests_level=level) as (site, lines):
        assert site.post(path, body).status_code == 200
    received, finished = lines
    assert (received["message"], finished["message"]) == ("Receive", "Finish")
    assert received["request_id"] == finished["request_id"] and received["rid"] == finished["rid"] == "mine"
    assert received["prompt_tokens"] == finished["prompt_tokens"] > 0
    assert finished["finish_reason"] == {"type": "length", "length": 3} and finished["completion_tokens"] == 3
    assert ("sampling_params" in received) == (level >= 1)
    if level >= 1:
        assert received["sampling_params"]["temperature"] == 0.25
    if level >= 2:
        assert SECRET in received["text"] and finished["text"] == text_of(3)
    else:
        assert SECRET not in json.dumps(lines) and "text" not in {*received, *finished}


@pytest.mark.parametrize(("level", "whole"), [(2, False), (3, True)])
def test_a_long_text_is_cut_below_the_highest_level(level: int, whole: bool) -> None:
    with logged_site(log_requests=True, log_requests_level=level, allow_auto_truncate=True) as (site, lines):
        site.good("/generate", {"text": "ab" * 2000, "sampling_params": {"max_new_tokens": 1}})
    assert (lines[0]["text"] == "ab" * 2000) == whole
    assert whole or lines[0]["text"] == "ab" * 1024


def test_the_samples_of_a_prompt() -> None:
    with logged_site(log_requests=True) as (site, lines):
        site.good("/generate", {"input_ids": [[1, 2], [3]], "sampling_params": {"max_new_tokens": 1, "n": 2}})
    assert [line["message"] for line in lines] == ["Receive"] * 2 + ["Finish"] * 4
    assert [line["index"] for line in lines[2:]] == [0, 1, 0, 1]


def test_a_failed_request_is_finished() -> None:
    with logged_site(log_requests=True) as (site, lines):
        site.manager.fail("gone")
        assert site.post("/generate", BODY).status_code == 503
    assert lines == [], "it was never started"
