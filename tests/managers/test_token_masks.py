"""Grammars in the scheduler, on the fake runner: the tokens never depend on the schedule, and nobody else waits."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from hash_grammar import allowed_after, constrained_output, hashed_vocabulary
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_rig import Rig

from fakes import expected_output
from tercet.managers.grammar import GrammarFailed, GrammarState
from tercet.managers.token_masks import masked_indices
from tercet.srt.errors import InvalidRequest
from tercet.srt.grammar_spec import ReasoningSpan
from tercet.srt.io_struct import AbortFinish, LengthFinish, StopFinish
from tercet.srt.logprobs import LogprobOptions
from tercet.srt.sampling_params import SamplingParams

SCHEDULES = int(os.environ.get("TERCET_SCHEDULES", "40"))
VOCAB = 40
EOS = frozenset({7, 11})
SPANS = [ReasoningSpan((20, 21), (5, 6, 13, 25), inside, most) for inside in (False, True) for most in (None, 0, 3)]
LIMITS = [span for span in SPANS if span.max_tokens is not None]

rigs = st.fixed_dictionaries(
    {
        "page_size": st.sampled_from([1, 1, 4]),
        "pool_size": st.sampled_from([64, 96, 512]),
        "max_running": st.integers(1, 8),
        "max_prefill_tokens": st.sampled_from([16, 64]),
        "chunked_prefill_size": st.sampled_from([16, 20, 64]),
        "mixed": st.booleans(),
        "threads": st.booleans(),
        "max_grammars": st.sampled_from([1, 64]),
        "max_drafts": st.sampled_from([0, 0, 3]),
        "joins_forced": st.booleans(),
    }
)


@st.composite
def requests(draw: st.DrawFn) -> dict[str, tuple[list[int], dict[str, Any]]]:
    """Prompt and sampling parameters of each request; about half have a grammar, and some only a limit of reasoning."""
    family = draw(st.lists(st.integers(0, 3), min_size=4, max_size=40))
    found = {}
    for index in range(draw(st.integers(1, 12))):
        most = draw(st.integers(1, 24))
        sampling: dict[str, Any] = {"max_new_tokens": most, "sampling_seed": draw(st.integers(0, 3))}
        grammar = draw(st.sampled_from([None, None, None, "anything", 0, 1, 2, 3]))
        if grammar == "anything":
            sampling["reasoning"] = draw(st.sampled_from(LIMITS))
            sampling["min_new_tokens"] = draw(st.sampled_from([0, 0, min(5, most)]))
        elif grammar is not None:
            sampling["regex"] = str(grammar)
            sampling["min_new_tokens"] = draw(st.sampled_from([0, 0, min(5, most)]))
            sampling["ignore_eos"] = draw(st.booleans())
            sampling["stop_token_ids"] = draw(st.sampled_from([[], [], [3]]))
            sampling["reasoning"] = draw(st.sampled_from([None, None, *SPANS]))
        found[f"r{index}"] = family[: draw(st.integers(1, len(family)))], sampling
    return found


def expected(prompt: list[int], sampling: dict[str, Any]) -> list[int]:
    most, seed = sampling["max_new_tokens"], sampling["sampling_seed"]
    if "regex" not in sampling and "reasoning" not in sampling:
        return expected_output(prompt, seed, most, VOCAB, EOS)
    return constrained_output(
        prompt,
        seed,
        most,
        VOCAB,
        grammar=int(sampling["regex"]) if "regex" in sampling else None,
        eos_ids=EOS,
        stop_ids=frozenset(sampling.get("stop_token_ids", ())),
        min_new_tokens=sampling["min_new_tokens"],
        ignore_eos=sampling.get("ignore_eos", False),
        reasoning=sampling.get("reasoning"),
    )


@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=SCHEDULES)
@given(rigs, requests(), st.booleans())
def test_outputs_with_grammars_do_not_depend_on_the_schedule(options: dict, work: dict, overlap: bool) -> None:
    rig = Rig(overlap=overlap, eos_ids=EOS, vocab_size=VOCAB, **options)
    for rid, (prompt, sampling) in work.items():
        rig.add(rid, prompt, **sampling)
    rig.run()
    for rid, (prompt, sampling) in work.items():
        assert rig.heard[rid].ids == expected(prompt, sampling)
        ended = rig.heard[rid].ids[-1] in EOS | set(sampling.get("stop_token_ids", ()))
        assert isinstance(rig.heard[rid].finish, StopFinish if ended else LengthFinish)
    assert rig.scheduler.queues.num_constrained == 0


def test_a_retraction_keeps_the_grammar() -> None:
    rig = Rig(pool_size=64, max_running=4, eos_ids=EOS, vocab_size=VOCAB, conservativeness=0.1)
    shared = {"max_new_tokens": 40, "min_new_tokens": 40, "ignore_eos": False, "regex": "2", "stop_token_ids": []}
    work = {f"r{i}": ([1, 2, 3, i], {"sampling_seed": i, **shared}) for i in range(4)}
    for rid, (prompt, sampling) in work.items():
        rig.add(rid, prompt, **sampling)
    rig.run()
    assert rig.planner.num_retractions > 0
    for rid, (prompt, sampling) in work.items():
        assert rig.heard[rid].ids == expected(prompt, sampling)


def test_only_rows_with_grammars_are_masked_and_only_when_sampled() -> None:
    rig = Rig(chunked_prefill_size=16, vocab_size=VOCAB)
    rig.add("alone", [1] * 8, max_new_tokens=5)
    rig.run()
    assert rig.runner.num_masked == 0
    rig.add("plain", [1] * 8, max_new_tokens=9)
    rig.add("constrained", [2] * 40, max_new_tokens=5, regex="1", ignore_eos=True, logprobs=LogprobOptions())
    rig.run()
    assert len(rig.runner.steps) > 5 and rig.runner.num_masked == 5, "two chunks had no mask"


def test_the_runner_bars_no_early_end_of_a_grammar() -> None:
    """Its masks do that, unless nothing else may come. Otherwise no token would be left."""
    rig = Rig(eos_ids=EOS, vocab_size=VOCAB)
    for rid, grammar in (("plain", None), ("constrained", "1")):
        stops = {"min_new_tokens": 4, "stop_token_ids": [3], "ignore_eos": False}
        rig.add(rid, [1] * 8, max_new_tokens=5, regex=grammar, **stops)
    rig.run()
    assert [new.stop_ids for step in rig.runner.steps for new in step.new_rows] == [(3, 7, 11), ()]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_grammar_that_fails_ends_its_own_request_alone(overlap: bool) -> None:
    rig = Rig(overlap=overlap, vocab_size=VOCAB)
    rig.add("fails", [1, 2], max_new_tokens=9, regex="fails 3")
    rig.add("other", [1, 3], max_new_tokens=9)
    rig.run()
    finish = rig.heard["fails"].finish
    assert isinstance(finish, AbortFinish) and finish.status_code == 400 and finish.err_type == InvalidRequest.__name__
    assert finish.message == "the grammar cannot be followed after 3 tokens of output: it fails on purpose"
    assert finish.param == "regex"
    assert len(rig.heard["fails"].ids) == 3
    assert rig.heard["other"].ids == expected_output([1, 3], 1, 9, VOCAB)


class Costly:
    """A grammar of any tokens, each of which takes the next of these times: seconds for its mask."""

    is_full = False

    def __init__(self, *times_s: float) -> None:
        self.now_s = 0.0
        self._times_s = list(times_s)

    def start(self) -> Costly:
        return self

    def fill(self, bits: Any, line: int) -> None:
        bits[line] = -1
        self.now_s += self._times_s.pop(0)

    def accept(self, token: int) -> None: ...

    def fork(self) -> Costly:
        return self


def tokens_until_failure(grammar: Costly, num_tokens: int) -> int:
    state = GrammarState(grammar, frozenset({7}), SamplingParams(), 1, clock=lambda: grammar.now_s)
    bits = np.zeros((1, 1), np.int32)
    for token in range(num_tokens):
        try:
            state.fill(bits, 0, token)
        except GrammarFailed as error:
            assert "too much time" in str(error)
            return token
        state.accept(1)
    return num_tokens


def test_a_grammar_has_a_limited_time() -> None:
    assert tokens_until_failure(Costly(0.9, *[0.004] * 500), 501) == 501, "a slow start, and then what it may take"
    assert tokens_until_failure(Costly(0.1, 1.1), 2) == 1
    assert tokens_until_failure(Costly(*[0.105] * 20), 20) == 9, "each token brings 5 ms of the 105 that it takes"
    assert tokens_until_failure(Costly(*[0.0] * 1000, 1.1), 1001) == 1000, "time is not saved up"


@pytest.mark.parametrize("overlap", [True, False])
def test_an_error_of_the_library_ends_its_own_request_alone(overlap: bool, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(overlap=overlap, vocab_size=VOCAB)
    rig.add("breaks", [1, 2], max_new_tokens=9, regex="breaks 3")
    rig.add("other", [1, 3], max_new_tokens=9)
    rig.run()
    finish = rig.heard["breaks"].finish
    assert isinstance(finish, AbortFinish) and (finish.status_code, finish.param) == (400, "regex")
    assert "its library failed" in finish.message and "on purpose" not in finish.message
    assert "it breaks on purpose" in caplog.text
    assert rig.heard["other"].ids == expected_output([1, 3], 1, 9, VOCAB)


def test_a_bad_grammar_is_refused_and_nobody_waits_for_a_slow_one() -> None:
    rig = Rig(threads=True, vocab_size=VOCAB, max_running=1)
    rig.add("first", [9], max_new_tokens=1, regex="1")
    rig.run()
    compiler = rig.scheduler._grammars._compiler
    compiler.may_go.clear()
    rig.add("slow", [1, 2], max_new_tokens=3, regex="2")
    rig.add("known", [1, 4], max_new_tokens=3, regex="1")
    rig.add("plain", [1, 3], max_new_tokens=3)
    rig.add("bad", [1, 3], max_new_tokens=3, regex="bad")
    rig.add("gone", [1, 3], max_new_tokens=3, regex="3")
    rig.abort("gone")
    for _ in range(20):
        rig.turn()
    assert len(rig.heard["plain"].ids) == 3 and len(rig.heard["known"].ids) == 3
    assert not rig.heard["slow"].ids and rig.heard["bad"].finish is None
    assert rig.heard["gone"].finish == AbortFinish("aborted by the client")
    compiler.may_go.set()
    rig.run()
    assert len(rig.heard["slow"].ids) == 3
    finish = rig.heard["bad"].finish
    assert isinstance(finish, AbortFinish) and finish.message == "the grammar is bad" and finish.status_code == 400


def test_equal_grammars_are_compiled_once() -> None:
    rig = Rig(threads=True, vocab_size=VOCAB)
    for index in range(4):
        rig.add(f"r{index}", [1, index], max_new_tokens=2, regex="1")
    rig.run()
    rig.add("later", [1, 2], max_new_tokens=2, regex="1")
    rig.run()
    assert len(rig.scheduler._grammars._compiler.compiled) == 1


class TwoTokens:
    """A grammar whose output is token 5 and then EOS."""

    is_full = False

    def start(self) -> TwoTokens:
        return self

    def fill(self, bits: Any, line: int) -> None:
        bits[line] = 0
        bits[line, 0] = 1 << 5 if not self.is_done else 1 << 7

    def accept(self, token: int) -> None:
        if token != 5:
            raise GrammarFailed("not 5")
        self.is_done = True

    def fork(self) -> TwoTokens:
        return self

    is_done = False


@pytest.mark.parametrize("sampling", [{"min_new_tokens": 5}, {"ignore_eos": True}, {"stop_token_ids": [5]}])
def test_the_end_is_allowed_early_where_nothing_else_may_come(sampling: dict[str, Any]) -> None:
    state = GrammarState(TwoTokens(), frozenset({7}), SamplingParams(**sampling), 2)
    bits = np.full((1, 2), -1, np.int32)
    state.fill(bits, 0, 0)
    assert bits.tolist() == [[1 << 5, 0]]
    state.accept(5)
    assert not state.is_over
    state.fill(bits, 0, 1)
    assert bits.tolist() == [[1 << 7, 0]]
    state.accept(7)
    assert state.is_over


def test_the_fake_grammar_allows_some_tokens_and_not_all() -> None:
    vocabulary = hashed_vocabulary(VOCAB, EOS)
    allowed = allowed_after([1, 2], 1, VOCAB, vocabulary.eos_ids)
    assert 0 < allowed.sum() < VOCAB
    assert masked_indices([]) == []
