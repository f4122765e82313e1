from __future__ import annotations

import re

import pytest
from fake_proposers import EachProposer
from scheduler_rig import Rig

from fakes import expected_output
from tercet.managers.req import Req
from tercet.srt.io_struct import Resumed


@pytest.mark.parametrize("overlap", [True, False])
def test_the_throughput_counts_no_pause(overlap: bool) -> None:
    rig = Rig(overlap=overlap, decode_log_interval=30)

    def generate(num_tokens: int) -> None:
        rig.add(f"r{len(rig.heard)}", [1, 2, 3], max_new_tokens=num_tokens)
        while rig.is_busy:
            rig.clock.now += 0.5
            rig.turn()

    for _ in range(12):
        generate(20)
        rig.clock.now += 3600.0
        rig.turn()
        assert rig.scheduler.state().last_gen_throughput == 0.0, "the engine is idle"
    rig.add("last", [1, 2, 3], max_new_tokens=20)
    for num_turns in range(15):
        rig.clock.now += 0.5
        rig.turn()
        # Half a second passes from one token of a request to the next.
        assert num_turns < 10 or 1.7 < rig.scheduler.state().last_gen_throughput < 2.6


def test_steps_with_prompts_count() -> None:
    """Requests of one token make no decode steps."""
    rig = Rig(overlap=False, decode_log_interval=10, max_running=1)
    for number in range(40):
        rig.add(f"r{number}", [number, 2, 3], max_new_tokens=1)
    for _ in range(25):
        rig.clock.now += 0.5
        rig.turn()
    assert rig.scheduler.state().last_gen_throughput == pytest.approx(2.0)


def test_steps_that_generate_nothing_log_no_decode_batch(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(overlap=False, decode_log_interval=2, chunked_prefill_size=4, max_prefill_tokens=4)
    rig.add("long", list(range(40)), max_new_tokens=1)
    with caplog.at_level("INFO"):
        for _ in range(8):
            rig.turn()
    assert any("Prefill batch" in one.getMessage() for one in caplog.records)
    assert not any("Decode batch" in one.getMessage() for one in caplog.records)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    "settings",
    [{}, {"eos_ids": frozenset(range(97))}, {"eos_ids": frozenset(range(12)), "max_drafts": 3}],
    ids=["length", "first token", "drafts"],
)
def test_only_tokens_that_a_client_gets_are_generated(settings: dict, overlap: bool) -> None:
    """A step may return more: of a request that has ended, or after the token that ends it."""
    rig = Rig(overlap=overlap, decode_log_interval=1, **settings)
    for number in range(6):
        rig.add(f"e{number}", [number, 2, 3], max_new_tokens=0, pooling="mean")
    rig.run()
    assert rig.scheduler._metrics.generated_tokens == 0
    for number in range(12):
        rig.add(f"r{number}", [number, 2, 3, 4], max_new_tokens=6)
    for _ in range(3):
        rig.turn()
    for number in range(0, 12, 3):
        rig.abort(f"r{number}")
    rig.run()
    assert rig.scheduler._metrics.generated_tokens == sum(len(heard.ids) for heard in rig.heard.values()) > 8


def test_the_throughput_of_a_server_of_embeddings_is_0() -> None:
    rig = Rig(overlap=False, decode_log_interval=3, max_running=1)
    for number in range(12):
        rig.add(f"e{number}", [number, 2, 3], max_new_tokens=0, pooling="last")
    while rig.is_busy:
        rig.clock.now += 0.5
        rig.turn()
        assert rig.scheduler.state().last_gen_throughput == 0.0


def test_the_throughput_is_that_of_the_last_interval() -> None:
    rig = Rig(overlap=False, decode_log_interval=10)
    rig.add("r", [1, 2, 3], max_new_tokens=200)
    for step_s in (1.0, 0.1):
        for _ in range(30):
            rig.clock.now += step_s
            rig.turn()
        assert rig.scheduler.state().last_gen_throughput == pytest.approx(1 / step_s)


def test_the_log_tells_how_many_drafts_of_the_last_interval_were_right(caplog: pytest.LogCaptureFixture) -> None:
    """Here an interval is one step: with a right draft, with a wrong one, and without any."""
    kinds = iter(["right", "wrong", "none"])

    def propose(req: Req, limit: int) -> list[int]:
        right = expected_output(req.token_ids().tolist(), req.sampling.sampling_seed, 1, 97)
        return {"right": right, "wrong": [96], "none": []}[next(kinds)]

    rig = Rig(overlap=False, decode_log_interval=1, proposer=EachProposer(propose))
    rig.add("r", [1, 2, 3], max_new_tokens=20)
    with caplog.at_level("INFO"):
        for _ in range(4):  # a line is written at a launch, so it is about the step before
            rig.turn()
    lines = [one.getMessage() for one in caplog.records if "Decode batch" in one.getMessage()]
    assert [re.findall("accept len: (.*)", line) for line in lines] == [[], ["2.00"], ["1.00"]]


@pytest.mark.parametrize("overlap", [True, False])
def test_the_last_output_tells_how_long_a_request_waited(overlap: bool) -> None:
    rig = Rig(overlap=overlap, max_running=1)
    rig.add("first", [1, 2, 3], max_new_tokens=4)
    rig.add("second", [4, 5, 6], max_new_tokens=4)
    while rig.is_busy:
        rig.turn()
        rig.clock.now += 1.0
        for heard in rig.heard.values():
            assert heard.last is not None
            assert (heard.last.counts.queue_time_s is not None) == (heard.finish is not None)
    first, second = (rig.heard[name].last for name in ("first", "second"))
    assert first is not None and first.counts.queue_time_s == 0.0
    assert second is not None and second.counts.queue_time_s is not None and second.counts.queue_time_s >= 4.0


def test_a_retraction_does_not_count_as_waiting() -> None:
    rig = Rig(pool_size=24, max_running=4, conservativeness=0.01)
    for name in "abc":
        rig.add(name, [ord(name), 2, 3], max_new_tokens=16)
    while rig.is_busy:
        rig.turn()
        rig.clock.now += 1.0
    retracted = [heard.last.counts for heard in rig.heard.values() if heard.last and heard.last.counts.num_retractions]
    assert retracted and all(counts.queue_time_s is not None and counts.queue_time_s < 5.0 for counts in retracted)


def test_what_an_engine_that_has_died_had_in_its_cache_is_no_hit(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    with caplog.at_level("INFO"):
        rig.add("resumed", list(range(30)), resumed=Resumed([7, 8], cached_tokens=20, num_retractions=0))
        rig.turn()
    assert "#new-token: 32, #cached-token: 0" in caplog.text
    while rig.is_busy:
        rig.turn()
    assert rig.scheduler.state().cache_hit_rate == 0.0
    assert rig.heard["resumed"].last is not None and rig.heard["resumed"].last.counts.cached_tokens == 20


def test_a_refused_request_did_not_wait() -> None:
    rig = Rig(max_queued=1, max_running=1)
    for name in "abc":
        rig.add(name, [1, 2, 3])
    while rig.is_busy:
        rig.turn()
    assert rig.heard["c"].last is not None and rig.heard["c"].last.counts.queue_time_s is None


def test_the_tokens_that_wait_for_prefill() -> None:
    rig = Rig(max_running=1, chunked_prefill_size=8, max_prefill_tokens=8, overlap=False)
    rig.add("warm", list(range(10)), max_new_tokens=1)
    while rig.is_busy:
        rig.turn()
    assert rig.scheduler.state().num_waiting_uncached_tokens == 0
    rig.add("long", list(range(50, 70)), max_new_tokens=4)
    rig.add("known", [*range(9), 90, 91], max_new_tokens=4)
    rig.turn()
    assert rig.scheduler.state().num_waiting_uncached_tokens == 20, "the one with a cached prefix goes first"
    while not rig.heard["known"].finish:
        rig.turn()
    rig.turn()
    assert rig.scheduler.state().num_waiting_uncached_tokens == 12, "8 of the 20 are computed"
    while rig.is_busy:
        rig.turn()
    assert rig.scheduler.state().num_waiting_uncached_tokens == 0
