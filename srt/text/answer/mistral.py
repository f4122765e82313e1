"""Mistral: `[TOOL_CALLS]` before a list of calls in JSON, or before each call as `name[ARGS]{...}` or `name{...}`."""

from __future__ import annotations

from .answer_text import AnswerText, Reading
from .json_reader import read_arguments, read_call
from .tools import NAME, Functions

START = "[TOOL_CALLS]"
CALL_ID = "[CALL_ID]"
ARGS = "[ARGS]"


def read_mistral(answer: AnswerText, functions: Functions) -> Reading[None]:
    while (yield from answer.content_until(START)):
        yield from answer.skip_space()
        char = yield from answer.peek()
        if char == "[":
            yield from answer.take()
            yield from _read_list(answer, functions)
        elif not (yield from (read_call if char == "{" else _read_named)(answer, functions)):
            answer.give_back()


def _read_list(answer: AnswerText, functions: Functions) -> Reading[None]:
    while True:
        yield from answer.skip_space()
        if not (yield from read_call(answer, functions)):
            answer.give_back()
            return
        answer.hold()
        yield from answer.skip_space()
        if not (yield from answer.accept(",")):
            yield from answer.accept("]")
            answer.release()
            return


def _read_named(answer: AnswerText, functions: Functions) -> Reading[bool]:
    name = yield from answer.word(NAME)
    if name not in functions:
        return False
    if (yield from answer.accept(CALL_ID)):
        yield from answer.word(NAME)
    yield from answer.accept(ARGS)
    return (yield from read_arguments(answer, name))
