"""The LoRA adapters of a scheduler: which adapter has which slot of the runner, and when a slot may be used again.

All loaded adapters are in the memory of the device. Loads and unloads happen between two steps.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping

from ..model_executor.step import Runner
from ..srt.adapters import AdapterFacts, AdapterRef, AdapterReply, LoadAdapterReq, UnloadAdapterReq
from ..srt.errors import InvalidRequest, StreamChanged
from ..srt.plain_values import reason_of
from .req import Req
from .request_queues import RequestQueues
from .scheduler_io import SchedulerIO

logger = logging.getLogger(__name__)

_MAX_REASON_CHARS = 6000
"""A path of the longest length fits. A file may have longer names."""


class Adapters:
    """The slots are 1 to `max_loras`. An adapter that is being unloaded keeps its slot until no request uses it."""

    def __init__(self, runner: Runner, max_loras: int, queues: RequestQueues, io: SchedulerIO) -> None:
        """`max_loras`: 0: the runner has no adapters."""
        self.max_loras = max_loras
        self._runner = runner
        self._queues = queues
        self._io = io
        self._loaded: dict[int, AdapterFacts] = {}
        """By their slots."""
        self._leaving: dict[int, UnloadAdapterReq] = {}
        """The slots of adapters that are being unloaded, with the messages that get the reply."""
        self._numbers = itertools.count(1)

    @property
    def facts(self) -> list[AdapterFacts]:
        """The adapters that new requests may name, in the order of their loads."""
        usable = [facts for slot, facts in self._loaded.items() if slot not in self._leaving]
        return sorted(usable, key=lambda facts: facts.number)

    def with_fingerprint(self, fingerprint: str) -> AdapterFacts | None:
        """The first adapter with these files that was loaded. Two names may have the same files."""
        return next((facts for facts in self._loaded.values() if facts.fingerprint == fingerprint), None)

    def begin(self, paths: Mapping[str, str], *, is_restart: bool) -> None:
        """Loads the adapters of the start, by their names.

        Raises ValueError if one cannot be used. `is_restart`: then it is left out instead, because a file that has gone
        since the start must not end the engine.
        """
        for name, path in paths.items():
            try:
                self._load(name, path)
            except Exception as error:
                if is_restart:
                    logger.error("The engine runs without the adapter %s: %s", name, _reason(error))
                elif isinstance(error, (ValueError, OSError)):
                    raise ValueError(f"--lora-paths: {name!r} cannot be used: {_reason(error)}") from error
                else:
                    raise

    def slot_of(self, ref: AdapterRef) -> int:
        """The slot for a new request. Raises InvalidRequest if the adapter is not loaded, and StreamChanged if its name
        has other files by now."""
        for slot, facts in self._loaded.items():
            if facts.name == ref.name and slot not in self._leaving:
                if facts.fingerprint != ref.fingerprint:
                    raise StreamChanged(f"the adapter {ref.name!r} has been replaced by another one of this name")
                return slot
        raise InvalidRequest(f"the adapter {ref.name!r} is no longer loaded", param="lora_path")

    def load(self, message: LoadAdapterReq) -> None:
        """Loads an adapter and replies."""
        self._io.reply(self._loaded_reply(message))

    def _loaded_reply(self, message: LoadAdapterReq) -> AdapterReply:
        call_id, name = message.call_id, message.name
        if any(facts.name == name for facts in self._loaded.values()):
            return AdapterReply(call_id, refusal=f"the adapter {name!r} is loaded already; unload it first")
        try:
            return AdapterReply(call_id, self._load(name, message.path))
        except (ValueError, OSError) as error:
            logger.warning("The adapter in %r was refused: %s", message.path, _reason(error))
            return AdapterReply(call_id, refusal=_reason(error))
        except Exception:
            logger.exception("The adapter in %r could not be loaded", message.path)
            return AdapterReply(call_id, failure="the adapter could not be loaded")

    def _load(self, name: str, path: str) -> AdapterFacts:
        """Raises ValueError and OSError."""
        slot = next((one for one in range(1, self.max_loras + 1) if one not in self._loaded), None)
        if slot is None:
            raise ValueError(f"--max-loras {self.max_loras} adapters are loaded; unload one first")
        fingerprint = self._runner.load_adapter(slot, path)
        facts = self._loaded[slot] = AdapterFacts(name, path, fingerprint, next(self._numbers))
        logger.info("Loaded the adapter %s from %r", name, path)
        return facts

    def unload(self, message: UnloadAdapterReq) -> None:
        """Refuses new requests of an adapter. `finish_unloads` replies when its last request has ended."""
        slot = next((slot for slot, facts in self._loaded.items() if facts.name == message.name), None)
        if slot is None or slot in self._leaving:
            state = "is not loaded" if slot is None else "is being unloaded already"
            self._io.reply(AdapterReply(message.call_id, refusal=f"the adapter {message.name!r} {state}"))
        else:
            self._leaving[slot] = message

    @property
    def is_unloading(self) -> bool:
        return bool(self._leaving)

    def finish_unloads(self, in_flight: Iterable[Req]) -> None:
        """Unloads the adapters that no request uses any more. `in_flight`: the requests of the step in flight. Some may
        have ended."""
        used = {req.adapter for req in (*self._queues.live(), *in_flight)}
        for slot in self._leaving.keys() - used:
            message = self._leaving.pop(slot)
            facts = self._loaded.pop(slot)
            self._runner.unload_adapter(slot)
            logger.info("Unloaded the adapter %s", facts.name)
            self._io.reply(AdapterReply(message.call_id, facts))


def _reason(error: Exception) -> str:
    """What an error says, cut if it is long."""
    text = reason_of(error)
    return text if len(text) <= _MAX_REASON_CHARS else text[:_MAX_REASON_CHARS] + "..."
