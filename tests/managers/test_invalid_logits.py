"""A request with invalid logits ends alone, and what it computed is offered to nobody."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_rig import Rig

from fakes import expected_output
from tercet.managers.req import Req
from tercet.srt.errors import InvalidLogits
from tercet.srt.io_struct import AbortFinish, LengthFinish, StopFinish
from tercet.srt.request_options import RequestOptions
from tercet.srt.sampling_params import SamplingParams

SCHEDULES = int(os.environ.get("TERCET_SCHEDULES", "80"))
POISON = 200
"""A token whose KV is NaN. No answer has it."""
GOOD = [i % 7 for i in range(60)]
EOS_IDS = frozenset({7, 11})

rigs = st.fixed_dictionaries(
    {
        "page_size": st.sampled_from([1, 1, 4, 16]),
        "pool_size": st.sampled_from([96, 160, 512]),
        "max_running": st.integers(1, 10),
        "max_prefill_tokens": st.sampled_from([16, 24, 64, 256]),
        "chunked_prefill_size": st.sampled_from([16, 20, 64]),
        "radix": st.booleans(),
        "eviction": st.sampled_from(["value", "lru", "lfu"]),
        "overlap": st.booleans(),
        "max_drafts": st.sampled_from([0, 0, 4]),
    }
)


@st.composite
def prompts(draw: st.DrawFn) -> list[list[int]]:
    """Prompts of a few families, some of which have a token that makes NaN."""
    family = draw(st.lists(st.integers(0, 3), min_size=4, max_size=60))
    if draw(st.booleans()):
        family[draw(st.integers(0, len(family) - 1))] = POISON
    prompts = []
    for _ in range(draw(st.integers(1, 16))):
        begin = family[: draw(st.integers(1, len(family)))]
        prompts.append(begin + draw(st.lists(st.sampled_from([0, 1, 2, 3, POISON]), max_size=12)))
    return prompts


def nan_in_cache(rig: Rig) -> int:
    """Tokens in the cache whose KV is NaN."""
    return int(rig.runner.is_nan[rig.kv.cache.audit()].sum())


def poisoned(rig: Rig, rid: str, prompt: list[int], **sampling: object) -> None:
    """Adds a request whose logits are invalid from its first token on."""
    rig.runner.poison = POISON
    rig.add(rid, [*prompt, POISON], **sampling)


@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=SCHEDULES)
@given(rigs, prompts(), st.sampled_from([POISON, 7, 50]), st.integers(0, 2))
def test_no_invalid_kv_stays_and_nobody_else_fails(options: dict, work: list, poison: int, gap: int) -> None:
    rig = Rig(eos_ids=EOS_IDS, **options)
    rig.runner.poison = poison
    for index, prompt in enumerate(work):
        rig.add(f"r{index}", prompt, max_new_tokens=24)
        for _ in range(gap):
            rig.turn()
    rig.run()
    for index, prompt in enumerate(work):
        heard = rig.heard[f"r{index}"]
        expected = [] if poison in prompt else expected_output(prompt, 1, 24, 97, EOS_IDS | {poison})
        assert heard.ids == expected
        if expected and expected[-1] in EOS_IDS:
            assert isinstance(heard.finish, StopFinish)
        elif len(expected) == 24:
            assert isinstance(heard.finish, LengthFinish)
        else:
            assert isinstance(heard.finish, AbortFinish) and heard.finish.err_type == InvalidLogits.__name__
    assert nan_in_cache(rig) == 0


@pytest.mark.parametrize("overlap", [True, False])
def test_invalid_logits_fail_one_request_alone(overlap: bool) -> None:
    rig = Rig(overlap=overlap)
    rig.add("bad", [1] * 10, max_new_tokens=20)
    rig.add("good", [2] * 10, max_new_tokens=20)
    rig.turn()
    rig.turn()
    bad = next(req for req in rig.scheduler.queues.running if req.rid == "bad")
    rig.runner.invalid_rows.add(bad.row)
    rig.run()
    assert rig.heard["bad"].finish.err_type == InvalidLogits.__name__
    assert rig.heard["good"].ids == expected_output([2] * 10, 1, 20, 97)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("page_size", [1, 4])
def test_the_chunks_of_an_invalid_prompt_leave_the_cache_and_what_it_found_there_stays(
    overlap: bool, page_size: int
) -> None:
    rig = Rig(overlap=overlap, page_size=page_size, chunked_prefill_size=16, max_prefill_tokens=16)
    rig.add("good", GOOD[:20], max_new_tokens=1)
    rig.run()
    poisoned(rig, "bad", GOOD)
    rig.run()
    assert rig.heard["bad"].finish.err_type == InvalidLogits.__name__
    assert rig.scheduler.state().num_evictable_tokens == 20
    rig.add("again", GOOD)
    rig.run()
    assert rig.heard["again"].last.counts.cached_tokens == 20
    assert rig.heard["again"].ids == expected_output(GOOD, 1, 8, 97)


def test_an_aborted_request_whose_logits_are_invalid_leaves_nothing() -> None:
    rig = Rig()
    poisoned(rig, "bad", GOOD)
    rig.turn()  # its prompt is in flight
    rig.abort("bad")
    rig.run()
    assert rig.heard["bad"].finish == AbortFinish("aborted by the client")
    assert rig.scheduler.state().num_evictable_tokens == 0


def test_an_aborted_request_gets_no_valid_drafts_from_before_invalid_logits() -> None:
    rig = Rig(max_drafts=4)
    rig.add("r", GOOD, max_new_tokens=20)
    rig.turn()
    rig.turn()
    req = rig.scheduler.queues.find("r")
    known = list(req.output_ids)
    results = rig.scheduler._results
    results.abort(req, AbortFinish("aborted by the client"))
    results._on_invalid_logits(req, [5, 6])
    assert req.output_ids == known and req.finish == AbortFinish("aborted by the client")


def test_a_retracted_request_whose_logits_are_invalid_leaves_nothing() -> None:
    rig = Rig(pool_size=64, conservativeness=0.01)
    for index in range(5):
        rig.add(f"old{index}", [index] * 4, max_new_tokens=20)
    rig.turn()
    while rig.scheduler.state().num_free_tokens > 19:
        rig.turn()
    poisoned(rig, "bad", [9] * 11, max_new_tokens=2)
    for _ in range(3):  # its prompt is in flight, and leaves less room than the next tokens of all six need
        rig.turn()
    assert rig.scheduler.state().num_retractions == 1
    assert rig.heard["bad"].finish.err_type == InvalidLogits.__name__
    assert rig.heard["bad"].last.counts.num_retractions == 1, "it was retracted after its end"
    rig.run()
    for index in range(5):
        assert rig.heard[f"old{index}"].ids == expected_output([index] * 4, 1, 20, 97)
    assert nan_in_cache(rig) == 0


def test_a_request_that_runs_on_a_discarded_prefix_shares_nothing_and_frees_it() -> None:
    rig = Rig(pool_size=1024, chunked_prefill_size=64, max_prefill_tokens=64)
    rig.add("bad", GOOD, max_new_tokens=30)
    rig.turn()
    rig.add("beside", [*GOOD, 1, 2, 3], max_new_tokens=30)
    rig.turn()
    rig.turn()
    assert rig.heard["beside"].last.counts.cached_tokens == len(GOOD)
    bad = next(req for req in rig.scheduler.queues.running if req.rid == "bad")
    rig.runner.invalid_rows.add(bad.row)
    for _ in range(3):
        rig.turn()
    assert rig.heard["bad"].finish.err_type == InvalidLogits.__name__
    rig.runner.invalid_rows.clear()
    state = rig.scheduler.state()
    assert (state.num_evictable_tokens, state.num_protected_tokens) == (0, len(GOOD) + 3)
    rig.add("after", GOOD)
    rig.run()
    assert rig.heard["after"].last.counts.cached_tokens == 0
    assert rig.heard["beside"].ids == expected_output([*GOOD, 1, 2, 3], 1, 30, 97)
    assert rig.kv.cache.match_len(np.array([*GOOD, 1], dtype=np.int32)) == len(GOOD), (
        "what came after is in the cache, alone"
    )


def test_a_request_that_computed_again_what_it_had_found_leaves_nothing() -> None:
    rig = Rig()
    kv = rig.kv
    rig.add("good", GOOD, max_new_tokens=1)
    rig.run()
    prompt = np.array(GOOD, dtype=np.int32)
    req = Req("bad", prompt, RequestOptions(sampling=SamplingParams(max_new_tokens=1, sampling_seed=1)), arrival=0)
    kv.admit(req, kv.match(req))
    assert req.reused_len == len(GOOD) - 1
    kv.release(req)  # retracted
    kv.cache.evict(30)
    kv.admit(req, kv.match(req))
    kv.extend([req], np.array([len(GOOD)], dtype=np.int32))
    kv.release(req)
    kv.discard(req)
    assert kv.cache.evictable_size == kv.cache.match_len(prompt) == req.reused_len == len(GOOD) - 30
    kv.audit([])
