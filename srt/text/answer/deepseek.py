"""DeepSeek V3 and R1, and V3.1: calls between `<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`.

V3 writes a call as a type, a name and a block of JSON; V3.1 as a name and JSON.
"""

from __future__ import annotations

from .answer_text import AnswerText, Reading
from .json_reader import read_arguments
from .tools import NAME, Functions

START = "<｜tool▁calls▁begin｜>"
END = "<｜tool▁calls▁end｜>"
CALL_START = "<｜tool▁call▁begin｜>"
CALL_END = "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"


def read_deepseek(answer: AnswerText, functions: Functions) -> Reading[None]:
    while (yield from answer.content_until(START)):
        calls_before = answer.num_calls
        while True:
            yield from answer.skip_space()
            if (yield from answer.accept(CALL_START, END)) != CALL_START:
                if answer.num_calls > calls_before:
                    answer.release()
                else:
                    answer.give_back()
                break
            if not (yield from _read_call(answer, functions)):
                answer.give_back()
                break
            yield from answer.skip_space()
            yield from answer.accept_end(CALL_END)
            answer.hold()


def _read_call(answer: AnswerText, functions: Functions) -> Reading[bool]:
    name = yield from answer.word(NAME)
    if not (yield from answer.accept(SEPARATOR)):
        return False
    yield from answer.skip_space()
    if (yield from answer.peek()) != "{":  # what came was the type
        name = yield from answer.word(NAME)
        yield from answer.skip_space()
        yield from answer.accept("```json")
    if name not in functions or not (yield from read_arguments(answer, name)):
        return False
    yield from answer.skip_space()
    yield from answer.accept_end("```")
    return True
