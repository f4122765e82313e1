"""A client that follows the events of /v1/responses has the items of the answer that is not a stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fake_http import Site
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tercet.srt.io_struct import AbortFinish

PATH = "/v1/responses"
TOOLS = [{"type": "function", "name": "f"}]
CALLS = ("Hm ", "", '<tool_call>{"name": "f", "argu', 'ments": {"x"', ": 1}}</tool_call>", '<tool_call>{"name": "f"}')
SAID = (("one", "", " two"), ("",), ("<think>", "I ", "think", "</think>", "Hi"), ("<think>I</think>", *CALLS))
PREFIX = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}
PART = {"message": "output_text", "reasoning": "reasoning_text"}
EMPTY = {"output_text": {"text": "", "annotations": [], "logprobs": []}, "reasoning_text": {"text": ""}}


@pytest.fixture
def thinking() -> Iterator[Site]:
    site = Site(reasoning_parser="qwen3")
    yield site
    site.close()


def followed(events: list[Any]) -> list[Any]:
    """The items that a client makes of the events about items."""
    made: list[Any] = []
    for event in events:
        kind, place = event["type"].removeprefix("response."), event["output_index"]
        if kind == "output_item.added":
            item = event["item"]
            assert place == len(made) and item["status"] == "in_progress"
            assert item["id"].startswith(PREFIX[item["type"]])
            assert (item.get("content"), item.get("arguments")) in (([], None), (None, ""))
            made.append(item)
            continue
        item = made[place]
        assert item is made[-1] and item["status"] == "in_progress"
        if kind == "output_item.done":
            assert event["item"] == {**item, "status": event["item"]["status"]}
            made[place] = event["item"]
            continue
        assert event["item_id"] == item["id"]
        if kind == "function_call_arguments.delta":
            item["arguments"] += event["delta"]
        elif kind == "function_call_arguments.done":
            assert (event["name"], event["arguments"]) == (item["name"], item["arguments"])
        else:
            name = PART[item["type"]]
            assert event["content_index"] == 0 and kind.startswith((name, "content_part."))
            if kind == "content_part.added":
                item["content"].append(event["part"])
                assert event["part"] == {"type": name, **EMPTY[name]}
            elif kind == "content_part.done":
                assert event["part"] == item["content"][0]
            elif kind == f"{name}.delta":
                item["content"][0]["text"] += event["delta"]
                assert event["delta"]
            else:
                assert kind == f"{name}.done" and event["text"] == item["content"][0]["text"]
            assert ("logprobs" in event) == kind.startswith("output_text")
    return made


def without_names(response: dict[str, Any]) -> dict[str, Any]:
    items = [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]]
    times = {"id", "created_at", "completed_at"}
    return {**{k: v for k, v in response.items() if k not in times}, "output": items}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(
    st.fixed_dictionaries({}, optional={"max_output_tokens": st.integers(0, 5), "tools": st.just(TOOLS)}),
    st.sampled_from(SAID),
    st.integers(1, 3),
)
def test_the_events_make_the_answer(thinking: Site, fields: dict[str, Any], said: tuple[str, ...], step: int) -> None:
    thinking.scheduler.say(*said)
    thinking.scheduler.step = step
    whole = thinking.good(PATH, {"input": "hi", **fields})
    begun, same, *about_items, end = thinking.stream(PATH, {"input": "hi", **fields})
    response = end.pop("response")
    assert end["type"] == f"response.{whole['status']}"
    assert (begun.pop("type"), same.pop("type")) == ("response.created", "response.in_progress")
    unknown = {"status": "in_progress", "output": [], "usage": None, "completed_at": None, "incomplete_details": None}
    assert begun["response"] == same["response"] == {**response, **unknown}
    assert without_names(response) == without_names(whole)
    assert followed(about_items) == response["output"]
    calls = [item["call_id"] for item in whole["output"] if item["type"] == "function_call"]
    assert all(name.startswith("call_") for name in calls) and len(set(calls)) == len(calls)
    statuses = [item["status"] for item in whole["output"]]
    assert statuses == ["completed"] * (len(statuses) - 1) + [whole["status"]]


def test_a_failure_before_any_text_is_an_event(site: Site) -> None:
    site.scheduler.words, site.scheduler.fail = ("",), (2, AbortFinish("not a number", 500, "InvalidLogits"))
    *_, failed = site.stream(PATH, {"input": "hi"})
    assert failed["type"] == "response.failed" and failed["response"]["output"] == []
    assert failed["response"]["usage"]["output_tokens"] == 1


def test_a_failure_names_the_field_of_this_api(site: Site) -> None:
    error = AbortFinish("response_format cannot be compiled", 400, "InvalidRequest", param="response_format")
    site.scheduler.fail = (2, error)
    failed = site.stream(PATH, {"input": "hi"})[-1]["response"]
    assert failed["error"]["message"] == "text.format: text.format cannot be compiled"
