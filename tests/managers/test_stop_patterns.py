from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.managers.stop_patterns import MAX_HELD_CHARS, StopPatternMatcher
from tercet.srt.text.stop_regex import MAX_STATES, compile_stop_regex

atoms = st.sampled_from(["a", "b", "[ab]", "[^a]", ".", r"\w", r"\s", "(?i:A)", "(?i:[^b1])", r"\d"])
patterns = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{2,}", "*?", "+?"])).map(
            lambda two: f"(?:{two[0]}){two[1]}"
        ),
    ),
    max_leaves=5,
).filter(lambda pattern: re.fullmatch(pattern, "") is None)


def reference(text: str, stops: list[str], regexes: list[str]) -> tuple[int, int] | None:
    """Where the first match begins and ends, by Python's own engine."""
    every = [re.compile(pattern) for pattern in (*map(re.escape, stops), *regexes)]
    for end in range(1, len(text) + 1):
        for start in range(end):
            if any(one.fullmatch(text, start, end) for one in every):
                return start, end
    return None


@settings(max_examples=300)
@given(
    pieces=st.lists(st.text("abB1 \n", max_size=6), max_size=6),
    stops=st.lists(st.text("ab ", min_size=1, max_size=4), max_size=2),
    regexes=st.lists(patterns, min_size=1, max_size=2),
    keep=st.booleans(),
)
def test_any_pieces_give_what_re_finds_in_the_whole_text(pieces, stops, regexes, keep):
    matcher = StopPatternMatcher(stops, regexes, keep=keep)
    text = "".join(pieces)
    shown = ""
    for piece in pieces:
        shown += matcher.push(piece)
        assert text.startswith(shown)
    found = reference(text, stops, regexes)
    if found is None:
        assert matcher.matched is None and shown + matcher.release() == text
    else:
        start, end = found
        assert matcher.matched == text[start:end] and shown == text[: end if keep else start]
        assert matcher.push("ab") == matcher.release() == ""


@pytest.mark.parametrize(
    ("pattern", "text", "matched", "shown"),
    [
        (r"\bfoo\b", "a foobar foo.", "foo", "a foobar "),
        (r"\bfoo\b", "a foobar foo", None, "a foobar foo"),
        (r"o\B", "foo fox", "o", "f"),
        ("^foo", "a\nfoo", None, "a\nfoo"),
        ("(?m)^foo", "a\nfoo", "foo", "a\n"),
        ("(?m)foo$", "food foo\n", "foo", "food "),
        (r"\n\d+\.", "a\n1b\n22.", "\n22.", "a\n1b"),
        ("(?is)user.*:", "a USER\nx: b", "USER\nx:", "a "),
        ("(?i)[^a-z ]", "Hello Bob!", "!", "Hello Bob"),
        ("(?a)é|x", "éx", "é", ""),
        (r"(?a)\w+", "éx", "x", "é"),
        (r"\w", "-é", "é", "-"),
        ("Answer: [A-D]", "Answer: E Answer: B", "Answer: B", "Answer: E "),
    ],
)
@pytest.mark.parametrize("keep", [False, True])
def test_places_and_flags(pattern, text, matched, shown, keep):
    matcher = StopPatternMatcher([], [pattern], keep=keep)
    got = "".join(map(matcher.push, text)) + matcher.release()
    assert matcher.matched == matched
    assert got == shown + (matched or "" if keep else "")


def test_only_the_possible_beginning_of_a_match_is_held():
    matcher = StopPatternMatcher([], [r"\n\d+\."])
    assert matcher.push("a\n") == "a"
    assert matcher.push("12") == ""
    assert matcher.push("x") == "\n12x"


def test_of_a_long_match_the_beginning_is_shown():
    matcher = StopPatternMatcher([], ["<.*>"])
    assert matcher.push("a<" + "x" * 1000) == "a<" + "x" * (1000 - MAX_HELD_CHARS)
    assert matcher.push(">b") == "x"
    assert matcher.matched == "x" * (MAX_HELD_CHARS - 1) + ">"


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|a)*b", "(a|aa)+b", "(?:a?){200}a{200}b", ".*.*.*.*.*b"])
def test_no_pattern_takes_more_than_linear_work(pattern, monkeypatch):
    """Patterns that a backtracking engine may need for ever for."""
    regex = compile_stop_regex(pattern)
    looks = 0

    def counted(test):
        def look(character):
            nonlocal looks
            looks += 1
            return test(character)

        return look

    steps = {state: (counted(test), then) for state, (test, then) in regex.steps.items()}
    monkeypatch.setattr(regex, "steps", steps)
    matcher = StopPatternMatcher([], [pattern])
    matcher.push("a" * 250)
    assert matcher.matched is None and 250 <= looks <= 250 * MAX_STATES
    assert matcher.push("ab") == "" and matcher.matched is not None
