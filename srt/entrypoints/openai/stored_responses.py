"""GET and DELETE /v1/responses/{response_id}, and GET /v1/responses/{response_id}/input_items."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from ...errors import InvalidRequest, ResponseNotFound, ResponseStoreOff, UnsupportedField
from ..response_store import ResponseStore, StoredResponse
from ..routing import SMALL_BODY_BYTES, Server, json_response
from ..wire import doc, shown
from .common import limit_of
from .conversation_items import ConversationItem, items_read
from .storing import FLAG, client_of

MAX_ITEMS = 100
"""Items in one answer: OpenAI's limit."""
_DEFAULT_ITEMS = 20


class DeletedResponse(msgspec.Struct, frozen=True):
    """Answer of DELETE /v1/responses/{response_id}."""

    id: Annotated[str, doc("Name of the response")]
    object: Annotated[Literal["response"], doc("The type of what was deleted")] = "response"
    deleted: Annotated[Literal[True], doc("Always true; a response that is not found is an error")] = True


class ItemList(msgspec.Struct, frozen=True):
    """Answer of /v1/responses/{response_id}/input_items."""

    object: Annotated[Literal["list"], doc("The type of this object")]
    data: Annotated[list[ConversationItem], doc("The items")]
    first_id: Annotated[str | None, doc("Name of the first item; null if there is none")]
    last_id: Annotated[str | None, doc("Name of the last item, for `after`; null if there is none")]
    has_more: Annotated[bool, doc("Whether further items follow")]


async def show_response(server: Server, request: Request, body: None) -> ASGIApp:
    """Raises ResponseStoreOff, ResponseNotFound, UnsupportedField, InvalidRequest."""
    _, _, stored = _find(server, request)
    given = request.query_params.get("stream", "false")
    if given not in ("true", "false"):
        raise InvalidRequest(f"stream must be true or false, got {shown(given)}", param="stream")
    if given == "true":
        raise UnsupportedField("stream: true is not supported: the events of a response are not stored", param="stream")
    return Response(stored.json(), media_type="application/json")


async def delete_response(server: Server, request: Request, body: None) -> ASGIApp:
    """Raises ResponseStoreOff, ResponseNotFound."""
    store, response_id, _ = _find(server, request)
    store.remove(response_id, client_of(request.scope))
    return json_response(DeletedResponse(response_id))


async def list_input_items(server: Server, request: Request, body: None) -> ASGIApp:
    """The items that the model has read: those of earlier turns, then the input of this one.

    Raises ResponseStoreOff, ResponseNotFound, InvalidRequest.
    """
    _, _, stored = _find(server, request)
    limit = limit_of(request, default=_DEFAULT_ITEMS, maximum=MAX_ITEMS)
    is_descending = _is_descending(request)
    if stored.turn.num_conversation_bytes > SMALL_BODY_BYTES:
        items = await asyncio.to_thread(items_read, stored.turn)
    else:
        items = items_read(stored.turn)
    if is_descending:
        items.reverse()
    begin = _begin(request, items)
    page = items[begin : begin + limit]
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return json_response(ItemList("list", page, first, last, begin + limit < len(items)))


def _find(server: Server, request: Request) -> tuple[ResponseStore, str, StoredResponse]:
    store, response_id = server.responses, request.path_params["response_id"]
    if store is None:
        raise ResponseStoreOff(f"responses are not stored; start the server with {FLAG}")
    stored = store.find(response_id, client_of(request.scope))
    if stored is None:
        raise ResponseNotFound(
            f"response {shown(response_id)} not found: it was not stored, or was deleted or dropped",
            param="response_id",
        )
    return store, response_id, stored


def _is_descending(request: Request) -> bool:
    given = request.query_params.get("order", "desc")
    if given not in ("asc", "desc"):
        raise InvalidRequest(f"order must be asc or desc, got {shown(given)}", param="order")
    return given == "desc"


def _begin(request: Request, items: list[ConversationItem]) -> int:
    """The place of the first item to list."""
    after = request.query_params.get("after")
    if after is None:
        return 0
    for place, item in enumerate(items):
        if item.id == after:
            return place + 1
    raise InvalidRequest(f"after must be the id of an item of the list, got {shown(after)}", param="after")
