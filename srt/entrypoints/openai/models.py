"""GET /v1/models and /v1/models/{id}. The clients of OpenAI and of Anthropic read the same answers."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from ...adapters import AdapterFacts
from ...errors import InvalidRequest
from ..lora import target_of
from ..routing import Server, json_response
from ..wire import shown
from .common import limit_of
from .protocol import ModelCard, ModelList

MAX_MODELS = 1000
"""Cards in one answer, also without `limit`: Anthropic's limit."""


async def list_models(server: Server, request: Request, body: None) -> ASGIApp:
    """Raises InvalidRequest."""
    cards = [_card(server), *(_adapter_card(server, one) for one in server.manager.adapters.usable)]
    limit = limit_of(request, default=MAX_MODELS, maximum=MAX_MODELS)
    after, before = _place(request, "after_id", cards), _place(request, "before_id", cards)
    begin = 0 if after is None else after + 1
    if before is None:
        page, has_more = cards[begin : begin + limit], begin + limit < len(cards)
    else:
        page, has_more = cards[max(begin, before - limit) : before], begin + limit < before
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return json_response(ModelList("list", page, first, last, has_more))


async def show_model(server: Server, request: Request, body: None) -> ASGIApp:
    """Raises ModelNotFound."""
    adapter = target_of(server.manager, request.path_params["model"]).adapter
    for one in server.manager.adapters.usable:
        if one.ref == adapter:
            return json_response(_adapter_card(server, one))
    return json_response(_card(server))


def _place(request: Request, name: str, cards: list[ModelCard]) -> int | None:
    """The place of the card that a query parameter names. None: the request does not have this parameter."""
    given = request.query_params.get(name)
    if given is None:
        return None
    for place, card in enumerate(cards):
        if card.id == given:
            return place
    raise InvalidRequest(f"{name} must be the id of a model of the list, got {shown(given)}", param=name)


def _card(server: Server) -> ModelCard:
    args = server.manager.server_args
    return ModelCard(
        id=args.model_name,
        object="model",
        created=server.started,
        owned_by="tercet",
        root=Path(args.model_path).name,
        parent=None,
        max_model_len=server.manager.facts.context_len,
        type="model",
        display_name=args.model_name,
        created_at=datetime.fromtimestamp(server.started, UTC).isoformat(),
        lifecycle="active",
    )


def _adapter_card(server: Server, adapter: AdapterFacts) -> ModelCard:
    return msgspec.structs.replace(
        _card(server),
        id=adapter.name,
        root=Path(adapter.path).name,
        parent=server.manager.server_args.model_name,
        display_name=adapter.name,
    )
