"""The adapters of a random case, as the process knows them that has the clients."""

from __future__ import annotations

from collections import Counter
from typing import Any

from scheduler_rig import Rig

from fakes import fingerprint_of
from tercet.srt.adapters import AdapterFacts, AdapterRef, AdapterReply, LoadAdapterReq, UnloadAdapterReq

_UNKNOWN = fingerprint_of(1)


class LoadedAdapters:
    """They outlive the engine. `seen`: how often something rare has happened."""

    def __init__(self, seen: Counter[str]) -> None:
        self._seen = seen
        self._loaded: dict[str, AdapterFacts] = {}
        self._asked: dict[int, LoadAdapterReq | UnloadAdapterReq] = {}
        """The messages without a reply."""
        self._last: dict[str, str] = {}
        """The last fingerprint of each name."""
        self._num_calls = 0

    def begin(self, rig: Rig) -> None:
        """An engine has started, and loads what was loaded. Calls to the one before have no replies."""
        self._asked.clear()
        rig.adapters.begin({one.name: one.path for one in self._loaded.values()}, is_restart=True)
        self._loaded = {one.name: one for one in rig.adapters.facts}

    def load(self, name: str, files: int) -> LoadAdapterReq:
        """A negative number: there are no such files."""
        return self._ask(LoadAdapterReq(self._num_calls, name, f"files {files}" if files > 0 else "no files"))

    def unload(self, name: str) -> UnloadAdapterReq:
        return self._ask(UnloadAdapterReq(self._num_calls, name))

    def _ask(self, message: Any) -> Any:
        self._asked[self._num_calls] = message
        self._num_calls += 1
        return message

    def ref(self, name: str) -> AdapterRef:
        """What a client gets that names it now. It may be a reference to an adapter that has gone or never was."""
        return AdapterRef(name, self._last.get(name, _UNKNOWN))

    def is_safe(self, name: str) -> bool:
        """Whether a request that names it now will be served: it is loaded, and nobody unloads it."""
        return name in self._loaded and all(one.name != name for one in self._asked.values())

    def hear(self, replies: list[AdapterReply]) -> None:
        for reply in replies:
            asked = self._asked.pop(reply.call_id)
            assert reply.failure is None
            if reply.adapter is None:
                assert reply.refusal
                self._seen["refused loads and unloads of adapters"] += 1
            elif isinstance(asked, LoadAdapterReq):
                assert asked.name not in self._loaded
                self._loaded[asked.name] = reply.adapter
                self._last[asked.name] = reply.adapter.fingerprint
                self._seen["loads of adapters"] += 1
            else:
                del self._loaded[asked.name]
                self._seen["unloads of adapters"] += 1
