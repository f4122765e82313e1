"""`AnswerParser`: splits one answer into reasoning, content and tool calls while it arrives."""

from __future__ import annotations

from typing import NamedTuple

from .answer_text import AnswerText, Part, Reading
from .harmony import read_harmony
from .reasoning import HARMONY, REASONING_FORMATS, Place, read_reasoning
from .tool_formats import TOOL_FORMATS
from .tools import Functions


class AnswerFormat(NamedTuple):
    """What is looked for in the answers of a request.

    reasoning, tools: names of formats, or None where nothing is looked for. dropped: special tokens that are left out
    of the text. most_calls: further calls are left out.
    """

    reasoning: str | None = None
    tools: str | None = None
    functions: Functions = Functions({})
    dropped: tuple[str, ...] = ()
    most_calls: int | None = None

    def marks(self) -> frozenset[str]:
        """The texts that the parser must see, even if they are special tokens."""
        marks: tuple[str, ...] = () if self.tools is None else TOOL_FORMATS[self.tools].marks
        if self.reasoning in REASONING_FORMATS:
            form = REASONING_FORMATS[self.reasoning]
            marks += form.starts + form.ends
        elif self.reasoning == HARMONY:
            marks += TOOL_FORMATS[HARMONY].marks
        return frozenset(marks)

    def ends(self) -> frozenset[str]:
        """The texts that the parser also reads, if they are special tokens."""
        names = {name for name in (self.tools, self.reasoning) if name in TOOL_FORMATS}
        return frozenset(text for name in names for text in TOOL_FORMATS[name].ends)

    def reasoning_starts(self) -> tuple[str, ...]:
        """The marks that begin reasoning; none if there is no reasoning, or if it begins otherwise."""
        return REASONING_FORMATS[self.reasoning].starts if self.reasoning in REASONING_FORMATS else ()

    def reasoning_ends(self) -> tuple[str, ...]:
        """The marks that end reasoning; none if there is no reasoning, or if it ends otherwise."""
        return REASONING_FORMATS[self.reasoning].ends if self.reasoning in REASONING_FORMATS else ()

    def place(self, prompt: str, continued: str = "") -> Place:
        """Where an answer to this prompt begins. `continued`: the text of the last message, if the answer continues it.

        Without marks around the reasoning, it begins before the reasoning.
        """
        form = REASONING_FORMATS.get(self.reasoning or "")
        return "before" if form is None else form.place(prompt, continued)


class AnswerParser:
    """Give it the text of an answer in pieces of any size. The joined parts do not depend on the pieces."""

    def __init__(self, form: AnswerFormat, inside_reasoning: bool = False) -> None:
        self._answer = AnswerText(form.dropped, form.most_calls)
        self._steps = _read(self._answer, form, inside_reasoning)
        self._finished = False
        next(self._steps, None)

    @property
    def num_calls(self) -> int:
        """The tool calls that have begun."""
        return self._answer.num_calls

    @property
    def has_reasoning(self) -> bool:
        """Whether the answer begins with reasoning between marks, as far as is known. It may have no text."""
        return self._answer.has_reasoning

    def push(self, text: str) -> list[Part]:
        """The parts that have become certain."""
        self._answer.push(text)
        next(self._steps, None)
        return self._answer.take_parts()

    def finish(self) -> list[Part]:
        """The rest, when the answer has ended. A second call returns nothing."""
        if self._finished:
            return []
        self._finished = True
        self._answer.end()
        for _ in self._steps:
            raise AssertionError("a reader waits for text after the end")
        self._answer.finish()
        return self._answer.take_parts()


def _read(answer: AnswerText, form: AnswerFormat, inside_reasoning: bool) -> Reading[None]:
    if HARMONY in (form.reasoning, form.tools):
        yield from read_harmony(answer, form.functions)
        return
    if form.reasoning is not None:
        yield from read_reasoning(answer, REASONING_FORMATS[form.reasoning], inside_reasoning)
    if form.tools is not None:
        yield from TOOL_FORMATS[form.tools].read(answer, form.functions)
    else:
        yield from answer.rest_is_content()
