"""The real libraries behind grammars: masks, ends, refusals and limits, on a small vocabulary."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import re
import time
from typing import Any

import numpy as np
import pytest
from grammar_cases import EOS, SPECIAL, VOCABULARY, allowed, spec_of, takes

from tercet.managers import grammar_backends
from tercet.managers.grammar import GrammarCompiler, GrammarFailed, GrammarState, compile_and_check
from tercet.managers.grammar_backends import make_compiler, why_no_grammars
from tercet.srt.errors import InvalidRequest
from tercet.srt.sampling_params import SamplingParams

pytest.importorskip("llguidance")
has_xgrammar = pytest.mark.skipif(
    why_no_grammars("xgrammar") is not None, reason="xgrammar is an optional extra (tercet[grammar])"
)

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_LETTERS = "abcdefghijklmnopqrstuvwxyz" * 2
WITH_WORDS = dataclasses.replace(
    VOCABULARY,
    tokens=[
        *VOCABULARY.tokens,
        *(prefix + _LETTERS[at : at + n].encode() for prefix in (b"", b" ") for n in range(2, 13) for at in range(26)),
    ],
)
"""A vocabulary with tokens of many letters."""


@pytest.fixture(scope="module")
def auto() -> GrammarCompiler:
    return make_compiler("auto", VOCABULARY)


@pytest.fixture(scope="module")
def exact() -> GrammarCompiler:
    return make_compiler("llguidance", VOCABULARY)


CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"regex": r"[a-c]{2}|\d+"}, ["ab", "7", "123"], ["", "a", "abc", "x"]),
    ({"regex": r"a\.b|c\+"}, ["a.b", "c+"], ["axb", "c"]),
    ({"ebnf": 'root ::= "a" item* "z"\nitem ::= [0-9] | "-"'}, ["az", "a1-2z"], ["a", "a1", "aaz"]),
    ({"ebnf": 'root ::= ("ab" | "a") ("bc" | "c")'}, ["abc", "abbc", "ac"], ["ab", "abb"]),
    (
        {"json_schema": OBJECT},
        ['{"a": 1}', '{"a": -20}'],
        ["{}", '{"a":1}', '{ "a": 1}', '{"a": 1, "b": 2}', '{"a": 1.5}'],
    ),
    ({"json_schema": {"type": "object"}}, ["{}", '{"x": {"y": [1, null]}}'], ["[]", "1"]),
    ({"json_schema": {**OBJECT, "x-guidance": {"whitespace_pattern": "z"}}}, ['{"a": 1}'], ['{"a":z1}', '{z"a": 1}']),
    ({"json_schema": {"enum": ["a", 1, None]}}, ['"a"', "1", "null"], ['"b"', "2"]),
    (
        {"json_schema": {"type": "string", "minLength": 2, "maxLength": 3}},
        ['"ab"', '"abc"', '"\u00e9\u00e9"'],
        ['"a"', '"abcd"'],
    ),
    (
        {"json_schema": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}},
        ["[true]", "[true, false]"],
        ["[]", "[true, true, true]"],
    ),
    (
        {"json_schema": {"type": "object", "required": ["z"]}},
        ['{"z": 1}', '{"z": 2, "y": 1}'],
        ["{}", '{"y": 1}'],
    ),
    (
        {"json_schema": {"allOf": [OBJECT, {"type": "object", "properties": {"b": {"const": 2}}, "required": ["b"]}]}},
        ['{"a": 1, "b": 2}'],
        ['{"a": 1}', "{}"],
    ),
    (
        {
            "json_schema": {
                "$defs": {
                    "n": {"type": "object", "properties": {"c": {"type": "array", "items": {"$ref": "#/$defs/n"}}}}
                },
                "type": "object",
                "properties": {"root": {"$ref": "#/$defs/n"}},
                "required": ["root"],
            }
        },
        ['{"root": {}}', '{"root": {"c": [{}, {"c": []}]}}'],
        ["{}", '{"root": {"d": 1}}'],
    ),
]


@pytest.mark.parametrize(("given", "good", "bad"), CASES)
@pytest.mark.parametrize("backend", ["auto", "llguidance", pytest.param("xgrammar", marks=has_xgrammar)])
def test_a_grammar_takes_what_matches_and_nothing_else(
    backend: Any, given: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    spec = spec_of(**given)
    try:
        grammar = compile_and_check(make_compiler(backend, VOCABULARY), spec, VOCABULARY.num_words)
    except InvalidRequest as error:
        assert backend == "xgrammar" and "does not enforce all of it" in error.message, error
        return
    for text in good:
        assert takes(grammar, text), text
    for text in bad:
        assert not takes(grammar, text), text


def test_a_date_is_a_day_that_exists(exact: GrammarCompiler) -> None:
    grammar = exact.compile(spec_of(json_schema={"type": "string", "format": "date", "pattern": "^[012]"}))
    for day in ("0001-01-01", "2024-02-29", "2000-02-29", "1999-12-31"):
        assert takes(grammar, f'"{day}"'), day
    for day in ("0000-01-23", "2023-02-29", "1900-02-29", "2024-02-30", "2024-04-31", "3000-01-01"):
        assert not takes(grammar, f'"{day}"'), day
    tags = {"type": "json_schema", "json_schema": {"type": "string", "format": "date-time"}}
    grammar = exact.compile(spec_of(structural_tag={"type": "structural_tag", "format": tags}))
    assert takes(grammar, '"2024-02-29T10:00:00Z"') and not takes(grammar, '"2023-02-29T10:00:00Z"')


@pytest.mark.parametrize("given", [{"regex": "a<eos>b<special>"}, {"json_schema": {"enum": ["<eos><special>"]}}])
@pytest.mark.parametrize("backend", ["llguidance", pytest.param("xgrammar", marks=has_xgrammar)])
def test_the_name_of_a_special_token_is_text(backend: Any, given: dict[str, Any]) -> None:
    """A real tokenizer makes the special token of its name."""
    names = {"<eos>": EOS, "<special>": SPECIAL}

    def encode(text: str) -> list[int]:
        parts = re.split("(<eos>|<special>)", text)
        return [token for part in parts for token in ([names[part]] if part in names else part.encode())]

    vocabulary = dataclasses.replace(VOCABULARY, encode=encode)
    text = given.get("regex") or '"<eos><special>"'
    assert takes(make_compiler(backend, vocabulary).compile(spec_of(**given)), text)


@pytest.mark.parametrize("backend", ["llguidance", pytest.param("xgrammar", marks=has_xgrammar)])
def test_a_fork_changes_nothing(backend: Any) -> None:
    matcher = make_compiler(backend, VOCABULARY).compile(spec_of(regex="ab*c")).start()
    matcher.accept(ord("a"))
    before = allowed(matcher)
    assert before == {ord("b"), ord("c")}
    fork = matcher.fork()
    fork.accept(ord("b"))
    fork.accept(ord("c"))
    assert allowed(fork) == {EOS} and allowed(matcher) == before
    with pytest.raises(GrammarFailed):
        fork.accept(ord("x"))
    with pytest.raises(GrammarFailed):
        fork.accept(ord("c"))
    assert allowed(matcher) == before
    matcher.accept(ord("c"))
    assert allowed(matcher) == {EOS}


@pytest.mark.parametrize(
    "given",
    [
        {"json_schema": {"type": "object", "properties": {"ab": {"type": "string"}, "abc": {"enum": ["ab", "abc"]}}}},
        {"regex": "(ab|abc)*[0-9]{1,3}(true|false|null)+"},
        {"ebnf": 'root ::= "<f>" item* "</f>"\nitem ::= "ab" | "abc" | root'},
    ],
    ids=["json", "regex", "ebnf"],
)
@pytest.mark.parametrize("backend", ["llguidance", pytest.param("xgrammar", marks=has_xgrammar)])
def test_drafts_have_the_masks_of_single_steps(backend: Any, given: dict[str, Any]) -> None:
    """Also after drafts that turned out to be wrong."""
    grammar = make_compiler(backend, VOCABULARY).compile(spec_of(**given))
    draw = random.Random(1)
    for _ in range(8):
        sampling = SamplingParams(min_new_tokens=draw.choice([0, 9]))
        one, other = (GrammarState(grammar, VOCABULARY.eos_ids, sampling, VOCABULARY.num_words) for _ in range(2))
        output: list[int] = []
        while len(output) < 30:
            drafts = drawn_text(grammar, output, draw)
            if draw.random() < 0.3:
                drafts[draw.randrange(len(drafts)) :] = [draw.randrange(len(VOCABULARY.tokens))]
            num_allowed = one.look_ahead(drafts, len(output))
            bits = np.empty((num_allowed + 1, VOCABULARY.num_words), np.int32)
            one.fill(bits, 0, len(output))
            one.fill_after(drafts[:num_allowed], bits, 1)
            for place in range(draw.randint(0, num_allowed) + 1):
                single = np.empty((1, VOCABULARY.num_words), np.int32)
                other.fill(single, 0, len(output))
                assert (single[0] == bits[place]).all()
                unpacked = np.unpackbits(single.view(np.uint8), bitorder="little")[: len(VOCABULARY.tokens)]
                ways = np.flatnonzero(unpacked).tolist()
                token = drafts[place] if place < num_allowed and draw.random() < 0.8 else draw.choice(ways)
                if token == EOS:
                    break
                output.append(token)
                one.accept(token)
                other.accept(token)
                if drafts[place : place + 1] != [token]:
                    break
            else:
                continue
            if token == EOS:
                break


def drawn_text(grammar: Any, output: list[int], draw: random.Random) -> list[int]:
    """Some tokens that may follow an output, and EOS if nothing else may."""
    matcher = grammar.start()
    for token in output:
        matcher.accept(token)
    found: list[int] = []
    while len(found) < 6:
        ways = allowed(matcher) - {EOS}
        if not ways:
            return found or [EOS]
        found.append(draw.choice(sorted(ways)))
        matcher.accept(found[-1])
    return found


@pytest.mark.parametrize("regex", ["[a-z]{600,}", "[a-zA-Z ,.]{600,}", "[a-z ]{600,}"])
def test_a_grammar_that_counts_letters_takes_little_work(monkeypatch: pytest.MonkeyPatch, regex: str) -> None:
    # The library counts its work. With its own sets of tokens, 40 units are not enough.
    monkeypatch.setitem(grammar_backends._LIMITS, "step_lexer_fuel", 25)
    matcher = make_compiler("llguidance", WITH_WORDS).compile(spec_of(regex=regex)).start()
    bits = np.empty((1, WITH_WORDS.num_words), np.int32)
    for byte in b"the" * 10:
        matcher.fill(bits, 0)
        matcher.accept(byte)


@pytest.mark.parametrize(
    "given",
    [
        {"regex": "[a-z]{3,12}"},
        {"regex": "[A-Za-z ]{2,40}[.!]"},
        {"json_schema": {"type": "string", "minLength": 1, "maxLength": 15}},
        {"json_schema": {"type": "object"}},
    ],
)
def test_sets_of_tokens_change_no_mask(monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]) -> None:
    with_sets = make_compiler("llguidance", WITH_WORDS).compile(spec_of(**given))
    monkeypatch.setattr(grammar_backends, "SLICES", ())
    without = make_compiler("llguidance", WITH_WORDS).compile(spec_of(**given))
    draw = random.Random(0)
    for _ in range(20):
        matchers = [with_sets.start(), without.start()]
        for _ in range(12):
            bits = np.empty((2, WITH_WORDS.num_words), np.int32)
            for line, matcher in enumerate(matchers):
                matcher.fill(bits, line)
            assert (bits[0] == bits[1]).all()
            unpacked = np.unpackbits(bits[0].view(np.uint8), bitorder="little")
            token = draw.choice(np.flatnonzero(unpacked).tolist())
            if token == EOS:
                break
            for matcher in matchers:
                matcher.accept(token)


@has_xgrammar
def test_auto_gives_xgrammar_plain_schemas_alone(auto: GrammarCompiler) -> None:
    assert type(auto.compile(spec_of(json_schema=OBJECT))).__name__ == "_XGrammar"
    for other in (
        spec_of(json_schema={"type": "string", "maxLength": 5}),
        spec_of(regex="a"),
        spec_of(ebnf="root ::= [a]"),
    ):
        assert type(auto.compile(other)).__name__ == "_LLGrammar"


@has_xgrammar
def test_xgrammar_takes_json_mode_and_tags_with_schemas_that_it_enforces() -> None:
    compiler = make_compiler("xgrammar", VOCABULARY)
    mode = compiler.compile(spec_of(json_schema={"type": "object", "title": "any"}))
    assert takes(mode, '{"a": [1, {}]}') and not takes(mode, "[]")
    assert takes(compiler.compile(spec_of(json_schema={})), "[1]")
    older = {"structures": [{"begin": "<a>", "schema": OBJECT, "end": "</a>"}], "triggers": ["<a>"]}
    tags = compiler.compile(spec_of(structural_tag=older))
    assert takes(tags, 'x<a>{"a": 1}</a>') and not takes(tags, '<a>{"b": 1}</a>')
    for schema in (
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        {"type": "string", "maxLength": 2},
    ):
        inner = {
            "type": "tag",
            "begin": "<a>",
            "content": {"type": "json_schema", "json_schema": schema},
            "end": "</a>",
        }
        form = {"type": "sequence", "elements": [{"type": "optional", "content": inner}, {"type": "any_text"}]}
        with pytest.raises(InvalidRequest, match="does not enforce all of it"):
            compiler.compile(spec_of(structural_tag={"type": "structural_tag", "format": form}))
    with pytest.raises(InvalidRequest, match="unknown field"):
        compiler.compile(spec_of(structural_tag={"format": {"type": "any_text", "minimum": 1}}))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"regex": "("}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"ebnf": "root ::= missing"}, "Rule 'missing' not found"),
        ({"ebnf": "x ::= [a]"}, ""),
        ({"ebnf": ""}, ""),
        ({"json_schema": "{"}, "Expecting property name"),
        ({"json_schema": "[]"}, "must be an object, got list"),
        ({"json_schema": "false"}, "allows no value"),
        ({"json_schema": {"$ref": "#"}}, "no text can follow"),
        ({"json_schema": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "no text can follow"),
        ({"json_schema": {"type": "frog"}}, ""),
        ({"json_schema": {"not": {"type": "string"}}}, 'Unimplemented keys: ["not"]'),
        ({"json_schema": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json_schema": {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}}, "uniqueItems"),
        ({"json_schema": {"oneOf": [{}, {"type": "null"}]}}, "oneOf constraints are not supported"),
        ({"json_schema": {"type": "string", "format": "nonsense"}}, "Unknown format"),
        ({"json_schema": {"$ref": "https://example.org/schema"}}, ""),
        ({"json_schema": '{"items":' * 500 + "{}" + "}" * 500}, ""),
        ({"ebnf": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000}, ""),
        ({"regex": "(" * 5000 + "a" + ")" * 5000}, ""),
        ({"structural_tag": "{}"}, "exactly one of"),
    ],
)
def test_a_bad_grammar_is_refused_by_name(exact: GrammarCompiler, given: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        compile_and_check(exact, spec_of(**given), VOCABULARY.num_words)
    (kind,) = given
    assert caught.value.param == kind and says in caught.value.message
    assert caught.value.message.startswith(f"{kind} cannot be used: ") and "\n" not in caught.value.message
    assert "coerce_one_of" not in caught.value.message  # no client can set this option of the library


@pytest.mark.parametrize(
    ("form", "says"),
    [
        (
            {"type": "json_schema", "json_schema": {"type": "frog"}},
            'Invalid type: frog, in the schema {"type": "frog"}',
        ),
        ({"type": "or", "elements": [{"type": "regex", "pattern": "("}]}, "error: unclosed group"),
    ],
)
def test_an_error_in_a_tag_quotes_the_request_and_not_its_translation(
    exact: GrammarCompiler, form: Any, says: str
) -> None:
    good = {"type": "json_schema", "json_schema": {"type": "object"}}
    with pytest.raises(InvalidRequest) as caught:
        exact.compile(spec_of(structural_tag={"format": {"type": "sequence", "elements": [good, form]}}))
    assert caught.value.message.endswith(says)
    assert "start:" not in caught.value.message and " at " not in caught.value.message


@pytest.mark.parametrize(
    "given",
    [
        {"regex": "(a{1,1000}){1,1000}"},
        {"regex": "((a|b|ab)*c?){50}[^x]*"},
        {"regex": "[ab]*a[ab]{18}"},
        {"regex": "(.*a){20}"},
        {"ebnf": 'root ::= root root | "a" | ""'},
        {"ebnf": 'root ::= s\ns ::= s s | s s s | "a"'},
        {"ebnf": "\n".join(["root ::= a0", *(f"a{i} ::= a{i + 1} a{i + 1}" for i in range(40)), 'a40 ::= "x"'])},
        {"json_schema": {"type": "string", "pattern": "^(a{1,1000}){1,1000}$"}},
        {"json_schema": {"type": "string", "maxLength": 10**9}},
        {"json_schema": {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(3000)}}},
    ],
)
def test_a_grammar_that_explodes_ends_or_stays_within_its_limits(exact: GrammarCompiler, given: dict[str, Any]) -> None:
    """Without limits, some of these take minutes for a compilation or a step, and the test runs out of time."""
    draw = random.Random(0)
    with contextlib.suppress(InvalidRequest, GrammarFailed):
        matcher = compile_and_check(exact, spec_of(**given), VOCABULARY.num_words).start()
        for _ in range(100):
            ids = sorted(allowed(matcher) - {EOS})
            if not ids:
                break
            matcher.accept(draw.choice(ids))


def test_an_ambiguous_grammar_reaches_a_limit(exact: GrammarCompiler) -> None:
    """Each of its steps takes longer than the one before, so without limits it would stop all requests for minutes."""
    grammar = compile_and_check(exact, spec_of(ebnf='root ::= s\ns ::= s s | s s s | "a"'), VOCABULARY.num_words)
    state = GrammarState(
        grammar, VOCABULARY.eos_ids, SamplingParams(), VOCABULARY.num_words, clock=lambda: 10 * time.thread_time()
    )
    bits = np.zeros((1, VOCABULARY.num_words), np.int32)
    with pytest.raises(GrammarFailed, match=r"too much time|max is"):
        for num_tokens in range(1000):
            state.fill(bits, 0, num_tokens)
            state.accept(ord("a"))


def test_without_a_library_a_grammar_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_no_grammars("auto") is None
    assert "--grammar-backend none" in (why_no_grammars("none") or "")
    monkeypatch.setattr(grammar_backends.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'tercet[grammar]'" in (why_no_grammars("xgrammar") or "")
    with pytest.raises(InvalidRequest, match="needs the package llguidance"):
        make_compiler("auto", VOCABULARY)
