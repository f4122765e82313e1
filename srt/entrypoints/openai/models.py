"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.types import ASGIApp

from ..routing import Server, json_response
from .protocol import ModelCard, ModelList


async def list_models(server: Server, request: Request, body: None) -> ASGIApp:
    return json_response(ModelList("list", [_card(server)]))


async def show_model(server: Server, request: Request, body: None) -> ASGIApp:
    """Raises ModelNotFound."""
    server.check_model(request.path_params["model"])
    return json_response(_card(server))


def _card(server: Server) -> ModelCard:
    args = server.manager.server_args
    context_len = server.manager.facts.context_len
    root = Path(args.model_path).name
    return ModelCard(args.model_name, "model", server.started, "tercet", root, None, context_len)
