"""LoRA adapters in the API: what a request names, and the endpoints that load and unload adapters.

The endpoints have the names and fields of SGLang and of vLLM.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from ...managers.tokenizer_manager import TokenizerManager
from ..adapters import AdapterRef
from ..errors import InvalidRequest, ModelNotFound, NotAllowed
from .allowed_paths import path_inside
from .routing import Server, json_response
from .wire import BodyCodec, Wire, doc, only, shown


class Target(NamedTuple):
    """What a request names."""

    model: str
    """The name for `model` in the answer: of the adapter, or of the model."""
    adapter: AdapterRef | None


def target_of(manager: TokenizerManager, model: str | None, lora_path: str | None = None) -> Target:
    """What the fields `model` and `lora_path` of a request name.

    `model`: a name of the model, NAME of an adapter, or MODEL:NAME. "" for `lora_path` is the same as None. Raises
    ModelNotFound and InvalidRequest.
    """
    args, adapters = manager.server_args, manager.adapters
    given = None if model is None or args.is_model(model) else _of_model(manager, model)
    if not lora_path:
        return Target(args.model_name if given is None else given.name, given)
    named = adapters.named(lora_path)
    if given is not None and given != named:
        raise InvalidRequest(
            f"model and lora_path must name the same adapter if both name one, got {shown(model)} and "
            f"{shown(lora_path)}",
            param="lora_path",
        )
    return Target(named.name, named)


def _of_model(manager: TokenizerManager, model: str) -> AdapterRef:
    """The adapter that `model` names. Raises ModelNotFound."""
    args, adapters = manager.server_args, manager.adapters
    prefixes = [f"{base}:" for base in (args.model_name, args.model_path, "default")]
    names = [model, *(model.removeprefix(prefix) for prefix in prefixes if model.startswith(prefix))]
    ref = next(filter(None, map(adapters.find, names)), None)
    if ref is None:
        others = f"; {adapters.listed()}" if args.enable_lora else ""
        raise ModelNotFound(
            f"the model {shown(model)} does not exist; the served model is {args.model_name!r}{others}", param="model"
        )
    return ref


class LoadAdapterBody(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of /load_lora_adapter."""

    lora_name: Annotated[str, doc("Name of the adapter in `model` and `lora_path` of requests")]
    lora_path: Annotated[str, doc("Folder of the adapter in PEFT's format, inside the folder of --lora-dir")]
    pinned: Annotated[Any, only("every loaded adapter stays in memory", True, False)] = None
    load_inplace: Annotated[Any, only("an adapter is unloaded before its name is used again", False)] = None


class UnloadAdapterBody(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of /unload_lora_adapter."""

    lora_name: Annotated[str, doc("Name of the adapter")]
    lora_int_id: Annotated[Any, only("an adapter is unloaded by its name")] = None


class AdapterAnswer(msgspec.Struct, frozen=True):
    """Answer of both endpoints."""

    success: Annotated[bool, doc("Always true; a refusal is an error")]
    message: Annotated[str, doc("What was done")]
    loaded_adapters: Annotated[dict[str, str], doc("The path of each loaded adapter by its name")]


LOAD_CODEC = BodyCodec(LoadAdapterBody)
UNLOAD_CODEC = BodyCodec(UnloadAdapterBody)


async def load_lora_adapter(server: Server, request: Request, body: LoadAdapterBody) -> ASGIApp:
    """Answers when requests may name the adapter. Raises NotAllowed and what `AdapterControl.load` raises."""
    args = server.manager.server_args
    folder = args.lora_dir
    if folder is None:
        flags = "--lora-dir" if args.enable_lora else "--enable-lora and --lora-dir"
        raise NotAllowed(f"loading adapters is off; start the server with {flags}")
    path = path_inside(folder, body.lora_path, param="lora_path", flag="--lora-dir")
    return json_response(await load_adapter(server.manager, body.lora_name, str(path)))


async def unload_lora_adapter(server: Server, request: Request, body: UnloadAdapterBody) -> ASGIApp:
    """Answers when the last request of the adapter has ended. Raises as `AdapterControl.unload` does."""
    return json_response(await unload_adapter(server.manager, body.lora_name))


async def load_adapter(manager: TokenizerManager, name: str, path: str) -> AdapterAnswer:
    await manager.adapters.load(name, path)
    return AdapterAnswer(True, f"the adapter {name!r} is loaded", loaded_adapters(manager))


async def unload_adapter(manager: TokenizerManager, name: str) -> AdapterAnswer:
    await manager.adapters.unload(name)
    return AdapterAnswer(True, f"the adapter {name!r} is unloaded", loaded_adapters(manager))


def loaded_adapters(manager: TokenizerManager) -> dict[str, str]:
    """The path of each loaded adapter by its name."""
    return {one.name: one.path for one in manager.adapters.usable}
