"""The headers of messages of gpt-oss. A prompt ends with the first words of one, so an answer begins within it."""

from __future__ import annotations

import pytest
from parsed_answers import parse_answer

from tercet.srt.text.answer.answer_parser import AnswerFormat
from tercet.srt.text.answer.answer_text import Arguments, CallStart, Content, Part
from tercet.srt.text.answer.tools import Functions

FORMAT = AnswerFormat(tools="gpt-oss", functions=Functions({"now": None}))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            " to=functions.now<|channel|>commentary json<|message|>{}<|call|>\n<|channel|>final<|message|>It is noon.",
            [CallStart("now"), Arguments("{}"), Content("It is noon.")],
        ),
        ("<|channel|>commentary to=functions.unknown<|message|>{}<|call|>", [Content("{}")]),
        ("<|start|>assistant<|message|>Hi.<|end|> So.", [Content("Hi. So.")]),
        ("<|start|>assistant to=functions.now", []),
        (" to=functions.now<|channel|>commentary", []),
    ],
    ids=["begun by the prompt", "of an unknown function", "without a channel", "cut", "cut and begun by the prompt"],
)
def test_what_a_header_says(text: str, parts: list[Part]) -> None:
    assert parse_answer(FORMAT, text) == parts
