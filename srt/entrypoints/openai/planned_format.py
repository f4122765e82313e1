"""`PlannedFormat`: a response format that reads its answers by an AnswerPlan."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from ....managers.generation import Generation
from ...grammar_spec import ReasoningSpan
from ...io_struct import StopFinish
from ..job import Sample
from ..request_names import RequestNames
from ..sse import ResponseFormat, event
from .message_reader import MessageReader
from .tools import AnswerPlan


class PlannedFormat(ResponseFormat):
    """The base of the formats of chats. `_readers` has the reader of each sample, by its index."""

    def __init__(self, plan: AnswerPlan, names: RequestNames) -> None:
        self._plan = plan
        self._names = names
        self._samples: Sequence[Sample] = ()
        self._readers: dict[int, MessageReader] = {}
        self._inside_reasoning = False
        self.reasoning: ReasoningSpan | None = None
        """The reasoning before the text of a grammar. Known when the prompt is rendered."""
        self.on_tool_call: Callable[[Generation], object] | None = None
        """Called with each sample that has ended in a tool call. None: no call."""

    def noting_prompt(self, render: Callable[[], Awaitable[str]], continued: str) -> Callable[[], Awaitable[str]]:
        """`render`, with a look at the prompt: its end says whether the answers begin with reasoning.

        `continued`: the text of the last message, if the answers continue it.
        """

        async def rendered() -> str:
            prompt = await render()
            form, span = self._plan.form, self._plan.before_grammar
            place = "before" if form is None else form.place(prompt, continued)
            self._inside_reasoning = place == "inside"
            if span is not None and place != "after":
                self.reasoning = msgspec.structs.replace(span, inside=self._inside_reasoning)
            return prompt

        return rendered

    def begin(self, samples: Sequence[Sample]) -> None:
        self._samples = samples
        self._readers = {
            one.index: MessageReader(self._plan, self._names, inside_reasoning=self._inside_reasoning)
            for one in samples
        }

    def note_end(self, sample: Sample) -> None:
        """The reader has the whole text of this sample."""
        is_call = self._readers[sample.index].has_calls and isinstance(sample.finish, StopFinish)
        if is_call and self.on_tool_call is not None:
            self.on_tool_call(sample.generation)


class NamedEventsFormat(PlannedFormat):
    """The base of formats whose streams have events with names."""

    def __init__(self, plan: AnswerPlan, names: RequestNames, *, is_stream: bool) -> None:
        super().__init__(plan, names)
        self._is_stream = is_stream
        self._num_events = 0
        self._events: list[bytes] = []
        """Those that `_told` has not returned."""

    @abstractmethod
    def _event(self, kind: str, **fields: Any) -> Any:
        """An event. `_num_events` is the number of earlier ones."""

    def _tell(self, kind: str, **fields: Any) -> None:
        """Adds an event to the stream, if the answer is one."""
        if self._is_stream:
            self._events.append(event(self._event(kind, **fields), kind))
            self._num_events += 1

    def _told(self) -> bytes:
        """The events since the last call."""
        data = b"".join(self._events)
        self._events.clear()
        return data
