"""gpt-oss (Harmony): messages on channels, `<|channel|>NAME<|message|>text<|end|>`.

The channel `analysis` is reasoning and `final` is content. A message to `functions.NAME` is a tool call. A message to
anything else keeps its header and its marks, which have the name.
"""

from __future__ import annotations

import re

from .answer_text import AnswerText, Reading, marks_of
from .tools import Functions

CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"
START = "<|start|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"\bto=(functions\.)?([\w.\-]+)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")


def read_harmony(answer: AnswerText, functions: Functions) -> Reading[None]:
    answer.hold()
    yield from answer.skip_space()
    begun = yield from answer.accept(CHANNEL, START, "to=")
    while begun:
        header = [begun]
        if not (yield from answer.until(marks_of(MESSAGE), header.append)):
            break  # the answer ends in a header, which is no part of the text
        answer.release()
        yield from _read_message(answer, "".join(header), functions)
        answer.hold()
        yield from answer.skip_space()
        begun = yield from answer.accept(CHANNEL, START)
    if begun:
        answer.release()
        return
    answer.give_back()
    yield from answer.rest_is_content()


def _read_message(answer: AnswerText, header: str, functions: Functions) -> Reading[None]:
    recipient = _RECIPIENT.search(header)
    channel = _CHANNEL.search(header)
    answer.new_part()
    if recipient is not None and recipient.group(1) and recipient.group(2) in functions:
        answer.start_call(recipient.group(2))
        yield from answer.until(marks_of(*ENDS), answer.arguments)
        return
    is_reasoning = channel is not None and channel.group(1) == "analysis"
    put = answer.reasoning if is_reasoning else answer.content
    if recipient is not None:
        put(header + MESSAGE)
        put((yield from answer.until(marks_of(*ENDS), put)))
        answer.new_part()
        return
    yield from answer.until(marks_of(*ENDS), put)
    if is_reasoning:
        answer.new_part()
