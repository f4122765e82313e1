"""Endpoints about the load of the engine, for routers and monitoring: /get_load, /v1/loads and /metrics."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from ..errors import InvalidRequest, MetricsOff
from .lora import loaded_adapters
from .routing import Server, json_response
from .wire import doc, shown

SECTIONS = ("all", "core", "disagg", "lora", "memory", "queues", "spec")
"""What `include` of /v1/loads may name. This engine has no values for disagg and spec."""
_GIB = 2**30


class Load(msgspec.Struct, frozen=True):
    """An element of the answer of /get_load; tokens are those of requests under way."""

    dp_rank: Annotated[int, doc("Always 0")]
    num_reqs: Annotated[int, doc("Requests that run or wait")]
    num_waiting_reqs: Annotated[int, doc("Requests that wait")]
    num_tokens: Annotated[int, doc("KV slots that requests hold, and prompt tokens that are still to be computed")]
    age_s: Annotated[float, doc("Seconds since the scheduler reported these numbers")]


class MemoryLoad(msgspec.Struct, frozen=True):
    """The section `memory` of /v1/loads."""

    weight_gb: Annotated[float, doc("GiB of weights")]
    kv_cache_gb: Annotated[float, doc("GiB of the KV pool")]
    graph_gb: Annotated[float, doc("GiB of CUDA graphs")]
    token_capacity: Annotated[int, doc("KV slots of the pool")]


class QueueLoad(msgspec.Struct, frozen=True):
    """The section `queues` of /v1/loads."""

    waiting: Annotated[int, doc("Requests that wait")]
    retracted: Annotated[int, doc("Retractions since the start")]


class LoraLoad(msgspec.Struct, frozen=True):
    """The section `lora` of /v1/loads."""

    slots_used: Annotated[int, doc("Adapters that are loaded, also those that are being unloaded")]
    slots_total: Annotated[int, doc("Adapters that may be loaded")]
    utilization: Annotated[float, doc("slots_used / slots_total")]
    adapters: Annotated[list[str], doc("Names of the adapters that requests may name")]


class LoadDetail(msgspec.Struct, frozen=True, kw_only=True):
    dp_rank: Annotated[int, doc("Always 0")]
    num_running_reqs: Annotated[int, doc("Requests that run")]
    num_waiting_reqs: Annotated[int, doc("Requests that wait")]
    num_total_reqs: Annotated[int, doc("Requests that run or wait")]
    num_waiting_uncached_tokens: Annotated[int, doc("Prompt tokens that are still to be computed")]
    num_used_tokens: Annotated[int, doc("KV slots that requests hold")]
    num_total_tokens: Annotated[int, doc("num_used_tokens + num_waiting_uncached_tokens")]
    max_total_num_tokens: Annotated[int, doc("KV slots of the pool")]
    max_running_requests: Annotated[int, doc("Most requests that run at once")]
    token_usage: Annotated[float, doc("num_used_tokens / max_total_num_tokens")]
    gen_throughput: Annotated[float, doc("Generated tokens per second, over the last steps; 0 if idle")]
    cache_hit_rate: Annotated[float, doc("Share of all prompt tokens whose KV the prefix cache had, since the start")]
    is_paused: Annotated[bool, doc("Generation is paused: no request gets tokens")]
    age_s: Annotated[float, doc("Seconds since the scheduler reported these numbers")]
    memory: Annotated[MemoryLoad | UnsetType, doc("Sizes; with `memory` or `all` in `include`")] = UNSET
    queues: Annotated[QueueLoad | UnsetType, doc("Queues; with `queues` or `all` in `include`")] = UNSET
    lora: Annotated[
        LoraLoad | UnsetType, doc("Adapters; with `lora` or `all` in `include`, on a server with --enable-lora")
    ] = UNSET


class Loads(msgspec.Struct, frozen=True):
    """Answer of /v1/loads."""

    timestamp: Annotated[float, doc("Unix time of the answer, in seconds")]
    version: Annotated[str, doc("Tercet's version")]
    loads: Annotated[list[LoadDetail], doc("The load of the one scheduler")]


async def get_load(server: Server, request: Request, body: None) -> ASGIApp:
    state, age_s = await server.manager.scheduler_state(server.state_timeout_s)
    num_tokens = state.num_used_tokens + state.num_waiting_uncached_tokens
    load = Load(0, state.num_running + state.num_waiting, state.num_waiting, num_tokens, age_s)
    return json_response([load])


async def loads(server: Server, request: Request, body: None) -> ASGIApp:
    sections = _sections(request.query_params.get("include", "all"))
    state, age_s = await server.manager.scheduler_state(server.state_timeout_s)
    used = state.num_used_tokens
    facts = server.manager.facts
    memory: MemoryLoad | UnsetType = UNSET
    if sections & {"all", "memory"}:
        memory = MemoryLoad(
            server.manager.weights.facts.num_bytes / _GIB,
            facts.kv_bytes / _GIB,
            facts.graph_bytes / _GIB,
            facts.max_total_num_tokens,
        )
    args = server.manager.server_args
    lora: LoraLoad | UnsetType = UNSET
    if args.enable_lora and sections & {"all", "lora"}:
        num_used, num_slots = server.manager.adapters.num_slots_used, args.max_loras or 0
        names = list(loaded_adapters(server.manager))
        lora = LoraLoad(num_used, num_slots, num_used / max(num_slots, 1), names)
    load = LoadDetail(
        dp_rank=0,
        num_running_reqs=state.num_running,
        num_waiting_reqs=state.num_waiting,
        num_total_reqs=state.num_running + state.num_waiting,
        num_waiting_uncached_tokens=state.num_waiting_uncached_tokens,
        num_used_tokens=used,
        num_total_tokens=used + state.num_waiting_uncached_tokens,
        max_total_num_tokens=state.max_total_num_tokens,
        max_running_requests=facts.max_running_requests,
        token_usage=used / max(state.max_total_num_tokens, 1),
        gen_throughput=state.last_gen_throughput,
        cache_hit_rate=state.cache_hit_rate,
        is_paused=state.is_paused,
        age_s=age_s,
        memory=memory,
        queues=QueueLoad(state.num_waiting, state.num_retractions) if sections & {"all", "queues"} else UNSET,
        lora=lora,
    )
    return json_response(Loads(time.time(), server.version, [load]))


def _sections(include: str) -> set[str]:
    sections = {name.strip() for name in include.split(",")}
    for name in sorted(sections - set(SECTIONS)):
        raise InvalidRequest(
            f"include must be a list of {', '.join(SECTIONS)}, separated by commas; got {shown(name)}", param="include"
        )
    return sections


async def metrics(server: Server, request: Request, body: None) -> ASGIApp:
    """Prometheus' page. Raises MetricsOff without --enable-metrics."""
    if server.metrics is None:
        raise MetricsOff("metrics are off; start the server with --enable-metrics")
    # In a thread: 65 tenants make a page of 3,000 lines, which takes some 20 ms.
    page, content_type = await asyncio.to_thread(server.metrics.render)
    return Response(page, headers={"content-type": content_type})
