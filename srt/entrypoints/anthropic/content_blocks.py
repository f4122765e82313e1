"""`ContentBlocks`: the parts of an answer become the blocks of a message, and the events that tell of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from ...text.answer.answer_text import Arguments, CallStart, Part, Reasoning
from .messages_answer import AnswerBlock, MessageDelta, TextBlock, ThinkingBlock, ToolUseBlock

Tell = Callable[..., None]
"""Takes the type of an event and its fields."""


class _Block:
    """The block that is being written."""

    def __init__(self, kind: type[Part], index: int, name: str = "", call_id: str = "") -> None:
        self.kind = kind
        self.index = index
        self.pieces: list[str] = []
        self._name = name
        self._call_id = call_id

    def block(self) -> AnswerBlock:
        text = "".join(self.pieces)
        if self.kind is CallStart:
            return ToolUseBlock(self._call_id, self._name, _object(text))
        return ThinkingBlock(text) if self.kind is Reasoning else TextBlock(text)


class ContentBlocks:
    """Give it the parts in order. `tell` is called with every event, `call_id` names a call."""

    def __init__(self, tell: Tell, call_id: Callable[[], str], *, omits_thinking: bool) -> None:
        """`omits_thinking`: blocks of reasoning have no text."""
        self.done: list[AnswerBlock] = []
        self._tell = tell
        self._call_id = call_id
        self._omits_thinking = omits_thinking
        self._open: _Block | None = None

    def add(self, parts: Iterable[Part]) -> None:
        for part in parts:
            if isinstance(part, CallStart):
                self._begin(_Block(CallStart, len(self.done) + (self._open is not None), part.name, self._call_id()))
                continue
            kind = CallStart if isinstance(part, Arguments) else type(part)
            if self._open is None or self._open.kind is not kind:
                self._begin(_Block(kind, len(self.done) + (self._open is not None)))
            if kind is not Reasoning or not self._omits_thinking:
                self._extend(part.text)

    def end(self) -> None:
        """Ends the block that is being written, if there is one."""
        if self._open is None:
            return
        self._tell("content_block_stop", index=self._open.index)
        self.done.append(self._open.block())
        self._open = None

    def _begin(self, block: _Block) -> None:
        self.end()
        self._open = block
        self._tell("content_block_start", index=block.index, content_block=block.block())

    def _extend(self, text: str) -> None:
        block = self._open
        assert block is not None
        block.pieces.append(text)
        if block.kind is CallStart:
            delta = MessageDelta(type="input_json_delta", partial_json=text)
        elif block.kind is Reasoning:
            delta = MessageDelta(type="thinking_delta", thinking=text)
        else:
            delta = MessageDelta(type="text_delta", text=text)
        self._tell("content_block_delta", index=block.index, delta=delta)


def _object(arguments: str) -> Any:
    """The JSON of the arguments, or an empty object if the model has not written a whole one."""
    try:
        msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {}
    return msgspec.Raw(arguments.encode())
