"""The scheduler on a real, tiny model: token streams are the same in both loops, launched or from graphs.

TERCET_SCHEDULES=500 python -m pytest tests/managers/test_scheduler_on_a_model.py plays that many random schedules.
"""

from __future__ import annotations

import os

import pytest
from fake_accelerator import FakeAccelerator, use_fake
from toy_schedules import Oracle, Runners, draw_schedule, play, same_logprobs, same_streams

from tercet.managers.ngram_proposer import NgramProposer
from tercet.model_executor import cpu_extension
from tercet.srt.io_struct import AbortFinish, LengthFinish

pytestmark = pytest.mark.timeout(300)

NUM_SCHEDULES = int(os.environ.get("TERCET_SCHEDULES", "24"))


@pytest.fixture(params=["torch", "cpu"])
def runners(request, monkeypatch):
    """The compiled operations of a CPU need no help from float64: what they compute has the same bits in any step."""
    if request.param == "cpu" and cpu_extension.load() is None:
        pytest.skip("no build of csrc/cpu for this processor")
    return Runners(monkeypatch, request.param)


@pytest.fixture
def runners_with_graphs(monkeypatch):
    runners = Runners(monkeypatch)
    runners.accelerator = FakeAccelerator(lag=5)
    use_fake(monkeypatch, runners.accelerator)
    return runners


def test_both_loops_stream_the_same_tokens(runners):
    seen = {"retractions": 0, "aborts": 0, "tokens": 0, "stops": 0}
    for seed in range(NUM_SCHEDULES):
        options, requests = draw_schedule(seed)
        normal, state = play(runners, options, requests, overlap=False)
        overlapped, other_state = play(runners, options, requests, overlap=True)
        try:
            same_streams(normal, overlapped, requests)
        except AssertionError as error:
            raise AssertionError(f"schedule {seed}") from error
        seen["retractions"] += state.num_retractions + other_state.num_retractions
        seen["aborts"] += sum(isinstance(heard.finish, AbortFinish) for heard in normal.values())
        seen["stops"] += sum(not isinstance(h.finish, AbortFinish | LengthFinish) for h in normal.values())
        seen["tokens"] += sum(len(heard.ids) for heard in normal.values())
    # The schedules were worth playing. Retractions are rare, and depend on what the model says: its float32 weights are
    # other ones.
    assert min(count for what, count in seen.items() if what != "retractions" or runners.backend == "torch") > 0, seen
    assert seen["tokens"] > 50 * NUM_SCHEDULES, seen


@pytest.mark.parametrize("recorded", [False, True])
def test_drafts_change_no_token(runners, recorded, monkeypatch):
    """Greedy and drawn tokens, with and without a grammar, and their log probabilities. The runner of these settings
    records steps with drafts."""
    if recorded and runners.backend == "torch":
        pytest.skip("torch layers are not recorded")
    seen = dict.fromkeys(("verifications", "drafts", "accepted"), 0)
    drafting = Runners(monkeypatch, runners.backend, speculative_algorithm="NGRAM") if recorded else runners
    for seed in range(NUM_SCHEDULES // 2):
        options, requests = draw_schedule(2_000_000 + seed)
        requests = [
            (f"{rid} logprobs" if index % 3 == 0 else rid, *rest) for index, (rid, *rest) in enumerate(requests)
        ]
        for index, (_, _, sampling, *_) in enumerate(requests):
            if index % 4 < 2:
                sampling["regex"] = str(index)
        plain, _ = play(runners, options, requests, overlap=False)
        ngrams, oracle = NgramProposer(max_drafts=5, max_tokens=16), Oracle(plain, seed)
        for proposer in (ngrams, oracle):
            drafted, state = play(drafting, options, requests, overlap=False, proposer=proposer)
            try:
                same_streams(plain, drafted, requests)
                same_logprobs(plain, drafted)
            except AssertionError as error:
                raise AssertionError(f"schedule {seed}, {proposer}") from error
            seen["verifications"] += state.speculation.num_verifications
            seen["drafts"] += state.speculation.num_drafts
            seen["accepted"] += state.speculation.num_accepted_drafts
    assert seen["drafts"] > seen["verifications"] > 5 * NUM_SCHEDULES, seen
    assert 0.3 * seen["drafts"] < seen["accepted"] < 0.95 * seen["drafts"], seen


def test_graphs_stream_the_same_tokens(runners_with_graphs, monkeypatch):
    """A table of the device's own, pinned memory, late copies home, padded and replayed decode steps."""
    streams = []
    for seed in range(NUM_SCHEDULES // 4):
        options, requests = draw_schedule(1_000_000 + seed)
        streams.append((options, requests, play(runners_with_graphs, options, requests, overlap=True)[0]))
    assert runners_with_graphs.accelerator.num_replays > 0
    monkeypatch.undo()
    plain = Runners(monkeypatch)
    for options, requests, heard in streams:
        same_streams(heard, play(plain, options, requests, overlap=False)[0], requests)
