"""Chats with tools through templates of every habit."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tercet.srt.errors import InvalidRequest
from tercet.srt.text.chat_template import ChatTemplate
from tercet.srt.text.tool_messages import CallShape, functions_text, without_tools

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
ARGUMENTS = '{"x": "é", "y": [1]}'
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}],
    },
    {"role": "tool", "content": "r1", "tool_call_id": "1"},
    {"role": "tool", "content": [{"type": "text", "text": "r2"}], "tool_call_id": "2"},
]


def template_of(call: str, around: str = "{{ m.content or '' }}CALL", tools: str = "{{ tools | tojson }}") -> str:
    loop = "{% for c in m.tool_calls or [] %}" + call + "{% endfor %}"
    return tools + "{% for m in messages %}<{{ m.role }}>" + around.replace("CALL", loop) + "{% endfor %}"


OBJECT = template_of("[{{ c.function.name }} {{ c.function.arguments | tojson }}]")
TEXT = template_of("{{ '[' + c.function.name + ' ' + c.function.arguments + ']' }}")
WORDS = template_of("{{ '[' ~ c.function.name ~ ' ' ~ c.function.arguments ~ ']' }}")
PRINTS = template_of("[{{ c.function.name }} {{ c.function.arguments | tojson }}]", "{{ m.content }}CALL")
NEEDS_NULL = template_of(
    "{{ '[' + c.function.name + ' ' + c.function.arguments + ']' }}",
    "{% if m.role == 'assistant' and m.content is none %}CALL{% else %}{{ m.content }}{% endif %}",
)


@pytest.mark.parametrize(
    ("source", "shape"),
    [
        (OBJECT, CallShape(None, False)),
        (TEXT, CallShape(None, True)),
        (WORDS, CallShape(None, True)),
        (PRINTS, CallShape("", False)),
        (NEEDS_NULL, CallShape(None, True)),
    ],
)
def test_a_template_gets_calls_in_its_shape(source: str, shape: CallShape) -> None:
    template = ChatTemplate(source, {})
    assert template.knows_tools and template.call_shape == shape
    for arguments in (ARGUMENTS, json.loads(ARGUMENTS)):
        chat = [dict(CHAT[0]), json.loads(json.dumps(CHAT[1])), *CHAT[2:]]
        chat[1]["tool_calls"][0]["function"]["arguments"] = arguments
        prompt = template.render(chat, tools=[TOOL])
        assert prompt.endswith(f"<user>Hi<assistant>[f {ARGUMENTS}]<tool>r1<tool>r2")
        assert '"name": "f"' in prompt.partition("<user>")[0]


def test_text_that_is_no_object_is_rendered_as_it_is() -> None:
    chat = [CHAT[0], {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"x": '}}]}]
    assert ChatTemplate(OBJECT, {}).render(chat).endswith('[f "{\\"x\\": "]')


@pytest.mark.parametrize("source", [OBJECT, TEXT])
def test_a_call_without_arguments_has_an_empty_object_in_every_shape(source: str) -> None:
    """Some clients send empty text where a stream had no piece of arguments."""
    for arguments in ("", "{}", {}):
        chat = [CHAT[0], {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]
        assert ChatTemplate(source, {}).render(chat).endswith("[f {}]")


PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}{{ raise_exception('no ' + m.role) }}"
    "{% endif %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('take turns') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
HISTORY = (
    '<assistant><tool_call>\n{"name": "f", "arguments": ' + ARGUMENTS + "}\n</tool_call>"
    "<user><tool_response>\nr1\n</tool_response>\n<tool_response>\nr2\n</tool_response>"
)


def test_a_template_without_tools_gets_them_as_text() -> None:
    template = ChatTemplate(PLAIN, {})
    assert not template.knows_tools
    functions = functions_text([TOOL])
    assert json.dumps(TOOL["function"]) in functions
    assert template.render(CHAT, tools=[TOOL]) == f"<system>{functions}<user>Hi{HISTORY}"
    system = {"role": "system", "content": "Be brief."}
    assert template.render([system, *CHAT], tools=[TOOL]) == f"<system>Be brief.\n\n{functions}<user>Hi{HISTORY}"
    assert template.render(CHAT) == f"<user>Hi{HISTORY}"
    said = [CHAT[0], {**CHAT[1], "content": "Wait."}]
    assert "<assistant>Wait.\n<tool_call>" in template.render(said)


IMAGE = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": "data:"}}]


@pytest.mark.parametrize("source", [OBJECT, PLAIN, NO_SYSTEM])
@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "tool", "content": IMAGE}, "parts of type 'image_url' are not supported"),
        ({"role": "user", "content": IMAGE}, "parts of type 'image_url' are not supported"),
        ({"role": "tool", "content": 5}, "content must be a string or a list of text parts, got int"),
        ("hi", "messages must be objects, got str"),
    ],
)
def test_what_no_template_takes_is_refused_also_beside_tools(source: str, message: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        ChatTemplate(source, {}).render([message, *CHAT[2:]], tools=[TOOL])


def test_a_result_may_be_the_first_message_and_functions_keep_their_letters() -> None:
    described = {"type": "function", "function": {"name": "f", "description": "Größe"}}
    prompt = ChatTemplate(PLAIN, {}).render(CHAT[2:], tools=[described])
    assert prompt.endswith("<user><tool_response>\nr1\n</tool_response>\n<tool_response>\nr2\n</tool_response>")
    assert '{"name": "f", "description": "Größe"}' in prompt


@pytest.mark.timeout(60)
def test_many_results_in_a_row_do_not_take_quadratic_time() -> None:
    """Copying the results so far for each one would copy two terabytes."""
    results = [{"role": "tool", "content": "r" * 400}] * 100_000
    (message,) = without_tools(results, None, takes_system=True)
    assert message["role"] == "user"
    assert message["content"].split("\n") == ["<tool_response>", "r" * 400, "</tool_response>"] * 100_000


def test_a_template_without_system_messages_gets_the_functions_from_the_user() -> None:
    template = ChatTemplate(NO_SYSTEM, {})
    assert not template.takes_system
    assert template.render(CHAT, tools=[TOOL]) == f"<user>{functions_text([TOOL])}\n\nHi{HISTORY}"
