"""Values of a Python caller that JSON cannot represent are refused with an error of Tercet's own."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from tercet.srt.errors import InvalidRequest
from tercet.srt.plain_values import check_in_json, plain_value


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"a": [value]}
    return value


def test_a_value_of_any_depth_is_taken_or_refused() -> None:
    outcomes = set()
    for depth in range(0, sys.getrecursionlimit(), 3):
        try:
            check_in_json(plain_value(nested(depth)), "json_schema")
            outcomes.add("taken")
        except InvalidRequest as error:
            assert "nested too deeply" in error.message
            outcomes.add("refused")
    assert outcomes == {"taken", "refused"}


def test_a_value_that_is_too_deep_for_a_check_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="json_schema is nested too deeply"):
        check_in_json(nested(sys.getrecursionlimit()), "json_schema")


def test_a_value_that_contains_itself_is_refused() -> None:
    value: dict[str, Any] = {}
    value["a"] = value
    with pytest.raises(InvalidRequest, match="contains itself"):
        plain_value(value)


class OwnText(str):
    def __str__(self) -> str:
        return "shown"


@pytest.mark.parametrize("text", [np.str_("ab"), OwnText("ab")])
def test_a_text_of_a_class_of_its_own_is_one_text(text: str) -> None:
    plain = plain_value({"text": text, "stop": [text]})
    assert plain == {"text": "ab", "stop": ["ab"]}
    assert type(plain["text"]) is str


def test_bytes_of_a_class_of_their_own_are_no_token_ids() -> None:
    with pytest.raises(InvalidRequest, match="must be a text, got bytes"):
        check_in_json(plain_value(np.bytes_(b"ab")), "text")


def test_a_name_that_python_does_not_write_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="values that JSON can represent"):
        plain_value({"logit_bias": {10**5000: 1}})
