"""A client that follows the events of /v1/messages has the blocks of the answer that is not a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fake_http import Site
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

PATH = "/v1/messages"
TOOLS = [{"name": "f", "input_schema": {"type": "object"}}]
SAID = (
    "one two 🙂 ",
    "<think>I think</think>Hi",
    "<think>not finished",
    'Hm <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>\n<tool_call>{"name": "f"}</tool_call>',
    '<think>I</think> <tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call> end',
    '<tool_call>{"name": "g"}</tool_call>',
)
NEW = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""For each kind of block, the kind of its deltas, and the field that has what is new."""


@pytest.fixture
def thinking() -> Iterator[Site]:
    site = Site(reasoning_parser="qwen3")
    yield site
    site.close()


@st.composite
def pieces(draw: st.DrawFn) -> list[str]:
    """An answer in pieces of any size, of which each is the text of a token."""
    text = draw(st.sampled_from(SAID))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def followed(events: list[Any]) -> list[Any]:
    """The blocks that a client makes of the events about blocks."""
    made: list[Any] = []
    is_open = False
    for event in events:
        kind = event.pop("type")
        if kind == "content_block_start":
            assert not is_open and event.pop("index") == len(made)
            is_open = True
            made.append(event.pop("content_block"))
            assert made[-1].get("text") in (None, "") and made[-1].get("input") in (None, {})
        elif kind == "content_block_delta":
            block, delta = made[-1], event.pop("delta")
            kind_of_delta, name = NEW[block["type"]]
            assert is_open and event.pop("index") == len(made) - 1
            assert delta.pop("type") == kind_of_delta and set(delta) == {name} and delta[name]
            block[name] = block.get(name, "") + delta[name]
        else:
            assert kind == "content_block_stop" and is_open and event.pop("index") == len(made) - 1
            is_open = False
        assert not event
    assert not is_open
    for block in made:
        if block["type"] == "tool_use":
            block["input"] = whole_object(block.pop("partial_json", ""))
    return made


def whole_object(arguments: str) -> Any:
    """The arguments of a call, or {} where the answer was cut off in them."""
    try:
        return json.loads(arguments)
    except ValueError:
        return {}


def without_ids(blocks: list[Any]) -> list[Any]:
    return [{name: value for name, value in block.items() if name != "id"} for block in blocks]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    st.fixed_dictionaries(
        {"max_tokens": st.integers(1, 9)},
        optional={
            "tools": st.just(TOOLS),
            "thinking": st.sampled_from([{"type": "enabled", "display": kind} for kind in ("summarized", "omitted")]),
            "tool_choice": st.just({"type": "auto", "disable_parallel_tool_use": True}),
        },
    ),
    pieces(),
    st.integers(1, 3),
)
def test_the_events_make_the_answer(thinking: Site, fields: dict[str, Any], said: list[str], step: int) -> None:
    thinking.scheduler.say(*said)
    thinking.scheduler.step = step
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    whole = thinking.good(PATH, body)
    begun, *about_blocks, delta, end = thinking.stream(PATH, body)
    assert (begun["type"], delta["type"], end) == ("message_start", "message_delta", {"type": "message_stop"})
    assert begun["message"]["content"] == [] and begun["message"]["stop_reason"] is None
    assert delta["delta"] == {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    assert delta["usage"] == whole["usage"]
    assert without_ids(followed(about_blocks)) == without_ids(whole["content"])
