"""The audit of the ownership of KV slots in an idle engine. It must not delay the next request.

An engine that becomes idle compares sums, which takes microseconds. The whole audit takes seconds in a large pool. It
starts after `QUIET_S` without a request, and runs in slices of a few milliseconds. Each turn of the scheduler runs one
slice. A request that arrives ends the audit. It starts again after the next `QUIET_S` without a request.
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
    """Idle for less than `QUIET_S`."""
    RUNNING = "running"
    DONE = "done"
    """Idle, and audited."""


class IdleAudit:
    """Logs, repairs and counts errors in the ownership of slots. An idle engine holds no KV, so the pool can be rebuilt
    while the server continues."""

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
        """Whether the next turn runs a slice."""
        return self._state is _State.RUNNING

    def restart(self) -> None:
        """Ends an audit that has started, because the owners of slots change. The next one starts after `QUIET_S` of
        idleness."""
        if self._state is not _State.BUSY:
            self._state = _State.BUSY
            self._slices = iter(())

    def on_idle_turn(self) -> None:
        """Does the work that is due now: a few milliseconds at most."""
        try:
            self._advance()
        except AssertionError:
            logger.exception("The KV audit failed: a slot has no owner or two; rebuilding the pool")
            self._kv.rebuild()
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
