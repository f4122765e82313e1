"""The check of the KV books while the engine is idle. It must not delay the next request.

When the engine falls idle, only sums are compared, which takes microseconds. The whole audit takes up to seconds in a
large pool. It starts after `QUIET_S` without a request and runs in slices of a few milliseconds, one a turn of the
scheduler's loop. A request that arrives ends it; the next quiet starts it again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from enum import Enum

from .kv_cache_manager import KVCacheManager

logger = logging.getLogger(__name__)

QUIET_S = 3.0
"""Seconds without a request before the whole audit starts."""


class _State(Enum):
    BUSY = "busy"
    QUIET = "quiet"
    """Idle; the audit waits for `QUIET_S` to pass."""
    RUNNING = "running"
    DONE = "done"
    """Idle since the audit."""


class IdleAudit:
    """A mistake in the books is logged, repaired and counted. While idle nothing holds KV, so the pool can be rebuilt,
    and the server goes on."""

    def __init__(self, kv: KVCacheManager, clock: Callable[[], float]) -> None:
        """`clock`: seconds from any start."""
        self.num_repairs = 0
        self._kv = kv
        self._clock = clock
        self._state = _State.DONE  # nothing has happened yet
        self._idle_since = 0.0
        self._slices: Iterator[None] = iter(())

    @property
    def is_running(self) -> bool:
        """Whether the next turn has a slice to do."""
        return self._state is _State.RUNNING

    def restart(self) -> None:
        """The books change: an audit that has started is void, and the next one waits for quiet."""
        if self._state is not _State.BUSY:
            self._state = _State.BUSY
            self._slices = iter(())

    def on_idle_turn(self) -> None:
        """Does what is due now, a few milliseconds of work at most."""
        try:
            self._advance()
        except AssertionError:
            logger.exception("The KV audit failed: a slot has no owner or two; rebuilding the pool")
            self._kv.flush()
            self.num_repairs += 1
            self._state = _State.DONE
            self._slices = iter(())

    def _advance(self) -> None:
        if self._state is _State.BUSY:
            self._idle_since = self._clock()
            self._state = _State.QUIET
            self._kv.check_sums([])
        elif self._state is _State.QUIET and self._clock() - self._idle_since >= QUIET_S:
            self._slices = self._kv.audit_slices([])
            self._state = _State.RUNNING
        elif self._state is _State.RUNNING:
            try:
                next(self._slices)
            except StopIteration:
                self._state = _State.DONE
