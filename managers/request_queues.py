"""The queues of live requests: waiting, in chunks, or decoding."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from .req import Req, Stage


class QueueObserver(Protocol):
    """A schedule policy that counts requests."""

    def on_arrival(self, req: Req) -> None: ...

    def on_end(self, req: Req) -> None: ...


class RequestQueues:
    """Each live request is in exactly one of three places. `holders` are the requests with KV.

    `waiting`, `unfinished` and `running` are ordered sets: dictionaries whose values mean nothing. The time to add,
    find or remove a request does not depend on their number.
    """

    def __init__(self, max_waiting: int = 1 << 30) -> None:
        self.waiting: dict[Req, None] = {}
        """In the order of `Req.place`: most urgent first, then in the order of arrival."""
        self._max_waiting = max_waiting
        self.unfinished: dict[Req, None] = {}
        """Prompts of which some chunks are computed, or will be by a launched step."""
        self.running: dict[Req, None] = {}
        """Requests whose whole prompt is computed, or will be by a launched step."""
        self.num_constrained = 0
        """Live requests with a grammar."""
        self.num_with_hidden = 0
        """Live requests that want hidden states."""
        self.observer: QueueObserver | None = None
        self._live: dict[str, Req] = {}

    @property
    def is_busy(self) -> bool:
        return bool(self._live)

    def __len__(self) -> int:
        return len(self._live)

    def find(self, rid: str) -> Req | None:
        """The live request of this id, if any."""
        return self._live.get(rid)

    def holders(self) -> list[Req]:
        return [*self.running, *self.unfinished]

    def live(self) -> list[Req]:
        return list(self._live.values())

    def add(self, req: Req) -> None:
        """Adds a new request to the waiting queue. It arrived after all others, and no live request has its id."""
        assert req.rid not in self._live
        self._live[req.rid] = req
        is_overtaking = bool(self.waiting) and req.urgency > next(reversed(self.waiting)).urgency
        self.waiting[req] = None
        self.num_constrained += req.sampling.grammar is not None
        self.num_with_hidden += req.hidden is not None
        if is_overtaking:
            self._sort()
        if self.observer is not None:
            self.observer.on_arrival(req)

    @property
    def is_full(self) -> bool:
        """The waiting queue has no place for another new request."""
        return len(self.waiting) >= self._max_waiting

    def gives_way_to(self, urgency: int) -> Req | None:
        """The last waiting request, if it is less urgent. Requests with output and aborted ones do not give way."""
        for req in reversed(self.waiting):
            if req.urgency >= urgency:
                return None
            if req.pending_abort is None and not req.output_ids and not req.num_steps_in_flight:
                return req
        return None

    def start(self, req: Req, *, whole: bool) -> None:
        """Moves a request whose extend is planned. `whole`: it runs from now on. Otherwise its prompt is in chunks."""
        self._leave(req)
        if whole:
            req.stage = Stage.DECODING
            self.running[req] = None
        else:
            req.stage = Stage.EXTENDING
            self.unfinished[req] = None

    def send_back(self, reqs: Iterable[Req]) -> None:
        """Moves retracted requests to their places in the waiting queue."""
        for req in reqs:
            self._leave(req)
            req.stage = Stage.WAITING
            self.waiting[req] = None
        self._sort()

    def _sort(self) -> None:
        self.waiting = dict.fromkeys(sorted(self.waiting, key=lambda req: req.place))

    def finish(self, req: Req) -> None:
        self._leave(req)
        req.stage = Stage.FINISHED
        del self._live[req.rid]
        self.num_constrained -= req.sampling.grammar is not None
        self.num_with_hidden -= req.hidden is not None
        if self.observer is not None:
            self.observer.on_end(req)

    def _leave(self, req: Req) -> None:
        """Removes a request from its place."""
        if req.stage is Stage.WAITING:
            del self.waiting[req]
        elif req.stage is Stage.EXTENDING:
            del self.unfinished[req]
        else:
            assert req.stage is Stage.DECODING
            del self.running[req]
