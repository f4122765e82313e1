from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tercet.srt.entrypoints import json_limits
from tercet.srt.entrypoints.json_limits import MAX_CONTAINERS, MAX_STRINGS, MAX_VALUES, check_limits
from tercet.srt.errors import InvalidRequest

TEXTS = st.text(st.sampled_from('a"\\[{,}]:é🙂\n'), max_size=6)
JSON = st.recursive(
    st.one_of(TEXTS, st.integers(), st.none()),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=20,
)


def counts(value: Any) -> tuple[int, int, int]:
    """Strings, containers and commas of a value's JSON."""
    if isinstance(value, str):
        return 1, 0, 0
    if not isinstance(value, list | dict):
        return 0, 0, 0
    inner = [counts(one) for one in (value.values() if isinstance(value, dict) else value)]
    names = len(value) if isinstance(value, dict) else 0
    strings, containers, commas = (sum(column) for column in zip(*inner, strict=True)) if inner else (0, 0, 0)
    return strings + names, containers + 1, commas + max(len(value) - 1, 0)


@given(value=JSON, slice_bytes=st.integers(2, 9), ascii_only=st.booleans())
def test_the_count_is_exact_wherever_a_slice_ends(value: Any, slice_bytes: int, ascii_only: bool) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    exact = dict(zip(("MAX_STRINGS", "MAX_CONTAINERS", "MAX_VALUES"), counts(value), strict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_limits, "_SLICE_BYTES", slice_bytes)
        for name, count in exact.items():
            patch.setattr(json_limits, name, count)
        check_limits(body)
        for name, count in exact.items():
            if count:
                patch.setattr(json_limits, name, count - 1)
                with pytest.raises(InvalidRequest, match=f"at most {count - 1} "):
                    check_limits(body)
                patch.setattr(json_limits, name, count)


@given(body=st.text(st.sampled_from('a"\\[{,'), max_size=12).map(str.encode), slice_bytes=st.integers(2, 9))
@example(b'"\\', 2)
def test_a_body_that_is_no_json_is_counted_to_its_end_in_any_slices(body: bytes, slice_bytes: int) -> None:
    """A backslash at the end escapes nothing."""

    def found(slice_bytes: int) -> dict[str, int]:
        counts: dict[str, int] = {}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(json_limits, "_SLICE_BYTES", slice_bytes)
            patch.setattr(json_limits, "_check", lambda what, count, limit: counts.update({what: count}))
            check_limits(body)
        return counts

    assert found(slice_bytes) == found(100)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"a": [' + b"[]," * MAX_CONTAINERS + b"[]]}", f"at most {MAX_CONTAINERS} lists and objects"),
        (b'{"a": ' * (MAX_CONTAINERS + 1), f"at most {MAX_CONTAINERS} lists and objects"),
        (b'"[[[",' + b"[" * (MAX_CONTAINERS + 1) + b'"' + b'\\"' * 10, f"at most {MAX_CONTAINERS} lists and objects"),
        (b"[" + b'"a",' * MAX_STRINGS + b'"a"]', f"at most {MAX_STRINGS} strings"),
        (b"{" + b'"a":1,' * MAX_STRINGS + b'"a":1}', f"at most {MAX_STRINGS} strings"),
        (b"[" + b"1," * (MAX_VALUES + 1) + b"1]", f"at most {MAX_VALUES} values"),
    ],
    ids=["lists", "nested", "behind a text", "texts", "names", "numbers"],
)
def test_what_would_fill_the_memory_is_refused(body: bytes, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        check_limits(body)


def test_large_bodies_that_somebody_needs_pass() -> None:
    check_limits(b'{"input_ids": [' + b"128000," * 1_000_000 + b"1]}")
    check_limits(b'{"text": "' + b'[{\\"\\\\, ' * 2_000_000 + b'"}')
    message = b'{"role": "user", "content": [{"type": "text", "text": "a, b"}]},'
    check_limits(b'{"messages": [' + message * 10_000 + b"{}]}")


@pytest.mark.parametrize("filling", [b"\\", b'\\"', b'\\\\"'])
def test_backslashes_take_linear_time(filling: bytes) -> None:
    """Whole slices of backslashes, and quotes behind them: minutes if each were looked at again."""
    body = b'"' + filling * (8_000_000 // len(filling))
    try:
        check_limits(body)
    except InvalidRequest:
        assert filling == b'\\\\"'
