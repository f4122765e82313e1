"""`MessageReader`: one sample's text becomes the deltas of a stream, or a message."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import UNSET

from ...text.answer.answer_parser import AnswerParser
from ...text.answer.answer_text import Arguments, CallStart, Content, Part, Reasoning
from ..request_names import RequestNames
from .chat_protocol import AssistantMessage, Delta
from .tool_protocol import FunctionCall, FunctionCallDelta, ToolCall, ToolCallDelta
from .tools import AnswerPlan


class MessageReader:
    """Give it the text of a sample in pieces. `inside_reasoning`: the answer begins within reasoning."""

    def __init__(self, plan: AnswerPlan, names: RequestNames, *, inside_reasoning: bool) -> None:
        self._plan = plan
        self._names = names
        self._parser = None if plan.form is None else AnswerParser(plan.form, inside_reasoning)
        self._separates = plan.form is not None and plan.form.reasoning is not None and not plan.content_only
        self._thoughts: list[str] = []  # reasoning that is sent in one piece
        self.has_calls = False
        """Whether the model has called a function."""
        self._num_calls = 0
        self._num_tokens = 0
        self._num_thought_tokens: int | None = None  # None until a token has ended the reasoning
        self._says = False

    @property
    def num_reasoning_tokens(self) -> int:
        """The tokens of the reasoning so far, its end included. 0 if no token ends it."""
        if self._parser is None or not self._parser.has_reasoning:
            return 0  # an end of reasoning in the content ends nothing
        if self._num_thought_tokens is not None:
            return self._num_thought_tokens
        return 0 if self._says else self._num_tokens

    def count(self, token_ids: Sequence[int]) -> None:
        """Counts the tokens up to the first one that ends reasoning.

        The text does not matter, because its pieces can come later than their tokens.
        """
        ends = self._plan.reasoning_ends
        if not ends or self._num_thought_tokens is not None:
            return
        for place, token in enumerate(token_ids, self._num_tokens + 1):
            if token in ends:
                self._num_thought_tokens = place
                return
        self._num_tokens += len(token_ids)

    def parts(self, text: str, *, is_last: bool) -> Sequence[Part]:
        """The parts of the next piece of text. `is_last`: nothing follows it."""
        if self._parser is None:
            return [Content(text)] if text else []
        parts = self._parser.push(text)
        if is_last:
            parts = [*parts, *self._parser.finish()]
        for part in parts:
            self.has_calls = self.has_calls or isinstance(part, CallStart)
            self._says = self._says or not isinstance(part, Reasoning)
        if not self._separates:
            return [Content(part.text) if isinstance(part, Reasoning) else part for part in parts]
        return self._with_whole_thoughts(parts, is_last=is_last) if self._plan.in_one_piece else parts

    def _with_whole_thoughts(self, parts: Iterable[Part], *, is_last: bool) -> list[Part]:
        """The parts with all reasoning in one piece."""
        found: list[Part] = []
        for part in parts:
            if isinstance(part, Reasoning):
                self._thoughts.append(part.text)
                continue
            self._end_thought(found)
            found.append(part)
        if is_last:
            self._end_thought(found)
        return found

    def _end_thought(self, found: list[Part]) -> None:
        if self._thoughts:
            found.append(Reasoning("".join(self._thoughts)))
            self._thoughts.clear()

    def deltas(self, text: str, *, is_last: bool) -> list[Delta]:
        """What the next piece of text adds to the message."""
        return [self._delta(part) for part in self.parts(text, is_last=is_last)]

    def _delta(self, part: Part) -> Delta:
        if isinstance(part, Content):
            return Delta(content=part.text)
        if isinstance(part, Reasoning):
            return Delta(reasoning_content=part.text)
        if isinstance(part, CallStart):
            self._num_calls += 1
            function = FunctionCallDelta(part.name, "")
            call = ToolCallDelta(self._num_calls - 1, self.call_id(), "function", function)
        else:
            call = ToolCallDelta(self._num_calls - 1, function=FunctionCallDelta(arguments=part.text))
        return Delta(tool_calls=[call])

    def message(self, text: str) -> AssistantMessage:
        """The message of a complete text."""
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[tuple[str, list[str]]] = []
        for part in self.parts(text, is_last=True):
            if isinstance(part, CallStart):
                calls.append((part.name, []))
            elif isinstance(part, Arguments):
                calls[-1][1].append(part.text)
            else:
                (content if isinstance(part, Content) else reasoning).append(part.text)
        made = [ToolCall(self.call_id(), "function", FunctionCall(name, "".join(texts))) for name, texts in calls]
        said = "".join(content)
        return AssistantMessage(
            "assistant",
            None if made and not said else said,
            ("".join(reasoning) or None) if self._separates else UNSET,
            made or UNSET,
        )

    def call_id(self) -> str:
        """A new name for a call. The templates of Mistral's models accept only names of nine letters and digits."""
        if self._plan.form is not None and self._plan.form.tools == "mistral":
            return self._names.hex()[:9]
        return f"call_{self._names.hex()[:24]}"
