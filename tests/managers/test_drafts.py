"""Decode steps with drafts: several tokens for each request in a step, and the KV of rejected drafts.

The random schedules of test_scheduler.py, test_planner.py and test_invalid_logits.py have drafts, too.
"""

from __future__ import annotations

import logging

import numpy as np
import pytest
from fake_proposers import EachProposer
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_makers import admit, extend, i32, make_kv, make_req
from scheduler_rig import Rig

from fakes import FakeClock, expected_output
from tercet.managers.planner import PlanLimits, Planner
from tercet.managers.req import Req
from tercet.managers.request_queues import RequestQueues
from tercet.managers.schedule_batch import build_extend
from tercet.model_executor.step import FROM_DEVICE, ForwardMode
from tercet.srt.logprobs import LogprobOptions
from tercet.srt.speculation_state import SpeculationState

PAGES = pytest.mark.parametrize("page_size", [1, 16])


def right_drafts(num_drafts: int):
    """A proposer that is always right, for a scheduler without overlap."""
    return EachProposer(lambda req, limit: right_draft(req, min(num_drafts, limit)))


def right_draft(req: Req, length: int) -> list[int]:
    return expected_output(req.token_ids().tolist(), req.sampling.sampling_seed, length, 97)


# Plans


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_step_returns_as_many_tokens_as_it_has_right_drafts_and_one_more(page_size: int) -> None:
    rig = Rig(page_size=page_size, overlap=False, proposer=right_drafts(3))
    rig.add("r", [1, 2, 3], max_new_tokens=20)
    rig.run()
    assert rig.heard["r"].ids == expected_output([1, 2, 3], 1, 20, 97)
    # The prompt's step returns 1 token and four steps return 4. The last step has 2 drafts, because 3 tokens are left.
    assert [step.num_tokens for step in rig.runner.steps] == [3, 4, 4, 4, 4, 3]


def test_no_step_computes_positions_after_the_last_token() -> None:
    """Its table has no column for them: the request fills the context."""
    rig = Rig(context_len=32, pool_size=32, overlap=False, proposer=right_drafts(50))
    rig.add("r", [1] * 12, max_new_tokens=20)
    rig.run()
    assert rig.heard["r"].ids == expected_output([1] * 12, 1, 20, 97)
    assert [step.seq_lens.tolist() for step in rig.runner.steps] == [[12], [31]]


def test_a_request_without_drafts_decodes_beside_one_that_has_some() -> None:
    proposer = EachProposer(lambda req, limit: right_draft(req, min(3, limit)) if req.rid == "fast" else [])
    rig = Rig(overlap=False, proposer=proposer)
    for rid in ("fast", "slow"):
        rig.add(rid, [ord(rid[0]) % 90] * 5, max_new_tokens=9)
    rig.run()
    for rid in ("fast", "slow"):
        assert rig.heard[rid].ids == expected_output([ord(rid[0]) % 90] * 5, 1, 9, 97)
    modes = [step.mode for step in rig.runner.steps]
    assert modes == [ForwardMode.EXTEND] * 3 + [ForwardMode.DECODE] * 6
    assert rig.runner.steps[1].extend_lens.tolist() == [4, 1]


def test_with_overlap_a_request_waits_until_its_drafts_are_verified() -> None:
    rig = Rig(proposer=EachProposer(lambda req, limit: [0] * min(2, limit)))
    rig.add("r", [1, 2, 3], max_new_tokens=6)
    seen = []
    for _ in range(20):
        rig.turn()
        seen.append(rig.in_flight is not None)
    assert rig.heard["r"].ids == expected_output([1, 2, 3], 1, 6, 97)
    assert seen[:6] == [True, True, False, True, False, True]


@pytest.mark.parametrize(("pool_size", "num_tokens"), [(30, 10), (29, 2), (22, 2)])
def test_drafts_retract_nobody(pool_size: int, num_tokens: int) -> None:
    """Two requests have 10 tokens each in the pool. Their drafts need 8 more, and their newest tokens need 2."""
    kv, queues = make_kv(1, pool_size, radix=False), RequestQueues()
    limits = PlanLimits(max_prefill_tokens=64, chunked_prefill_size=64)
    planner = Planner(limits, kv, queues, EachProposer(lambda req, limit: [0] * min(4, limit)), clock=FakeClock())
    for arrival in range(2):
        req = make_req(range(11), arrival, max_new_tokens=10)
        queues.add(req)
        admit(kv, req)
        extend(kv, req, 10)
        queues.start(req, whole=True)
    batch = planner.plan()
    assert batch is not None and batch.inputs.num_tokens == num_tokens
    assert planner.num_retractions == 0


@PAGES
def test_the_demand_of_a_decode_step_counts_the_new_tokens_of_each_request(page_size: int) -> None:
    kv = make_kv(page_size)
    reqs = [make_req(range(100 * i, 100 * i + 40), i) for i in range(3)]
    for req, length in zip(reqs, (16, 15, 16), strict=True):
        admit(kv, req)
        extend(kv, req, length)
    assert kv.decode_demand(reqs, i32(1, 1, 17)) == (19 if page_size == 1 else 16 + 0 + 32)
    assert kv.decode_demand(reqs, 2) == (6 if page_size == 1 else 3 * 16)
    assert kv.decode_demand(reqs, 1) == kv.decode_demand(reqs)


def test_a_step_names_the_known_tokens_and_the_drafts_of_each_request() -> None:
    kv = make_kv(1)
    reqs = [make_req(range(10), 0), make_req(range(20, 26), 1)]
    for req in reqs:
        admit(kv, req)
        extend(kv, req, req.num_tokens - 1)
    batch = build_extend(kv, [], reqs, [[FROM_DEVICE], [25, 9]], [[7, 8], [4]])
    assert batch.inputs.mode is ForwardMode.EXTEND
    assert batch.inputs.input_ids.tolist() == [FROM_DEVICE, 7, 8, 25, 9, 4]
    assert batch.inputs.extend_lens.tolist() == [3, 3]
    assert batch.inputs.seq_lens.tolist() == [req.kv_len for req in reqs] == [12, 8]
    assert batch.sampled_lens.tolist() == [10, 7]
    assert (batch.sampled, batch.num_drafts, batch.num_prompt_tokens) == (reqs, [2, 1], 0)
    assert [batch.drafts_of(index) for index in (0, 1)] == [[7, 8], [4]]


# KV of rejected drafts


@PAGES
def test_truncating_frees_the_pages_that_become_empty(page_size: int) -> None:
    kv = make_kv(page_size)
    req = make_req(range(60))
    admit(kv, req)
    slots = extend(kv, req, 50)
    kv.truncate(req, 33)
    assert req.kv_len == 33
    assert kv.private_slots([req]).tolist() == slots[:33].tolist()
    kv.audit([req])
    kv.truncate(req, 33)
    kv.truncate(req, 32)
    assert kv.num_private([req]) == 32
    kv.audit([req])


@PAGES
def test_what_the_cache_owns_is_never_truncated(page_size: int) -> None:
    kv = make_kv(page_size)
    req = make_req(range(60))
    admit(kv, req)
    extend(kv, req, 50)
    kv.share(req)
    with pytest.raises(AssertionError):
        kv.truncate(req, req.locked_len - 1)
    kv.truncate(req, req.locked_len)
    kv.audit([req])


@settings(deadline=None, max_examples=100)
@given(
    page_size=st.sampled_from([1, 4, 16]),
    moves=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 30), st.integers(0, 40)), max_size=20),
)
def test_the_books_add_up_after_any_growth_and_truncation(page_size: int, moves: list) -> None:
    kv = make_kv(page_size, 1024)
    reqs = [make_req(range(1000 * i, 1000 * i + 900), i) for i in range(3)]
    for req in reqs:
        admit(kv, req)
    for index, growth, rejected in moves:
        req = reqs[index]
        before = kv.private_slots([req]).tolist()
        slots = extend(kv, req, req.kv_len + growth).tolist()
        kept = max(req.kv_len - rejected, 0)
        kv.truncate(req, kept)
        assert kv.private_slots([req]).tolist() == [*before, *slots][:kept]
        kv.audit(reqs)
    for req in reqs:
        kv.release(req)
    kv.audit([])


def test_wrong_drafts_leave_nothing_in_the_cache() -> None:
    """The next request begins with them: it must not find their KV, which was computed for another continuation."""
    rig = Rig(overlap=False, proposer=EachProposer(lambda req, limit: [96] * min(4, limit)))
    rig.add("r", [1, 2, 3], max_new_tokens=3)
    rig.run()
    first, second, _ = expected_output([1, 2, 3], 1, 3, 97)
    assert 96 not in (first, second)
    assert rig.scheduler.state().num_evictable_tokens == 3 + 2
    cached = rig.runner._kv_token[rig.kv.cache.audit()]
    assert sorted(cached.tolist()) == sorted([1, 2, 3, first, second])


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_that_is_aborted_with_drafts_in_flight_gives_back_their_kv(overlap: bool) -> None:
    rig = Rig(overlap=overlap, proposer=EachProposer(lambda req, limit: [96] * min(4, limit)))
    rig.add("r", [1, 2, 3], max_new_tokens=30)
    for _ in range(2):
        rig.turn()
    rig.abort("r")
    rig.run()
    assert 96 not in rig.runner._kv_token[rig.kv.cache.audit()]


# Counts


def test_the_throughput_counts_the_tokens_of_a_step_and_not_its_requests(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(overlap=False, decode_log_interval=5, proposer=right_drafts(3))
    rig.add("r", [1, 2, 3], max_new_tokens=120)
    rates = []
    with caplog.at_level(logging.INFO):
        while rig.is_busy:
            rig.clock.now += 1.0
            rig.turn()
            rates.append(rig.scheduler.state().last_gen_throughput)
    assert rates[-2:] == [pytest.approx(4.0), 0.0]
    assert sum("Prefill batch" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("logprobs", [None, LogprobOptions()])
def test_right_drafts_after_the_end_of_a_request_are_not_counted(logprobs: LogprobOptions | None) -> None:
    """The first step with drafts would return five tokens. A stop string ends the request after the third of them."""
    expected = expected_output([1, 2, 3], 1, 9, 97)
    rig = Rig(overlap=False, proposer=EachProposer(lambda req, limit: expected[1:5] if req.output_ids else []))
    rig.add("r", [1, 2, 3], max_new_tokens=9, stop=f"{expected[2]} {expected[3]}", logprobs=logprobs)
    rig.run()
    assert rig.heard["r"].ids == expected[:4]
    speculation = rig.scheduler.state().speculation
    assert speculation == SpeculationState(num_verifications=1, num_drafts=4, num_accepted_drafts=2)
    counts = rig.heard["r"].last.counts
    assert (counts.num_drafts, counts.num_accepted_drafts) == (4, 2)
    assert speculation.accept_length == 3


def test_the_fake_proposer_is_right_and_wrong() -> None:
    """Otherwise the random schedules would test little."""
    rig = Rig(overlap=False, max_drafts=5, pool_size=4096)
    for index in range(6):
        rig.add(f"r{index}", [index] * 5, max_new_tokens=40)
    rig.run()
    sizes = np.concatenate([step.extend_lens for step in rig.runner.steps[1:] if step.extend_lens is not None])
    num_computed = int(sizes.sum()) + sum(step.num_tokens for step in rig.runner.steps if step.extend_lens is None)
    assert set(sizes.tolist()) >= {1, 2, 3}
    assert 6 * 39 < num_computed < 2 * 6 * 39
    assert len(rig.runner.steps) < 35
