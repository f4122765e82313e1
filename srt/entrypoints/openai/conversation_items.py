"""The items of a stored conversation: what /v1/responses/{response_id}/input_items lists, and later turns read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

import msgspec

from ..request_names import RequestNames
from ..response_store import Turn
from ..wire import doc
from .responses_answer import FunctionCallItem, ItemStatus, OutputText, ReasoningItem, ReasoningText, SummaryText
from .responses_input import text_of
from .responses_protocol import InputItem, InputPart

_TYPE = "type"


class InputText(msgspec.Struct, frozen=True, tag="input_text", tag_field=_TYPE):
    text: Annotated[str, doc("The text")]


class ConversationMessage(msgspec.Struct, frozen=True, tag="message", tag_field=_TYPE):
    """A message of a client, or of the model."""

    id: Annotated[str, doc("Name of the item")]
    status: Annotated[ItemStatus, doc("As in the request; default `completed`")]
    role: Annotated[Literal["system", "developer", "user", "assistant"], doc("Author of the message")]
    content: Annotated[list[InputText | OutputText], doc("The text, in one or several parts")]


class FunctionOutputItem(msgspec.Struct, frozen=True, tag="function_call_output", tag_field=_TYPE):
    """The result of a call."""

    id: Annotated[str, doc("Name of the item")]
    call_id: Annotated[str, doc("Name of the call")]
    output: Annotated[str, doc("The result, as one text")]
    status: Annotated[ItemStatus, doc("As in the request; default `completed`")]


ConversationItem = ConversationMessage | FunctionCallItem | FunctionOutputItem | ReasoningItem

_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_given = msgspec.json.Decoder(list[InputItem])
_stored = msgspec.json.Decoder(list[ConversationItem])


def conversation_before(turn: Turn) -> list[InputItem]:
    """The items of a turn and of all turns before, as if a client had sent them."""
    return [
        item
        for one in turn.conversation()
        for items in (one.input_items, one.output_items)
        for item in _given.decode(items)
    ]


def items_read(turn: Turn) -> list[ConversationItem]:
    """The items that the model has read before its output of this turn."""
    *earlier, last = turn.conversation()
    items = [item for one in earlier for both in (one.input_items, one.output_items) for item in _stored.decode(both)]
    return items + _stored.decode(last.input_items)


def named_items(given: Sequence[InputItem], names: RequestNames, before: Iterable[InputItem]) -> list[ConversationItem]:
    """The items that a client has given, which `chat_of` has accepted. Each has a name of its own in the conversation.

    `before`: the items of the conversation before.
    """
    known = {item.id for item in before}
    items = []
    for item in given:
        kind = item.type or "message"
        item_id = item.id
        if not item_id or item_id in known:  # a list goes on after a name, so a name must have one place
            item_id = f"{_PREFIXES[kind]}_{names.hex()}"
        known.add(item_id)
        items.append(_named(item, kind, item_id))
    return items


def _named(item: InputItem, kind: str, item_id: str) -> ConversationItem:
    status = item.status or "completed"
    if kind == "message":
        assert item.role is not None
        texts = _texts(item.content)
        if item.role == "assistant":
            return ConversationMessage(item_id, status, item.role, [OutputText(text, [], []) for text in texts])
        return ConversationMessage(item_id, status, item.role, [InputText(text) for text in texts])
    if kind == "reasoning":
        summary = [SummaryText(text) for text in _texts(item.summary)]
        return ReasoningItem(item_id, summary, [ReasoningText(text) for text in _texts(item.content)], status)
    assert item.call_id is not None
    if kind == "function_call_output":
        return FunctionOutputItem(item_id, item.call_id, text_of(item.output), status)
    assert item.name is not None and item.arguments is not None
    namespace = msgspec.UNSET if item.namespace is None else item.namespace
    return FunctionCallItem(item_id, item.call_id, item.name, item.arguments, status, namespace)


def _texts(content: str | Sequence[InputPart] | None) -> list[str]:
    if content is None:
        return []
    return [content] if isinstance(content, str) else [part.text for part in content]
