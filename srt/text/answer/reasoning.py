"""The reasoning that a model writes before its answer, between two marks."""

from __future__ import annotations

from typing import Literal, NamedTuple

from .answer_text import AnswerText, Reading

Place = Literal["before", "inside", "after"]
"""Where an answer begins: before reasoning that it may have, inside reasoning, or after it."""


class ReasoningFormat(NamedTuple):
    """The marks around reasoning. Several marks are alternatives.

    assumed: the answer begins with reasoning even if neither the prompt nor the answer has the mark at its start.
    """

    starts: tuple[str, ...]
    ends: tuple[str, ...]
    assumed: bool = False

    def place(self, prompt: str, continued: str = "") -> Place:
        """Where an answer to this prompt begins. `continued`: the text of the last message, if the answer continues it.

        A chat template can open the reasoning, or open and close it, so that the model thinks or does not think.
        """
        if continued:
            opened, closed = (max(map(continued.rfind, marks)) for marks in (self.starts, self.ends))
            return "inside" if opened > closed else "after"
        prompt = prompt.rstrip()
        if prompt.endswith(self.ends):
            return "after"
        return "inside" if self.assumed or prompt.endswith(self.starts) else "before"


REASONING_FORMATS = {
    "deepseek-r1": ReasoningFormat(("<think>",), ("</think>",), assumed=True),
    "qwen3": ReasoningFormat(("<think>",), ("</think>",)),
    "mistral": ReasoningFormat(("[THINK]",), ("[/THINK]",)),
    "granite": ReasoningFormat(
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
    ),
}
HARMONY = "gpt-oss"
"""The reasoning of gpt-oss is on a channel of its own: see harmony.py."""


def read_reasoning(answer: AnswerText, form: ReasoningFormat, inside: bool) -> Reading[None]:
    """Reads the reasoning at the start of an answer, if there is any."""
    answer.hold()
    yield from answer.skip_space()
    mark = yield from answer.accept(*form.starts)
    if not mark and not inside:
        answer.give_back()
        return
    answer.has_reasoning = True
    answer.release()
    answer.new_part()
    yield from answer.reasoning_until(*form.ends)
    answer.release()
    answer.new_part()
