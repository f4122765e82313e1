"""Where every live request is: waiting, being prefilled in chunks, or decoding."""

from __future__ import annotations

from collections.abc import Iterable

from .req import Req, Stage


class RequestQueues:
    """Each live request is in exactly one of the three places; `holders` are those that hold KV.

    `waiting` and `running` are ordered sets: dictionaries whose values mean nothing. The time to add, find or remove a
    request does not depend on their number.
    """

    def __init__(self) -> None:
        self.waiting: dict[Req, None] = {}
        """In the order of arrival."""
        self.chunked: Req | None = None
        """The one prompt of which a part is computed."""
        self.running: dict[Req, None] = {}
        """Requests whose whole prompt is computed, or about to be by a launched step."""
        self._live: dict[str, Req] = {}

    @property
    def is_busy(self) -> bool:
        return bool(self._live)

    def __len__(self) -> int:
        return len(self._live)

    def find(self, rid: str) -> Req | None:
        """The live request of this id."""
        return self._live.get(rid)

    def holders(self) -> list[Req]:
        return [*self.running, self.chunked] if self.chunked is not None else list(self.running)

    def live(self) -> list[Req]:
        return list(self._live.values())

    def add(self, req: Req) -> None:
        """A new request waits. It arrived after all others, and no live request has its id."""
        assert req.rid not in self._live
        self._live[req.rid] = req
        self.waiting[req] = None

    def start(self, req: Req, *, whole: bool) -> None:
        """Moves a request to where its planned extend brings it: running, or (not `whole`) the chunk's place."""
        self._leave(req)
        if whole:
            req.stage = Stage.DECODING
            self.running[req] = None
        else:
            assert self.chunked is None
            req.stage = Stage.EXTENDING
            self.chunked = req

    def send_back(self, reqs: Iterable[Req]) -> None:
        """Retracted requests wait again, at their places in the order of arrival. Sorts the waiting queue."""
        for req in reqs:
            self._leave(req)
            req.stage = Stage.WAITING
            self.waiting[req] = None
        self.waiting = dict.fromkeys(sorted(self.waiting, key=lambda req: req.arrival))

    def finish(self, req: Req) -> None:
        self._leave(req)
        req.stage = Stage.FINISHED
        del self._live[req.rid]

    def _leave(self, req: Req) -> None:
        """Takes a request out of its place."""
        if req.stage is Stage.WAITING:
            del self.waiting[req]
        elif req.stage is Stage.EXTENDING:
            assert req is self.chunked
            self.chunked = None
        else:
            assert req.stage is Stage.DECODING
            del self.running[req]
