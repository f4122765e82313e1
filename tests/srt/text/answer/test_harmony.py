"""The headers of messages of gpt-oss. A prompt ends with the first words of one, so an answer begins within it."""

from __future__ import annotations

import pytest
from parsed_answers import parse_answer

from tercet.srt.text.answer.answer_parser import AnswerFormat
from tercet.srt.text.answer.answer_text import Arguments, CallStart, Content, Part, Reasoning
from tercet.srt.text.answer.tools import Functions

UNKNOWN = "<|channel|>commentary to=functions.unknown<|message|>{}<|call|>"
PYTHON = "<|channel|>analysis to=python code<|message|>print(1)<|call|>"
FORMAT = AnswerFormat(tools="gpt-oss", functions=Functions({"now": None}))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            " to=functions.now<|channel|>commentary json<|message|>{}<|call|>\n<|channel|>final<|message|>It is noon.",
            [CallStart("now"), Arguments("{}"), Content("It is noon.")],
        ),
        (UNKNOWN, [Content(UNKNOWN)]),
        ("<|channel|>commentary to=functions.unknown<|message|>{", [Content(UNKNOWN.split("}")[0])]),
        (
            f"<|channel|>final<|message|>I look.<|end|>{UNKNOWN}\n"
            + "<|channel|>commentary to=functions.now<|message|>{}",
            [Content(f"I look.{UNKNOWN}"), CallStart("now"), Arguments("{}")],
        ),
        (PYTHON, [Reasoning(PYTHON)]),
        ("<|start|>assistant<|message|>Hi.<|end|> So.", [Content("Hi. So.")]),
        ("<|start|>assistant to=functions.now", []),
        (" to=functions.now<|channel|>commentary", []),
    ],
    ids=[
        "begun by the prompt",
        "of an unknown function",
        "of an unknown function, cut",
        "of an unknown function among others",
        "to another tool, as reasoning",
        "without a channel",
        "cut",
        "cut and begun by the prompt",
    ],
)
def test_what_a_header_says(text: str, parts: list[Part]) -> None:
    assert parse_answer(FORMAT, text) == parts
