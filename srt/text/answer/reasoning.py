"""The reasoning that a model writes before its answer, between two marks."""

from __future__ import annotations

from typing import NamedTuple

from .answer_text import AnswerText, Reading


class ReasoningFormat(NamedTuple):
    """The marks around reasoning. Several marks are alternatives.

    assumed: the answer begins with reasoning even if neither the prompt nor the answer has the mark at its start.
    """

    starts: tuple[str, ...]
    ends: tuple[str, ...]
    assumed: bool = False

    def begins_inside(self, prompt: str) -> bool:
        """Whether an answer to this prompt begins within reasoning.

        A chat template can open the reasoning, or open and close it, so that the model thinks or does not think.
        """
        prompt = prompt.rstrip()
        return prompt.endswith(self.starts) or (self.assumed and not prompt.endswith(self.ends))


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
    answer.release()
    answer.new_part()
    yield from answer.reasoning_until(*form.ends)
    answer.release()
    answer.new_part()
