"""Tokens that a grammar forces: they are taken before a step samples them, and one step computes a run of them.

The random schedules of test_token_masks.py and test_random_steps.py have forced tokens, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hash_grammar import HashMatcher, constrained_output
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_rig import Rig
from scripted_grammar import EOS, VOCAB, Script, answer, new_tokens, scripted

from fakes import next_token, next_tokens
from tercet.managers.grammar import GrammarState, mask_of, only_token
from tercet.managers.req import MAX_FORCED, Req
from tercet.model_executor.step import FROM_DEVICE, ForwardMode, LaunchedStep, StepInputs
from tercet.srt.io_struct import AbortFinish, GenerateReq, LengthFinish, Resumed, StopFinish, pack_ids
from tercet.srt.logprobs import LogprobOptions
from tercet.srt.request_options import RequestOptions
from tercet.srt.sampling_params import SamplingParams
from tercet.srt.step_journal import StepJournal, read_journal

BOTH_LOOPS = pytest.mark.parametrize("overlap", [False, True])

TEXT = [None, 1, 2, 3, None, None, 4, 5]


# Masks


@given(st.integers(1, 4), st.sets(st.integers(0, 127), max_size=4))
def test_a_mask_with_one_bit_names_its_token(num_words: int, tokens: set[int]) -> None:
    tokens = {token % (32 * num_words) for token in tokens}
    mask = np.zeros(num_words, np.int32)
    for token in tokens:
        mask |= mask_of(token, num_words)
        assert np.flatnonzero(np.unpackbits(mask_of(token, num_words).view(np.uint8), bitorder="little")) == [token]
    assert only_token(mask) == (tokens.pop() if len(tokens) == 1 else None)


def test_each_mask_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = scripted(monkeypatch, TEXT)
    places: list[int] = []
    fill = Script.fill
    monkeypatch.setattr(Script, "fill", lambda self, *args: places.append(self.at) or fill(self, *args))
    rig.add("r", [1, 2], max_new_tokens=20, regex="1")
    rig.run()
    assert places == [0, *range(len(TEXT) + 1)], "the first one by the check of the grammar"


def test_the_fake_hashes_many_tokens_as_one() -> None:
    assert next_tokens([3, 5], 9, 8).tolist() == [next_token([3, 5, i], 0, 8) for i in range(9)]


# Steps


def test_one_step_computes_a_run_and_none_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = scripted(monkeypatch, TEXT, overlap=False)
    rig.add("r", [1, 2], max_new_tokens=20, regex="1")
    rig.run()
    assert rig.heard["r"].ids == answer([1, 2], TEXT)
    assert rig.heard["r"].finish == StopFinish(EOS)
    # The prompt; the first gap and 1, 2, 3; the second gap. The rest is forced after the third gap.
    assert new_tokens(rig.runner.steps) == [[2], [4], [1]]


def test_with_overlap_a_run_is_joined_behind_the_step_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = scripted(monkeypatch, TEXT)
    rig.add("r", [1, 2], max_new_tokens=20, regex="1")
    rig.run()
    assert rig.heard["r"].ids == answer([1, 2], TEXT)
    # The second step was in flight when 1, 2 and 3 became known, and the last when the end did.
    assert new_tokens(rig.runner.steps) == [[2], [1], [3], [1], [1]]


@BOTH_LOOPS
@pytest.mark.parametrize("joins", [False, True])
def test_the_step_journal_has_the_places_after_forced_tokens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, overlap: bool, joins: bool
) -> None:
    """A place that is too early would clear a suspect before its fatal step."""
    rig = scripted(monkeypatch, [None, 1, 2, 3, *[None] * 6], overlap=overlap, joins_forced=joins)
    rig.scheduler._journal = StepJournal(tmp_path / "journal", max_rows=4)
    launch, places = rig.runner.launch, []

    def checked(step: StepInputs) -> LaunchedStep:
        (row,) = read_journal(tmp_path / "journal").rows or ()
        (req,) = rig.scheduler.queues.holders()
        assert row.position >= len(req.output_ids) + req.num_steps_in_flight
        places.append(row.position)
        return launch(step)

    rig.runner.launch = checked
    rig.add("r", [1, 2], max_new_tokens=20, regex="1")
    rig.run()
    assert places[-1] >= 9 and places == sorted(places)


@BOTH_LOOPS
@pytest.mark.parametrize("joins", [False, True])
def test_forced_tokens_are_sent_at_once(monkeypatch: pytest.MonkeyPatch, overlap: bool, joins: bool) -> None:
    rig = scripted(monkeypatch, [None, 1, 2, 3, None], overlap=overlap, joins_forced=joins)
    rig.add("r", [1, 2], max_new_tokens=20, regex="1")
    sizes = []
    while rig.is_busy:
        before = len(rig.heard["r"].ids)
        rig.turn()
        sizes.append(len(rig.heard["r"].ids) - before)
    assert [size for size in sizes if size] == [4, 2]
    assert rig.heard["r"].ids == answer([1, 2], [None, 1, 2, 3, None])


@BOTH_LOOPS
@pytest.mark.parametrize("has_room", [False, True])
def test_otherwise_each_step_computes_one_token(monkeypatch: pytest.MonkeyPatch, has_room: bool, overlap: bool) -> None:
    """Where runs are not joined, or if memory is short: forced tokens retract nobody."""
    text = [None, *[1] * 12, None]
    rig = scripted(monkeypatch, text, overlap=overlap, joins_forced=not has_room)
    if not has_room:
        monkeypatch.setattr(rig.kv, "decode_shortfall", lambda reqs, num_new=1: int(np.any(np.asarray(num_new) > 1)))
    rig.add("r", [1, 2], max_new_tokens=20, regex="1")
    rig.run()
    assert rig.heard["r"].ids == answer([1, 2], text)
    assert rig.planner.num_retractions == 0
    assert new_tokens(rig.runner.steps) == [[2]] + [[1]] * (13 + overlap)


def test_in_a_step_with_prompts_a_run_has_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = scripted(monkeypatch, [None, 1, 2, 3, 4, None], overlap=False, mixed=True)
    rig.add("r", [1, 2], max_new_tokens=20, regex="1")
    rig.turn()
    rig.add("prompt", [9] * 60, max_new_tokens=1)
    rig.run()
    assert rig.heard["r"].ids == answer([1, 2], [None, 1, 2, 3, 4, None])
    assert new_tokens(rig.runner.steps) == [[2], [60, 1], [4]]


def test_requests_with_and_without_runs_share_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = scripted(monkeypatch, [None, 1, 2, 3, None, None], overlap=False)
    rig.add("free", [3, 4], max_new_tokens=4, ignore_eos=True)
    rig.add("r", [1, 2], max_new_tokens=20, regex="1")
    rig.add("free too", [5, 6], max_new_tokens=4, ignore_eos=True)
    rig.run()
    step = rig.runner.steps[1]
    assert step.extend_lens.tolist() == [1, 4, 1]
    assert step.input_ids.tolist()[2:] == [1, 2, 3, FROM_DEVICE] and step.input_ids[0] == FROM_DEVICE
    assert [step.mode for step in rig.runner.steps[2:]] == [ForwardMode.DECODE] * 2


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty", "repetition_penalty"])
def test_with_penalties_the_device_samples_each_token(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    rig = scripted(monkeypatch, TEXT, overlap=False)
    rig.add("r", [1, 2], max_new_tokens=20, regex="1", **{name: 0.5})
    rig.run()
    assert rig.heard["r"].ids == answer([1, 2], TEXT)
    assert new_tokens(rig.runner.steps) == [[2]] + [[1]] * 5, "and the end is forced"


@BOTH_LOOPS
@pytest.mark.parametrize("wish", [{"logprobs": LogprobOptions()}, {"hidden": True}])
def test_a_request_that_wants_more_of_each_token_takes_none_early(
    monkeypatch: pytest.MonkeyPatch, wish: dict[str, Any], overlap: bool
) -> None:
    rig = scripted(monkeypatch, TEXT, overlap=overlap)
    monkeypatch.setattr(Req, "accept_forced", None)
    rig.add("r", [1, 2], max_new_tokens=20, regex="1", **wish)
    rig.run()
    assert rig.heard["r"].ids == answer([1, 2], TEXT)
    assert rig.runner.num_masked >= len(TEXT) + 1


def test_a_long_run_is_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    text = [None, *[1] * 100, None]
    rig = scripted(monkeypatch, text, overlap=False)
    rig.add("r", [1, 2], max_new_tokens=200, regex="1")
    rig.run()
    assert rig.heard["r"].ids == answer([1, 2], text)
    assert new_tokens(rig.runner.steps) == [[2], [MAX_FORCED + 1], [MAX_FORCED + 1], [MAX_FORCED + 1], [2]]


def test_a_step_has_no_more_tokens_than_a_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest step decides how much memory the runner has."""
    text = [None, *[1] * 30, None]
    rig = scripted(monkeypatch, text, overlap=False, max_prefill_tokens=16, chunked_prefill_size=16)
    for index in range(3):
        rig.add(f"r{index}", [1, index], max_new_tokens=200, regex="1")
    rig.run()
    for index in range(3):
        assert rig.heard[f"r{index}"].ids == answer([1, index], text)
    assert max(rig.extend_sizes) == 16


# Ends


@BOTH_LOOPS
@pytest.mark.parametrize(
    ("sampling", "length", "finish"),
    [
        ({"max_new_tokens": 3}, 3, LengthFinish(3)),
        ({"max_new_tokens": 20, "stop_token_ids": [2]}, 3, StopFinish(2)),
        ({"max_new_tokens": 20, "stop": "1 2"}, 3, StopFinish("stop")),
        ({"max_new_tokens": 20, "stop_token_ids": [2], "min_new_tokens": 9}, 3, StopFinish(2)),
        ({"max_new_tokens": 9}, 9, StopFinish(EOS)),
        ({"max_new_tokens": 8, "ignore_eos": True}, 8, LengthFinish(8)),
        ({"max_new_tokens": 20, "ignore_eos": True}, 9, StopFinish(EOS)),
    ],
)
def test_a_run_ends_as_single_tokens_do(
    monkeypatch: pytest.MonkeyPatch, sampling: dict[str, Any], length: int, finish: object, overlap: bool
) -> None:
    for takes in (True, False):
        monkeypatch.setattr(Req, "takes_forced_tokens", takes)
        rig = scripted(monkeypatch, TEXT, overlap=overlap)
        rig.add("r", [1, 2], regex="1", **sampling)
        rig.run()
        heard = rig.heard["r"]
        assert heard.ids == answer([1, 2], TEXT)[:length]
        assert heard.finish == finish and heard.last.counts.completion_tokens == length


@BOTH_LOOPS
def test_a_grammar_that_fails_in_a_run_ends_its_request_there(monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    rig = scripted(monkeypatch, [None, 1, 2, -1], overlap=overlap)
    rig.add("r", [1, 2], max_new_tokens=20, regex="1")
    rig.run()
    finish = rig.heard["r"].finish
    assert isinstance(finish, AbortFinish) and finish.status_code == 400 and "after 3 tokens" in finish.message
    assert rig.heard["r"].ids == answer([1, 2], [None, 1, 2])[:-1]


@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=25)
@given(
    grammar=st.integers(0, 3), num_known=st.integers(0, 20), overlap=st.booleans(), joins=st.booleans(),
    penalty=st.sampled_from([0.0, 0.5]), interval=st.sampled_from([1, 5]), page_size=st.sampled_from([1, 4]),
)  # fmt: skip
def test_a_request_goes_on_after_a_restart_of_the_engine(
    grammar: int, num_known: int, overlap: bool, joins: bool, penalty: float, interval: int, page_size: int
) -> None:
    """In any place, also inside a run."""
    expected = constrained_output([1, 2], 1, 30, VOCAB, grammar=grammar, eos_ids=frozenset({EOS}))
    known = expected[: min(num_known, len(expected) - 1)]
    rig = Rig(
        overlap=overlap, joins_forced=joins, stream_interval=interval, page_size=page_size, vocab_size=VOCAB,
        eos_ids=frozenset({EOS}), audit=False,
    )  # fmt: skip
    params = SamplingParams(max_new_tokens=30, sampling_seed=1, regex=str(grammar), frequency_penalty=penalty)
    request = GenerateReq("r", pack_ids([1, 2]), RequestOptions(sampling=params), Resumed(known, 0, 0))
    rig.inbox.messages.append(request)
    rig.heard["r"].ids.extend(known)
    rig.run()
    assert rig.heard["r"].ids == expected


# What is counted


@BOTH_LOOPS
@pytest.mark.parametrize("joins", [False, True])
def test_the_throughput_counts_forced_tokens_once(monkeypatch: pytest.MonkeyPatch, overlap: bool, joins: bool) -> None:
    rig = scripted(monkeypatch, TEXT, overlap=overlap, joins_forced=joins)
    counted: list[int] = []
    monkeypatch.setattr(rig.scheduler._metrics, "on_result", counted.append)
    rig.add("r", [1, 2], max_new_tokens=20, regex="1")
    rig.run()
    assert sum(counted) == len(TEXT) + 1


def test_logits_of_forced_tokens_are_unchecked_until_a_step_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory gets only KV that is known to give finite logits."""
    rig = scripted(monkeypatch, [None, 1, 2, 3, 4, None], joins_forced=False)
    rig.add("r", [1, 2], max_new_tokens=20, regex="1")
    seen = []
    while rig.is_busy:
        rig.turn()
        for req in rig.scheduler.queues.running:
            if req.output_ids:
                checked = req.num_tokens - 1 - req.num_unchecked
                seen.append(req.num_unchecked)
                assert checked <= req.kv_len - req.num_steps_in_flight
    assert seen == [4, 3, 2, 1, 0]


@BOTH_LOOPS
@pytest.mark.parametrize("joins", [False, True])
def test_no_kv_of_forced_tokens_with_invalid_logits_stays(
    monkeypatch: pytest.MonkeyPatch, overlap: bool, joins: bool
) -> None:
    rig = scripted(
        monkeypatch, [None, 1, 2, 3, 4, None], overlap=overlap, joins_forced=joins, host_blocks=20, block_pages=1
    )
    rig.runner.poison = 2
    rig.add("r", [5, 6], max_new_tokens=20, regex="1")
    rig.run()
    while rig.kv.has_copies:
        rig.turn()
    finish = rig.heard["r"].finish
    assert isinstance(finish, AbortFinish) and finish.err_type == "InvalidLogits"
    saved = [*rig.kv.tiers.blocks._block_of.values()]
    assert len(saved) >= 2 and not rig.runner.host[saved, 2].any()
    assert rig.kv.cache.evictable_size == 0


def test_a_request_without_a_grammar_takes_none_of_these_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in [(Req, "accept_forced"), (Req, "takes_forced_tokens"), (GrammarState, "forced_token")]:
        monkeypatch.setattr(owner, name, None)
    rig = Rig(vocab_size=VOCAB)
    monkeypatch.setattr(rig.planner, "_plan_several", None)
    monkeypatch.setattr(HashMatcher, "fill", None)
    rig.add("r", [1, 2], max_new_tokens=9)
    rig.run()
    assert len(rig.heard["r"].ids) == 9
