"""Several calls of Llama 3, and what separates them."""

from __future__ import annotations

import pytest
from parsed_answers import join_parts

from tercet.srt.text.answer.answer_parser import AnswerFormat, AnswerParser
from tercet.srt.text.answer.answer_text import Arguments, CallStart, Content
from tercet.srt.text.answer.tools import Functions

FORMAT = AnswerFormat(tools="llama3_json", functions=Functions({"f": None}))
CALL = '{"name": "f"}'
CALLED = [CallStart("f"), Arguments("{}")]


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("start", ["", " \n", "<|python_tag|>", " <|python_tag|>\n"])
@pytest.mark.parametrize("separator", ["", ";", ",", " ", "\n; ", " ,\n"])
def test_spaces_and_separators_of_calls_are_no_content(separator: str, start: str, size: int) -> None:
    text = f"{start}{CALL}{separator}{CALL} Done"
    parser = AnswerParser(FORMAT)
    parts = [part for at in range(0, len(text), size) for part in parser.push(text[at : at + size])]
    assert join_parts([*parts, *parser.finish()]) == [*CALLED, *CALLED, Content("Done")]
