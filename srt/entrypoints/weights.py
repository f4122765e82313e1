"""The endpoint that loads other weights into the running engine, as SGLang's clients call it."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from ...managers.tokenizer_manager import TokenizerManager
from ...managers.weight_control import DRAIN_TIMEOUT_S
from ..errors import InvalidRequest, NotAllowed
from ..weight_messages import VERSION_RULE, is_version
from .allowed_paths import path_inside
from .routing import Server, json_response
from .wire import BodyCodec, Wire, doc, only, shown


class UpdateWeightsBody(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of /update_weights_from_disk."""

    model_path: Annotated[str, doc("Folder or GGUF file of the weights, inside the folder of --update-weights-dir")]
    load_format: Annotated[
        Literal["auto", "safetensors", "gguf"] | None, doc("Format of the weights; auto (default): what the path has")
    ] = None
    abort_all_requests: Annotated[
        bool | None,
        doc("End all requests first, with the output so far; default false: requests run to their end"),
    ] = None
    drain_timeout: Annotated[
        float | None,
        doc("Seconds in which running requests must end, or the update is refused; default 60"),
    ] = None
    weight_version: Annotated[
        str | None, doc("Name of the weights, at most 128 characters; default: a name that no other weights have")
    ] = None
    flush_cache: Annotated[Any, only("cached KV of the old weights is never used", True)] = None
    is_async: Annotated[Any, only("no step runs while weights are loaded", False)] = None
    keep_pause: Annotated[Any, only("a pause lasts until /continue_generation", False)] = None
    torch_empty_cache: Annotated[Any, only("the memory of the old weights is always released", True, False)] = None
    recapture_cuda_graph: Annotated[Any, only("recorded steps always read the new weights", True, False)] = None
    token_step: Annotated[Any, only("`weight_version` names the weights", 0)] = None
    manifest: Annotated[Any, only("the files themselves are read")] = None


class UpdateWeightsAnswer(msgspec.Struct, frozen=True):
    success: Annotated[bool, doc("Always true; a refusal is an error")]
    message: Annotated[str, doc("What was done")]
    num_paused_requests: Annotated[int, doc("Requests that waited, and continue with the new weights")]
    weight_version: Annotated[str, doc("The name of the new weights")]


UPDATE_WEIGHTS_CODEC = BodyCodec(UpdateWeightsBody)


async def update_weights_from_disk(server: Server, request: Request, body: UpdateWeightsBody) -> ASGIApp:
    """Answers when the new weights are in use. Raises NotAllowed, InvalidRequest, EngineBusy."""
    folder = server.manager.server_args.update_weights_dir
    if folder is None:
        raise NotAllowed("updates of the weights are off; start the server with --update-weights-dir")
    path = path_inside(folder, body.model_path, param="model_path", flag="--update-weights-dir")
    return json_response(await load_weights(server.manager, str(path), body))


async def load_weights(manager: TokenizerManager, path: str, body: UpdateWeightsBody) -> UpdateWeightsAnswer:
    """Loads the weights at `path`. Raises InvalidRequest, EngineBusy; then the old weights are in use."""
    version = body.weight_version
    if version is not None and not is_version(version):
        raise InvalidRequest(f"weight_version must have {VERSION_RULE}, got {shown(version)}", param="weight_version")
    timeout_s = DRAIN_TIMEOUT_S if body.drain_timeout is None else body.drain_timeout
    if not 0 <= timeout_s < math.inf:
        raise InvalidRequest(f"drain_timeout must be 0 or more, got {timeout_s:g}", param="drain_timeout")
    num_waiting = await manager.weights.update(
        path,
        body.load_format or "auto",
        version,
        dtype=manager.facts.dtype,
        abort_all=bool(body.abort_all_requests),
        drain_timeout_s=timeout_s,
    )
    return UpdateWeightsAnswer(True, "the new weights are in use", num_waiting, manager.weights.version)
