"""What the tiers of the KV cache know about a request (kv_tiers.py). A request without tiers has none."""

from __future__ import annotations

from dataclasses import dataclass

from ..mem_cache.block_keys import BlockKeys
from ..mem_cache.kv_storage import ReadJob


@dataclass(eq=False, slots=True)
class ReqTiers:
    """The state of one request. Only KVTiers changes it."""

    keys: BlockKeys
    num_admitted: int = 0
    """Its tokens at its last admission. If it has more, the KV of all but the newest and the `num_unchecked` before it
    gave finite logits."""
    job: ReadJob | None = None
    """The last read that it waited for since it was last released."""
    give_up_s: float | None = None
    """When it no longer waits for reads. None: it has not asked for any."""
    is_settled: bool = False
    """Whether it waits for no read, because there is nothing to read or because it has waited long enough."""

    @property
    def awaits_files(self) -> bool:
        """Whether it stays in the queue because of a read."""
        return self.job is not None and not self.is_settled

    def restart(self) -> None:
        """It waits again, after a retraction."""
        self.job = self.give_up_s = None
        self.is_settled = False
