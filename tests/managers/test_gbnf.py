"""GBNF that the real library behind grammars reads as llama.cpp does."""

from __future__ import annotations

import pytest
from grammar_cases import VOCABULARY, spec_of, takes
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.managers import gbnf
from tercet.managers.grammar import Grammar, compile_and_check
from tercet.managers.grammar_backends import make_compiler
from tercet.srt.errors import InvalidRequest

pytest.importorskip("llguidance")
COMPILER = make_compiler("llguidance", VOCABULARY)
NAMED = {"\n": r"\n", "\r": r"\r", "\t": r"\t", "\\": r"\\", '"': r"\"", "[": r"\[", "]": r"\]"}
TRICKY = 'az09&~-^#/|.*(){}$ \t\n\\"[]\x00\x7f\u0080\u00e9\u0141\u2028\u4e2d\U0001f600'
chars = st.sampled_from(TRICKY) | st.characters(exclude_categories=["Cs"])


def grammar_of(ebnf: str) -> Grammar:
    return compile_and_check(COMPILER, spec_of(ebnf=ebnf), VOCABULARY.num_words)


@st.composite
def spelled(draw: st.DrawFn, char: str, signs: str = "") -> str:
    """One of the ways to write a character in GBNF. `signs`: characters that only an escape stands for."""
    ways = [f"\\U{ord(char):08x}"]
    if ord(char) < 0x10000:
        ways.append(f"\\u{ord(char):04X}")
    if ord(char) < 0x100:
        ways.append(f"\\x{ord(char):02x}")
    if char in NAMED:
        ways.append(NAMED[char])
    if char not in signs + '\\"[]':
        ways.append(char)
    return draw(st.sampled_from(ways))


@settings(max_examples=50)
@given(st.data(), st.text(chars, min_size=1, max_size=5))
def test_a_string_is_its_characters(data: st.DataObject, text: str) -> None:
    grammar = grammar_of('root ::= "' + "".join(data.draw(spelled(char)) for char in text) + '"')
    assert takes(grammar, text) and not takes(grammar, text + text) and not takes(grammar, text[:-1])


@settings(max_examples=50)
@given(st.data(), st.lists(chars | st.tuples(chars, chars), min_size=1, max_size=4), st.booleans(), chars)
def test_a_class_is_its_characters_and_ranges(
    data: st.DataObject, items: list[str | tuple[str, str]], is_negated: bool, other: str
) -> None:
    ranges = [(min(item), max(item)) for item in items]
    parts = ["-".join(data.draw(spelled(end, "-^")) for end in sorted(item)) for item in items]
    grammar = grammar_of(f"root ::= [{'^' * is_negated}{''.join(parts)}]")
    for char in {other, *TRICKY[:12], *(end for ends in ranges for end in ends)}:
        is_in = any(first <= char <= last for first, last in ranges)
        assert takes(grammar, char) == (is_in != is_negated), char


@pytest.mark.parametrize(
    ("ebnf", "good", "bad"),
    [
        ("root ::= [a-z&&b]", ["a", "b", "&"], ["", "A"]),
        ("root ::= [a-]", ["a", "-"], ["b"]),
        ("root ::= [--/]", ["-", ".", "/"], [","]),
        ("root ::= [+--]", ["+", ",", "-"], ["."]),
        ('root ::= a--b # a comment: " [ \\u00e9\na--b ::= [^&~]', ["a", "-"], ["&", "~"]),
    ],
)
def test_signs_have_no_meaning_of_another_notation(ebnf: str, good: list[str], bad: list[str]) -> None:
    grammar = grammar_of(ebnf)
    assert [text for text in good if not takes(grammar, text)] == []
    assert [text for text in bad if takes(grammar, text)] == []


@pytest.mark.parametrize("escape", [r"\ud800", r"\U00110000", r"\u00e", r"\q", r"\x4"])
@pytest.mark.parametrize("around", ['"{}"', "[{}]"])
def test_what_is_no_character_is_refused(escape: str, around: str) -> None:
    with pytest.raises(InvalidRequest, match="ebnf cannot be used"):
        grammar_of("root ::= " + around.format(escape))


@pytest.mark.parametrize("text", ["", '"', "[", '"\\', "[\\", "[]", "[^]", '""', "root ::= x\nx ::= 'a'", "#"])
def test_what_has_nothing_to_misread_stays(text: str) -> None:
    assert gbnf.plain(text) == text
