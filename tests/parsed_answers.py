"""Complete answers, parsed at once or in pieces."""

from __future__ import annotations

from collections.abc import Iterable

from tercet.srt.text.answer.answer_parser import AnswerFormat, AnswerParser
from tercet.srt.text.answer.answer_text import AnswerText, Part


def parse_answer(form: AnswerFormat, text: str, inside_reasoning: bool = False) -> list[Part]:
    return in_pieces(form, [text], inside_reasoning)


def in_pieces(form: AnswerFormat, pieces: list[str], inside: bool = False) -> list[Part]:
    parser = AnswerParser(form, inside)
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
    assert parser.finish() == []
    assert all(part[0] for part in parts), "a stream would have an event without news"
    return join_parts(parts)


def join_parts(parts: Iterable[Part]) -> list[Part]:
    """The parts with neighbouring pieces of one part joined."""
    answer = AnswerText()
    for part in parts:
        answer.put(part)
    return answer.take_parts()
