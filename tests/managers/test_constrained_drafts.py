"""Drafts of requests with a grammar: where they are cut, the masks along them, and that they change no token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from fake_proposers import EachProposer
from hash_grammar import HashGrammar, HashMatcher, allowed_after, constrained_output, hashed_vocabulary
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_makers import make_req
from scheduler_rig import Rig

from tercet.managers.grammar import Grammar, GrammarFailed, GrammarState
from tercet.managers.ngram_proposer import NgramProposer
from tercet.managers.req import Req
from tercet.managers.token_masks import allowed_drafts
from tercet.srt.io_struct import AbortFinish, LengthFinish, Resumed, StopFinish
from tercet.srt.logprobs import LogprobOptions
from tercet.srt.sampling_params import SamplingParams

VOCAB, EOS = 40, frozenset({7, 11})
VOCABULARY = hashed_vocabulary(VOCAB, EOS)
NUM_WORDS = VOCABULARY.num_words


def make_state(text: str, clock: Any = lambda: 0.0, **sampling: Any) -> GrammarState:
    return GrammarState(HashGrammar(text, VOCABULARY), EOS, SamplingParams(**sampling), NUM_WORDS, clock=clock)


def next_masks(state: GrammarState, drafts: Sequence[int], num_output: int) -> np.ndarray:
    bits = np.empty((1 + len(drafts), NUM_WORDS), np.int32)
    state.fill(bits, 0, num_output)
    state.fill_after(drafts, bits, 1)
    return bits


# The cut


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 9), start=st.integers(0, 3), choices=st.lists(st.integers(0, 1 << 16), max_size=8),
    wrong=st.integers(0, 12), wrong_token=st.integers(0, VOCAB + 90), asked=st.integers(0, 8),
    sampling=st.sampled_from([{}, {"min_new_tokens": 5}, {"ignore_eos": True}, {"stop_token_ids": [3]}]),
)  # fmt: skip
def test_drafts_are_cut_at_the_first_forbidden_token_and_have_the_masks_of_single_steps(
    seed: int, start: int, choices: list[int], wrong: int, wrong_token: int, asked: int, sampling: dict[str, Any]
) -> None:
    state, alone = make_state(str(seed), **sampling), make_state(str(seed), **sampling)
    output: list[int] = []
    drafts: list[int] = []
    masks = [next_masks(alone, [], 0)[0]]
    for place, choice in enumerate(choices):
        ways = np.flatnonzero(np.unpackbits(masks[-1].view(np.uint8), bitorder="little"))
        ways = [token for token in ways.tolist() if token not in EOS]
        if not ways:
            break
        token = ways[choice % len(ways)]
        alone.accept(token)
        if place < start:
            state.accept(token)
            output.append(token)
            masks = []
        else:
            drafts.append(token)
        masks.append(next_masks(alone, [], place + 1)[0])
    num_right = len(drafts)
    if wrong < len(drafts) and (wrong_token in EOS or not _allows(masks[wrong], wrong_token)):
        drafts[wrong], num_right = wrong_token, wrong
    if asked < len(drafts):  # the proposer asks for some of the drafts before
        assert state.look_ahead(drafts[:asked], len(output)) == min(asked, num_right)
    assert state.look_ahead(drafts, len(output)) == num_right
    assert next_masks(state, drafts[:num_right], len(output)).tolist() == [
        mask.tolist() for mask in masks[: num_right + 1]
    ]
    assert next_masks(state, [], len(output)).tolist() == [masks[0].tolist()]
    for place in range(num_right):  # the state has not moved
        state.accept(drafts[place])
        assert next_masks(state, [], len(output) + place + 1)[0].tolist() == masks[place + 1].tolist()


def _allows(mask: np.ndarray, token: int) -> bool:
    return token < 32 * NUM_WORDS and bool(np.unpackbits(mask.view(np.uint8), bitorder="little")[token])


@pytest.mark.parametrize("text", ["fails 2", "breaks 2"])
def test_a_failure_behind_a_draft_leaves_the_request_alone(text: str) -> None:
    """The draft may be wrong. If it is right, the failure comes again when its turn has come."""
    (first, second) = constrained_output([1], 1, 2, VOCAB, grammar=2, eos_ids=EOS)
    state = make_state(text)
    assert state.look_ahead([first, second], 0) == 1
    state.accept(first)
    assert state.look_ahead([second], 1) == 0, "a library that failed once is not asked again"
    state.accept(second)
    assert state.look_ahead([first], 2) == 0
    with pytest.raises(GrammarFailed):
        next_masks(state, [], 2)


class Anything:
    """A grammar of any tokens, which may end anywhere."""

    is_full = False

    def start(self) -> Anything:
        return self

    def fill(self, bits: Any, line: int) -> None:
        bits[line] = -1

    def accept(self, token: int) -> None: ...

    def fork(self) -> Anything:
        return self


def test_the_end_is_barred_up_to_the_right_draft() -> None:
    state = GrammarState(Anything(), EOS, SamplingParams(min_new_tokens=3), NUM_WORDS, clock=lambda: 0.0)
    state.accept(1)
    assert state.look_ahead([1, 1, 1], 1) == 3
    assert [_allows(mask, 7) for mask in next_masks(state, [1, 1, 1], 1)] == [False, False, True, True]


def test_a_library_that_has_failed_behind_a_draft_is_not_asked_again() -> None:
    asked = []

    class Fails(Anything):
        def fork(self) -> Anything:
            asked.append(self)
            raise RuntimeError

    state = GrammarState(Fails(), EOS, SamplingParams(), NUM_WORDS, clock=lambda: 0.0)
    for place in range(3):
        assert state.look_ahead([1], place) == 0
        state.accept(1)
    assert len(asked) == 1


FORK_S, MASK_S = 2**-10, 0.75


class Slow:
    """A grammar of any tokens. Forking takes FORK_S, and each mask of a fork takes MASK_S."""

    is_full = False

    def __init__(self, clock: list[float], *, is_fork: bool = False) -> None:
        self.clock, self.is_fork = clock, is_fork

    def start(self) -> Slow:
        return self

    def fill(self, bits: Any, line: int) -> None:
        bits[line] = -1
        self.clock[0] += MASK_S * self.is_fork

    def accept(self, token: int) -> None: ...

    def fork(self) -> Slow:
        self.clock[0] += FORK_S
        return Slow(self.clock, is_fork=True)


def test_slow_masks_of_drafts_end_the_drafts_and_not_the_request() -> None:
    now = [0.0]
    grammar: Grammar = Slow(now)
    state = GrammarState(grammar, frozenset({7}), SamplingParams(), NUM_WORDS, clock=lambda: now[0])
    counts = []
    for place in range(300):
        counts.append(state.look_ahead([1, 1, 1], place))
        assert len(next_masks(state, [], place)) == 1
        state.accept(1)
    assert counts[0] == 1, "the second mask is over the limit"
    assert now[0] == 4 * MASK_S + 3 * FORK_S, "drafts are tried twice more, when tokens have brought the time"


def test_the_proposer_gives_the_room_of_forbidden_drafts_to_others_and_does_not_count_them() -> None:
    prompt = [*range(20, 30), *range(20, 26)]  # 26, 27, ... follow
    reqs = [make_req(prompt, 0), make_req(prompt, 1)]

    class Until28:
        def fill(self, bits: Any, line: int) -> None:
            bits[line] = -1 & ~(1 << 28)

        def accept(self, token: int) -> None: ...

        def fork(self) -> Until28:
            return self

        start = fork

    reqs[0].grammar = GrammarState(Until28(), EOS, SamplingParams(), NUM_WORDS, clock=lambda: 0.0)
    proposer = NgramProposer(8, 8)
    first, second = proposer.propose(reqs, [100, 100])
    assert list(first) == [26, 27] and len(second) == 4
    others = [make_req(prompt, 2), make_req(prompt, 3)]
    assert [len(drafts) for drafts in NgramProposer(8, 8).propose(others, [100, 100])] == [3, 3]
    history = proposer._histories[reqs[0]]
    before = list(history._right)
    reqs[0].output_ids += [26, 27, 5]
    proposer.propose(reqs, [100, 100])
    assert sum(history._right) > sum(before) and history._total[3] == pytest.approx((5 * 0.9 + 1) * 0.9 + 1)


def test_a_second_look_at_the_same_position_forks_no_matcher() -> None:
    """The proposer looks first, and the planner at what is left."""

    class Counted(Anything):
        num_forks = 0

        def fill(self, bits: Any, line: int) -> None:
            bits[line] = -1 & ~(1 << 28)

        def fork(self) -> Counted:
            Counted.num_forks += 1
            return self

    prompt = [*range(20, 30), *range(20, 26)]  # 26, 27, ... follow
    req = make_req(prompt, 0)
    req.grammar = state = GrammarState(Counted(), EOS, SamplingParams(), NUM_WORDS, clock=lambda: 0.0)
    for position in range(2):
        looks = [state.look_ahead([26, 27, 28], position) for _ in range(2)]
        assert looks == [2, 2] and state.look_ahead([26], position) == 1, "28 is forbidden"
        assert state.look_ahead([], position) == 0
        assert state.look_ahead([26, 27, 7, 1], position) == 2, "7 ends the output"
        assert Counted.num_forks == position + 1
        assert state.look_ahead([26, 27, 29], position) == 3 and Counted.num_forks == position + 2
        assert len(next_masks(state, [26, 27, 29], position)) == 4
        state.accept(26)
        Counted.num_forks = position + 1
    req.grammar = GrammarState(Counted(), EOS, SamplingParams(), NUM_WORDS, clock=lambda: 0.0)
    Counted.num_forks, proposer = 0, NgramProposer(8, 8)
    for _ in range(2):
        (drafts,) = proposer.propose([req], [100])
        assert list(allowed_drafts(req, drafts)) == [26, 27]
    assert Counted.num_forks == 1


# Steps


def run(rig: Rig, prompt: list[int], **sampling: Any) -> list[int]:
    rig.add("r", prompt, **sampling)
    rig.run()
    return rig.heard["r"].ids


def right(expected: list[int], prompt_len: int, most: int) -> EachProposer:
    """A proposer that is always right."""
    return EachProposer(lambda req, limit: expected[req.num_tokens - prompt_len :][: min(most, limit)])


GRAMMAR = next(
    grammar
    for grammar in range(200)
    if len(constrained_output([1, 2], 1, 30, VOCAB, grammar=grammar, eos_ids=EOS)) == 30
)
EXPECTED = constrained_output([1, 2], 1, 30, VOCAB, grammar=GRAMMAR, eos_ids=EOS)
MANY = {"max_new_tokens": 30, "regex": str(GRAMMAR)}


@pytest.mark.parametrize("logprobs", [None, LogprobOptions(top_logprobs_num=1)])
def test_right_drafts_save_steps(logprobs: LogprobOptions | None) -> None:
    counts = []
    for most in (0, 5):
        rig = Rig(overlap=False, vocab_size=VOCAB, eos_ids=EOS, proposer=right(EXPECTED, 2, most))
        assert run(rig, [1, 2], logprobs=logprobs, **MANY) == EXPECTED
        counts.append(len(rig.runner.steps))
    # With log probabilities, no token is taken early: the prompt's step returns one, and the others six each.
    assert counts[1] == 1 + 5 if logprobs else counts[1] < 0.7 * counts[0]


def test_the_masks_of_a_step_follow_its_drafts() -> None:
    rig = Rig(overlap=False, vocab_size=VOCAB, eos_ids=EOS, proposer=right(EXPECTED, 2, 5))
    run(rig, [1, 2], logprobs=LogprobOptions(), **MANY)
    assert rig.runner.num_masked == 30, "each choice was masked"


def test_no_step_computes_a_forbidden_draft() -> None:
    """Any proposer may propose it, and the planner leaves it out."""
    wrong = EachProposer(lambda req, limit: [_forbidden(EXPECTED[: len(req.output_ids)]), 1, 2][:limit])
    rig = Rig(overlap=False, vocab_size=VOCAB, eos_ids=EOS, proposer=wrong)
    assert run(rig, [1, 2], logprobs=LogprobOptions(), **MANY) == EXPECTED
    assert [step.num_tokens for step in rig.runner.steps] == [2] + [1] * 29


def _forbidden(output: list[int]) -> int:
    return int(np.flatnonzero(~allowed_after(output, GRAMMAR, VOCAB, EOS))[0])


def test_where_each_step_computes_one_forced_token_drafts_wait_for_the_last() -> None:
    """The row is behind the tokens that the host knows. test_decode_tokens.py has steps with runs and drafts."""
    seen = []

    def propose(req: Req, limit: int) -> list[int]:
        seen.append(req.num_tokens - req.kv_len)
        return EXPECTED[len(req.output_ids) :][: min(3, limit)]

    rig = Rig(overlap=False, vocab_size=VOCAB, eos_ids=EOS, joins_forced=False, proposer=EachProposer(propose))
    assert run(rig, [1, 2], **MANY) == EXPECTED
    assert set(seen) == {1}


def test_tokens_after_an_accepted_draft_that_ends_the_request_are_dropped() -> None:
    stop = EXPECTED[8]
    assert stop not in EXPECTED[:8]
    for sampling, finish in (
        ({"stop_token_ids": [stop]}, StopFinish(stop)),
        ({"stop": f"{EXPECTED[7]} {stop}"}, StopFinish("stop")),
        ({"max_new_tokens": 9}, LengthFinish(9)),
    ):
        rig = Rig(overlap=False, vocab_size=VOCAB, eos_ids=EOS, proposer=right(EXPECTED, 2, 20), host_blocks=20)
        assert run(rig, [1, 2], logprobs=LogprobOptions(), **{**MANY, **sampling}) == EXPECTED[:9]
        assert rig.heard["r"].finish == finish


def test_no_draft_follows_the_end_of_the_grammar() -> None:
    grammar, output = next(
        (seed, output)
        for seed in range(100)
        if (output := constrained_output([1, 2], 1, 30, VOCAB, grammar=seed, eos_ids=EOS))[-1] in EOS
        and len(output) > 5
    )
    rig = Rig(overlap=False, vocab_size=VOCAB, eos_ids=EOS, proposer=right([*output, 1, 2, 3], 2, 20))
    assert run(rig, [1, 2], max_new_tokens=40, regex=str(grammar), logprobs=LogprobOptions()) == output
    assert rig.runner.num_masked == len(output) and rig.heard["r"].finish == StopFinish(output[-1])


def test_a_grammar_that_fails_behind_an_accepted_draft_ends_its_request_with_the_tokens_before() -> None:
    expected = constrained_output([1, 2], 1, 5, VOCAB, grammar=5, eos_ids=frozenset())
    rig = Rig(overlap=False, vocab_size=VOCAB, proposer=right([*expected, 1, 2], 2, 9))
    assert run(rig, [1, 2], max_new_tokens=30, regex="fails 5", logprobs=LogprobOptions()) == expected
    finish = rig.heard["r"].finish
    assert isinstance(finish, AbortFinish) and "after 5 tokens" in finish.message


@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=40)
@given(
    grammar=st.integers(0, 3), num_known=st.integers(0, 20), overlap=st.booleans(), joins=st.booleans(),
    interval=st.sampled_from([1, 5]), page_size=st.sampled_from([1, 4]), has_logprobs=st.booleans(),
    max_drafts=st.sampled_from([1, 3, 8]),
)  # fmt: skip
def test_a_request_goes_on_after_a_restart_of_the_engine(
    grammar: int, num_known: int, overlap: bool, joins: bool, interval: int, page_size: int, has_logprobs: bool,
    max_drafts: int,
) -> None:  # fmt: skip
    expected = constrained_output([1, 2], 1, 30, VOCAB, grammar=grammar, eos_ids=EOS)
    known = expected[: min(num_known, len(expected) - 1)]
    rig = Rig(
        overlap=overlap, joins_forced=joins, stream_interval=interval, page_size=page_size, vocab_size=VOCAB,
        eos_ids=EOS, max_drafts=max_drafts,
    )  # fmt: skip
    rig.heard["r"].ids.extend(known)
    logprobs = LogprobOptions() if has_logprobs else None
    resumed = Resumed(known, 0, 0) if known else None
    rig.add("r", [1, 2], max_new_tokens=30, regex=str(grammar), resumed=resumed, logprobs=logprobs)
    rig.run()
    assert rig.heard["r"].ids == expected


def test_logits_of_accepted_drafts_are_checked() -> None:
    """Host memory gets their KV, but not that of the forced tokens after them."""
    rig = Rig(overlap=False, vocab_size=VOCAB, eos_ids=EOS, proposer=right(EXPECTED, 2, 3))
    rig.add("r", [1, 2], **MANY)
    num_forced = 0
    while rig.is_busy:
        rig.turn()
        for req in rig.scheduler.queues.running:
            if req.output_ids:
                num_forced += req.num_unchecked
                assert req.num_tokens - 1 - req.num_unchecked == req.kv_len
    assert num_forced
    speculation = rig.scheduler.state().speculation
    assert speculation is not None and speculation.num_accepted_drafts


def test_the_fake_grammar_is_forked() -> None:
    matcher = HashMatcher(HashGrammar("1", VOCABULARY))
    fork = matcher.fork()
    fork.accept(int(np.flatnonzero(allowed_after([], 1, VOCAB, EOS))[0]))
    assert not matcher._output
