"""Updates of the weights as the TokenizerManager sees them: which weights are in use, and when they may change."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any

from ..srt.errors import EngineBusy, EngineDead, InvalidRequest, StreamChanged, TercetError
from ..srt.pause_messages import ContinueReq, PauseReply, PauseReq
from ..srt.server_args import ServerArgs
from ..srt.weight_messages import UpdateWeightsReply, UpdateWeightsReq, WeightFacts
from .calls import Calls, SchedulerLink
from .generation import Generation
from .pause_control import PauseControl
from .request_registry import RequestRegistry

logger = logging.getLogger(__name__)

_POLL_S = 0.02
_ABORT_TIMEOUT_S = 10.0
"""Aborted requests may need this time to end, because a step that is under way ends first."""
DRAIN_TIMEOUT_S = 60.0
"""How long an update waits for running requests by default."""


class WeightControl:
    """The weights of the engine. After a restart, the engine loads those of the last update."""

    def __init__(
        self,
        server_args: ServerArgs,
        facts: WeightFacts,
        calls: Calls,
        link: Callable[[], SchedulerLink],
        pause: PauseControl,
        requests: RequestRegistry,
        release: Callable[[], None],
    ) -> None:
        """`link`: the way to the scheduler; it raises EngineDead and EngineRestarting. `release`: sends the samples
        that were held."""
        self.server_args = server_args
        """The settings, with those of the weights in use."""
        self.facts = facts
        """What the weights in use are like."""
        self.num_updates = 0
        """How often other weights have been loaded. Their settings may be the same."""
        self.is_holding = False
        """New samples wait, because running ones shall end before the weights change."""
        self._calls = calls
        self._link = link
        self._pause = pause
        self._requests = requests
        self._release = release
        self._is_changing = False
        """No sample runs, and the engine loads weights."""
        self.is_updating = False
        """An update waits for running requests, or the engine loads weights."""

    @property
    def version(self) -> str:
        """The name of the weights in use."""
        return self.server_args.weight_version

    def holds(self, generation: Generation) -> bool:
        """Whether a sample has to wait for the end of an update. Samples that an engine has had may end before it, with
        the weights that began them."""
        return self.is_holding and (self._is_changing or generation.waits_to_begin)

    async def update(
        self,
        model_path: str,
        load_format: str,
        version: str | None,
        *,
        dtype: str,
        abort_all: bool,
        drain_timeout_s: float = DRAIN_TIMEOUT_S,
    ) -> int:
        """Loads other weights of the same model. Returns the number of requests that wait and continue with them.

        If generation is not paused, running requests end first, and new ones wait. `version`: None: a name that no
        other weights have. `dtype`: of the engine. Raises InvalidRequest for weights that do not suit the engine,
        EngineBusy during another update, if requests still run after `drain_timeout_s`, or if a pause has ended or left
        requests their KV, EngineDead, EngineRestarting and TercetError. After an error the old weights are in use.
        """
        if self.is_updating:
            raise EngineBusy("the weights are being updated already")
        version = f"update-{time.time_ns()}" if version is None else version
        self.is_updating = True
        change: asyncio.Task[int] | None = None
        try:
            if abort_all:
                self._requests.abort_all()
                drain_timeout_s = max(drain_timeout_s, _ABORT_TIMEOUT_S)
            await self._drain(drain_timeout_s)
            change = asyncio.create_task(self._change(model_path, load_format, version, dtype))
        finally:
            if change is None:
                self._end()
        # A caller that is cancelled does not stop the engine, which may have the new weights already.
        return await asyncio.shield(change)

    async def _change(self, model_path: str, load_format: str, version: str, dtype: str) -> int:
        try:
            reply = await self._load(model_path, load_format, version)
            if reply.refusal is not None:
                raise InvalidRequest(reply.refusal, param="model_path")
            if reply.busy is not None:
                raise EngineBusy(reply.busy)
            if reply.failure is not None:
                raise TercetError(reply.failure)
            self.use(model_path, load_format, version, dtype)
            assert reply.facts is not None
            self.facts = reply.facts
            return reply.num_waiting
        finally:
            self._end()

    def _end(self) -> None:
        """The update is over: what it has held is sent."""
        self.is_updating = self._is_changing = False
        if self.is_holding:
            self.is_holding = False
            self._release()

    async def _drain(self, timeout_s: float) -> None:
        """Returns when every sample that the engine has is at its end, or when generation is paused.

        Raises EngineBusy after `timeout_s`, because new samples wait all this time.
        """
        deadline = time.monotonic() + timeout_s
        while not self._pause.is_on:
            self._link()
            self.is_holding = True
            # Suspects that wait for their trials have tokens of the old weights.
            num_running = sum(
                one.is_sent or (one.waits_for_engine and not self.holds(one)) for one in self._requests.live()
            )
            if not num_running:
                self._is_changing = True
                return
            if time.monotonic() >= deadline:
                raise EngineBusy(
                    f"the weights were not updated: {num_running} samples still ran after {timeout_s:g} s; pause "
                    "generation first, set abort_all_requests, or allow a longer drain_timeout"
                )
            await asyncio.sleep(_POLL_S)

    async def _load(self, model_path: str, load_format: str, version: str) -> UpdateWeightsReply:
        """Loads the weights while no step runs."""
        was_paused = self._pause.is_on
        link = self._link()
        if not was_paused:
            await self._calls.ask(link, lambda call_id: PauseReq(call_id, retract=False), PauseReply)
        try:
            return await self._calls.ask(
                link, lambda call_id: UpdateWeightsReq(call_id, model_path, load_format, version), UpdateWeightsReply
            )
        finally:
            if not self._pause.is_wanted:  # a client may have paused meanwhile
                with contextlib.suppress(EngineDead):  # a new engine is not paused
                    await self._calls.ask(self._link(), ContinueReq, PauseReply)

    def use(self, model_path: str, load_format: str, version: str, dtype: str) -> None:
        """The engine has these weights. What was taken from the old files, such as the tokenizer, stays."""
        args = self.server_args
        changes: dict[str, Any] = {
            "model_path": model_path,
            "load_format": load_format,
            "tokenizer_path": args.tokenizer_path or args.model_path,
            "served_model_name": args.model_name,
            "dtype": dtype,
            "weight_version": version,
        }
        self.server_args = dataclasses.replace(args, **changes)
        self.num_updates += 1
        for generation in self._requests.live():
            if self._is_changing and generation.waits_for_engine and generation.output_ids:
                # A stream of another server came while the weights were loaded.
                generation.fail(StreamChanged("the weights were updated before the stream could continue"))
            generation.weight_version = version  # these weights compute its tokens from now on
        logger.info("The engine uses the weights in %r, version %s", model_path, version)
