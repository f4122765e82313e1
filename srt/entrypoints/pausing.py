"""The endpoints that pause and continue generation, as SGLang's clients call them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from .routing import Server, json_response
from .wire import BodyCodec, Wire, doc, only


class PauseBody(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of /pause_generation."""

    mode: Annotated[
        Literal["abort", "retract", "in_place"] | None,
        doc(
            "abort (default): requests end with the output so far; retract: running requests release their KV and wait "
            "again; in_place: running requests keep their KV"
        ),
    ] = None


class ContinueBody(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of /continue_generation."""

    torch_empty_cache: Annotated[Any, only("the memory of the KV pool is never released", True, False)] = None


class PauseAnswer(msgspec.Struct, frozen=True):
    message: Annotated[str, doc("What was done")]
    status: Annotated[str, doc("Always `ok`; a refusal is an error")] = "ok"


PAUSE_CODEC = BodyCodec(PauseBody)
CONTINUE_CODEC = BodyCodec(ContinueBody)


async def pause_generation(server: Server, request: Request, body: PauseBody) -> ASGIApp:
    """Answers when no step runs any more."""
    mode = body.mode or "abort"
    await server.manager.pause.begin(mode)
    return json_response(PauseAnswer(f"generation is paused ({mode})"))


async def continue_generation(server: Server, request: Request, body: ContinueBody) -> ASGIApp:
    """Does nothing if generation is not paused."""
    await server.manager.pause.end()
    return json_response(PauseAnswer("generation continues"))
