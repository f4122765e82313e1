"""The scheduler on a real, tiny model: drafts of requests with penalties change no token, whatever is beside them."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_reference import counts_of
from scheduler_rig import Rig
from toy_schedules import VOCAB_SIZE, Oracle, Runners, draw_schedule, play, same_logprobs, same_streams

from tercet.managers.ngram_proposer import NgramProposer
from tercet.model_executor import cpu_extension
from tercet.model_executor.sampling.sampler import Sampler

NUM_CASES = int(os.environ.get("TERCET_SCHEDULES", "16"))
PENALTIES = st.fixed_dictionaries(
    {
        "frequency_penalty": st.sampled_from([0.0, 0.4, 2.0, -1.0]),
        "presence_penalty": st.sampled_from([0.0, 0.6, -0.5]),
        "repetition_penalty": st.sampled_from([1.0, 1.2, 2.0, 0.5]),
    },
    optional={
        "temperature": st.just(0.0),
        "min_p": st.just(0.05),
        "top_k": st.just(5),
        "top_p": st.just(0.8),
        "logit_bias": st.just({"3": 1.5, "9": -4.0}),
        "min_new_tokens": st.integers(1, 4),
        "regex": st.sampled_from(["0", "1", "2"]),
    },
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("is_short", [False, True], ids=["enough memory", "retractions"])
def test_tokens_log_probabilities_and_counts_are_those_without_drafts(
    backend: str, is_short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With grammars, retractions, aborts and stops of all kinds, in both loops. After each step, the counts of each row
    are those of a new row with the same tokens."""
    if backend == "cpu" and cpu_extension.load() is None:
        pytest.skip("no build of csrc/cpu for this processor")
    plain_runners = Runners(monkeypatch, backend)
    runners = Runners(monkeypatch, backend, speculative_algorithm="NGRAM")
    seen: Counter[str] = Counter()

    @settings(deadline=None, max_examples=NUM_CASES // 3)
    @given(
        seed=st.integers(0, 100_000),
        sampling=st.lists(PENALTIES, min_size=1, max_size=5),
        wrong=st.sampled_from([None, 0.1, 0.3, 1.0]),
        overlap=st.booleans(),
    )
    def check(seed: int, sampling: list[dict], wrong: float | None, overlap: bool) -> None:
        options, drawn = draw_schedule(seed)
        if is_short:  # of memory, so that requests are retracted
            options |= {"pool_size": 72, "page_size": 1, "max_running": 8, "conservativeness": 0.05, "mixed": True}
        requests = []
        for index, (rid, prompt, own, arrives, abort_at) in enumerate(drawn):
            if index % 4 < 3:
                own |= sampling[index % len(sampling)]
            if is_short:
                prompt, arrives = prompt[:20], 0
                # With ignore_eos, room for all tokens would be kept.
                own |= {"max_new_tokens": 50, "min_new_tokens": 40, "ignore_eos": False}
                own.pop("stop", None)
            requests.append((f"{rid} logprobs" if index % 3 == 0 else rid, prompt, own, arrives, abort_at))
        plain, _ = play(plain_runners, options, requests, overlap=False)
        overlap = overlap and wrong is not None  # a proposer that knows the newest token
        proposer = NgramProposer(5, 16) if wrong is None else Oracle(plain, seed, wrong)
        drafted, state = play(
            runners, options, requests, overlap, proposer, lambda rig: seen.update(checked=check_counts(rig))
        )
        same_streams(plain, drafted, requests)
        same_logprobs(plain, drafted)
        seen["retractions"] += state.num_retractions
        if state.speculation is not None:
            seen["drafts"] += state.speculation.num_drafts
            seen["accepted"] += state.speculation.num_accepted_drafts

    check()
    wanted = ["checked", "drafts", "accepted"] + ["retractions"] * is_short
    assert min(seen[what] for what in wanted) > 0, seen


def check_counts(rig: Rig) -> int:
    """Compare the counts of each decoding row with those of a new row. Returns the number of rows with penalties."""
    if rig.in_flight is not None:
        return 0
    sampler, num_checked = rig.runner.sampler, 0
    for req in rig.scheduler.queues.running:
        known = req.output_ids[: req.kv_len + 1 - len(req.prompt_ids)]  # further tokens are forced, and not yet chosen
        fresh = Sampler(sampler._num_rows, VOCAB_SIZE, "cpu")
        fresh.set_row(replace(req.as_new_row(), output_ids=np.array(known, np.int32)))
        counts = [counts_of(one, req.row) for one in (sampler, fresh)]
        assert counts[0] == counts[1], (req.rid, known)
        num_checked += counts[0] is not None
    return num_checked


def test_a_request_with_penalties_is_done_in_fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    runners = Runners(monkeypatch)
    request = ("r", [1, 2, 3], {"max_new_tokens": 30, "temperature": 0.0, "frequency_penalty": 0.7}, 0, None)
    options = {"max_running": 1}
    plain, _ = play(runners, options, [request], overlap=False)
    turns: list[int] = []
    oracle = Oracle(plain, 0, wrong=0.0)
    drafted, state = play(
        runners,
        options,
        [request],
        overlap=False,
        proposer=oracle,
        watch=lambda rig: turns.append(len(rig.heard["r"].ids)),
    )
    assert drafted["r"].ids == plain["r"].ids
    assert len(set(turns)) < 15, "a step each would be 30"
    assert state.speculation is not None and state.speculation.num_accepted_drafts == state.speculation.num_drafts
