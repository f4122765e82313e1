"""`Storing`: what one request of /v1/responses reads from the stored responses, and what it adds to them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.types import Scope

from ...errors import InvalidRequest, PreviousNotFound, StreamChanged, UnsupportedField
from ..replay import replay_of
from ..request_names import RequestNames
from ..response_store import OVERHEAD_BYTES, ResponseStore, Turn
from ..routing import Server, hold_conversation
from ..tenants import owner_of, tenant_of
from ..wire import shown
from .conversation_items import conversation_before, named_items
from .responses_answer import Response
from .responses_protocol import InputItem, ResponsesBody

FLAG = "--response-store-mib"
_STORED_STATUSES = ("completed", "incomplete")
_encode = msgspec.json.Encoder().encode


def client_of(scope: Scope) -> str:
    """Whose stored responses a request may use: those of the same API key and the same tenant of the header."""
    return f"{owner_of(scope)}/{tenant_of(scope) or ''}"


class Storing:
    """Call `conversation`, then `note_input`, then `note_response`."""

    def __init__(self, before: Turn | None, store: ResponseStore | None, client: str) -> None:
        """`before`: the turn that the request continues. `store`: where its response will be; None: it is not
        stored."""
        self._before = before
        self._store = store
        self._client = client
        self._input_items = b""

    @classmethod
    def of(cls, server: Server, request: Request, body: ResponsesBody) -> Storing:
        """Raises UnsupportedField, PreviousNotFound, BodyTooLarge, QueueFull, StreamChanged."""
        store, client, previous = server.responses, client_of(request.scope), body.previous_response_id
        if store is None:
            if body.store:
                raise UnsupportedField(f"store: true needs a server with {FLAG}", param="store")
            if previous is not None:
                raise UnsupportedField(
                    f"previous_response_id needs a server with {FLAG}; otherwise, send the whole conversation as input",
                    param="previous_response_id",
                )
        before = None if store is None or previous is None else _find(server, request, store, client, previous)
        return cls(before, None if body.store is False else store, client)

    @property
    def is_on(self) -> bool:
        return self._store is not None

    def conversation(self) -> list[InputItem]:
        """The items of the conversation that the request continues."""
        return [] if self._before is None else conversation_before(self._before)

    def note_input(self, given: Sequence[InputItem], names: RequestNames, before: Sequence[InputItem]) -> None:
        """`given`: the items of the body. `before`: those of `conversation`.

        Raises InvalidRequest if the store has no room for them.
        """
        if self._store is None:
            return
        self._input_items = _encode(named_items(given, names, before))
        num_bytes = Turn(self._before, self._input_items, b"").num_conversation_bytes + OVERHEAD_BYTES
        if num_bytes > self._store.max_bytes:
            raise InvalidRequest(
                f"the response cannot be stored: its conversation takes {num_bytes} bytes, and {FLAG} allows "
                f"{self._store.max_bytes}; send store: false",
                param="store",
            )

    def note_response(self, response: Response) -> None:
        """Stores the response, unless it was aborted: then it is no answer that a client could continue."""
        if self._store is None or response.status not in _STORED_STATUSES:
            return
        head = _encode(msgspec.structs.replace(response, output=[]))
        turn = Turn(self._before, self._input_items, _encode(response.output))
        self._store.add(response.id, self._client, head, turn)


def _find(server: Server, request: Request, store: ResponseStore, client: str, response_id: str) -> Turn:
    if replay_of(request.scope) is not None:  # the responses have ended with the server that began the stream
        raise StreamChanged("the stream continues a response that only the server before had stored")
    found = store.find(response_id, client)
    if found is None:
        raise PreviousNotFound(
            f"previous response {shown(response_id)} not found: it was not stored, or was deleted or dropped",
            param="previous_response_id",
        )
    hold_conversation(server, request, found.turn.num_conversation_bytes)
    return found.turn
