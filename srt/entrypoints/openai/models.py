"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from ...adapters import AdapterFacts
from ..lora import target_of
from ..routing import Server, json_response
from .protocol import ModelCard, ModelList


async def list_models(server: Server, request: Request, body: None) -> ASGIApp:
    adapters = [_adapter_card(server, one) for one in server.manager.adapters.usable]
    return json_response(ModelList("list", [_card(server), *adapters]))


async def show_model(server: Server, request: Request, body: None) -> ASGIApp:
    """Raises ModelNotFound."""
    adapter = target_of(server.manager, request.path_params["model"]).adapter
    for one in server.manager.adapters.usable:
        if one.ref == adapter:
            return json_response(_adapter_card(server, one))
    return json_response(_card(server))


def _card(server: Server) -> ModelCard:
    args = server.manager.server_args
    context_len = server.manager.facts.context_len
    root = Path(args.model_path).name
    return ModelCard(args.model_name, "model", server.started, "tercet", root, None, context_len)


def _adapter_card(server: Server, adapter: AdapterFacts) -> ModelCard:
    return msgspec.structs.replace(
        _card(server), id=adapter.name, root=Path(adapter.path).name, parent=server.manager.server_args.model_name
    )
