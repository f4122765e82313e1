"""The limits of llguidance's lexer, which all requests of a compiled grammar share."""

from __future__ import annotations

import functools
import random

import pytest
from grammar_cases import EOS, VOCABULARY, allowed, spec_of

from tercet.managers import grammar_backends
from tercet.managers.grammar import Grammar, GrammarFailed
from tercet.managers.grammar_backends import make_compiler
from tercet.managers.grammar_loader import GrammarLoader

pytest.importorskip("llguidance")


def tokens_until_failure(grammar: Grammar, seed: int) -> int:
    matcher, draw, output = grammar.start(), random.Random(seed), []
    with pytest.raises(GrammarFailed, match="lexer"):
        while len(output) < 1000:
            output.append(draw.choice(sorted(allowed(matcher) - {EOS})))
            matcher.accept(output[-1])
    return len(output)


def test_a_request_that_reaches_the_limits_does_not_end_later_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(grammar_backends._LIMITS, "max_lexer_states", 200)
    loader = GrammarLoader(lambda: VOCABULARY, functools.partial(make_compiler, "llguidance"), in_thread=False)
    spec = spec_of(regex="[a-z]{1,50}( [0-9]{2,30}|.{0,200}bar)")
    grammar = loader.load(spec)
    assert loader.load(spec) is grammar and not grammar.is_full
    num_tokens = tokens_until_failure(grammar, 1)
    assert num_tokens > 10
    again = loader.load(spec)
    assert again is not grammar and loader.load(spec) is again
    assert tokens_until_failure(again, 1) == num_tokens, "it has as much room as the first one"
