"""The queues of live requests: waiting, in chunks, or decoding."""

from __future__ import annotations

from collections.abc import Callable, Collection

from .req import Req, Stage
from .waiting_queue import WaitingQueue


class RequestQueues:
    """Each live request is in exactly one of three places. `holders` are the requests with KV.

    `unfinished` and `running` are ordered sets: dictionaries whose values mean nothing. The time to add, find or remove
    a request does not depend on their number, except that retracted requests are sorted with older waiting ones.
    """

    def __init__(self, max_waiting: int = 1 << 30) -> None:
        self.waiting = WaitingQueue()
        self._max_waiting = max_waiting
        self.num_startable = 0
        """New requests that may wait beyond the limit, because the next step has rows for them: the rows that were free
        when the last plan left no request waiting."""
        self.unfinished: dict[Req, None] = {}
        """Prompts of which some chunks are computed, or will be by a launched step."""
        self.running: dict[Req, None] = {}
        """Requests whose whole prompt is computed, or will be by a launched step."""
        self.num_constrained = 0
        """Live requests with a grammar."""
        self.num_with_hidden = 0
        """Live requests that want hidden states."""
        self.interrupted: dict[Req, None] = {}
        """The requests in `waiting` and `unfinished` that had KV before, and those that came with output. If they have
        no output yet, it may come from a step in flight."""
        self.on_wait: list[Callable[[Req], object]] = []
        """Called with each request that enters the waiting queue, a new or a retracted one."""
        self.on_end: list[Callable[[Req], object]] = []
        """Called with each request that ends, while it is still in its place."""
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
        self.waiting.add(req)
        if req.output_ids:
            self.interrupted[req] = None
        for tell in self.on_wait:
            tell(req)
        self.num_constrained += req.options.grammar is not None
        self.num_with_hidden += req.hidden is not None

    @property
    def is_full(self) -> bool:
        """The waiting queue has no place for another new request."""
        return len(self.waiting) >= self._max_waiting + self.num_startable

    def start(self, req: Req, *, whole: bool) -> None:
        """Moves a request whose extend is planned. `whole`: it runs from now on. Otherwise its prompt is in chunks."""
        self._leave(req)
        if whole:
            req.stage = Stage.DECODING
            self.running[req] = None
            self.interrupted.pop(req, None)
        else:
            req.stage = Stage.EXTENDING
            self.unfinished[req] = None

    def send_back(self, reqs: Collection[Req]) -> None:
        """Moves retracted requests to their places in the waiting queue."""
        for req in reqs:
            self._leave(req)
            req.stage = Stage.WAITING
            self.interrupted[req] = None
            for tell in self.on_wait:
                tell(req)
        self.waiting.put_back(reqs)

    def finish(self, req: Req) -> None:
        for tell in self.on_end:
            tell(req)
        self._leave(req)
        req.stage = Stage.FINISHED
        del self._live[req.rid]
        self.interrupted.pop(req, None)
        self.num_constrained -= req.options.grammar is not None
        self.num_with_hidden -= req.hidden is not None

    def _leave(self, req: Req) -> None:
        """Removes a request from its place."""
        if req.stage is Stage.WAITING:
            self.waiting.remove(req)
        elif req.stage is Stage.EXTENDING:
            del self.unfinished[req]
        else:
            assert req.stage is Stage.DECODING
            del self.running[req]
