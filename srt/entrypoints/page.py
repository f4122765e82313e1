"""The web page at `/`: a chat and a live view of the engine. The files are in web/, and load nothing else."""

from __future__ import annotations

import functools
from importlib import resources
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from ..errors import InvalidRequest
from ..io_struct import EngineView
from ..text.tokenizer import Tokenizer
from ..view_parts import HotPrefix, RequestView, StepRecord
from .routing import Server, json_response
from .wire import doc, shown

_MEDIA_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "common.js": "text/javascript; charset=utf-8",
    "chat.js": "text/javascript; charset=utf-8",
    "engine.js": "text/javascript; charset=utf-8",
}
SCRIPT_PATHS = tuple(f"/web/{name}" for name in _MEDIA_TYPES if name.endswith(".js"))
_PATIENCE = 10
"""The view may take this many times longer than other states: a long step delays it, and only the page waits."""
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class PrefixText(msgspec.Struct, frozen=True):
    """One edge of the prefix cache's tree. The list is in depth-first order."""

    depth: Annotated[int, doc("Number of listed edges above this one")]
    start: Annotated[int, doc("Position of the edge's first token")]
    num_tokens: Annotated[int, doc("Tokens of the edge")]
    num_uses: Annotated[int, doc("Number of requests that have used the edge")]
    is_locked: Annotated[bool, doc("Whether a running request uses the edge")]
    text: Annotated[
        str, doc("The first tokens of the edge as text; empty without a tokenizer, and if there are several API keys")
    ]


class EngineViewAnswer(msgspec.Struct, frozen=True):
    """Answer of /engine_view. The lists are bounded: 256 steps, 64 requests, 12 prefixes."""

    model: Annotated[str, doc("The served name")]
    version: Annotated[str, doc("Tercet's version")]
    max_running_requests: Annotated[int, doc("Most requests that run at once")]
    context_len: Annotated[int, doc("Maximum number of tokens of a prompt and its answer together")]
    now_s: Annotated[float, doc("Time on the scheduler's clock, in seconds")]
    state: Annotated[dict[str, Any], doc("The scheduler's state, as in `internal_states` of /server_info")]
    generated_tokens: Annotated[int, doc("Tokens generated since the engine's start, which a restart begins again")]
    steps: Annotated[list[StepRecord], doc("The newest finished steps, oldest first")]
    requests: Annotated[list[RequestView], doc("Unfinished requests, running ones first")]
    prefixes: Annotated[list[PrefixText], doc("The cached prefixes that saved the most computation")]


async def show_file(server: Server, request: Request, body: None) -> ASGIApp:
    """The page, or one of its other files."""
    name = request.url.path.rpartition("/")[2] or "index.html"
    return Response(_content(name), media_type=_MEDIA_TYPES[name], headers=_HEADERS)


@functools.cache
def _content(name: str) -> bytes:
    return resources.files(__package__).joinpath("web", name).read_bytes()


async def engine_view(server: Server, request: Request, body: None) -> ASGIApp:
    """What the engine is doing now. `after_step` leaves out the steps that the client has, unless they are of an engine
    before a restart."""
    given = request.query_params.get("after_step", "0")
    if not (given.isascii() and given.isdecimal() and len(given) < 16):
        raise InvalidRequest(f"after_step must be the number of a step, got {shown(given)}", param="after_step")
    manager = server.manager
    view = await manager.engine_view(int(given), _PATIENCE * server.state_timeout_s)
    return json_response(_answer(server, view))


def _answer(server: Server, view: EngineView) -> EngineViewAnswer:
    manager = server.manager
    # Several keys are clients that must not read one another's prompts.
    tokenizer = None if len(manager.server_args.api_keys) > 1 else manager.inputs.tokenizer
    return EngineViewAnswer(
        model=manager.server_args.model_name,
        version=server.version,
        max_running_requests=manager.facts.max_running_requests,
        context_len=manager.facts.context_len,
        now_s=view.now_s,
        state=msgspec.structs.asdict(view.state),
        generated_tokens=view.generated_tokens,
        steps=view.steps,
        requests=view.requests,
        prefixes=[_prefix_text(prefix, tokenizer) for prefix in view.prefixes],
    )


def _prefix_text(prefix: HotPrefix, tokenizer: Tokenizer | None) -> PrefixText:
    return PrefixText(
        depth=prefix.depth,
        start=prefix.start,
        num_tokens=prefix.num_tokens,
        num_uses=prefix.num_uses,
        is_locked=prefix.is_locked,
        text="" if tokenizer is None else tokenizer.decode(prefix.token_ids, skip_special_tokens=False),
    )
