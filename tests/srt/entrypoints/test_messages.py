"""/v1/messages, complete and streamed, from scripted answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fake_http import CONTEXT_LEN, Site, text_of

from tercet.srt.io_struct import AbortFinish, LengthFinish, StopFinish

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
HI: dict[str, Any] = {"role": "user", "content": "hi"}
PLAIN: dict[str, Any] = {"messages": [HI], "max_tokens": 9}
TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in "fg"]
CALL = '<tool_call>{"name": "f", "argu', 'ments": {"x"', ': "y"}}</tool_call>'


@pytest.fixture
def thinking() -> Iterator[Site]:
    site = Site(reasoning_parser="qwen3")
    yield site
    site.close()


def test_one_answer(site: Site) -> None:
    site.scheduler.say("Hi", " there")
    answer = site.good(PATH, {**PLAIN, "model": "tiny", "system": "be"})
    assert answer.pop("id").startswith("msg_")
    prompt_tokens = len("<system>be\n<user>hi\n<assistant>")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "Hi there"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 1,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": prompt_tokens - 1,
            "output_tokens": 2,
        },
    }


def block(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


def turn(role: str, *content: Any) -> dict[str, Any]:
    return {"role": role, "content": list(content)}


TEXT_A, TEXT_B = block("text", text="a"), block("text", text="b")
USES = block("tool_use", id="c1", name="f", input={}), block("tool_use", id="c2", name="g", input={"x": 1})
RESULT = block("tool_result", tool_use_id="c1", content="r1")
RESULTS = RESULT, block("tool_result", tool_use_id="c2", content=[block("text", text="r"), block("text", text="2")])


@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        ([HI], "<user>hi\n<assistant>"),
        ([turn("user", TEXT_A, TEXT_B)], "<user>a\n\nb\n<assistant>"),
        ([HI, turn("user", TEXT_A)], "<user>hi\n\na\n<assistant>"),
        ([HI, {"role": "system", "content": "be"}], "<user>hi\n<system>be\n<assistant>"),
        # A message without blocks is one with an empty text: an answer without a token has none.
        ([turn("user")], "<user>\n<assistant>"),
        ([HI, turn("assistant"), HI], "<user>hi\n<assistant>\n<user>hi\n<assistant>"),
        ([HI, turn("assistant", TEXT_A), turn("user")], "<user>hi\n<assistant>a\n<user>\n<assistant>"),
        ([HI, turn("user"), turn("user", TEXT_A)], "<user>hi\n\na\n<assistant>"),
        (
            [HI, turn("assistant", TEXT_A, TEXT_B), turn("assistant", TEXT_A), HI],
            "<user>hi\n<assistant>aba\n<user>hi\n<assistant>",
        ),
        (
            [
                HI,
                turn("assistant", block("thinking", thinking="why", signature=""), TEXT_A, *USES),
                turn("user", *RESULTS),
            ],
            '<user>hi\n<assistant>a[why]<tool_call>c1 f{}<tool_call>c2 g{"x": 1}\n'
            "<tool>r1(f)(c1)\n<tool>r\n\n2(g)(c2)\n<assistant>",
        ),
        (
            [turn("assistant", USES[0]), turn("user", {**RESULT, "is_error": True}, TEXT_A)],
            "<assistant><tool_call>c1 f{}\n<tool>Error: r1(f)(c1)\n<user>a\n<assistant>",
        ),
        ([turn("user", block("tool_result", tool_use_id="c9"))], "<tool>(c9)\n<assistant>"),
        (
            [turn("assistant", *[block("thinking", thinking=one) for one in "pq"], TEXT_A), HI],
            "<assistant>a[p\nq]\n<user>hi\n<assistant>",
        ),
    ],
)
def test_messages_become_a_prompt(site: Site, messages: list[Any], prompt: str) -> None:
    site.good(PATH, {**PLAIN, "messages": messages})
    assert site.scheduler.prompt_texts() == [prompt]
    assert site.good(COUNT, {"messages": messages}) == {"input_tokens": len(prompt)}


def test_parts_of_the_system_message_are_paragraphs(site: Site) -> None:
    site.good(PATH, {**PLAIN, "system": [{**TEXT_A, "cache_control": {"type": "ephemeral", "ttl": "1h"}}, TEXT_B]})
    assert site.scheduler.prompt_texts() == ["<system>a\n\nb\n<user>hi\n<assistant>"]


def test_the_answer_continues_a_last_message_of_the_assistant(site: Site) -> None:
    site.good(PATH, {**PLAIN, "messages": [HI, turn("assistant", TEXT_A)]})
    assert site.scheduler.prompt_texts() == ["<user>hi\n<assistant>a"]


def test_an_answer_can_be_sent_back(thinking: Site) -> None:
    thinking.scheduler.say("<think>why</think>Ok", *CALL)
    content = thinking.good(PATH, {**PLAIN, "tools": TOOLS})["content"]
    assert [one["type"] for one in content] == ["thinking", "text", "tool_use"]
    result = block("tool_result", tool_use_id=content[2]["id"], content="42")
    thinking.good(PATH, {**PLAIN, "messages": [HI, turn("assistant", *content), turn("user", result)], "tools": TOOLS})
    prompt = thinking.scheduler.prompt_texts()[-1].partition("<user>")[2]
    assert prompt.startswith("hi\n<assistant>Ok[why]<tool_call>") and "<tool>42(f)" in prompt


def kinds(events: list[Any]) -> list[str]:
    return [event["type"] for event in events]


def test_a_stream_of_text(site: Site) -> None:
    site.scheduler.say("Hi", " there")
    whole = site.good(PATH, PLAIN)
    events = site.stream(PATH, PLAIN)
    assert kinds(events) == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    begun = events[0]["message"]
    assert (begun["content"], begun["stop_reason"], begun["model"]) == ([], None, whole["model"])
    assert {**begun["usage"], "output_tokens": 2} == whole["usage"] == events[5]["usage"]
    assert events[1]["content_block"] == {"type": "text", "text": ""}
    assert [one["delta"] for one in events[2:4]] == [{"type": "text_delta", "text": text} for text in ("Hi", " there")]
    assert events[5]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[6] == {"type": "message_stop"}


def test_the_end_of_a_stream_is_its_last_event(site: Site) -> None:
    site.scheduler.say("Hi")
    content = site.post(PATH, {**PLAIN, "stream": True}).content
    assert content.endswith(b'event: message_stop\ndata: {"type":"message_stop"}\n\n')


def joined(events: list[Any]) -> list[dict[str, Any]]:
    """The blocks that the events of a stream tell of."""
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            delta = dict(event["delta"])
            kind = delta.pop("type")
            ((name, text),) = delta.items()
            assert (kind, name) in {
                ("text_delta", "text"),
                ("thinking_delta", "thinking"),
                ("input_json_delta", "partial_json"),
            }
            blocks[-1][name] = blocks[-1].get(name, "") + text
    return blocks


@pytest.mark.parametrize("display", [None, "summarized", "omitted"])
def test_a_stream_of_everything(thinking: Site, display: str | None) -> None:
    thinking.scheduler.say("<think>wh", "y</think>", "Ok ", *CALL, '<tool_call>{"name": "g"}')
    body = {**PLAIN, "tools": TOOLS, "thinking": {"type": "enabled", "display": display}}
    whole = thinking.good(PATH, body)
    events = thinking.stream(PATH, body)
    thought, text, *calls = joined(events)
    assert thought == {"type": "thinking", "thinking": "" if display == "omitted" else "why", "signature": ""}
    assert [thought, text] == whole["content"][:2]
    assert [(one["name"], one["input"], one["partial_json"]) for one in calls] == [
        ("f", {}, '{"x": "y"}'),
        ("g", {}, "{}"),
    ]
    assert [(one["name"], one["input"]) for one in whole["content"][2:]] == [("f", {"x": "y"}), ("g", {})]
    assert kinds(events).count("content_block_stop") == 4
    assert events[-2]["delta"]["stop_reason"] == whole["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("finish", "reason", "sequence"),
    [
        (LengthFinish(9), "max_tokens", None),
        (LengthFinish(2), "model_context_window_exceeded", None),
        (StopFinish("x"), "stop_sequence", "x"),
        (StopFinish("of the model"), "end_turn", None),
        (StopFinish(256), "end_turn", None),
        (AbortFinish("asked for"), "pause_turn", None),
    ],
)
def test_why_an_answer_ended(site: Site, finish: Any, reason: str, sequence: str | None) -> None:
    site.scheduler.fail = (2, finish)
    body = {**PLAIN, "stop_sequences": ["x"]}
    answer = site.good(PATH, body)
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)
    assert answer["content"] == [{"type": "text", "text": text_of(2)}]
    assert site.stream(PATH, body)[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


def test_an_answer_at_the_end_of_the_context(site: Site) -> None:
    answer = site.good(PATH, {**PLAIN, "max_tokens": 10**9})
    usage = answer["usage"]
    assert answer["stop_reason"] == "model_context_window_exceeded"
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["output_tokens"] == CONTEXT_LEN


def test_an_answer_without_text_has_no_block(site: Site) -> None:
    site.scheduler.say("")
    assert site.good(PATH, PLAIN)["content"] == []
    assert joined(site.stream(PATH, PLAIN)) == []


@pytest.mark.parametrize("said", ['{"x": "y', "[1]", '{"x": 1e999}'])
def test_arguments_that_are_no_whole_object(site: Site, said: str) -> None:
    site.scheduler.say(f'<tool_call>{{"name": "f", "arguments": {said}')
    site.scheduler.fail = (1, LengthFinish(9))
    content = site.good(PATH, {**PLAIN, "tools": TOOLS})["content"]
    assert [one.get("input", {}) for one in content] == [{}]


def test_a_failure_in_a_stream(site: Site) -> None:
    for finish, kind in (
        (AbortFinish("not a number", 500, "InvalidLogits"), "api_error"),
        (AbortFinish("gone", 503, "EngineDead"), "overloaded_error"),
    ):
        site.scheduler.fail = (2, finish)
        last = site.stream(PATH, PLAIN)[-1]
        assert last == {"type": "error", "error": {"type": kind, "message": finish.message}}
    site.scheduler.fail = (1, AbortFinish("not a number", 500, "InvalidLogits"))
    assert site.refused(PATH, PLAIN, 500)["message"] == "not a number"
    assert site.idle()


def test_a_failure_in_a_stream_names_the_field_of_this_api(site: Site) -> None:
    problem = "response_format cannot be compiled"
    site.scheduler.fail = (2, AbortFinish(problem, 400, "InvalidRequest", param="response_format"))
    told = "output_config.format: output_config.format cannot be compiled"
    assert site.stream(PATH, PLAIN)[-1]["error"] == {"type": "invalid_request_error", "message": told}


def with_block(**fields: Any) -> dict[str, Any]:
    return {"messages": [turn("user", fields)]}


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"messages": []}, "messages", "messages must contain 1 to 10000 messages, got 0"),
        ({"max_tokens": None}, "max_tokens", "max_tokens"),
        ({"max_tokens": -1}, "max_tokens", "max_tokens must be at least 0"),
        ({"temperature": -1}, "temperature", "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences", "stop_sequences must be non-empty strings"),
        ({"messages": [{"role": "user", "content": "x" * CONTEXT_LEN}]}, "messages", "maximum context length"),
        (with_block(type="image", source={"type": "url"}), "messages[0].content[0].source", "text only"),
        (with_block(type="document"), "messages[0].content[0].type", "'document' is not supported"),
        (with_block(type="thinking", thinking="a"), "messages[0].content[0].type", "not allowed with role user"),
        (with_block(type="text"), "messages[0].content[0].text", "is required with type text"),
        (with_block(type="text", text="a", id="b"), "messages[0].content[0].id", "id is not allowed with type text"),
        (
            with_block(type="tool_result", tool_use_id="c", content=[{"type": "text"}]),
            "messages[0].content[0].content[0].text",
            "is required",
        ),
        ({"messages": [HI, turn("assistant", USES[0])]}, "messages", "a message with their results"),
        ({"system": [{"type": "image"}]}, "system[0].type", "'image' is not supported"),
        ({"tools": [{**TOOLS[0], "name": "a b"}]}, "tools[0]", "letters, digits"),
        ({"tools": [{"type": "web_search_20250305", "name": "a"}]}, "tools[0].type", "web_search"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "there are no tools"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name", "is required with type tool"),
        ({"tool_choice": {"type": "any", "name": "f"}}, "tool_choice.name", "is not allowed with type any"),
        (
            {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": True}},
            "chat_template_kwargs.enable_thinking",
            "another field makes it False",
        ),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "must not contain messages"),
        ({"context_management": {"edits": [{"type": "clear"}]}}, "context_management", "does not shorten"),
    ],
)
def test_bad_input_is_refused(site: Site, body: dict[str, Any], param: str, says: str) -> None:
    body = {name: value for name, value in {**PLAIN, **body}.items() if value is not None}
    error = site.refused(PATH, body)
    assert says in error["message"]
    assert error["param"] == param or (param == "max_tokens" and "missing" in error["message"])
    assert site.idle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_schema_names_the_field_of_this_api(site: Site, stream: bool) -> None:
    config = {"format": {"type": "json_schema", "schema": {"title": "bad"}}}
    error = site.refused(PATH, {**PLAIN, "output_config": config, "stream": stream})
    assert (error["param"], error["message"]) == ("output_config.format", "the grammar is bad")


def test_the_api_key_may_be_in_the_header_of_anthropics_libraries() -> None:
    site = Site(api_key="secret")
    try:
        for headers, status in (
            ({"x-api-key": "secret"}, 200),
            ({"x-api-key": "wrong"}, 401),
            ({"x-api-key": "wrong", "authorization": "Bearer secret"}, 200),
            ({"authorization": "Bearer wrong", "x-api-key": "secret"}, 401),
            ({}, 401),
        ):
            assert site.post(PATH, PLAIN, headers=headers).status_code == status
    finally:
        site.close()
