from __future__ import annotations

import re

import pytest

from tercet.srt.errors import InvalidRequest
from tercet.srt.sampling_params import SamplingParams
from tercet.srt.text.stop_regex import MAX_STATES, compile_stop_regex


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(", "unterminated subpattern"),
        ("a**", "multiple repeat"),
        ("a*", "matches the empty text"),
        (r"\b", "matches the empty text"),
        ("^(?:)+", "matches the empty text"),
        ("END$", "end of the text"),
        (r"END\Z", "end of the text"),
        ("a(?=b)", "look-ahead"),
        ("(?<!a)b", "look-behind"),
        (r"(a)\1", "back-reference"),
        ("(?>a)b", "atomic group"),
        ("a++b", "possessive repeat"),
        ("(a)?(?(1)b|c)", "conditional group"),
        ("(?:a{1000}){1000}", f"{MAX_STATES} states"),
        ("(?:" * 35 + "a" + "){2}" * 35, f"{MAX_STATES} states"),
        ("(?:(?:){65535}){65535}", "matches the empty text"),
        ("a{99999999999}", "too large"),
    ],
)
def test_patterns_that_are_refused(pattern, reason):
    with pytest.raises(InvalidRequest, match=reason) as error:
        SamplingParams(stop_regex=pattern)
    assert error.value.param == "stop_regex"


def test_limits_of_a_request():
    assert SamplingParams(stop_regex=["a"] * 32).stop_patterns == ["a"] * 32
    assert SamplingParams(stop_regex="").stop_patterns == SamplingParams(stop_regex=[]).stop_patterns == ()
    for patterns, allowed in (
        (["a"] * 33, "at most 32 patterns"),
        ("é" * 129, "at most 256 bytes each"),
        (["a{600}", "b{600}"], f"at most {MAX_STATES} states together"),
    ):
        with pytest.raises(InvalidRequest, match=allowed):
            SamplingParams(stop_regex=patterns)


def test_a_pattern_is_compiled_once():
    assert compile_stop_regex("a|b") is compile_stop_regex("a|b")


@pytest.mark.parametrize("flags", ["", "(?a)", "(?i)", "(?ai)"])
@pytest.mark.parametrize(
    "item",
    [
        "a",
        "K",
        "ß",
        "µ",
        "[a-k]",
        "[A-K]",
        "[^a]",
        "[^a-k ]",
        "[^A-Kß]",
        r"[\Wa]",
        r"[^\Wa]",
        r"[^\da-c]",
        "[Α-Ω]",
        r"\s",
        r"\S",
        "ﬆ",
        "\u0390",
    ],
)
def test_a_character_is_tested_as_by_re(item, flags):
    regex, python = compile_stop_regex(flags + item), re.compile(flags + item)
    ((passes, _),) = regex.steps.values()
    characters = [*map(chr, range(0x180)), *"ſẞμΜωΩΩK\u0345ϑﬁﬅﬆ\u0390\u1fd3"]
    assert [one for one in characters if passes(one)] == [one for one in characters if python.fullmatch(one)]
