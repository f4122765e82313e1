"""The scheduler is told of each answer that is a tool call, and retains its prefix; and what requests may ask."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fake_http import Site

from tercet.managers.tool_call_retention import tool_call_retention_s
from tercet.srt.entrypoints import sse
from tercet.srt.io_struct import LengthFinish
from tercet.srt.server_args import ServerArgs

CHAT = "/v1/chat/completions"
CALL = ("I look. ", '<tool_call>{"name": "f"}', "</tool_call>")
BODY = {"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function", "function": {"name": "f"}}]}
RESPONSES = {"input": "hi", "tools": [{"type": "function", "name": "f"}]}


@contextmanager
def serving(**settings: Any) -> Iterator[Site]:
    site = Site(**settings)
    try:
        site.scheduler.say(*CALL)
        yield site
    finally:
        site.close()


@pytest.mark.parametrize(("path", "body"), [(CHAT, BODY), ("/v1/responses", RESPONSES)])
def test_an_answer_that_is_a_tool_call_is_retained(path: str, body: dict[str, Any]) -> None:
    with serving(tool_call_retention_s=45) as site:
        site.good(path, {**body, "session_id": "s", "cache_salt": "salt", "user": "me"})
        (message,) = site.scheduler.retained
        (request,) = site.scheduler.received
        assert message.seconds == 45
        assert message.token_ids == request.input_ids + bytes([0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0])
        options = message.options
        assert (options.session_id, options.cache_salt, options.tenant) == ("s", "salt", "me")
        site.stream(path, body)
        assert len(site.scheduler.retained) == 2


@pytest.mark.parametrize(("path", "body"), [(CHAT, {**BODY, "logprobs": True}), ("/v1/responses", RESPONSES)])
def test_an_answer_that_is_written_in_a_thread_uses_the_link_in_the_event_loop(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link to the scheduler is for one thread."""
    monkeypatch.setattr(sse, "_MAX_VALUES_IN_LOOP", -1)
    with serving() as site:
        threads = []
        send = site.scheduler.send
        monkeypatch.setattr(
            site.scheduler, "send", lambda message: (threads.append(threading.get_ident()), send(message))
        )
        site.good(path, body)
        site.stream(path, body)
        assert len(site.scheduler.retained) == 2 and len(set(threads)) == 1


def test_each_sample_is_retained_once() -> None:
    with serving() as site:
        site.good(CHAT, {**BODY, "n": 2})
        assert len(site.scheduler.retained) == 2
        site.stream(CHAT, {**BODY, "n": 3})
        assert len(site.scheduler.retained) == 5


def test_other_answers_are_not_retained() -> None:
    with serving() as site:
        site.scheduler.fail = (3, LengthFinish(3))  # a call that was cut off is no call
        site.good(CHAT, BODY)
        site.scheduler.fail = None
        site.good(CHAT, {"messages": BODY["messages"]})  # without tools, this is text
        site.scheduler.say("Hello", ".")
        site.good(CHAT, BODY)
        assert site.scheduler.retained == []


def test_what_the_request_asks_for_itself_counts() -> None:
    with serving() as site:
        site.good(CHAT, {**BODY, "retention_seconds": 0})
        assert site.scheduler.retained == []


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [
        ({}, 60),
        ({"tool_call_retention_s": 5}, 5),
        ({"tool_call_retention_s": 0}, 0),
        ({"max_retention_s": 7}, 7),
        ({"radix_eviction_policy": "lru"}, 0),
        ({"disable_radix_cache": True}, 0),
    ],
)
def test_the_settings_decide(settings: dict[str, Any], seconds: float) -> None:
    assert tool_call_retention_s(ServerArgs(model_path="m", **settings)) == seconds
    with serving(**settings) as site:
        site.good(CHAT, BODY)
        assert [message.seconds for message in site.scheduler.retained] == [seconds] * bool(seconds)


@pytest.mark.parametrize(
    ("settings", "given", "message"),
    [
        ({}, {"retention_seconds": -1}, "retention_seconds must be in [0, 86400], got -1"),
        ({}, {"retention_seconds": 1e9}, "retention_seconds must be in [0, 86400], got 1e+09"),
        ({}, {"retention_seconds": 3601}, "retention_seconds must be at most 3600 (--max-retention-s), got 3601"),
        ({"max_retention_s": 9}, {"retention_seconds": 10}, "retention_seconds must be at most 9 (--max-retention-s)"),
        ({}, {"session_id": "s" * 257}, "session_id must have at most 256 characters, got 257"),
        ({"radix_eviction_policy": "lru"}, {"retention_seconds": 1}, "retention_seconds needs a server with a prefix"),
        ({"radix_eviction_policy": "lfu"}, {"session_id": "s"}, "session_id needs a server with a prefix cache and"),
        ({"disable_radix_cache": True}, {"retention_seconds": 0}, "retention_seconds needs a server with a prefix"),
    ],
)
def test_what_the_server_cannot_honour_is_refused(
    settings: dict[str, Any], given: dict[str, Any], message: str
) -> None:
    bodies = {
        "/generate": {"text": "a"},
        "/v1/completions": {"prompt": "a"},
        CHAT: BODY,
        "/v1/responses": RESPONSES,
    }
    with serving(**settings) as site:
        for path, body in bodies.items():
            answer = site.post(path, {**body, **given})
            assert answer.status_code == 400, path
            error = answer.json()["error"]
            assert message in error["message"] and error["param"] == next(iter(given))


def test_a_list_has_one_value_for_each_prompt() -> None:
    with serving() as site:
        site.good("/generate", {"text": ["a", "b"], "retention_seconds": [1, 2], "session_id": ["x", "y"]})
        asked = [(one.options.retention_seconds, one.options.session_id) for one in site.scheduler.received]
        assert asked == [(1, "x"), (2, "y")]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_retention_s": -1}, r"--max-retention-s must be in \[0, 86400\], got -1"),
        ({"tool_call_retention_s": float("nan")}, r"--tool-call-retention-s must be in \[0, 86400\], got nan"),
        ({"max_retained_share": 0}, r"--max-retained-share must be in \(0, 1\], got 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServerArgs(model_path="m", **given)
