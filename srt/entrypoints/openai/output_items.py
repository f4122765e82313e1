"""`OutputItems`: the parts of an answer become the items of a response, and the events that tell of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec import UNSET

from ...text.answer.answer_text import Arguments, CallStart, Content, Part, Reasoning
from ..request_names import RequestNames
from .responses_answer import (
    FunctionCallItem,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
)

Tell = Callable[..., None]
"""Takes the type of an event and its fields."""


class _Item:
    """The item that is being written."""

    def __init__(
        self, kind: type[Part], index: int, item_id: str, name: str, call_id: str, namespace: str | None
    ) -> None:
        self.id = item_id
        self.kind = kind
        self.index = index
        self.name = name
        self.namespace = UNSET if namespace is None else namespace
        self.call_id = call_id
        self.pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def item(self, status: ItemStatus) -> OutputItem:
        begun = status == "in_progress"
        if self.kind is CallStart:
            return FunctionCallItem(self.id, self.call_id, self.name, self.text, status, self.namespace)
        if self.kind is Reasoning:
            return ReasoningItem(self.id, [], [] if begun else [ReasoningText(self.text)], status)
        return OutputMessage(self.id, status, "assistant", [] if begun else [OutputText(self.text, [], [])])

    def part(self) -> OutputText | ReasoningText:
        return ReasoningText(self.text) if self.kind is Reasoning else OutputText(self.text, [], [])


class OutputItems:
    """Give it the parts in order. `tell` is called with every event; `names` names items, and `call_id` a call."""

    def __init__(
        self,
        tell: Tell,
        names: RequestNames,
        call_id: Callable[[], str],
        in_namespaces: Mapping[str, tuple[str, str]],
    ) -> None:
        """`in_namespaces`: namespace and name of the functions in namespaces, by the names that the model reads."""
        self.done: list[OutputItem] = []
        self._tell = tell
        self._names = names
        self._call_id = call_id
        self._in_namespaces = in_namespaces
        self._open: _Item | None = None

    def add(self, parts: Iterable[Part]) -> None:
        for part in parts:
            if isinstance(part, CallStart):
                self._begin(CallStart, part.name)
                continue
            kind = CallStart if isinstance(part, Arguments) else type(part)
            if self._open is None or self._open.kind is not kind:
                self._begin(kind)
            self._extend(part.text)

    def end(self, status: ItemStatus) -> None:
        """Ends the item that is being written. An answer without any item gets an empty message."""
        if self._open is None:
            self._begin(Content)
        self._close(status)

    def so_far(self) -> list[OutputItem]:
        """All items, the one that is being written as incomplete."""
        return [*self.done, *([] if self._open is None else [self._open.item("incomplete")])]

    def _begin(self, kind: type[Part], name: str = "") -> None:
        self._close("completed")
        prefix = {Content: "msg", Reasoning: "rs", CallStart: "fc"}[kind]
        item_id = f"{prefix}_{self._names.hex()}"
        call_id = self._call_id() if kind is CallStart else ""
        namespace, name = self._in_namespaces.get(name, (None, name))
        self._open = item = _Item(kind, len(self.done), item_id, name, call_id, namespace)
        self._tell("response.output_item.added", output_index=item.index, item=item.item("in_progress"))
        if kind is not CallStart:
            self._about(item, "response.content_part.added", content_index=0, part=item.part())

    def _extend(self, text: str) -> None:
        item = self._open
        assert item is not None
        item.pieces.append(text)
        if item.kind is CallStart:
            self._about(item, "response.function_call_arguments.delta", delta=text)
        elif item.kind is Reasoning:
            self._about(item, "response.reasoning_text.delta", content_index=0, delta=text)
        else:
            self._about(item, "response.output_text.delta", content_index=0, delta=text, logprobs=[])

    def _close(self, status: ItemStatus) -> None:
        item, self._open = self._open, None
        if item is None:
            return
        text = item.text
        if item.kind is CallStart:
            self._about(item, "response.function_call_arguments.done", name=item.name, arguments=text)
        elif item.kind is Reasoning:
            self._about(item, "response.reasoning_text.done", content_index=0, text=text)
        else:
            self._about(item, "response.output_text.done", content_index=0, text=text, logprobs=[])
        if item.kind is not CallStart:
            self._about(item, "response.content_part.done", content_index=0, part=item.part())
        self.done.append(item.item(status))
        self._tell("response.output_item.done", output_index=item.index, item=self.done[-1])

    def _about(self, item: _Item, kind: str, **fields: Any) -> None:
        self._tell(kind, output_index=item.index, item_id=item.id, **fields)
