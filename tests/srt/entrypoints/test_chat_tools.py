"""Tools and reasoning in /v1/chat/completions, complete and streamed, from scripted answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, get_args, get_type_hints

import pytest
from fake_http import TEMPLATE, Site, byte_tokenizer, with_template

from tercet.srt.entrypoints.openai.chat import CHAT_CODEC
from tercet.srt.entrypoints.openai.chat_protocol import ChatBody
from tercet.srt.entrypoints.openai.tool_protocol import Function, FunctionName, ToolChoice
from tercet.srt.entrypoints.openai.tools import AnswerPlan, constrained, plan_answer
from tercet.srt.entrypoints.wire import fields_of
from tercet.srt.io_struct import LengthFinish
from tercet.srt.server_args import ServerArgs
from tercet.srt.text.answer.reasoning import HARMONY, REASONING_FORMATS
from tercet.srt.text.answer.tool_formats import TOOL_FORMATS

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "string"}}}}},
    {"type": "function", "function": {"name": "g"}},
]
BODY = {"messages": HI, "tools": TOOLS}
CALLS = ("Let me ", "see.\n<tool", '_call>{"name": "f", "argu', 'ments": {"x"', ': "y"}}</tool_call>\n', "<tool_call>")
CALLS += ('\n{"name": "g"}\n</tool_call>',)


@pytest.fixture
def thinking() -> Iterator[Site]:
    site = Site(reasoning_parser="qwen3")
    yield site
    site.close()


def joined(events: Sequence[Any], index: int = 0) -> dict[str, Any]:
    """The message that a client makes of the deltas of one choice, with its finish reason."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for event in events:
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            assert message.get("finish_reason") is None, "only the last delta has it"
            delta = choice["delta"]
            message["content"] += delta.get("content", "")
            message["reasoning_content"] += delta.get("reasoning_content", "")
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    assert call["index"] == len(message["tool_calls"]) and call["type"] == "function"
                    message["tool_calls"].append({"id": call["id"], **call["function"]})
                else:
                    message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
            message["finish_reason"] = choice["finish_reason"]
    return message


def test_the_flags_name_the_formats() -> None:
    hints = get_type_hints(ServerArgs, include_extras=True)
    assert set(get_args(hints["tool_call_parser"].__origin__)) == {"auto", *TOOL_FORMATS}
    assert set(get_args(get_args(hints["reasoning_parser"].__origin__)[0])) == {*REASONING_FORMATS, HARMONY}


def test_calls(site: Site) -> None:
    site.scheduler.say(*CALLS)
    (choice,) = site.good(PATH, BODY)["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] == "Let me see."
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "f", "arguments": '{"x": "y"}'},
        {"name": "g", "arguments": "{}"},
    ]
    assert all(call["id"].startswith("call_") and call["type"] == "function" for call in message["tool_calls"])
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    prompt = site.scheduler.prompt_texts()[0]
    assert prompt == "<tools>" + "".join(json.dumps(tool["function"]) for tool in TOOLS) + "<user>hi\n<assistant>"


def test_calls_in_a_stream(site: Site) -> None:
    site.scheduler.say(*CALLS)
    events = site.stream(PATH, BODY)
    message = joined(events)
    assert (message["content"], message["finish_reason"]) == ("Let me see.", "tool_calls")
    assert [(call["name"], call["arguments"]) for call in message["tool_calls"]] == [("f", '{"x": "y"}'), ("g", "{}")]
    deltas = [event["choices"][0]["delta"] for event in events]
    pieces = [one["tool_calls"][0]["function"].get("arguments") for one in deltas if "tool_calls" in one]
    assert pieces == ["", '{"x"', ': "y"}', "", "{}"], "arguments come while they are written"


def test_calls_of_several_samples(site: Site) -> None:
    site.scheduler.say(*CALLS)
    for i in range(2):
        assert len(joined(site.stream(PATH, {**BODY, "n": 2}), i)["tool_calls"]) == 2
    assert [len(one["message"]["tool_calls"]) for one in site.good(PATH, {**BODY, "n": 2})["choices"]] == [2, 2]


def test_only_a_call_has_no_content(site: Site) -> None:
    site.scheduler.say('<tool_call>{"name": "g"}</tool_call>')
    message = site.good(PATH, BODY)["choices"][0]["message"]
    assert message["content"] is None and len(message["tool_calls"]) == 1


@pytest.mark.parametrize("text", ["<tool_call>oops", '<tool_call>{"name": "unknown"}</tool_call>', "<tool_call"])
def test_what_is_no_call_is_content(site: Site, text: str) -> None:
    site.scheduler.say("I ", *text)
    (choice,) = site.good(PATH, BODY)["choices"]
    assert choice["message"] == {"role": "assistant", "content": f"I {text}"}
    assert choice["finish_reason"] == "stop"
    assert joined(site.stream(PATH, BODY))["content"] == f"I {text}"


def test_a_call_that_is_cut_off_ends_by_length(site: Site) -> None:
    site.scheduler.say('<tool_call>{"name": "f", "arguments": {"x": "y')
    site.scheduler.fail = (1, LengthFinish(1))
    (choice,) = site.good(PATH, BODY)["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": "y'}


def test_without_tools_nothing_is_looked_for(site: Site) -> None:
    site.scheduler.say(*CALLS)
    for body in ({"messages": HI}, {**BODY, "tool_choice": "none"}, {"messages": HI, "tools": []}):
        message = site.good(PATH, body)["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "".join(CALLS)}
        assert site.scheduler.prompt_texts()[-1] == "<user>hi\n<assistant>"


def test_a_chat_with_results(site: Site) -> None:
    site.scheduler.say(*CALLS)
    message = site.good(PATH, BODY)["choices"][0]["message"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "42"} for call in message["tool_calls"]]
    site.good(PATH, {"messages": [*HI, message, *results]})
    first, second = (call["id"] for call in message["tool_calls"])
    assert site.scheduler.prompt_texts()[-1] == (
        f'<user>hi\n<assistant>Let me see.<tool_call>{first} f{{"x": "y"}}<tool_call>{second} g{{}}\n'
        f"<tool>42({first})\n<tool>42({second})\n<assistant>"
    )
    silent = {"role": "assistant", "content": None, "tool_calls": message["tool_calls"][:1]}
    site.good(PATH, {"messages": [*HI, silent, results[0]]})
    assert "<assistant><tool_call>" in site.scheduler.prompt_texts()[-1]


def test_token_ids_beside_calls(site: Site) -> None:
    site.scheduler.say(*CALLS)
    events = site.stream(PATH, {**BODY, "return_token_ids": True})
    ids = [token for event in events for token in event["choices"][0].get("token_ids", [])]
    assert ids == list(range(len(CALLS)))


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0]", "letters, digits"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0]", "1 to 128"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1]", "two functions have the name 'f'"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": ["array", "null"]}}}]},
            "tools[0]",
            "the parameters of the function 'f' must have type object, got ['array', 'null']",
        ),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type", "invalid enum value 'custom'"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "required"),
        ({"tool_choice": "any"}, "tool_choice", "any"),
        ({"tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice", "tools has ['f', 'g']"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"functions": [{"name": "f"}]}, "functions", "the older form of tools"),
        (
            {"messages": [{"role": "user", "content": "a", "tool_call_id": "1"}]},
            "messages[0].tool_call_id",
            "role tool",
        ),
        (
            {"messages": [{"role": "user", "content": "a", "tool_calls": [{"function": {"name": "f"}}]}]},
            "messages[0].tool_calls",
            "only with role assistant",
        ),
        ({"messages": [{"role": "tool"}]}, "messages[0].content", "required"),
    ],
)
def test_bad_tools_are_refused(site: Site, fields: dict[str, Any], param: str, says: str) -> None:
    error = site.refused(PATH, {**BODY, **fields})
    assert says in error["message"]
    assert error["param"] == param
    assert site.idle()


def test_a_format_that_is_not_known_is_refused(site: Site) -> None:
    site.manager.inputs.tokenizer = with_template("{{ tools }}{{ messages }}")
    error = site.refused(PATH, BODY)
    assert error["param"] == "tools" and "--tool-call-parser" in error["message"]


def test_a_template_without_tools_gets_them_as_text() -> None:
    site = Site(tool_call_parser="auto")
    site.manager.inputs.tokenizer = with_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    site.scheduler.say('<tool_call>{"name": "g"}</tool_call>')
    error = site.refused(PATH, BODY)
    assert error["code"] == "context_length_exceeded", "the fake context is shorter than the description of the tools"
    prompt = bytes(site.good("/tokenize", {"messages": HI, "tools": TOOLS})["tokens"]).decode()
    assert prompt.endswith("hi") and "<tool_call>" in prompt and '{"name": "g"}' in prompt
    site.close()


def test_a_named_format_needs_a_template_with_tools() -> None:
    site = Site(tool_call_parser="mistral")
    site.scheduler.say('[TOOL_CALLS]g{"a": 1}')
    (call,) = site.good(PATH, BODY)["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "g", "arguments": '{"a": 1}'}
    assert len(call["id"]) == 9 and call["id"].isalnum(), "the only names that the templates of Mistral accept"
    site.manager.inputs.tokenizer = with_template("{{ messages }}")
    assert "--tool-call-parser mistral needs a chat template" in site.refused(PATH, BODY)["message"]
    site.close()


def test_marks_that_are_special_tokens_are_seen(site: Site) -> None:
    """The name of another special token is text."""
    site.manager.inputs.tokenizer = with_template(TEMPLATE, "<tool_call>", "<pad>")
    site.scheduler.say("a<pad>b", '<tool_call>{"name": "g"}')
    message = site.good(PATH, BODY)["choices"][0]["message"]
    assert message["content"] == "a<pad>b" and len(message["tool_calls"]) == 1
    options = site.scheduler.received[-1].options
    assert options.sampling.skip_special_tokens and options.shown_tokens == [258]
    shown = site.good(PATH, {**BODY, "skip_special_tokens": False})["choices"][0]["message"]
    assert shown["content"] == "a<pad>b"
    site.good(PATH, {"messages": HI})
    assert site.scheduler.received[-1].options.sampling.skip_special_tokens is True
    assert site.scheduler.received[-1].options.shown_tokens == []


@pytest.mark.parametrize(
    ("choice", "strict", "parallel", "names", "several", "by"),
    [
        ("required", False, None, ["f", "g"], False, "tool_choice"),
        ("required", False, True, ["f", "g"], True, "tool_choice"),
        (ToolChoice(type="function", function=FunctionName(name="g")), False, True, ["g"], False, "tool_choice"),
        ("auto", True, None, ["f", "g"], True, "tools"),
        (None, True, False, ["f", "g"], False, "tools"),
    ],
)
def test_required_calls_and_strict_functions_are_constrained(
    site: Site, choice: Any, strict: bool, parallel: bool | None, names: list[str], several: bool, by: str
) -> None:
    functions = [Function(name="f", strict=strict, parameters={"type": "object", "x": 1}), Function(name="g")]
    plan = plan_answer(site.manager, functions, choice, parallel=parallel)
    assert plan.constraint is not None and plan.constrained_by == by
    form = plan.constraint["format"]
    assert form["type"] == ("tags_with_separator" if by == "tool_choice" else "triggered_tags")
    assert form["stop_after_first"] != several
    assert all(f'"name": "{name}"' in tag["begin"] for name, tag in zip(names, form["tags"], strict=True))
    assert plan.form is not None and plan.form.tools == "hermes"


def test_nothing_else_is_constrained(site: Site) -> None:
    for choice, strict in (("auto", False), (None, None), ("none", True)):
        plan = plan_answer(site.manager, [Function(name="f", strict=strict)], choice)
        assert plan.constraint is None


def test_a_format_without_a_grammar_is_constrained_to_another_one() -> None:
    site = Site(tool_call_parser="gpt-oss", reasoning_parser="gpt-oss")
    plan = plan_answer(site.manager, [Function(name="f")], "required")
    assert plan.form is not None and (plan.form.tools, plan.form.reasoning) == ("hermes", None)
    site.close()


@pytest.mark.parametrize("field", [{"response_format": {"type": "text"}}, {}])
def test_a_required_call_sets_the_bodys_structural_tag(field: dict[str, Any]) -> None:
    plan = AnswerPlan(constraint={"type": "structural_tag"}, constrained_by="tool_choice")
    body = CHAT_CODEC.convert({"messages": HI, **field})
    assert constrained(body, plan)[0].structural_tag == plan.constraint
    assert constrained(body, AnswerPlan())[0] is body


THOUGHT = ("<think>\nI ", "think", "</th", "ink>\n\nHi", " there")


def test_reasoning(thinking: Site) -> None:
    thinking.scheduler.say(*THOUGHT)
    message = thinking.good(PATH, {"messages": HI})["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Hi there", "reasoning_content": "I think"}
    events = thinking.stream(PATH, {"messages": HI})
    assert joined(events) == {
        "content": "Hi there",
        "reasoning_content": "I think",
        "tool_calls": [],
        "finish_reason": "stop",
    }
    pieces = [event["choices"][0]["delta"].get("reasoning_content") for event in events]
    assert [piece for piece in pieces if piece] == ["I", " think"]
    thinking.scheduler.say("Hi")
    assert thinking.good(PATH, {"messages": HI})["choices"][0]["message"]["reasoning_content"] is None


def test_reasoning_is_counted_where_a_token_ends_it(thinking: Site) -> None:
    """Output token i of the fake engine has id i. So the third one ends the reasoning."""
    body = {"messages": HI, "stream_options": {"include_usage": True}}
    thinking.scheduler.say("<think>I", " think", "</think>", "Hi")
    assert "completion_tokens_details" not in thinking.good(PATH, {"messages": HI})["usage"]
    made = byte_tokenizer()
    made.backend.add_tokens(["</think>"])
    for said, expected in ((("<think>I", " think", "</think>", "Hi"), 3), (("Hi",), 0), (("<think>I", " think"), 2)):
        thinking.scheduler.say(*said)
        made.token_to_id = {"</think>": 2}.get  # type: ignore[method-assign]
        thinking.manager.inputs.tokenizer = made
        details = {"reasoning_tokens": expected}
        assert thinking.good(PATH, {"messages": HI})["usage"]["completion_tokens_details"] == details
        assert thinking.stream(PATH, body)[-1]["usage"]["completion_tokens_details"] == details
        usage = thinking.good("/v1/responses", {"input": "hi"})["usage"]
        assert usage["output_tokens_details"] == details


@pytest.mark.parametrize("step", [1, 2, 4])
def test_an_end_of_reasoning_in_the_content_counts_no_tokens(thinking: Site, step: int) -> None:
    body = {"messages": HI, "stream_options": {"include_usage": True}}
    made = byte_tokenizer()
    made.token_to_id = {"</think>": 2}.get  # type: ignore[method-assign]
    thinking.manager.inputs.tokenizer = made
    thinking.scheduler.step = step
    marked, cut = ("<think>", "\n", "</think>", "Hi"), ("<think>I</th", "ink>Hi")  # no token ends the last one
    for said, expected in ((("Write", " it as ", "</think>", "."), 0), (marked, 3), (cut, 0)):
        thinking.scheduler.say(*said)
        details = {"reasoning_tokens": expected}
        assert thinking.good(PATH, {"messages": HI})["usage"]["completion_tokens_details"] == details
        assert thinking.stream(PATH, body)[-1]["usage"]["completion_tokens_details"] == details


def test_reasoning_in_one_piece_or_not_separated(thinking: Site) -> None:
    thinking.scheduler.say(*THOUGHT)
    events = thinking.stream(PATH, {"messages": HI, "stream_reasoning": False})
    pieces = [event["choices"][0]["delta"].get("reasoning_content") for event in events]
    assert [piece for piece in pieces if piece] == ["I think"]
    message = thinking.good(PATH, {"messages": HI, "separate_reasoning": False})["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "".join(THOUGHT)}


def test_the_prompt_can_open_and_close_reasoning(thinking: Site) -> None:
    thinking.scheduler.say("I think</think>Hi")
    for mood, expected in (("<think>\n", ("Hi", "I think")), ("<think>\n\n</think>", ("I think</think>Hi", None))):
        body = {"messages": HI, "chat_template_kwargs": {"mood": mood}}
        message = thinking.good(PATH, body)["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == expected


def test_reasoning_before_calls(thinking: Site) -> None:
    thinking.scheduler.say(*THOUGHT[:-1], *CALLS)
    message = thinking.good(PATH, BODY)["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("HiLet me see.", "I think")
    assert len(message["tool_calls"]) == 2
    assert joined(thinking.stream(PATH, BODY))["tool_calls"][0]["arguments"] == '{"x": "y"}'


def test_harmony() -> None:
    site = Site(reasoning_parser="gpt-oss", tool_call_parser="gpt-oss")
    site.scheduler.say("<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>", "Hi")
    for body, content, reasoning in (({}, "Hi", "Hm"), ({"separate_reasoning": False}, "HmHi", None)):
        message = site.good(PATH, {"messages": HI, **body})["choices"][0]["message"]
        assert (message["content"], message.get("reasoning_content")) == (content, reasoning)
    site.scheduler.say("<|channel|>commentary to=functions.f <|constrain|>json<|message|>", '{"x": "y"}')
    message = site.good(PATH, BODY)["choices"][0]["message"]
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": "y"}'}
    site.close()


def test_harmony_without_the_flag_has_its_analysis_in_the_content() -> None:
    site = Site(tool_call_parser="gpt-oss")
    call = '<|start|>assistant<|channel|>commentary to=functions.f<|message|>{"x": "y"}'
    site.scheduler.say("<|channel|>analysis<|message|>Hm<|end|>", call)
    message = site.good(PATH, BODY)["choices"][0]["message"]
    assert message["content"] == "Hm" and "reasoning_content" not in message and len(message["tool_calls"]) == 1
    streamed = joined(site.stream(PATH, BODY))
    assert (streamed["content"], streamed["reasoning_content"], len(streamed["tool_calls"])) == ("Hm", "", 1)
    output = site.good("/v1/responses", {"input": "hi", "tools": [{"type": "function", "name": "f"}]})["output"]
    assert [item["type"] for item in output] == ["message", "function_call"]
    site.close()


def test_without_a_parser_the_fields_of_reasoning_change_nothing(site: Site) -> None:
    site.scheduler.say(*THOUGHT)
    plain = site.good(PATH, {"messages": HI})["choices"]
    for name in ("separate_reasoning", "stream_reasoning"):
        assert name in {field.name for field in fields_of(ChatBody)}
        for value in (True, False):
            assert site.good(PATH, {"messages": HI, name: value})["choices"] == plain
