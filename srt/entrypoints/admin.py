"""Endpoints about the engine itself: health, model and server information, load, cache flush, aborts."""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from ..errors import EngineBusy, EngineDead, InvalidRequest
from ..io_struct import AbortFinish, SchedulerState
from ..request_options import RequestOptions
from .routing import Server, json_response
from .wire import BodyCodec, Wire, doc, shown

_MAX_FLUSH_WAIT_S = 3600.0
_GIB = 2**30


class Status(msgspec.Struct, frozen=True):
    status: Annotated[str, doc("`ok`, or `ready` from /ready; every other answer is an error")]


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
    weight_version: Annotated[str, doc("Always `default`")]
    load_format: Annotated[str, doc("The setting --load-format")]
    model_type: Annotated[str, doc("The family, as the model's files call it")]
    architectures: Annotated[list[str], doc("The one architecture, as the model's files call it")]
    has_image_understanding: Annotated[bool, doc("Always false")]
    has_audio_understanding: Annotated[bool, doc("Always false")]


class Load(msgspec.Struct, frozen=True):
    """An element of the answer of /get_load; tokens are those of requests under way."""

    dp_rank: Annotated[int, doc("Always 0")]
    num_reqs: Annotated[int, doc("Requests that run or wait")]
    num_waiting_reqs: Annotated[int, doc("Requests that wait")]
    num_tokens: Annotated[int, doc("KV slots that running requests hold")]
    age_s: Annotated[
        float,
        doc("Seconds since the scheduler reported these numbers"),
    ]


class LoadDetail(msgspec.Struct, frozen=True):
    dp_rank: Annotated[int, doc("Always 0")]
    num_running_reqs: Annotated[int, doc("Requests that run")]
    num_waiting_reqs: Annotated[int, doc("Requests that wait")]
    num_used_tokens: Annotated[int, doc("KV slots that running requests hold")]
    max_total_num_tokens: Annotated[int, doc("KV slots of the pool")]
    max_running_requests: Annotated[int, doc("Most requests that run at once")]
    token_usage: Annotated[float, doc("num_used_tokens / max_total_num_tokens")]
    gen_throughput: Annotated[float, doc("Tokens generated a second, lately")]
    cache_hit_rate: Annotated[float, doc("Share of all prompt tokens whose KV the prefix cache had, since the start")]
    age_s: Annotated[
        float,
        doc("Seconds since the scheduler reported these numbers"),
    ]


class Loads(msgspec.Struct, frozen=True):
    """Answer of /v1/loads."""

    timestamp: Annotated[float, doc("Unix time of the answer, in seconds")]
    version: Annotated[str, doc("Tercet's version")]
    loads: Annotated[list[LoadDetail], doc("The load of the one scheduler")]


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
    """200 when every process is alive, the scheduler's loop turns and requests are accepted; 503 otherwise."""
    check_up(server)
    return json_response(Status("ok"))


async def ready(server: Server, request: Request, body: None) -> ASGIApp:
    """200 when a request would be accepted now; 503 otherwise."""
    server.manager.check_accepting()
    return json_response(Status("ready"))


def check_up(server: Server) -> None:
    """Raises EngineDead when the engine is broken, hung or about to stop."""
    server.manager.check_accepting()
    if not server.manager.is_healthy:
        raise EngineDead("the scheduler does not answer")


async def health_generate(server: Server, request: Request, body: None) -> ASGIApp:
    """Generates one token in the running engine. 503 when the token does not arrive in time."""
    check_up(server)
    manager = server.manager
    sampling = manager.make_sampling({"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True})
    rid = f"health-{uuid.uuid4().hex}"
    (generation,) = await manager.submit([0], RequestOptions(sampling=sampling, cache_salt=rid), rid=rid)
    try:
        async with asyncio.timeout(server.health_timeout_s):
            out = await generation.result()
    except TimeoutError:
        raise EngineDead(f"the probe request returned no token within {server.health_timeout_s:g} s") from None
    finally:
        generation.close()
    if isinstance(out.finish, AbortFinish):
        raise EngineDead("the probe request was aborted")
    return json_response(Status("ok"))


async def model_info(server: Server, request: Request, body: None) -> ASGIApp:
    manager = server.manager
    args, config = manager.server_args, manager.model_config
    return json_response(
        ModelInfo(
            model_path=args.model_path,
            tokenizer_path=args.tokenizer_path or args.model_path,
            served_model_name=args.model_name,
            is_generation=True,
            preferred_sampling_params=dict(manager.default_sampling) or None,
            weight_version="default",
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
    settings = dataclasses.asdict(manager.server_args)
    del settings["api_key"]
    facts = manager.facts
    # Settings that were "auto" show their resolved values.
    settings |= {
        "dtype": facts.dtype,
        "device": facts.device,
        "attention_backend": facts.attention_backend,
        "page_size": facts.page_size,
        "context_length": facts.context_len,
        "chunked_prefill_size": facts.chunked_prefill_size,
        "max_prefill_tokens": facts.max_prefill_tokens,
        "served_model_name": manager.server_args.model_name,
    }
    return {
        **settings,
        "status": "ready" if manager.is_healthy and not manager.draining else "not ready",
        "version": server.version,
        "max_total_num_tokens": facts.max_total_num_tokens,
        "max_req_input_len": facts.max_req_input_len,
        "internal_states": [{**_internal_state(server, state), "age_s": age_s}],
    }


def _internal_state(server: Server, state: SchedulerState) -> dict[str, Any]:
    facts = server.manager.facts
    memory = {
        "weight": round(facts.weight_bytes / _GIB, 3),
        "kvcache": round(facts.kv_bytes / _GIB, 3),
        "token_capacity": facts.max_total_num_tokens,
        "graph": round(facts.graph_bytes / _GIB, 3),
    }
    return {
        **msgspec.structs.asdict(state),
        "memory_usage": memory,
        "weight_bytes": facts.weight_bytes,
        "kv_bytes": facts.kv_bytes,
        "graph_bytes": facts.graph_bytes,
        "effective_max_running_requests_per_dp": facts.max_running_requests,
        "avg_spec_accept_length": None,
    }


async def get_load(server: Server, request: Request, body: None) -> ASGIApp:
    state, age_s = await server.manager.scheduler_state(server.state_timeout_s)
    load = Load(0, state.num_running + state.num_waiting, state.num_waiting, _used_tokens(state), age_s)
    return json_response([load])


async def loads(server: Server, request: Request, body: None) -> ASGIApp:
    state, age_s = await server.manager.scheduler_state(server.state_timeout_s)
    used = _used_tokens(state)
    load = LoadDetail(
        dp_rank=0,
        num_running_reqs=state.num_running,
        num_waiting_reqs=state.num_waiting,
        num_used_tokens=used,
        max_total_num_tokens=state.max_total_num_tokens,
        max_running_requests=server.manager.facts.max_running_requests,
        token_usage=used / max(state.max_total_num_tokens, 1),
        gen_throughput=state.last_gen_throughput,
        cache_hit_rate=state.cache_hit_rate,
        age_s=age_s,
    )
    return json_response(Loads(time.time(), server.version, [load]))


def _used_tokens(state: SchedulerState) -> int:
    """KV slots that requests hold. Slots that only the prefix cache holds count as free, because it can evict them."""
    return state.num_protected_tokens + state.num_private_tokens


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
            reply = await server.manager.flush_cache(timeout_s)
    except TimeoutError:
        raise EngineDead("the scheduler did not answer") from None
    if not reply.ok:
        raise EngineBusy(f"the cache was not flushed: {reply.num_busy} requests are running or waiting")
    return json_response(FlushAnswer(True, "the prefix cache is empty"))


async def abort_request(server: Server, request: Request, body: AbortBody) -> ASGIApp:
    """Aborts a request by its name, or all requests. A missing request is no error: it may just have finished."""
    if (body.rid is not None) == bool(body.abort_all):
        raise InvalidRequest("exactly one of rid and abort_all: true is required", param="rid")
    manager = server.manager
    if body.rid is None:
        aborted = manager.num_unfinished > 0
        manager.abort_all()
    else:
        aborted = manager.abort(body.rid)
    return json_response(AbortAnswer(aborted))
