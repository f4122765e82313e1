"""Endpoints about the engine itself: health, model and server information, cache flush, aborts."""

from __future__ import annotations

import asyncio
import uuid
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from ...managers.generation import error_of
from ...managers.tokenizer_manager import TokenizerManager
from ..errors import EngineDead, EnginePaused, EngineRestarting, InvalidRequest, QueueFull
from ..io_struct import AbortFinish, FinishReason, SchedulerState
from ..kv_events import read_config
from ..request_options import RequestOptions
from .lora import loaded_adapters
from .routing import Server, json_response
from .wire import BodyCodec, Wire, doc, shown

_MAX_FLUSH_WAIT_S = 3600.0
_GIB = 2**30


class Status(msgspec.Struct, frozen=True):
    status: Annotated[
        str, doc("`ok`, `restarting` or `paused` from /health, `ready` from /ready; every other answer is an error")
    ]


class ModelInfo(msgspec.Struct, frozen=True):
    """Answer of /model_info."""

    model_path: Annotated[str, doc("Where the model's files are")]
    tokenizer_path: Annotated[str, doc("Where the tokenizer's files are")]
    served_model_name: Annotated[str, doc("The served name")]
    is_generation: Annotated[bool, doc("Always true")]
    preferred_sampling_params: Annotated[
        dict[str, Any] | None,
        doc("Sampling parameters of a request that sets none, where they are not the API's own defaults"),
    ]
    weight_version: Annotated[str, doc("Name of the weights in use")]
    load_format: Annotated[str, doc("The setting --load-format")]
    model_type: Annotated[str, doc("The family, as the model's files call it")]
    architectures: Annotated[list[str], doc("The architecture, as named in the model's files")]
    has_image_understanding: Annotated[bool, doc("Always false")]
    has_audio_understanding: Annotated[bool, doc("Always false")]


class FlushAnswer(msgspec.Struct, frozen=True):
    success: Annotated[bool, doc("Always true; a refusal is an error")]
    message: Annotated[str, doc("What was done")]


class AbortBody(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of /abort_request: one of the two."""

    rid: Annotated[str | None, doc("Abort the request or prompt of exactly this name")] = None
    abort_all: Annotated[bool | None, doc("Abort every request")] = None


class AbortAnswer(msgspec.Struct, frozen=True):
    aborted: Annotated[bool, doc("Whether there was such a request")]


ABORT_CODEC = BodyCodec(AbortBody)


async def health(server: Server, request: Request, body: None) -> ASGIApp:
    """200 when every process is alive, their loops turn and requests are accepted; 503 otherwise.

    Also 200 while the engine is being restarted, and while generation is paused: a supervisor must not end a server
    that will soon continue.
    """
    check_up(server)
    if server.manager.is_restarting:
        return json_response(Status("restarting"))
    return json_response(Status("paused" if server.manager.pause.is_on else "ok"))


async def ready(server: Server, request: Request, body: None) -> ASGIApp:
    """200 when a request would be accepted and run now; 503 otherwise."""
    manager = server.manager
    check_up(server)
    if manager.is_recovering:
        raise EngineRestarting("the engine is being restarted, and new requests wait; try again in a moment")
    check_not_paused(server)
    if manager.weights.is_holding:
        raise EnginePaused("new requests wait for an update of the weights; try again in a moment")
    if manager.stall is not None:
        raise EngineDead("a process of the engine is stopped, or its step takes very long")
    return json_response(Status("ready"))


def check_up(server: Server) -> None:
    """Raises EngineDead when the engine is broken, hung or about to stop."""
    server.manager.check_accepting()
    if not server.manager.is_healthy and not server.manager.is_restarting:
        raise EngineDead("a process of the engine hangs")


def check_not_paused(server: Server) -> None:
    """Raises EnginePaused."""
    if server.manager.pause.is_on:
        raise EnginePaused("generation is paused; /continue_generation ends the pause")


async def health_generate(server: Server, request: Request, body: None) -> ASGIApp:
    """Generates one token in the running engine. 503 when the token does not arrive in time."""
    check_up(server)
    try:
        async with asyncio.timeout(server.health_timeout_s):
            while True:
                check_not_paused(server)
                finish = await _probe(server.manager)
                # An abort of all requests ends the probe, too, and says nothing about the engine.
                if not isinstance(finish, AbortFinish) or finish.status_code is not None:
                    break
    except TimeoutError:
        raise EngineDead(f"the probe request returned no token within {server.health_timeout_s:g} s") from None
    if isinstance(finish, AbortFinish):
        failed = error_of(finish)
        if isinstance(failed, QueueFull):
            raise failed
        raise EngineDead(f"the probe request has no token: {finish.message}")
    return json_response(Status("ok"))


async def _probe(manager: TokenizerManager) -> FinishReason | None:
    """The end of a request for one token."""
    sampling = manager.inputs.make_sampling({"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True})
    rid = f"health-{uuid.uuid4().hex}"
    (generation,) = await manager.submit([0], RequestOptions(sampling=sampling, cache_salt=rid), rid=rid)
    try:
        return (await generation.result()).finish
    finally:
        generation.close()


async def model_info(server: Server, request: Request, body: None) -> ASGIApp:
    manager = server.manager
    args, config = manager.server_args, manager.model_config
    return json_response(
        ModelInfo(
            model_path=args.model_path,
            tokenizer_path=args.tokenizer_path or args.model_path,
            served_model_name=args.model_name,
            is_generation=True,
            preferred_sampling_params=dict(manager.inputs.default_sampling) or None,
            weight_version=manager.weights.version,
            load_format=args.load_format,
            model_type=config.model_type,
            architectures=[config.architecture],
            has_image_understanding=False,
            has_audio_understanding=False,
        )
    )


async def server_info(server: Server, request: Request, body: None) -> ASGIApp:
    """The effective settings, without the API key, and the scheduler's state."""
    return json_response(await collect_server_info(server))


async def collect_server_info(server: Server) -> dict[str, Any]:
    """The response of /server_info."""
    manager = server.manager
    state, age_s = await manager.scheduler_state(server.state_timeout_s)
    settings = manager.server_args.without_secrets()
    facts = manager.facts
    # Settings that were "auto" show their resolved values.
    settings |= {
        "dtype": facts.dtype,
        "weight_dtype": manager.weights.facts.dtype,
        "device": facts.device,
        "attention_backend": facts.attention_backend,
        "cpu_kernels": None if facts.cpu_kernels is None else msgspec.structs.asdict(facts.cpu_kernels),
        "page_size": facts.page_size,
        "context_length": facts.context_len,
        "chunked_prefill_size": facts.chunked_prefill_size,
        "max_prefill_tokens": facts.max_prefill_tokens,
        "served_model_name": manager.server_args.model_name,
    }
    if manager.server_args.enable_lora:
        settings["loaded_lora_adapters"] = loaded_adapters(manager)
    if server.responses is not None:
        settings["num_stored_responses"] = len(server.responses)
        settings["stored_responses_bytes"] = server.responses.num_bytes
    kv_events = read_config(manager.server_args.kv_events_config)
    if kv_events is not None:
        settings["kv_events"] = kv_events.described(facts.page_size)
    return {
        **settings,
        "status": _status(manager),
        "version": server.version,
        "max_total_num_tokens": facts.max_total_num_tokens,
        "max_req_input_len": facts.max_req_input_len,
        "num_engine_restarts": manager.recovery.num_restarts,
        "num_resumed_samples": manager.recovery.num_resumed,
        "num_fatal_samples": manager.recovery.num_fatal,
        "internal_states": [{**_internal_state(server, state), "age_s": age_s}],
    }


def _status(manager: TokenizerManager) -> str:
    if manager.is_restarting:
        return "restarting"
    if manager.pause.is_on and manager.is_healthy:
        return "paused"
    return "ready" if manager.is_healthy and not manager.draining else "not ready"


def _internal_state(server: Server, state: SchedulerState) -> dict[str, Any]:
    facts = server.manager.facts
    memory = {
        "weight": round(server.manager.weights.facts.num_bytes / _GIB, 3),
        "kvcache": round(facts.kv_bytes / _GIB, 3),
        "token_capacity": facts.max_total_num_tokens,
        "graph": round(facts.graph_bytes / _GIB, 3),
    }
    return {
        **msgspec.structs.asdict(state),
        "memory_usage": memory,
        "weight_bytes": server.manager.weights.facts.num_bytes,
        "kv_bytes": facts.kv_bytes,
        "graph_bytes": facts.graph_bytes,
        "effective_max_running_requests_per_dp": facts.max_running_requests,
        "avg_spec_accept_length": None if state.speculation is None else state.speculation.accept_length,
    }


async def flush_cache(server: Server, request: Request, body: None) -> ASGIApp:
    """Empties the prefix cache. Raises EngineBusy if requests are still running or waiting after `timeout` seconds."""
    given = request.query_params.get("timeout", "0")
    try:
        timeout_s = float(given)
    except ValueError:
        timeout_s = -1.0
    if not 0 <= timeout_s <= _MAX_FLUSH_WAIT_S:
        raise InvalidRequest(
            f"timeout must be a number of seconds in [0, {_MAX_FLUSH_WAIT_S:g}], got {shown(given)}", param="timeout"
        )
    try:
        async with asyncio.timeout(timeout_s + server.flush_timeout_s):
            await server.manager.flush_cache(timeout_s)
    except TimeoutError:
        raise EngineDead("the scheduler did not answer") from None
    return json_response(FlushAnswer(True, "the prefix cache is empty"))


async def abort_request(server: Server, request: Request, body: AbortBody) -> ASGIApp:
    """Aborts a request by its name, or all requests. A missing request is no error: it may just have finished."""
    check_abort(body)
    manager = server.manager
    if body.rid is None:
        aborted = manager.num_unfinished > 0
        manager.abort_all()
    else:
        aborted = manager.abort(body.rid)
    return json_response(AbortAnswer(aborted))


def check_abort(body: AbortBody) -> None:
    """Raises InvalidRequest unless exactly one of the two is given."""
    if (body.rid is not None) == bool(body.abort_all):
        raise InvalidRequest("exactly one of rid and abort_all: true is required", param="rid")
