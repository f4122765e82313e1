"""An event is one line for every client, also for one that splits lines where Python's `str.splitlines` does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fake_http import Site, events_of

from tercet.srt.io_struct import AbortFinish

BREAKS = "\u2028\u2029\x85\r\n\v\f\x1c\x1d\x1e"
"""All characters at which `str.splitlines` splits."""
HI = [{"role": "user", "content": "hi"}]
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"text": "a"},
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": HI, "tools": [{"type": "function", "function": FUNCTION}]},
    "/v1/messages": {"messages": HI, "max_tokens": 9, "tools": [{"name": "f", "input_schema": FUNCTION["parameters"]}]},
    "/v1/responses": {"input": "hi", "tools": [{"type": "function", **FUNCTION}]},
}


@pytest.fixture(params=[True, False], ids=["incremental", "cumulative"])
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    site = Site(reasoning_parser="qwen3", incremental_streaming_output=request.param)
    arguments = f'{{"x": "{BREAKS[:3]}"}}'  # the others are no JSON
    call = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    site.scheduler.say(f"<think>a{BREAKS}b</think>", f"é\\{BREAKS}é", call)
    yield site
    site.close()


def events_by_line(site: Site, path: str) -> list[Any]:
    """The events of a stream, from the lines that httpx makes of it."""
    answer = site.post(path, {**BODIES[path], "stream": True})
    lines = [line for line in answer.iter_lines() if line and not line.startswith("event: ")]
    assert all(line.startswith("data: ") for line in lines)
    if path != "/v1/messages":
        assert lines.pop() == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert events == events_of(answer.content)
    return events


@pytest.mark.parametrize("path", BODIES)
def test_no_character_of_the_text_cuts_an_event_in_two(site: Site, path: str) -> None:
    texts = json.dumps(events_by_line(site, path), ensure_ascii=False)
    for char in BREAKS[:3]:
        assert texts.count(char) >= 3  # the reasoning, the content and the arguments


@pytest.mark.parametrize("path", BODIES)
def test_no_character_of_an_error_cuts_its_event_in_two(site: Site, path: str) -> None:
    site.scheduler.fail = (2, AbortFinish(f"not{BREAKS}a number", 500, "InvalidLogits"))
    last = events_by_line(site, path)[-1]
    assert last.get("response", last)["error"]["message"] == f"not{BREAKS}a number"
