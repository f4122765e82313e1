"""LoRA adapters as the TokenizerManager sees them: which ones requests may name, and their loads and unloads."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from ..srt.adapters import (
    AdapterFacts,
    AdapterRef,
    AdapterReply,
    LoadAdapterReq,
    UnloadAdapterReq,
    check_adapter_name,
    written_lora_paths,
)
from ..srt.errors import EngineBusy, InvalidRequest, TercetError
from .calls import Calls, SchedulerLink
from .request_registry import RequestRegistry
from .weight_control import WeightControl

logger = logging.getLogger(__name__)

_POLL_S = 0.02


class AdapterControl:
    """The adapters of the engine. After a restart, the engine loads those that were loaded before."""

    def __init__(
        self,
        calls: Calls,
        link: Callable[[], SchedulerLink],
        requests: RequestRegistry,
        weights: WeightControl,
        loaded: Iterable[AdapterFacts],
    ) -> None:
        """`link`: the way to the scheduler; it raises EngineDead and EngineRestarting. `weights`: has the settings,
        which name the adapters that a restarted engine loads. `loaded`: by the engine at its start."""
        self._calls = calls
        self._link = link
        self._requests = requests
        self._weights = weights
        self._loaded = {one.name: one for one in loaded}
        self._loading: set[str] = set()
        self._leaving: set[str] = set()
        """Those that are being unloaded. New requests may not name them."""
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def usable(self) -> list[AdapterFacts]:
        """The adapters that new requests may name, in the order of their loads."""
        return [one for one in self._loaded.values() if one.name not in self._leaving]

    @property
    def num_slots_used(self) -> int:
        """Adapters that the engine has. One that is being unloaded has its slot until its last request has ended."""
        return len(self._loaded)

    @property
    def is_loading(self) -> bool:
        """The engine loads an adapter."""
        return bool(self._loading)

    def find(self, name: str) -> AdapterRef | None:
        """The adapter of this name; None if no new request may name it."""
        facts = self._loaded.get(name)
        return None if facts is None or name in self._leaving else facts.ref

    def named(self, name: str) -> AdapterRef:
        """The adapter that a request names. Raises InvalidRequest."""
        self._check_on("lora_path")
        ref = self.find(name)
        if ref is None:
            raise InvalidRequest(f"the LoRA adapter {name[:80]!r} is not loaded; {self.listed()}", param="lora_path")
        return ref

    def listed(self) -> str:
        """A clause that lists the loaded adapters, for errors."""
        names = [repr(one.name) for one in self.usable]
        return f"the loaded adapters are {', '.join(names)}" if names else "no adapter is loaded"

    def use(self, loaded: Iterable[AdapterFacts]) -> None:
        """A new engine has these adapters, or the process that has the engine tells of them."""
        now = {one.name: one for one in loaded}
        lost = sorted(self._loaded.keys() - now.keys())
        if lost:
            logger.info("These LoRA adapters are no longer loaded: %s", ", ".join(lost))
        if now != self._loaded:
            self._loaded = now
            self._keep()

    async def load(self, name: str, path: str) -> None:
        """Loads an adapter. Raises InvalidRequest for one that does not suit the engine, for a name in use and if no
        slot is free, EngineBusy for a name that is being unloaded, EngineDead, EngineRestarting and TercetError; then
        nothing has changed."""
        self._check_on("lora_name")
        try:
            check_adapter_name(name, "lora_name")
        except ValueError as error:
            raise InvalidRequest(str(error), param="lora_name") from None
        if self._weights.server_args.is_model(name):
            raise InvalidRequest(f"{name!r} is a name of the model; an adapter needs another one", param="lora_name")
        if name in self._leaving:
            raise EngineBusy(f"the adapter {name!r} is being unloaded; load it when its requests have ended")
        if name in self._loaded or name in self._loading:
            raise InvalidRequest(f"the adapter {name!r} is loaded already; unload it first", param="lora_name")
        link = self._link()
        self._loading.add(name)
        await self._whole(self._load(link, name, path))

    async def unload(self, name: str) -> None:
        """Refuses new requests of an adapter, waits for the end of those that it has, and unloads it.

        Raises InvalidRequest if it is not loaded, EngineBusy if it is being unloaded already, and otherwise as `load`.
        """
        self._check_on("lora_name")
        if name not in self._loaded:
            raise InvalidRequest(f"the adapter {name[:80]!r} is not loaded; {self.listed()}", param="lora_name")
        if name in self._leaving:
            raise EngineBusy(f"the adapter {name!r} is being unloaded already")
        self._link()
        self._leaving.add(name)
        await self._whole(self._unload(name))

    async def _whole(self, change: Coroutine[Any, Any, None]) -> None:
        """Makes a change to its end, also if the caller is cancelled: the engine may have made it."""
        task = asyncio.create_task(change)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.shield(task)

    async def _load(self, link: SchedulerLink, name: str, path: str) -> None:
        try:
            reply = await self._calls.ask(link, lambda call_id: LoadAdapterReq(call_id, name, path), AdapterReply)
            self._loaded[name] = _done(reply, "lora_path")
            self._keep()
        finally:
            self._loading.discard(name)

    async def _unload(self, name: str) -> None:
        try:
            while any(_uses(one.options.adapter, name) for one in self._requests.live()):
                await asyncio.sleep(_POLL_S)
            reply = await self._calls.ask(self._link(), lambda call_id: UnloadAdapterReq(call_id, name), AdapterReply)
            _done(reply, "lora_name")
            del self._loaded[name]
            self._keep()
        finally:
            self._leaving.discard(name)

    def _keep(self) -> None:
        """The next engine loads the adapters of now."""
        paths = written_lora_paths({one.name: one.path for one in self._loaded.values()})
        self._weights.server_args = dataclasses.replace(self._weights.server_args, lora_paths=paths)

    def _check_on(self, param: str) -> None:
        """Raises InvalidRequest on a server without adapters."""
        if not self._weights.server_args.enable_lora:
            raise InvalidRequest(f"{param} needs a server with --enable-lora or --lora-paths", param=param)


def _uses(ref: AdapterRef | None, name: str) -> bool:
    return ref is not None and ref.name == name


def _done(reply: AdapterReply, param: str) -> AdapterFacts:
    """Raises InvalidRequest and TercetError if it was not done."""
    if reply.refusal is not None:
        raise InvalidRequest(reply.refusal, param=param)
    if reply.failure is not None:
        raise TercetError(reply.failure)
    assert reply.adapter is not None
    return reply.adapter
