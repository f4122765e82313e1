"""How long streams pause after a restart of the engine, in simulated time. Their prompts take short steps."""

from __future__ import annotations

from statistics import median

import pytest
from timed_rig import SLOW, TimedRig

from fakes import expected_output
from tercet.managers.token_gap import AUTO_GAP_S
from tercet.srt.io_struct import GenerateReq, LengthFinish, Resumed, pack_ids
from tercet.srt.request_options import RequestOptions
from tercet.srt.sampling_params import SamplingParams

NUM_NEW = 120
_PROMPT_LENGTHS = (20, 30, 50, 70, 100, 150, 250, 400)
LENGTHS = {f"stream{index}": (length, 40 + 5 * index) for index, length in enumerate(_PROMPT_LENGTHS)}
"""Of the prompt and of the output so far, the shortest first."""


class RestartedRig(TimedRig):
    """An engine that has just been started again, and the streams of its predecessor."""

    def __init__(self, **settings) -> None:
        limits = {"max_prefill_tokens": 2048, "chunked_prefill_size": 1024, "pool_size": 8192, "context_len": 1024}
        super().__init__(SLOW, max_running=16, **limits, **settings)
        self.wanted: dict[str, list[int]] = {}

    def resume(self, rid: str) -> None:
        index = int(rid.removeprefix("stream"))
        prompt_len, num_known = LENGTHS[rid]
        prompt = [(index * 31 + place * (index + 3)) % 97 for place in range(prompt_len)]
        self.wanted[rid] = expected_output(prompt, 1, NUM_NEW, 97)
        known = self.heard[rid].ids = self.wanted[rid][:num_known]
        self.times_s[rid] = [self.clock.now] * num_known
        options = RequestOptions(sampling=SamplingParams(max_new_tokens=NUM_NEW, sampling_seed=1), stream=True)
        self.inbox.messages.append(GenerateReq(rid, pack_ids(prompt), options, Resumed(known.copy(), 0, 0)))


def pauses_s(max_itl_s: float | str | None, **settings) -> list[float]:
    """The longest time between two tokens of each stream. Checks all tokens."""
    rig = RestartedRig(max_itl_s=max_itl_s, **settings)
    for rid in LENGTHS:
        rig.resume(rid)
    rig.run(max_turns=5000)
    assert {rid: rig.heard[rid].ids for rid in LENGTHS} == rig.wanted
    return [max(rig.gaps_s(rid)) for rid in LENGTHS]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
def test_the_median_stream_does_not_wait_for_all_prompts(overlap: bool, mixed: bool) -> None:
    at_once = pauses_s(None, overlap=overlap, mixed=mixed)
    in_short_steps = pauses_s("auto", overlap=overlap, mixed=mixed)
    assert min(at_once) == max(at_once) > 1.4, "one step for all prompts: 1530 tokens"
    assert median(in_short_steps) < 0.5 * max(at_once)
    assert max(in_short_steps) < 1.2 * max(at_once)


def test_the_first_streams_go_on_while_the_others_wait() -> None:
    rig = RestartedRig(max_itl_s="auto", overlap=False)
    for rid in LENGTHS:
        rig.resume(rid)
    began = rig.clock.now
    rig.turn()
    assert rig.clock.now - began < AUTO_GAP_S, "nothing was measured yet, but a token is taken to cost 1 ms"
    assert len(rig.scheduler.queues.running) == 3
    while len(rig.scheduler.queues.running) < len(LENGTHS):
        num_sent = {req.rid: len(rig.heard[req.rid].ids) for req in rig.scheduler.queues.running}
        rig.turn()
        assert all(len(rig.heard[rid].ids) == num + 1 for rid, num in num_sent.items()), "each step brings their tokens"


def test_prompts_without_output_are_still_computed_in_one_step() -> None:
    """Nobody has seen a token of theirs, so they have no gap."""
    rig = RestartedRig(max_itl_s="auto", overlap=False)
    for index, (prompt_len, _) in enumerate(LENGTHS.values()):
        rig.add(f"new{index}", [index] * prompt_len)
    rig.turn()
    assert rig.extend_sizes == [sum(prompt_len for prompt_len, _ in LENGTHS.values())]


def test_a_stream_that_has_all_its_tokens_ends_without_a_step() -> None:
    """An engine with less memory may give it no more."""
    rig = RestartedRig()
    options = RequestOptions(sampling=SamplingParams(max_new_tokens=4, sampling_seed=1), stream=True)
    known = rig.heard["r"].ids = [5, 6, 7, 8]
    rig.inbox.messages.append(GenerateReq("r", pack_ids([1] * 9), options, Resumed(known.copy(), 0, 0)))
    rig.run()
    assert rig.heard["r"].finish == LengthFinish(4) and not rig.runner.steps
