"""Structural tags that require calls, compiled by xgrammar, accept what the readers of the formats read."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from tercet.srt.text.answer.answer_parser import AnswerFormat, parse_answer
from tercet.srt.text.answer.answer_text import CallStart
from tercet.srt.text.answer.constraint import format_under_grammar, may_call, must_call
from tercet.srt.text.answer.tool_formats import TOOL_FORMATS
from tercet.srt.text.answer.tools import Functions

xgrammar = pytest.importorskip("xgrammar", reason="only --grammar-backend xgrammar needs it")

FUNCTIONS = Functions(
    {
        "f": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "n": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "g": None,
    }
)
ONE = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"city": "P"}}\n</tool_call>',
    "llama3_json": '{"name": "f", "parameters": {"city": "P"}}',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"city": "P"}}]',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"
    '{"city": "P"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
}
TWO = {
    "hermes": ONE["hermes"] + '\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
    "llama3_json": ONE["llama3_json"] + '; {"name": "g", "parameters": {}}',
    "mistral": ONE["mistral"][:-1] + ', {"name": "g", "arguments": {}}]',
    "deepseek_v3": ONE["deepseek_v3"].replace(
        "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
}


@functools.cache
def compiler() -> Any:
    vocabulary = [chr(i) for i in range(32, 127)] + ["\n", "<eos>"]
    return xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[len(vocabulary) - 1]))


def accepts(tag: dict[str, Any], text: str) -> bool:
    """Whether the text is a whole answer under the structural tag."""
    matcher = xgrammar.GrammarMatcher(
        compiler().compile_structural_tag(json.dumps(tag)), terminate_without_stop_token=True
    )
    return bool(matcher.accept_string(text) and matcher.is_terminated())


def num_calls(name: str, text: str) -> int:
    form = AnswerFormat(tools=name, functions=FUNCTIONS)
    return sum(isinstance(part, CallStart) for part in parse_answer(form, text))


def test_every_format_with_a_grammar_has_a_case() -> None:
    assert set(ONE) == {name for name, form in TOOL_FORMATS.items() if form.grammar is not None}
    assert {format_under_grammar(name) for name in set(TOOL_FORMATS) - set(ONE)} == {"hermes"}


@pytest.mark.parametrize("name", sorted(ONE))
def test_a_required_call(name: str) -> None:
    several = must_call(name, FUNCTIONS, FUNCTIONS, several=True)
    single = must_call(name, FUNCTIONS, FUNCTIONS, several=False)
    for tag in (several, single):
        assert accepts(tag, ONE[name])
        assert not accepts(tag, "Hello") and not accepts(tag, "")
        assert not accepts(tag, ONE[name].replace("city", "town")), "the schema is followed"
    assert num_calls(name, ONE[name]) == 1
    assert accepts(several, TWO[name]) and not accepts(single, TWO[name])
    assert num_calls(name, TWO[name]) == 2


@pytest.mark.parametrize("name", sorted(ONE))
def test_a_named_function(name: str) -> None:
    assert accepts(must_call(name, FUNCTIONS, ["f"], several=False), ONE[name])
    assert not accepts(must_call(name, FUNCTIONS, ["g"], several=False), ONE[name])


@pytest.mark.parametrize("name", sorted(ONE))
def test_strict_functions_follow_their_schema(name: str) -> None:
    wrong = ONE[name].replace("city", "town")
    tag = may_call(name, FUNCTIONS, ["f"], several=True)
    assert accepts(tag, "Hello") and accepts(tag, f"Hello {ONE[name]}") and not accepts(tag, f"Hello {wrong}")
    assert accepts(may_call(name, FUNCTIONS, ["g"], several=True), f"Hello {wrong}"), "f is not strict"
