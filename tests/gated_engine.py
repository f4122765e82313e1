"""A TokenizerManager with a scheduler that does nothing unless a test lets it. Its engine dies as the test says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container
from typing import Any

import msgspec
from fake_http import FakeScheduler, make_manager

from tercet.managers.generation import Generation
from tercet.managers.recovery import Blame
from tercet.managers.tokenizer_manager import TokenizerManager
from tercet.srt.request_options import RequestOptions
from tercet.srt.sampling_params import SamplingParams

_OPTIONS = {"priority", "tenant", "waiting_timeout"}


def options(**sampling: Any) -> RequestOptions:
    return RequestOptions(sampling=SamplingParams(**{"max_new_tokens": 40, **sampling}), stream=True)


class Engine:
    """A manager with a gated scheduler: nothing moves unless a test lets it."""

    def __init__(self, **settings: Any) -> None:
        self.scheduler = self._scheduler()
        self.manager: TokenizerManager = make_manager(self.scheduler, **settings)

    def _scheduler(self) -> FakeScheduler:
        scheduler = FakeScheduler()
        scheduler.gate = True
        return scheduler

    async def submit(self, num: int, text: str = "hi", **given: Any) -> list[Generation]:
        """`given`: sampling parameters, and options of the request."""
        own = {name: given.pop(name) for name in _OPTIONS & given.keys()}
        whole = msgspec.structs.replace(options(**given), **own)
        return [one for _ in range(num) for one in await self.manager.submit(text, whole)]

    async def submit_different(self, num: int) -> list[Generation]:
        return [one for i in range(num) for one in await self.submit(1, f"{i}")]

    def step(self, num_steps: int = 1) -> None:
        """Every request that the scheduler has gets a token."""
        for _ in range(num_steps):
            held, self.scheduler.held = self.scheduler.held, []
            for request, done in held:
                self.scheduler._write(request, done)

    def die(self, blame: Blame | None, begun: Container[str] = ()) -> bool:
        self.scheduler.dead = True
        return self.manager.on_death(blame, begun)

    def restart(self, max_total_num_tokens: int | None = None) -> None:
        """`max_total_num_tokens`: of the new engine's KV pool; None: as before."""
        self.scheduler = self._scheduler()
        self.scheduler.manager = self.manager
        facts = self.manager.facts
        if max_total_num_tokens is not None:
            facts = msgspec.structs.replace(
                facts, max_total_num_tokens=max_total_num_tokens, max_req_input_len=max_total_num_tokens - 1
            )
        self.manager.resume(self.scheduler, facts)

    def sent(self) -> list[str]:
        return [request.rid for request in self.scheduler.received]


def scenario(work: Callable[[Engine], Any]) -> Callable[[], None]:
    def test() -> None:
        asyncio.run(work(Engine()))

    test.__name__ = work.__name__
    test.__doc__ = work.__doc__
    return test
