"""Values of a Python caller that JSON cannot represent are refused with an error of Tercet's own."""

from __future__ import annotations

import sys
from typing import Any

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
