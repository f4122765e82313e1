"""The work of an idle engine, in slices of a few milliseconds: memory for the KV pool, then the audit of its slots.

Each turn of an idle scheduler does one slice, and looks for messages before the next one. So no request waits longer
than a slice.

KVEventPublisher reports some files in each turn, also in a busy one. While some remain, an idle engine does not sleep.
"""

from __future__ import annotations

from .idle_audit import IdleAudit
from .kv_tiers import KVTiers
from .touch_ahead import TouchAhead


class IdleWork:
    """Does the slices, and knows whether the scheduler may sleep."""

    def __init__(self, audit: IdleAudit, touch_ahead: TouchAhead | None, tiers: KVTiers | None = None) -> None:
        self._audit = audit
        self._touch_ahead = touch_ahead
        self._tiers = tiers

    @property
    def num_kv_repairs(self) -> int:
        return self._audit.num_repairs

    @property
    def is_due(self) -> bool:
        """Whether the next idle turn does a slice. If not, the scheduler may sleep."""
        if self._audit.is_running or (self._tiers is not None and self._tiers.has_file_changes):
            return True
        return self._touch_ahead is not None and self._touch_ahead.is_due

    def restart(self) -> None:
        """The engine is busy, or the owners of slots change: the audit must start again."""
        self._audit.restart()

    def on_idle_turn(self) -> None:
        """Do a slice of the work that is due."""
        if self._touch_ahead is not None and self._touch_ahead.is_due:
            self._touch_ahead.touch_slice()
        self._audit.on_idle_turn()
