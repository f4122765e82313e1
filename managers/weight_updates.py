"""Updates of the weights in the scheduler, between two steps. All KV of the old weights is dropped."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from ..model_executor.device.heap import trim_heap
from ..srt.plain_values import reason_of
from ..srt.weight_messages import UpdateWeightsReply, UpdateWeightsReq, WeightFacts
from .kv_cache_manager import KVCacheManager
from .request_queues import RequestQueues
from .scheduler_io import SchedulerIO

logger = logging.getLogger(__name__)


class LoadedWeights(NamedTuple):
    identity: bytes
    """of their KV (`kv_identity`)"""
    facts: WeightFacts


LoadWeights = Callable[[UpdateWeightsReq], LoadedWeights]
"""Loads weights into the runner. If it raises an error, the old weights are in use as before; ValueError and OSError
say what is wrong with the new ones."""


class WeightUpdates:
    """Handles the messages that update weights."""

    def __init__(self, load: LoadWeights | None, kv: KVCacheManager, queues: RequestQueues, io: SchedulerIO) -> None:
        """`load`: None: the engine has always the same weights."""
        self._load = load
        self._kv = kv
        self._queues = queues
        self._io = io

    def update(self, message: UpdateWeightsReq, *, is_paused: bool) -> None:
        """Loads the weights and replies. `is_paused`: no step is in flight, and none will be planned.

        Then gives the memory of the weights that are not used back to the system.
        """
        self._io.reply(self._update(message, is_paused=is_paused))
        trim_heap()  # not before: the error holds what was read of weights that are refused

    def _update(self, message: UpdateWeightsReq, *, is_paused: bool) -> UpdateWeightsReply:
        if self._load is None:
            return UpdateWeightsReply(message.call_id, refusal="this engine can load no other weights")
        if not is_paused:
            return UpdateWeightsReply(message.call_id, busy="generation was continued before the update; try again")
        num_holders = len(self._queues.holders())
        if num_holders:
            return UpdateWeightsReply(
                message.call_id,
                busy=f"{num_holders} requests keep KV of the old weights; pause generation with the mode retract or "
                "abort",
            )
        try:
            loaded = self._load(message)
        except (ValueError, OSError) as error:
            reason = reason_of(error)
            logger.warning("The weights in %r were refused: %s", message.model_path, reason)
            return UpdateWeightsReply(message.call_id, refusal=reason)
        except Exception:
            logger.exception("The weights in %r could not be loaded", message.model_path)
            return UpdateWeightsReply(message.call_id, failure="the new weights could not be loaded")
        self._kv.flush()
        if self._kv.tiers is not None:
            self._kv.tiers.change_identity(loaded.identity)
        for req in self._queues.live():
            req.on_new_weights()
        logger.info("Loaded the weights in %r, version %s", message.model_path, message.weight_version)
        return UpdateWeightsReply(message.call_id, len(self._queues), facts=loaded.facts)
