"""Where every live request is: waiting, being prefilled in chunks, or decoding."""

from __future__ import annotations

from .req import Req, Stage


class RequestQueues:
    """Each live request is in exactly one of the three places; `holders` are those that hold KV."""

    def __init__(self) -> None:
        self.waiting: list[Req] = []
        self.chunked: Req | None = None
        """The one prompt of which a part is computed."""
        self.running: list[Req] = []
        """Requests whose whole prompt is computed, or about to be by a launched step."""
        self._live: dict[str, Req] = {}

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting or self.running or self.chunked)

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running) + (self.chunked is not None)

    def find(self, rid: str) -> Req | None:
        """The live request of this id."""
        return self._live.get(rid)

    def add(self, req: Req) -> None:
        """A new request waits."""
        self._live[req.rid] = req
        self.waiting.append(req)

    def holders(self) -> list[Req]:
        return [*self.running, self.chunked] if self.chunked is not None else list(self.running)

    def live(self) -> list[Req]:
        return self.waiting + self.holders()

    def start(self, req: Req, *, whole: bool) -> None:
        """Out of the waiting queue or the chunk's place, to where its planned extend brings it."""
        if req.stage is Stage.WAITING:
            self.waiting.remove(req)
        elif req is self.chunked:
            self.chunked = None
        if whole:
            req.stage = Stage.DECODING
            self.running.append(req)
        else:
            assert self.chunked is None
            req.stage = Stage.EXTENDING
            self.chunked = req

    def send_back(self, req: Req) -> None:
        """A retracted request waits again, at its place in the order of arrival."""
        self._remove(req)
        req.stage = Stage.WAITING
        self.waiting.append(req)

    def finish(self, req: Req) -> None:
        self._remove(req)
        req.stage = Stage.FINISHED
        del self._live[req.rid]

    def _remove(self, req: Req) -> None:
        if req.stage is Stage.WAITING:
            self.waiting.remove(req)
        elif req.stage is Stage.EXTENDING:
            assert req is self.chunked
            self.chunked = None
        else:
            assert req.stage is Stage.DECODING
            self.running.remove(req)
