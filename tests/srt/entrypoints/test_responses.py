"""/v1/responses, complete and streamed, from scripted answers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fake_http import CONTEXT_LEN, Site, text_of, with_template

from tercet.managers import generation
from tercet.srt.entrypoints.openai.responses import _repeated
from tercet.srt.errors import InvalidRequest
from tercet.srt.io_struct import AbortFinish, LengthFinish

PATH = "/v1/responses"
TOOLS = [{"type": "function", "name": "f", "parameters": {"type": "object"}}, {"type": "function", "name": "g"}]
CALL = '<tool_call>{"name": "f", "argu', 'ments": {"x"', ': "y"}}</tool_call>'


@pytest.fixture
def thinking() -> Iterator[Site]:
    site = Site(reasoning_parser="qwen3")
    yield site
    site.close()


def test_one_answer(site: Site) -> None:
    site.scheduler.say("Hi", " there")
    answer = site.good(PATH, {"model": "tiny", "input": "hi", "instructions": "be", "metadata": {"a": "b"}})
    assert answer["id"].startswith("resp_") and answer["created_at"] > 1_600_000_000
    assert (answer["object"], answer["status"], answer["model"]) == ("response", "completed", "tiny")
    assert answer["completed_at"] >= answer["created_at"]
    (message,) = answer["output"]
    assert message.pop("id").startswith("msg_")
    text = {"type": "output_text", "text": "Hi there", "annotations": [], "logprobs": []}
    assert message == {"type": "message", "role": "assistant", "status": "completed", "content": [text]}
    prompt_tokens = len("<system>be\n<user>hi\n<assistant>")
    assert answer["usage"] == {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": prompt_tokens - 1, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt_tokens + 2,
    }
    assert (answer["store"], answer["tool_choice"], answer["parallel_tool_calls"]) == (False, "auto", True)
    assert (answer["instructions"], answer["metadata"], answer["text"]) == (
        "be",
        {"a": "b"},
        {"format": {"type": "text"}},
    )


def test_an_answer_is_complete_with_its_last_token(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "time", SimpleNamespace(monotonic=itertools.count(0, 1000).__next__))
    site.scheduler.say("Hi", " there")
    answer = site.good(PATH, {"input": "hi"})
    assert answer["completed_at"] == answer["created_at"] + 2000, "a thousand seconds for each token"


def test_the_answer_repeats_the_request(site: Site) -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "description": None, "strict": False}
    sent: dict[str, Any] = {
        "instructions": "be",
        "max_output_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.25,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "tools": [tool],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        "parallel_tool_calls": False,
        "text": {"format": {"type": "text"}},
        "metadata": {"a": "b"},
        "truncation": "auto",
    }
    answer = site.good(PATH, {"input": "hi", **sent, "reasoning": {"effort": "low"}})
    assert {name: answer[name] for name in sent} == sent
    assert answer["reasoning"] == {"effort": "low", "summary": None}
    json_object = {"format": {"type": "json_object"}}
    assert site.good(PATH, {"input": "hi", "text": json_object, "tool_choice": "none"})["text"] == json_object
    plain = site.good(PATH, {"input": "hi"})
    assert (plain["tools"], plain["tool_choice"], plain["reasoning"]["effort"]) == ([], "auto", None)
    assert site.good(PATH, {"input": "hi", "tool_choice": "none"})["tool_choice"] == "none"
    assert plain["metadata"] == {}


CONVERSATION: list[dict[str, Any]] = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "why"}]},
    {
        "type": "message",
        "id": "msg_1",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "b", "annotations": [], "logprobs": []}],
    },
    {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": "{}", "status": "completed"},
    {"type": "function_call", "call_id": "c2", "name": "g", "arguments": '{"x": 1}'},
    {"type": "function_call_output", "call_id": "c1", "output": "r1"},
    {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "r2"}]},
]


SHORT = [{"type": "summary_text", "text": "short"}]


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ({"input": "hi"}, "<user>hi\n<assistant>"),
        (
            {"input": [{"role": "developer", "content": "be"}, {"role": "user", "content": "hi"}]},
            "<system>be\n<user>hi\n<assistant>",
        ),
        (
            {"instructions": "one", "input": [{"role": "system", "content": "two"}, {"role": "user", "content": "hi"}]},
            "<system>one\n\ntwo\n<user>hi\n<assistant>",
        ),
        (
            {"instructions": "one", "input": [{"role": "developer", "content": "two"}]},
            "<system>one\n\ntwo\n<assistant>",
        ),
        ({"instructions": "one", "input": []}, "<system>one\n<assistant>"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": text} for text in "ab"]}]},
            "<user>ab\n<assistant>",
        ),
        (
            {"input": [CONVERSATION[2], CONVERSATION[1], CONVERSATION[3]]},
            "<assistant>b\n<assistant>[why]<tool_call>c1 f{}\n<assistant>",
        ),
        ({"input": [{"type": "reasoning"}, CONVERSATION[2]]}, "<assistant>b\n<assistant>"),
        ({"input": [{**CONVERSATION[1], "summary": SHORT}, CONVERSATION[2]]}, "<assistant>b[why]\n<assistant>"),
        ({"input": "hi", "text": {}, "reasoning": {}, "tools": []}, "<user>hi\n<assistant>"),
        (
            {"input": "hi", "reasoning": {"effort": None}, "chat_template_kwargs": {"reasoning_effort": "low"}},
            "<user>hi\n<assistant>(low)",
        ),
        (
            {"input": CONVERSATION},
            '<user>a\n<assistant>b[why]<tool_call>c1 f{}<tool_call>c2 g{"x": 1}\n'
            "<tool>r1(f)(c1)\n<tool>r2(g)(c2)\n<assistant>",
        ),
        (
            {"input": [CONVERSATION[0], CONVERSATION[3], CONVERSATION[5]]},
            "<user>a\n<assistant><tool_call>c1 f{}\n<tool>r1(f)(c1)\n<assistant>",
        ),
        ({"input": [CONVERSATION[1], CONVERSATION[0]]}, "<assistant>[why]\n<user>a\n<assistant>"),
        ({"input": [CONVERSATION[0], CONVERSATION[1]]}, "<user>a\n<assistant>[why]\n<assistant>"),
        ({"input": [CONVERSATION[1], CONVERSATION[1], CONVERSATION[2]]}, "<assistant>b[why\nwhy]\n<assistant>"),
    ],
)
def test_items_become_a_prompt(site: Site, body: dict[str, Any], prompt: str) -> None:
    site.good(PATH, {**body, "max_output_tokens": 1})
    assert site.scheduler.prompt_texts() == [prompt]


def test_only_a_message_after_reasoning_has_some(site: Site) -> None:
    """A template may read reasoning from the content of messages that have none, as Qwen3's does."""
    site.manager.inputs.tokenizer = with_template(
        "{% for one in messages %}{{ 'reasoning_content' in one }} {% endfor %}"
    )
    said = [{"role": role, "content": role} for role in ("user", "assistant", "user", "assistant")]
    site.good(PATH, {"input": [*said[:3], {"type": "reasoning", "summary": [], "content": "why"}, said[3]]})
    assert site.scheduler.prompt_texts() == ["False False False True "]


def test_two_efforts_must_be_equal(site: Site) -> None:
    for effort, expected in (("low", 200), ("high", 400)):
        body = {"input": "hi", "reasoning": {"effort": "low"}, "chat_template_kwargs": {"reasoning_effort": effort}}
        answer = site.post(PATH, {**body, "max_output_tokens": 1})
        assert answer.status_code == expected
    error = answer.json()["error"]
    assert error["param"] == "reasoning.effort" and "got 'low' and 'high'" in error["message"]


def test_an_answer_can_be_sent_back(thinking: Site) -> None:
    thinking.scheduler.say("<think>why</think>Ok", *CALL)
    first = [{"role": "user", "content": "a"}]
    output = thinking.good(PATH, {"input": first, "tools": TOOLS})["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
    result = {"type": "function_call_output", "call_id": output[2]["call_id"], "output": "42"}
    thinking.good(PATH, {"input": [*first, *output, result], "tools": TOOLS})
    prompt = thinking.scheduler.prompt_texts()[-1].partition("<user>")[2]
    assert prompt.startswith("a\n<assistant>Ok[why]<tool_call>") and "<tool>42(f)" in prompt


def names(events: list[Any]) -> list[str]:
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return [event["type"].removeprefix("response.") for event in events]


def test_a_stream_of_text(site: Site) -> None:
    site.scheduler.say("Hi", " there")
    events = site.stream(PATH, {"input": "hi"})
    assert names(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["usage"] is None
    item = events[2]["item"]
    assert (item["status"], item["content"]) == ("in_progress", [])
    about_text = events[3:8]
    assert {(one["item_id"], one["output_index"], one["content_index"]) for one in about_text} == {(item["id"], 0, 0)}
    assert [one["delta"] for one in events[4:6]] == ["Hi", " there"]
    assert events[6]["text"] == events[7]["part"]["text"] == "Hi there"
    last = events[-1]["response"]
    assert last["output"] == [events[-2]["item"]] and last["usage"]["output_tokens"] == 2


def test_a_stream_of_everything(thinking: Site) -> None:
    thinking.scheduler.say("<think>wh", "y</think>", "Ok ", *CALL, '<tool_call>{"name": "g"}')
    events = thinking.stream(PATH, {"input": "hi", "tools": TOOLS})
    kinds = names(events)
    assert [event["item"]["type"] for event in events if event["type"].endswith("item.added")] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert [event["output_index"] for event in events if event["type"].endswith("item.done")] == [0, 1, 2, 3]
    arguments = [event["delta"] for event in events if event["type"].endswith("arguments.delta")]
    assert arguments == ['{"x"', ': "y"}', "{}"]
    done = [event for event in events if event["type"].endswith("arguments.done")]
    assert [(event["name"], event["arguments"]) for event in done] == [("f", '{"x": "y"}'), ("g", "{}")]
    assert kinds.count("reasoning_text.delta") == 2 and kinds.count("reasoning_text.done") == 1
    output = events[-1]["response"]["output"]
    assert output == [event["item"] for event in events if event["type"].endswith("item.done")]
    whole = thinking.good(PATH, {"input": "hi", "tools": TOOLS})["output"]
    assert [one.get("arguments", one.get("content")) for one in whole] == [
        one.get("arguments", one.get("content")) for one in output
    ]


def test_an_answer_that_is_cut_off(site: Site) -> None:
    answer = site.good(PATH, {"input": "hi", "max_output_tokens": 3})
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["output"][0]["status"] == "incomplete"
    assert answer["output"][0]["content"][0]["text"] == text_of(3)
    assert names(site.stream(PATH, {"input": "hi", "max_output_tokens": 3}))[-1] == "incomplete"


def test_an_answer_without_text_is_an_empty_message(site: Site) -> None:
    site.scheduler.say("")
    (message,) = site.good(PATH, {"input": "hi"})["output"]
    assert message["content"][0]["text"] == ""


def test_an_abort_by_the_client(site: Site) -> None:
    site.scheduler.fail = (2, AbortFinish("asked for"))
    answer = site.good(PATH, {"input": "hi"})
    assert answer["status"] == "cancelled" and answer["output"][0]["content"][0]["text"] == text_of(2)


def test_a_failure_in_a_stream(site: Site) -> None:
    site.scheduler.fail = (2, AbortFinish("not a number", 500, "InvalidLogits"))
    events = site.stream(PATH, {"input": "hi"})
    assert names(events)[-1] == "failed"
    last = events[-1]["response"]
    assert (last["status"], last["error"]) == ("failed", {"code": "server_error", "message": "not a number"})
    assert last["output"][0]["status"] == "incomplete"
    site.scheduler.fail = (1, AbortFinish("not a number", 500, "InvalidLogits"))
    assert site.refused(PATH, {"input": "hi"}, 500)["message"] == "not a number"
    assert site.idle()


def test_a_failure_in_a_stream_has_its_code(site: Site) -> None:
    site.scheduler.fail = (2, AbortFinish("gone", 503, "EngineDead"))
    last = site.stream(PATH, {"input": "hi"})[-1]["response"]
    assert last["error"] == {"code": "engine_dead", "message": "gone"}


def formatted(kind: str, **fields: Any) -> dict[str, Any]:
    return {"text": {"format": {"type": kind, **fields}}}


@pytest.mark.parametrize("server_truncates", [False, True])
def test_the_request_or_else_the_server_says_whether_a_long_prompt_is_truncated(server_truncates: bool) -> None:
    site = Site(allow_auto_truncate=server_truncates)
    try:
        for given, truncates in ((None, server_truncates), ("auto", True), ("disabled", False)):
            shown = "auto" if truncates else "disabled"
            assert site.good(PATH, {"input": "hi", "truncation": given})["truncation"] == shown
            too_long = {"input": "x" * 240, "truncation": given}
            if truncates:
                assert site.good(PATH, too_long)["usage"]["input_tokens"] == CONTEXT_LEN - 1
            else:
                assert "maximum context length" in site.refused(PATH, too_long)["message"]
    finally:
        site.close()


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "input", "input is required"),
        ({"input": []}, "input", "input must contain 1 to 10000 messages, got 0"),
        ({"input": "hi", "store": True}, "store", "needs a server with --response-store-mib"),
        ({"input": "hi", "previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation"),
        ({"input": "hi", "previous_response_id": "resp_1"}, "previous_response_id", "--response-store-mib"),
        ({"input": "hi", "background": True}, "background", "background"),
        ({"input": "hi", "truncation": "middle"}, "truncation", "middle"),
        ({"input": "x" * 240, "truncation": "disabled"}, "input", "maximum context length"),
        ({"input": "hi", "max_output_tokens": -1}, "max_output_tokens", "max_output_tokens must be"),
        ({"input": "hi", "temperature": -1}, "temperature", "temperature"),
        ({"input": "hi", "tools": [{"type": "web_search"}]}, "tools[0].type", "web_search"),
        ({"input": "hi", "tools": [{"type": "function", "name": "a b"}]}, "tools[0]", "letters, digits"),
        ({"input": [{"role": "user"}]}, "input[0].content", "required"),
        ({"input": [{"content": "a"}]}, "input[0].role", "required"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id", "required"),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": "a", "role": "user"}]},
            "input[0].role",
            "role is not allowed in an item of type function_call_output",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "item_reference"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
            "input_image",
        ),
        ({"input": "hi", "chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "must not contain messages"),
        ({"input": "x" * 240}, "input", "maximum context length"),
        ({"input": "hi", "messages": []}, "messages", "unknown field"),
        ({"input": "hi", **formatted("json_schema", schema=5)}, "text.format.schema", "text.format.schema: expected"),
        (
            {"input": "hi", **formatted("json_schema", schemas={})},
            "text.format.schemas",
            "in text.format; did you mean",
        ),
        (
            {"input": "hi", **formatted("json_object", json_schema={})},
            "text.format.json_schema",
            "text.format.json_schema is allowed only with type json_schema",
        ),
        ({"input": "hi", **formatted("json")}, "text.format.type", "text.format.type: invalid enum value"),
        ({"input": "hi", "tools": [{**TOOLS[1], "name": "response_format"}] * 2}, "tools[1]", "name 'response_format'"),
    ],
)
def test_bad_input_is_refused(site: Site, body: dict[str, Any], param: str, says: str) -> None:
    error = site.refused(PATH, body)
    assert says in error["message"]
    assert error["param"] == param
    assert param.startswith("input") or not error["message"].startswith("input")
    assert site.idle()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_tool", [False, True])
def test_what_the_answer_repeats_can_be_nested_as_deeply_as_a_body(site: Site, is_tool: bool, stream: bool) -> None:
    """The decoder refuses a deeper body. Every other one gets an answer, or an error that names the field."""
    fields = '"tool_choice": "none", "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}]'
    if not is_tool:
        fields = '"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}'
    text = f'{{"input": "hi", "max_output_tokens": 1, "stream": {str(stream).lower()}, {fields}}}'

    def answer(depth: int) -> Any:
        schema = '{"a":' * depth + "{}" + "}" * depth
        return site.post(PATH, text.replace("SCHEMA", schema).encode())

    works, fails = 10, 100_000
    while fails - works > 1:
        middle = (works + fails) // 2
        if (found := answer(middle)).status_code == 200:
            works = middle
        else:
            assert found.status_code == 400
            fails = middle
    for depth in range(fails, fails + 20):
        error = site.refused(PATH, text.replace("SCHEMA", '{"a":' * depth + "{}" + "}" * depth).encode())
        assert "nested too deeply" in error["message"]
    assert site.idle()


def test_what_cannot_be_repeated_names_its_field() -> None:
    value: dict[str, Any] = {}
    for _ in range(100_000):
        value = {"a": value}
    with pytest.raises(InvalidRequest, match=r"text\.format is nested too deeply") as caught:
        _repeated(value, "text.format")
    assert caught.value.param == "text.format"


def test_a_limit_during_a_call(site: Site) -> None:
    site.scheduler.say('<tool_call>{"name": "f", "arguments": {"x": "y')
    site.scheduler.fail = (1, LengthFinish(1))
    (call,) = site.good(PATH, {"input": "hi", "tools": TOOLS})["output"]
    assert (call["name"], call["arguments"], call["status"]) == ("f", '{"x": "y', "incomplete")
