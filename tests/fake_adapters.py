"""LoRA adapters of the fake engine behind the HTTP server: nothing is loaded, and the files say nothing."""

from __future__ import annotations

import itertools
from typing import Any

from fake_http import FakeScheduler

from tercet.srt.adapters import AdapterFacts, AdapterReply, LoadAdapterReq, UnloadAdapterReq

PIRATE = AdapterFacts("pirate", "/adapters/pirate-7", "f1", 1)
WITH_PIRATE: dict[str, Any] = {"adapters": [PIRATE], "lora_paths": [f"pirate={PIRATE.path}"]}
"""Settings of a fake server with one adapter."""


class FakeLoads:
    """The scheduler's side of loads and unloads. `refusal`, `failure`: its answer."""

    def __init__(self, scheduler: FakeScheduler) -> None:
        self.asked: list[LoadAdapterReq | UnloadAdapterReq] = []
        self.refusal: str | None = None
        self.failure: str | None = None
        self._numbers = itertools.count(2)
        scheduler.answers |= {LoadAdapterReq: self._load, UnloadAdapterReq: self._unload}

    def _load(self, message: LoadAdapterReq) -> AdapterReply:
        number = next(self._numbers)
        return self._reply(message, AdapterFacts(message.name, message.path, f"f{number}", number))

    def _unload(self, message: UnloadAdapterReq) -> AdapterReply:
        return self._reply(message, AdapterFacts(message.name, "", "", 0))

    def _reply(self, message: LoadAdapterReq | UnloadAdapterReq, facts: AdapterFacts) -> AdapterReply:
        self.asked.append(message)
        if self.refusal is not None or self.failure is not None:
            return AdapterReply(message.call_id, refusal=self.refusal, failure=self.failure)
        return AdapterReply(message.call_id, facts)
