"""Large numbers in JSON schemas: a real library takes no number outside of bounds, and no other constant."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from grammar_cases import VOCABULARY, spec_of, takes
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.managers.grammar import GrammarCompiler
from tercet.managers.grammar_backends import make_compiler, why_no_grammars
from tercet.managers.json_schema import MAX_INTEGER, is_plain, with_exact_numbers
from tercet.srt.errors import InvalidRequest

pytest.importorskip("llguidance")
has_xgrammar = pytest.mark.skipif(
    why_no_grammars("xgrammar") is not None, reason="xgrammar is an optional extra (tercet[grammar])"
)

_MAGNITUDES = st.sampled_from([0, 2**53, 2**54, 10**18, MAX_INTEGER, 2**63, 2**64, 10**20])
LARGE = st.builds(
    lambda magnitude, offset, sign: sign * (magnitude + offset),
    _MAGNITUDES,
    st.integers(-3, 3) | st.sampled_from([-1025, -1024, 1024]),
    st.sampled_from([1, -1]),
)
BOUNDS = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), LARGE | LARGE.map(float))
)


@pytest.fixture(scope="module")
def auto() -> GrammarCompiler:
    return make_compiler("auto", VOCABULARY)


def _allows(bounds: dict[str, Any], number: float) -> bool:
    return bounds.get("minimum", number) <= number <= bounds.get("maximum", number) and bounds.get(
        "exclusiveMinimum", -math.inf
    ) < number < bounds.get("exclusiveMaximum", math.inf)


@settings(max_examples=60, deadline=None)
@given(kind=st.sampled_from(["integer", "number"]), bounds=BOUNDS, others=st.lists(LARGE, max_size=4))
def test_a_grammar_takes_no_number_outside_of_its_bounds(
    auto: GrammarCompiler, kind: str, bounds: dict[str, Any], others: list[int]
) -> None:
    try:
        grammar = auto.compile(spec_of(json_schema={"type": kind, **bounds}))
    except InvalidRequest:
        return
    near = {int(bound) + offset for bound in bounds.values() for offset in (-1025, -1024, -2, -1, 0, 1, 2, 1024)}
    for number in {*near, *others}:
        value = number if kind == "integer" else float(number)  # as a program reads it
        assert _allows(bounds, value) or not takes(grammar, str(number)), number


@pytest.mark.parametrize("name", ["integer", "number"])
@pytest.mark.parametrize("size", [53, 63, 64, 128])
def test_the_bounds_of_integer_types_of_languages_can_be_used(auto: GrammarCompiler, name: str, size: int) -> None:
    signed = {"type": name, "minimum": -(2 ** (size - 1)), "maximum": 2 ** (size - 1) - 1}
    unsigned = {"type": name, "minimum": 0, "maximum": 2**size - 1}
    for schema in (signed, unsigned, {"type": name, "exclusiveMaximum": 2**size, "exclusiveMinimum": -1}):
        grammar = auto.compile(spec_of(json_schema=schema))
        assert takes(grammar, "0") and takes(grammar, str(2 ** min(size - 2, 62))), schema


def test_bounds_beyond_the_largest_are_refused_by_name() -> None:
    for bounds, reason in (
        ({"minimum": 2**63}, f"minimum must be at most {MAX_INTEGER}, got {2**63}"),
        ({"exclusiveMinimum": MAX_INTEGER}, f"exclusiveMinimum must be at most {MAX_INTEGER}, got {MAX_INTEGER}"),
        ({"maximum": -1e20}, rf"maximum must be at least -{MAX_INTEGER}, got -1e\+20"),
    ):
        with pytest.raises(ValueError, match=reason):
            with_exact_numbers({"properties": {"a": {"type": "integer", **bounds}}})


def test_a_tighter_bound_remains() -> None:
    assert with_exact_numbers({"maximum": 5, "exclusiveMaximum": 2**64}) == {"maximum": 5}
    assert with_exact_numbers({"minimum": -(2**64), "exclusiveMinimum": -(2**53)}) == {"minimum": 1 - 2**53}
    for schema in ({"maximum": True}, {"minimum": "a"}, {"exclusiveMinimum": 2.5, "maximum": 2**53 - 1}, False):
        assert with_exact_numbers(schema) == schema


@pytest.mark.parametrize("number", [2**53 + 1, 1 - 2**60, 2**63 - 1, 1 - 2**63, -(2**63), 2**64, 10**30])
@pytest.mark.parametrize("is_tag", [False, True])
def test_a_constant_that_would_be_rounded_is_refused(auto: GrammarCompiler, number: int, is_tag: bool) -> None:
    for schema in ({"enum": [1, number], "minimum": 0}, {"properties": {"a": {"const": {"b": [number]}}}}):
        form = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
        spec = spec_of(structural_tag=form) if is_tag else spec_of(json_schema=schema)
        with pytest.raises(InvalidRequest, match=f"an integer of enum or const must be one .*; got {number}"):
            auto.compile(spec)


@pytest.mark.parametrize("number", [MAX_INTEGER, -MAX_INTEGER, 2**60])
def test_other_constants_are_written_whole(auto: GrammarCompiler, number: int) -> None:
    for schema in ({"enum": [number]}, {"allOf": [{"enum": [number]}]}, {"const": [number]}):
        text = f"[{number}]" if "const" in schema else str(number)
        grammar = auto.compile(spec_of(json_schema=schema))
        assert takes(grammar, text) and not takes(grammar, text[:-1] + "9"), schema


@has_xgrammar
@pytest.mark.parametrize("number", [1 - MAX_INTEGER, 1234567890123456789, 2**53 + 1])
def test_xgrammar_writes_the_large_constants_of_plain_schemas(auto: GrammarCompiler, number: int) -> None:
    """The compiler that checks is always llguidance, and must not refuse what xgrammar will write."""
    spec = spec_of(json_schema={"enum": [number]})
    make_compiler("auto", VOCABULARY, only_check=True).compile(spec)
    grammar = auto.compile(spec)
    assert takes(grammar, str(number)) and not takes(grammar, str(number + 1))
    for backend, schema in (("llguidance", {"enum": [number]}), ("auto", {"allOf": [{"enum": [number]}]})):
        with pytest.raises(InvalidRequest, match="one that float64 holds"):
            make_compiler(backend, VOCABULARY, only_check=True).compile(spec_of(json_schema=schema))


def test_constants_beyond_64_bits_are_not_plain() -> None:
    for number, expected in ((MAX_INTEGER, True), (2**63, False), (-(2**63), False)):
        schema = {"enum": [number]}
        assert is_plain(schema, json.dumps(schema)) is expected
