"""Random steps of the whole scheduler, all features together. `scripts/steps` runs millions of them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hash_grammar import HashMatcher
from random_steps import scheduler_case
from random_steps.cases import draw_case
from random_steps.command import scheduler_steps, shrink
from random_steps.scheduler_case import SchedulerCase

from tercet.managers.adapters import Adapters
from tercet.managers.fair_policy import FairPolicy
from tercet.managers.grammar import GrammarState
from tercet.managers.kv_cache_manager import KVCacheManager
from tercet.managers.kv_tiers import KVTiers
from tercet.managers.pause import Pause
from tercet.managers.prefix_states import PrefixStates
from tercet.managers.req import Req
from tercet.managers.req_logprobs import ReqLogprobs
from tercet.managers.request_queues import RequestQueues
from tercet.managers.schedule_policy import MAX_PASSED_OVER
from tercet.mem_cache.radix_cache import RadixCache
from tercet.mem_cache.recurrent_cache import RecurrentCache
from tercet.mem_cache.retention import Retentions
from tercet.mem_cache.tier_events import TierEvents
from tercet.model_executor.step import NewRow
from tercet.srt.arrays import Int32Array
from tercet.srt.request_options import RequestOptions

NUM_STEPS = int(os.environ.get("TERCET_STEPS", "30000"))
"""test_radix_machine.py makes more steps, of the allocator and the tree."""
RARE = (
    "retentions of requests",
    "retentions of tool calls",
    "turns with all retained that may be",
    "updates of weights",
    "refused or failed updates",
    "outputs of several weights",
    "restarts",
    "resumed requests with tokens",
    "blocks read from files",
    "damaged files",
    "full disks",
    "files that others have removed",
    "blocks displaced from host memory",
    "retractions",
    "retractions under a grammar",
    "drafts accepted under a grammar",
    "drafts after forced tokens",
    "drafts accepted with penalties",
    "preemptions",
    "log probabilities beside reused KV",
    "log probabilities under a grammar",
    "hidden states",
    "requests with an adapter",
    "requests without their adapter",
    "loads of adapters",
    "unloads of adapters",
    "refused loads and unloads of adapters",
)
"""What 30,000 steps must have seen."""
FIRST_CASE = 0 if os.environ.get("CI") else Random().randrange(1 << 32)


@pytest.mark.timeout(600)
def test_no_feature_disturbs_another() -> None:
    """`SchedulerCase` says what is checked after each step."""
    number, num_steps = FIRST_CASE, 0
    seen: Counter[str] = Counter()
    while num_steps < NUM_STEPS:
        num_steps += scheduler_steps(number, seen)
        number += 1
    if num_steps >= 30_000:
        assert {name for name in RARE if not seen[name]} == set()


def _ignore(*_: object, **__: object) -> None:
    pass


def _pin(self: KVCacheManager, token_ids: Int32Array, seconds: float, options: RequestOptions) -> None:
    """As `retain`, but the prefix can never be evicted."""
    _retain(self, token_ids, seconds, options)
    self.cache.lock(self.cache.match(token_ids, options.namespace).node)


def _begin_grammar_anew(self: Req) -> None:
    _on_retract(self)
    if self.grammar is not None:
        self.grammar._matcher = HashMatcher(self.grammar._matcher._grammar)


def _repeat_mask(self: GrammarState, drafts: Sequence[int], bits: Int32Array, line: int) -> None:
    bits[line : line + len(drafts)] = bits[line - 1]


def _new_row_without_output(self: Req) -> NewRow:
    return replace(_as_new_row(self), output_ids=np.empty(0, np.int32))


def _new_row_without_adapter(self: Req) -> NewRow:
    return replace(_as_new_row(self), adapter=self.adapter if not self.num_retractions else 0)


def _unload_at_once(self: Adapters, in_flight: Sequence[Req]) -> None:
    """Without a look at the requests."""
    self._queues = RequestQueues()
    _finish_unloads(self, ())


_as_new_row = Req.as_new_row
_finish_unloads = Adapters.finish_unloads
_retain = KVCacheManager.retain
_on_retract = Req.on_retract

BREAKAGES: dict[str, tuple[type, str, Callable[..., object]]] = {
    "KV that is NaN stays in the cache": (KVCacheManager, "discard", _ignore),
    "KV of wrong drafts stays": (KVCacheManager, "truncate", _ignore),
    "a lock is never released": (RadixCache, "unlock", _ignore),
    "host blocks stay pinned": (KVTiers, "on_copied", lambda self: self._under_way.popleft()),
    "readers do not learn what host memory drops": (TierEvents, "on_dropped", _ignore),
    "readers do not learn of files": (TierEvents, "on_file", _ignore),
    "policies ignore host memory": (KVTiers, "expected_end", lambda self, req, start: start),
    "nothing is ever resumed": (Pause, "end", _ignore),
    "a tenant is never forgotten": (FairPolicy, "on_end", _ignore),
    "nothing is retained": (RadixCache, "retain", _ignore),
    "retention is a pin": (KVCacheManager, "retain", _pin),
    "retained tokens are not counted": (Retentions, "_count", _ignore),
    "a retention never lapses": (Retentions, "lapse", lambda self, tick: tick),
    "KV of old weights stays in the cache": (KVCacheManager, "flush", _ignore),
    "KV of old weights is read from files": (KVTiers, "change_identity", _ignore),
    "a retracted request begins its grammar anew": (Req, "on_retract", _begin_grammar_anew),
    "all drafts have the mask of the next token": (GrammarState, "fill_after", _repeat_mask),
    "penalties miss forced tokens": (Req, "joins_forced_tokens", True),
    "penalties forget output at a retraction": (Req, "as_new_row", _new_row_without_output),
    "tokens of a dead engine are forgotten": (Req, "resume", _ignore),
    "reused KV takes the log probabilities of a prompt": (ReqLogprobs, "reusable_len", None),
    "adapters share prefixes": (RequestOptions, "namespace", property(lambda self: self.cache_salt)),
    "an adapter is unloaded under its requests": (Adapters, "finish_unloads", _unload_at_once),
    "a retracted request loses its adapter": (Req, "as_new_row", _new_row_without_adapter),
    "KV without a state is continued": (RecurrentCache, "match", RadixCache.match),
    "a shortened prefix keeps its state": (RecurrentCache, "_shorten_leaf", RadixCache._shorten_leaf),
    "states are not loaded": (PrefixStates, "take_copies", _ignore),
    "a taken row is never given back": (PrefixStates, "on_shared", _ignore),
    "reused KV takes hidden states": (Req, "reusable_len", property(lambda self: self.num_tokens - 1)),
}


NOTICED_BY = {
    "KV of old weights is read from files": 65,
    "penalties miss forced tokens": 155,
    "penalties forget output at a retraction": 56,
    "reused KV takes the log probabilities of a prompt": 79,
    "a retracted request loses its adapter": 80,
    "reused KV takes hidden states": 76,
}
"""Cases that notice what few do, tried first to save time. They change with the way in which cases are drawn."""


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_the_checks_notice_what_is_wrong(breakage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*BREAKAGES[breakage])
    with pytest.raises(Exception, match=r".") as caught:
        for number in (NOTICED_BY.get(breakage, 50), *range(50, 350)):
            scheduler_steps(number, Counter())
    assert "scripts/steps --case" in caught.value.__notes__[0]


def test_the_checks_count_how_often_a_request_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_case, "_MAX_DELAYED", -MAX_PASSED_OVER)
    with pytest.raises(AssertionError, match="is starved"):
        for number in range(50, 350):
            scheduler_steps(number, Counter())


def test_a_failing_case_becomes_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVTiers, "on_copied", lambda self: self._under_way.popleft())
    number = next(number for number in range(300) if _fails(number))
    case = draw_case(number)
    small = shrink(case)
    assert len(small.happenings) == 1 < len(case.happenings)


def _fails(number: int) -> bool:
    try:
        SchedulerCase(draw_case(number)).run()
    except Exception:
        return True
    return False
