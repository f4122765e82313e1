"""`ResponseStore`: the responses of /v1/responses that clients can continue, read and delete (`--response-store-mib`).

A turn has the new items of one response, its input and its output, and refers to the turn before. So a conversation of
n turns has each item once, not n times. A turn stays as long as a stored response or a later turn needs it: a later
response keeps its whole conversation when an earlier one is deleted or dropped.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

OVERHEAD_BYTES = 1024
"""The most memory that a turn or a response takes besides its JSON: objects, references and the entry of the table."""


class Turn:
    """The items of one response, as JSON lists. `before`: the turn that it continues."""

    __slots__ = ("before", "input_items", "num_conversation_bytes", "num_users", "output_items")

    def __init__(self, before: Turn | None, input_items: bytes, output_items: bytes) -> None:
        self.before = before
        self.input_items = input_items
        self.output_items = output_items
        self.num_conversation_bytes: int = self.num_bytes + (0 if before is None else before.num_conversation_bytes)
        """Of this turn and all turns before."""
        self.num_users = 0
        """Stored responses and turns with users that refer to this turn."""

    @property
    def num_bytes(self) -> int:
        return len(self.input_items) + len(self.output_items) + OVERHEAD_BYTES

    def conversation(self) -> list[Turn]:
        """The turns of the conversation up to this one, oldest first."""
        turns, one = [self], self.before
        while one is not None:
            turns.append(one)
            one = one.before
        return turns[::-1]


class StoredResponse:
    """A response. `head`: its JSON without the items of its output, which its turn has."""

    __slots__ = ("head", "owner", "turn")

    def __init__(self, owner: str, head: bytes, turn: Turn) -> None:
        self.owner = owner
        self.head = head
        self.turn = turn

    @property
    def num_bytes(self) -> int:
        """Without its turn."""
        return len(self.head) + OVERHEAD_BYTES

    def json(self) -> bytes:
        """The response as its client got it."""
        fields = msgspec.json.decode(self.head, type=dict[str, msgspec.Raw])
        fields["output"] = msgspec.Raw(self.turn.output_items)
        return msgspec.json.encode(fields)


class ResponseStore:
    """The stored responses of all clients. It takes at most `max_bytes`; of more, the oldest responses are dropped."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._responses)

    def find(self, response_id: str, owner: str) -> StoredResponse | None:
        """The response of this name, if it belongs to the owner."""
        found = self._responses.get(response_id)
        return found if found is not None and found.owner == owner else None

    def add(self, response_id: str, owner: str, head: bytes, turn: Turn) -> None:
        """Stores a response, in place of an earlier one of this name.

        One that does not fit together with its conversation is not stored, and nothing is dropped for it.
        """
        self._drop(response_id)
        stored = StoredResponse(owner, head, turn)
        if stored.num_bytes + turn.num_conversation_bytes > self.max_bytes:
            return
        self._responses[response_id] = stored
        self.num_bytes += stored.num_bytes
        self._use(turn)
        while self.num_bytes > self.max_bytes:
            self._drop(next(iter(self._responses)))

    def remove(self, response_id: str, owner: str) -> bool:
        """Returns whether the owner had such a response."""
        if self.find(response_id, owner) is None:
            return False
        self._drop(response_id)
        return True

    def _drop(self, response_id: str) -> None:
        stored = self._responses.pop(response_id, None)
        if stored is not None:
            self.num_bytes -= stored.num_bytes
            self._release(stored.turn)

    def _use(self, turn: Turn) -> None:
        """Counts one more user. A turn without users may come back: its response was dropped while another continued
        it."""
        one: Turn | None = turn
        while one is not None:
            one.num_users += 1
            if one.num_users > 1:
                return
            self.num_bytes += one.num_bytes
            one = one.before

    def _release(self, turn: Turn) -> None:
        one: Turn | None = turn
        while one is not None:
            one.num_users -= 1
            if one.num_users:
                return
            self.num_bytes -= one.num_bytes
            one = one.before
