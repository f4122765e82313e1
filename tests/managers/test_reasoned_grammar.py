"""A grammar whose text comes after the model's reasoning."""

from __future__ import annotations

import numpy as np
import pytest
from grammar_cases import EOS, SPECIAL, TOKENS, VOCABULARY, allowed, spec_of
from hash_grammar import HashGrammar, constrained_output, hashed_vocabulary, num_thoughts
from hypothesis import given
from hypothesis import strategies as st
from scheduler_rig import Rig

from tercet.managers.grammar import Matcher
from tercet.managers.grammar_backends import make_compiler
from tercet.managers.reasoned_grammar import AnyGrammar, ReasonedGrammar
from tercet.srt.grammar_spec import ReasoningSpan
from tercet.srt.io_struct import Resumed

THINK, UNTHINK = 1, 2
TEXT = frozenset(token for token, text in enumerate(TOKENS) if text and token not in (EOS, SPECIAL))


def test_the_grammar_begins_after_the_reasoning() -> None:
    grammar = make_compiler("llguidance", VOCABULARY).compile(spec_of(regex="a+"))
    inside = ReasonedGrammar(grammar, ReasoningSpan((THINK,), (SPECIAL,), inside=True), VOCABULARY).start()
    for token in (THINK, *b'{"a', TOKENS.index(b"abc")):
        assert allowed(inside, special=True) == TEXT | {SPECIAL}, "any text and the end, which is a special token"
        inside.accept(token)
    inside.accept(SPECIAL)
    assert allowed(inside) == {ord("a")}
    inside.accept(ord("a"))
    assert allowed(inside) == {ord("a"), EOS}

    before = ReasonedGrammar(grammar, ReasoningSpan((THINK,), (UNTHINK,)), VOCABULARY).start()
    assert allowed(before) == {ord("a"), THINK}, "the first token may begin the reasoning"
    before.accept(ord("a"))
    assert allowed(before) == {ord("a"), EOS}


def test_the_reasoning_has_a_limit() -> None:
    grammar = make_compiler("llguidance", VOCABULARY).compile(spec_of(regex="a+"))
    for most, inside in ((0, True), (2, True), (2, False)):
        span = ReasoningSpan((THINK,), (SPECIAL, UNTHINK), inside, most)
        matcher = ReasonedGrammar(grammar, span, VOCABULARY).start()
        if not inside:
            matcher.accept(THINK)  # is no token of the reasoning
        for _ in range(most):
            assert allowed(matcher, special=True) == TEXT | {SPECIAL}
            matcher.accept(ord("b"))
        assert allowed(matcher, special=True) == {SPECIAL}
        matcher.accept(SPECIAL)
        assert allowed(matcher) == {ord("a")}


def test_a_limit_alone_changes_nothing_but_the_end_of_the_reasoning() -> None:
    span = ReasoningSpan((THINK,), (UNTHINK,), inside=True, max_tokens=1)
    matcher = ReasonedGrammar(AnyGrammar(), span, VOCABULARY).start()
    bits = np.zeros((2, VOCABULARY.num_words), np.int32)

    def allows_everything() -> bool:
        """Also EOS, special tokens, and tokens without a text."""
        matcher.fill(bits, 1)
        return not bits[0].any() and bool((bits[1] == -1).all())

    assert allows_everything()
    matcher.accept(ord("b"))
    assert allowed(matcher) == {UNTHINK}
    matcher.accept(UNTHINK)
    for token in (UNTHINK, THINK, ord("b")):
        assert allows_everything()
        matcher.accept(token)


VOCAB, ENDS = 40, frozenset({7})
SPANS = [ReasoningSpan((20,), (5, 6, 13, 25, 30, 31), inside) for inside in (False, True)]
LIMITED = [ReasoningSpan((20,), (31, 6), inside, max_tokens=3) for inside in (False, True)]


# With many starts, the first token often begins the reasoning.
@given(
    st.sampled_from([*SPANS, *LIMITED, ReasoningSpan(tuple(range(20, 40)), (5, 6, 13), max_tokens=2)]),
    st.lists(st.integers(0, 1 << 16), max_size=12),
)
def test_a_fork_goes_on_with_the_same_masks_and_changes_nothing(span: ReasoningSpan, choices: list[int]) -> None:
    matcher = ReasonedGrammar(
        HashGrammar("3", hashed_vocabulary(VOCAB, ENDS)), span, hashed_vocabulary(VOCAB, ENDS)
    ).start()
    forks, masks, accepted = [matcher.fork()], [mask_after(matcher)], []
    for choice in choices:
        ways = [token for token in np.flatnonzero(masks[-1]).tolist() if token not in ENDS]
        if not ways:
            break
        accepted.append(ways[choice % len(ways)])
        matcher.accept(accepted[-1])
        forks.append(matcher.fork())
        masks.append(mask_after(matcher))
    for first, fork in enumerate(forks):
        for place in range(first, len(masks)):
            assert (mask_after(fork) == masks[place]).all()
            if place < len(accepted):
                fork.accept(accepted[place])


def mask_after(matcher: Matcher) -> np.ndarray:
    bits = np.zeros((1, hashed_vocabulary(VOCAB, ENDS).num_words), np.int32)
    matcher.fill(bits, 0)
    return np.unpackbits(bits.view(np.uint8), bitorder="little")[:VOCAB]


@pytest.mark.parametrize("grammar", [2, None])
@pytest.mark.parametrize("span", [*SPANS, *LIMITED])
def test_a_restarted_engine_goes_on_inside_and_after_the_reasoning(span: ReasoningSpan, grammar: int | None) -> None:
    if grammar is None and span.max_tokens is None:
        return  # then nothing limits the output
    prompt, most, found = [1, 2, 3], 12, set()
    regex = {} if grammar is None else {"regex": str(grammar)}
    for seed in range(2):
        want = constrained_output(prompt, seed, most, VOCAB, grammar=grammar, eos_ids=ENDS, reasoning=span)
        for num_known in range(0, len(want), 2):
            rig = Rig(vocab_size=VOCAB, eos_ids=ENDS, audit=False)
            resumed = Resumed(want[:num_known], 0, 0) if num_known else None
            rig.add("r", prompt, max_new_tokens=most, sampling_seed=seed, reasoning=span, resumed=resumed, **regex)
            rig.run()
            assert rig.heard["r"].ids == want
            found.add(num_thoughts(want[:num_known], span) is None)
    assert not span.inside or found == {True, False}
