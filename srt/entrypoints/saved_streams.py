"""The streams that a server finds in its `--resume-file`, and the records of its own streams.

A stream is restored when its client asks for it, not at the start: no step is spent on clients that never return, and a
request that crashes servers runs only if its client returns.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from ...managers.request_registry import PromptSamples
from ..errors import EngineDead, StreamChanged
from .answer_settings import changed
from .replay import Replay, StreamRecorder, set_replay
from .request_names import names_of, set_names
from .resumable import ResumableStreams, new_stream_id
from .stream_journal import WEIGHTS, SavedPrompt, SavedRequest, StreamJournal
from .tenants import tenant_headers

logger = logging.getLogger(__name__)

BODY = "tercet.body"
"""In the scope of a request: its body, if a stream of it is recorded."""
_OTHER_VERSION = "the stream began on another version of Tercet, and cannot continue here"
_SHUTTING_DOWN = "the server is shutting down; the next one will continue this stream"


class Replayed(Protocol):
    """Handles the request of a recorded stream again."""

    async def __call__(self, scope: Mapping[str, Any], body: bytes, replay: Replay) -> ASGIApp: ...


class SavedStreams:
    """The streams of the server before. It also makes the recorders of new ones."""

    def __init__(self, journal: StreamJournal, settings: dict[str, str], grace_s: float) -> None:
        """`settings`: see `answer_settings`. `grace_s`: how long a client may take to ask for a stream."""
        self.streams = ResumableStreams(grace_s, journal)
        self._journal = journal
        self._settings = settings
        self._grace_s = grace_s
        self._waiting = set(journal.ids())
        """Streams of the previous server that no client has asked for yet."""
        self._restoring: dict[str, asyncio.Task[None]] = {}
        self._is_grace_over = False

    def begin_grace(self) -> None:
        """The server is ready: from now on, the clients of the server before have the grace time."""
        if self._waiting:
            logger.info("%d streams of the previous server can be continued", len(self._waiting))
            asyncio.get_running_loop().call_later(self._grace_s, self._forget_waiting)

    def _forget_waiting(self) -> None:
        self._is_grace_over = True
        for stream_id in self._waiting - self._restoring.keys():
            self._waiting.discard(stream_id)
            self._journal.forget(stream_id)
        self._journal.flush()

    def recorder(
        self, request: Request, path: str, owner: str, prompts: Sequence[PromptSamples], replay: Replay | None
    ) -> StreamRecorder:
        """The recorder of a request's stream. `path`: of its endpoint."""

        def make_request(saved: list[SavedPrompt], weight_version: str) -> SavedRequest:
            names, body = names_of(request.scope), request.scope.pop(BODY)
            settings = self._settings | {WEIGHTS: weight_version}
            return SavedRequest(path, body, owner, names.nonce, names.began_s, settings, saved)

        if replay is None:
            return StreamRecorder(self._journal, new_stream_id(), make_request, prompts)
        known = replay.saved
        weights, num_known = known.request.weight_version, len(known.batches)
        return StreamRecorder(self._journal, replay.stream_id, make_request, prompts, num_known, weights)

    async def restore(
        self,
        stream_id: str,
        owner: str,
        weight_version: Callable[[], str],
        scope: Mapping[str, Any],
        handle: Replayed,
    ) -> None:
        """Makes a stream of the server before one of this server. Does nothing for a stream that is not known, or of
        which somebody else is the owner: who asks is told the same in both cases.

        `weight_version`: gives that of the weights in use. `handle`: handles the recorded request. Raises EngineDead,
        StreamChanged, and what the handler raises.
        """
        if self._journal.owner(stream_id) != owner:
            return
        if stream_id in self._waiting:
            task = self._restoring.get(stream_id)
            if task is None:
                try:
                    request = self._journal.request(stream_id)
                except msgspec.DecodeError:
                    raise StreamChanged(_OTHER_VERSION) from None
                self._check(request, weight_version())
                task = asyncio.create_task(self._restore(stream_id, weight_version, scope, handle))
                self._restoring[stream_id] = task
                task.add_done_callback(partial(self._on_tried, stream_id))
            await asyncio.shield(task)
        # Shutdown may have begun meanwhile. It drops streams that no client reads yet.
        if self.streams.is_draining and stream_id in self._journal and stream_id not in self.streams:
            raise EngineDead(_SHUTTING_DOWN)

    def _on_tried(self, stream_id: str, task: asyncio.Task[None]) -> None:
        """A restore has ended. If it has failed, another one may follow in the grace time, or at the next server."""
        del self._restoring[stream_id]
        if self._is_grace_over and not task.cancelled() and not self.streams.is_draining:
            self._forget_waiting()

    def _check(self, request: SavedRequest, weight_version: str) -> None:
        differing = changed(request.settings, self._settings | {WEIGHTS: weight_version})
        if differing:
            raise StreamChanged(
                f"the stream began on a server with other settings ({', '.join(differing)}), and cannot continue here"
            )

    async def _restore(
        self, stream_id: str, weight_version: Callable[[], str], scope: Mapping[str, Any], handle: Replayed
    ) -> None:
        try:
            replay = Replay(stream_id, await asyncio.to_thread(self._journal.load, stream_id))
        except msgspec.DecodeError:
            raise StreamChanged(_OTHER_VERSION) from None
        request = replay.saved.request
        self._check(request, weight_version())  # an update may have ended meanwhile
        headers = tenant_headers(scope)
        again: dict[str, Any] = {**scope, "method": "POST", "path": request.path, "headers": headers}
        set_names(again, replay.names())
        set_replay(again, replay)
        await handle(again, request.body, replay)
        if stream_id in self.streams:
            await self.streams[stream_id].until(replay.is_replayed)
        if stream_id in self.streams:
            self._waiting.discard(stream_id)
