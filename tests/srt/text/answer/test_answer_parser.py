"""Every format, whole and in pieces of every size."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parsed_answers import in_pieces, parse_answer

from tercet.srt.text.answer.answer_parser import AnswerFormat, AnswerParser
from tercet.srt.text.answer.answer_text import Arguments, CallStart, Content, Part, Reasoning
from tercet.srt.text.answer.reasoning import REASONING_FORMATS
from tercet.srt.text.answer.tool_formats import TOOL_FORMATS, detect_tool_format
from tercet.srt.text.answer.tools import Functions

FUNCTIONS = Functions(
    {
        "get_weather": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array"}},
        },
        "now": None,
        "a.b-c": {},
    }
)
PARIS = ("get_weather", {"city": "Paris"})
TWO = [PARIS, ("now", {})]


def form(tools: str | None, **fields: Any) -> AnswerFormat:
    return AnswerFormat(tools=tools, functions=FUNCTIONS, **fields)


def summary(parts: list[Part]) -> tuple[str, str, list[tuple[str, Any]]]:
    """Content, reasoning and calls. Arguments that are not JSON stay text."""
    content = "".join(part.text for part in parts if isinstance(part, Content))
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    calls: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, CallStart):
            calls.append((part.name, ""))
        elif isinstance(part, Arguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
    return content, reasoning, [(name, _json_or_text(text)) for name, text in calls]


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def both_ways(form: AnswerFormat, text: str, inside: bool = False) -> tuple[str, str, list[tuple[str, Any]]]:
    whole = parse_answer(form, text, inside)
    assert in_pieces(form, list(text), inside) == whole
    return summary(whole)


V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
CALLS: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', "", [PARIS]),
    (
        "hermes",
        'I look.\n\n<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>\n'
        '<tool_call>\n{"name": "now"}\n</tool_call>\nDone.',
        "I look.Done.",
        TWO,
    ),
    ("hermes", '<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}</tool_call>', "", [PARIS]),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}', "", [PARIS]),
    ("hermes", '<tool_call>{"id": 3, "name": "now", "arguments": null, "type": "function"}', "", [("now", {})]),
    (
        "hermes",
        '<tool_call>{"name": "now", "x": [1], "arguments": {}, "y": {"z": "}"}, "w": 2}</tool_call> rest',
        "rest",
        [("now", {})],
    ),
    ("llama3_json", '{"x": 1, "name": "now"}', '{"x": 1, "name": "now"}', []),
    (
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": '
        '{"city": "a\n\\d\\n\\u00e9\\\\C:\\users\\u12", "tags": [1, [], {"x": null}]}}',
        "",
        [("get_weather", {"city": "a\n\\d\né\\C:\\users\\u12", "tags": [1, [], {"x": None}]})],
    ),
    ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
    (
        "llama3_json",
        ' <|python_tag|>{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "now"} ',
        "",
        TWO,
    ),
    ("llama3_json", 'Now: <|python_tag|>{"name": "now", "parameters": {}} ok', "Now:ok", [("now", {})]),
    ("mistral", '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}} ,\n{"name": "now"} ]', "", TWO),
    ("mistral", 'Well.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now{}', "Well.", TWO),
    ("mistral", '[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Paris"}', "", [PARIS]),
    ("mistral", '[TOOL_CALLS]{"name": "now", "arguments": {}}', "", [("now", {})]),
    ("pythonic", '[get_weather(city="Paris"), now()]', "", TWO),
    (
        "pythonic",
        "<|python_start|>[get_weather(city='it\\'s [x], (y)', days=-3, tags=[1, {'a': (2,)}, None]), "
        "a.b-c( ok = True )]<|python_end|> Done",
        "Done",
        [
            ("get_weather", {"city": "it's [x], (y)", "days": -3, "tags": [1, {"a": [2]}, None]}),
            ("a.b-c", {"ok": True}),
        ],
    ),
    ("pythonic", "[get_weather(city=Paris, days=1e999)]", "", [("get_weather", {"city": "Paris", "days": "1e999"})]),
    (
        "qwen3_coder",
        '<tool_call>\n<function=get_weather>\n<parameter=city>\nPa"r\nis <b>\n</parameter>\n<parameter=days>\n3\n'
        "</parameter>\n<parameter=tags>\n[1, 2]\n</parameter>\n</function>\n</tool_call>\n<function=now></function>",
        "",
        [("get_weather", {"city": 'Pa"r\nis <b>', "days": 3, "tags": [1, 2]}), ("now", {})],
    ),
    (
        "qwen3_coder",
        "<function=a.b-c><parameter=x>12</parameter><parameter=y>True</parameter><parameter=z>NaN</parameter>"
        "</function>",
        "",
        [("a.b-c", {"x": 12, "y": True, "z": "NaN"})],
    ),
    (
        "gemma",
        '<start_function_call>call:get_weather{city:<escape>Pa{r}is, "<escape>,days:3,'
        "tags:[1,true,{a:<escape>b<escape>},"
        "bare text]}<end_function_call><start_function_call>call:now{}<end_function_call>",
        "",
        [("get_weather", {"city": 'Pa{r}is, "', "days": 3, "tags": [1, True, {"a": "b"}, "bare text"]}), ("now", {})],
    ),
    ("gemma", 'Hm <|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>', "Hm", [PARIS]),
    (
        "deepseek_v3",
        "Hm.<｜tool▁calls▁begin｜>"
        + V3.replace("{}", "get_weather", 1).replace("{}", '{"city": "Paris"}')
        + "\n"
        + V3.replace("{}", "now", 1)
        + "<｜tool▁calls▁end｜>",
        "Hm.",
        TWO,
    ),
    (
        "deepseek_v3",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        TWO,
    ),
    ("gpt-oss", "<|start|>to=functions.now<|message|><|call|>" * 2, "", [("now", ""), ("now", "")]),
    (
        "gpt-oss",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>',
        "I look.",
        [PARIS],
    ),
    ("gpt-oss", "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}", "", [("now", {})]),
]


@pytest.mark.parametrize(("tools", "text", "content", "calls"), CALLS)
def test_calls(tools: str, text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    assert both_ways(form(tools), text) == (content, "", calls)


def test_every_format_has_a_case() -> None:
    assert {case[0] for case in CALLS} == set(TOOL_FORMATS)


NO_CALLS = [
    "",
    " \n",
    "Hello, < world > [x](y) {z} ",
    '{"answer": [1, 2]}',
    "[1, 2, 3]",
    "[link](http://x) and [get_weather] and [get_weather(",
    "<tool_call>",
    "<tool_call>no</tool_call><tool_call></tool_call>",
    '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "now", "arguments": 5}</tool_call>',
    '<tool_call>{"name": "now", "arguments": {city: 1}}</tool_call>',
    '<tool_call>{"name": 5}</tool_call>',
    '<tool_call>{"nam',
    '<tool_call>{"name": "get_weather"',
    "[TOOL_CALLS]nothing{}",
    "[TOOL_CALLS] [5] [TOOL_CALLS] []",
    "<function=unknown>\n</function>",
    "<start_function_call>call:unknown{}<end_function_call>",
    "<｜tool▁calls▁begin｜>nothing",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>unknown\n```json\n{}\n```",
    "<|python_tag|>print(1)",
]


@pytest.mark.parametrize("tools", sorted(TOOL_FORMATS))
@pytest.mark.parametrize("text", NO_CALLS)
def test_what_is_no_call_is_content(tools: str, text: str) -> None:
    assert both_ways(form(tools), text) == (text, "", [])


def test_arguments_that_go_wrong_end_their_call() -> None:
    text = (
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"</tool_call> Sorry <tool_call>{"name": "now"}'
    )
    content, _, calls = both_ways(form("hermes"), text)
    assert calls == [("get_weather", '{"city": "Paris"'), ("now", {})]
    assert content == "Sorry"


@pytest.mark.parametrize(("tools", "text", "content", "calls"), CALLS)
def test_no_call_looks_complete_early(tools: str, text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    for end in range(len(text)):
        _, _, found = both_ways(form(tools), text[:end])
        assert found[:-1] == calls[: max(len(found) - 1, 0)]
        for (name, arguments), (whole_name, whole) in zip(found, calls, strict=False):
            assert name == whole_name and (arguments == whole or isinstance(arguments, str)), text[:end]


def test_a_mark_that_is_not_complete_is_not_sent() -> None:
    parser = AnswerParser(form("hermes"))
    assert parser.push("Hello <tool_") == [Content("Hello")]
    assert parser.push("call") == []
    assert parser.push("er") == [Content(" <tool_caller")]
    assert parser.finish() == []


def test_arguments_are_sent_while_they_arrive() -> None:
    parser = AnswerParser(form("hermes"))
    assert parser.push('<tool_call>{"name": "get_weather", "argu') == []
    assert parser.push('ments": {"city": "Pa') == [CallStart("get_weather"), Arguments('{"city": "Pa')]
    assert parser.push('ris"') == [Arguments('ris"')]
    assert parser.push("}}") == [Arguments("}")]
    long_text = AnswerParser(form("qwen3_coder"))
    long_text.push("<function=get_weather><parameter=city>fir")
    assert long_text.push("st line\nsec") == [Arguments("st line\\nsec")]


def test_one_call_at_most() -> None:
    text = 'A <tool_call>{"name": "now"}</tool_call> B <tool_call>{"name": "now"}</tool_call> C'
    assert both_ways(form("hermes", most_calls=1), text) == ("AB", "", [("now", {})])


def test_special_tokens_are_left_out_of_the_text() -> None:
    given_text = "a<s>b <pad>c [TOOL_CALLS]now{}<s>"
    assert both_ways(form("mistral", dropped=("<s>", "<pad>", "[TOOL_CALLS]")), given_text) == (
        "ab c",
        "",
        [("now", {})],
    )
    assert both_ways(AnswerFormat("mistral", dropped=("<s>",)), "[THINK]a<s>b[/THINK]c<s>d") == ("cd", "ab", [])


THINK = "Let me\nthink"
REASONED: list[tuple[str, str, bool, str, str]] = [
    ("deepseek-r1", f"{THINK}\n</think>\n\nHi ", True, THINK, "Hi "),
    ("deepseek-r1", f"<think>\n{THINK}\n</think>\n\nHi", True, THINK, "Hi"),
    ("deepseek-r1", f"{THINK} </thi", True, f"{THINK} </thi", ""),
    ("qwen3", f"<think>\n{THINK}\n</think>\n\nHi", False, THINK, "Hi"),
    ("qwen3", "\n<think>\n\n</think>\n\nHi", False, "", "Hi"),
    ("qwen3", "Hi <think> there", False, "", "Hi <think> there"),
    ("qwen3", " Hi", False, "", " Hi"),
    ("mistral", f"[THINK]{THINK}[/THINK]Hi", False, THINK, "Hi"),
    ("granite", f"Here is my thought process:\n{THINK}\nHere's my response:\nHi", False, THINK, "Hi"),
    ("granite", "Here is my dog", False, "", "Here is my dog"),
    (
        "gpt-oss",
        f"<|channel|>analysis<|message|>{THINK}<|end|><|start|>assistant<|channel|>final<|message|>Hi<|return|>",
        False,
        THINK,
        "Hi",
    ),
    ("gpt-oss", "Hi <|x", False, "", "Hi <|x"),
]


@pytest.mark.parametrize(("name", "text", "inside", "reasoning", "content"), REASONED)
def test_reasoning(name: str, text: str, inside: bool, reasoning: str, content: str) -> None:
    assert both_ways(AnswerFormat(name), text, inside) == (content, reasoning, [])


def test_reasoning_then_calls() -> None:
    text = f"<think>\n{THINK}: <tool_call>\n</think>\n\nOk\n" + CALLS[0][1]
    assert both_ways(form("hermes", reasoning="qwen3"), text) == ("Ok", f"{THINK}: <tool_call>", [PARIS])
    text = f"<|channel|>analysis<|message|>{THINK}<|end|>" + "<|start|>assistant" + CALLS[-2][1].split("assistant")[1]
    assert both_ways(form("gpt-oss", reasoning="gpt-oss"), text) == ("", THINK, [PARIS])


@pytest.mark.parametrize(
    ("name", "prompt", "continued", "place"),
    [
        ("qwen3", "<assistant>\n", "", "before"),
        ("qwen3", "<assistant>\n<think>\n", "", "inside"),
        ("qwen3", "<assistant>\n<think>\n\n</think>\n\n", "", "after"),
        ("deepseek-r1", "<assistant>\n", "", "inside"),
        ("deepseek-r1", "<assistant></think>", "", "after"),
        ("deepseek-r1", "<user><think><assistant>It is", "It is", "after"),
        ("qwen3", "<assistant>\n<think>\nI th", "<think>\nI th", "inside"),
        ("qwen3", "<assistant>\n<think>\nI</think>It", "<think>\nI</think>It", "after"),
    ],
)
def test_the_prompt_says_where_the_answer_begins(name: str, prompt: str, continued: str, place: str) -> None:
    assert REASONING_FORMATS[name].place(prompt, continued) == place
    assert AnswerFormat(name).place(prompt, continued) == place
    assert AnswerFormat().place(prompt, continued) == "before"


def test_the_marks_that_must_be_seen() -> None:
    assert AnswerFormat("mistral", "mistral").marks() >= {"[THINK]", "[/THINK]", "[TOOL_CALLS]"}
    assert "<|channel|>" in AnswerFormat("gpt-oss").marks()
    assert AnswerFormat().marks() == frozenset()


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("<tool_call><function=x><parameter=y>", "qwen3_coder"),
        ("<tool_call>name<arg_key>", None),
        ("[AVAILABLE_TOOLS][TOOL_CALLS]", "mistral"),
        ("plain", None),
    ],
)
def test_a_template_shows_its_format(template: str, name: str | None) -> None:
    assert detect_tool_format(template) == name


FRAGMENTS = st.sampled_from(
    [
        *(sign for form in TOOL_FORMATS.values() for sign in form.signs + form.marks),
        "</tool_call>", "<function=", "get_weather", ">", "</parameter>", "</function>", "<parameter=city>", "now",
        '{"name": "', '"', '", "arguments": ', '{"city": "', "{", "}", "[", "]", "(", ")", "city=", ",", ":", "\\",
        "\n", " ", "call:", "[ARGS]", "<｜tool▁call▁end｜>", "```json\n", "<|message|>", "<|end|>", " to=functions.now",
        "5", "<think>", "</think>", "é🙂", '{"name": "get_weather", "arguments": {"city": "x"}}',
    ]
)  # fmt: skip
TEXTS = st.one_of(
    st.lists(FRAGMENTS, max_size=12).map("".join),
    st.tuples(st.sampled_from([case[1] for case in CALLS]), st.lists(FRAGMENTS, max_size=4).map("".join)).map("".join),
)


@settings(deadline=None)
@given(data=st.data(), text=TEXTS, tools=st.sampled_from([None, *TOOL_FORMATS]), inside=st.booleans())
def test_any_pieces_give_the_parts_of_the_whole(
    data: st.DataObject, text: str, tools: str | None, inside: bool
) -> None:
    reasoning = data.draw(st.sampled_from([None, *REASONING_FORMATS]))
    made = form(tools, reasoning=reasoning, dropped=data.draw(st.sampled_from([(), ("<|end|>", "<think>")])))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert in_pieces(made, pieces, inside) == parse_answer(made, text, inside)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(arguments=st.dictionaries(st.text(max_size=6), JSON, max_size=4), indent=st.sampled_from([None, 2]))
def test_any_json_comes_back(arguments: dict[str, Any], indent: int | None) -> None:
    written = json.dumps({"name": "now", "arguments": arguments}, indent=indent)
    for tools, text in (("hermes", f"<tool_call>{written}</tool_call>"), ("llama3_json", written)):
        assert summary(parse_answer(form(tools), text)) == ("", "", [("now", arguments)])


@settings(deadline=None)
@given(
    arguments=st.dictionaries(
        st.from_regex(r"[a-z]{1,4}", fullmatch=True), JSON.filter(lambda v: not isinstance(v, str)), max_size=4
    )
)
def test_any_python_literal_comes_back(arguments: dict[str, Any]) -> None:
    written = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    assert summary(parse_answer(form("pythonic"), f"[now({written})]")) == ("", "", [("now", arguments)])


def test_halves_of_characters_stay_escapes() -> None:
    """UTF-8 has no halves."""
    in_text = r"{\"x\": \"\ud83d\\ude42\", \"y\": [\"\ud83d\"]}"
    for tools, text in (
        ("pythonic", r'[now(x="\ud83d\ude42", y=["\ud83d"])]'),
        ("hermes", f'<tool_call>{{"name": "now", "arguments": "{in_text}"}}</tool_call>'),
    ):
        parts = parse_answer(form(tools), text)
        assert "".join(part[0] for part in parts).isascii()
        assert summary(parts) == ("", "", [("now", {"x": "🙂", "y": ["\ud83d"]})])
