from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest

from tercet.srt.entrypoints.wire import BodyCodec, Int32, Wire, doc, fields_of, only, shown
from tercet.srt.errors import InvalidRequest, UnsupportedField


class Inner(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    depth: Annotated[Int32 | None, doc("How deep")] = None
    magic: Annotated[Any, only("no magic here", False)] = None


class Body(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A body."""

    zero: Annotated[Any, only("only nought", 0)] = None
    false: Annotated[Any, only("only nought", False)] = None
    things: Annotated[Any, only("no things", [], {"a": 1})] = None
    text: Annotated[str, doc("The text")]
    inner: Annotated[Inner | list[Inner] | None, doc("More")] = None
    counts: Annotated[dict[str, Int32] | None, doc("How many")] = None


CODEC = BodyCodec(Body)


def failure(body: str | bytes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        CODEC.decode(body.encode() if isinstance(body, str) else body)
    return caught.value


def test_null_means_absent() -> None:
    assert CODEC.decode(b'{"text": "a", "zero": null, "inner": null}') == Body(text="a")


@pytest.mark.parametrize("extra", ['"zero": 0', '"false": false', '"things": []', '"things": {"a": 1}'])
def test_a_value_that_asks_for_what_happens_anyway_is_accepted(extra: str) -> None:
    CODEC.decode(b'{"text": "a", ' + extra.encode() + b"}")


@pytest.mark.parametrize(
    ("extra", "name", "accepted"),
    [
        ('"zero": false', "zero", "null or 0"),
        ('"zero": 0.0', "zero", "null or 0"),
        ('"false": 0', "false", "null or false"),
        ('"things": [1]', "things", 'null or [] or {"a":1}'),
    ],
)
def test_any_other_value_is_refused_by_name(extra: str, name: str, accepted: str) -> None:
    error = failure('{"text": "a", ' + extra + "}")
    assert isinstance(error, UnsupportedField) and error.code == "unsupported_field" and error.status == 400
    assert error.param == name
    assert name in error.message and f"accepted: {accepted};" in error.message
    assert "(in " not in error.message


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ('{"text": "a", "txet": 1}', "txet", "unknown field 'txet'; did you mean text?"),
        ('{"text": "a", "depth": 1}', "depth", "did you mean inner.depth?"),
        ('{"text": "a", "qqqq": 1}', "qqqq", "unknown field 'qqqq'"),
        ('{"text": "a", "inner": {"dept": 1}}', "inner.dept", "unknown field 'dept' in inner; did you mean depth?"),
        ('{"text": "a", "inner": [{}, {"dept": 1}]}', "inner[1].dept", "in inner[1]; did you mean depth?"),
        ('{"text": "a", "inner": {"magic": 1}}', "inner.magic", "got 1 (in inner)"),
        ('{"text": "a", "inner": {"depth": "1"}}', "inner.depth", "inner.depth: expected int | null, got str"),
        ('{"text": "a", "inner": {"depth": 4294967296}}', "inner.depth", "expected int <= 2147483647"),
        ('{"text": "a", "inner": {"depth": -2147483649}}', "inner.depth", "expected int >= -2147483648"),
        ('{"text": "a", "counts": {"x": "1"}}', "counts", "counts: expected int, got str"),
        ('{"inner": {}}', "text", "text is required"),
        ('{"text": 1}', "text", "text: expected str, got int"),
        ("[]", None, "the body: expected object, got array"),
        ("null", None, "the body: expected object, got null"),
        ('{"text": "a\\n`b`": 1}', None, "not valid JSON"),
        ("", None, "the body is empty; a JSON object is required"),
        (" \n", None, "the body is empty"),
        ("{", None, "not valid JSON: Input data was truncated"),
        ('{"text": "a"} x', None, "not valid JSON: trailing characters"),
        ('{"text": NaN}', None, "not valid JSON"),
        ('{"text": "\\ud800 abcdef"}', None, "not valid JSON: unexpected end of escaped utf-16 surrogate pair"),
        ('{"text": "\\ud800"}', None, "not valid JSON: unexpected end of escaped utf-16 surrogate pair"),
        ('{"text": "\\ud8', None, "not valid JSON: Input data was truncated"),
        (b'{"text": "\xff"}', None, "not valid UTF-8"),
        ('{"text": "a", "things": ' + "[" * 50_000 + "]" * 50_000 + "}", None, "nested too deeply"),
        ('{"text": "a", "zero": 1e999}', "zero", "number out of range"),
    ],
)
def test_what_is_wrong_is_said(body: str | bytes, param: str | None, says: str) -> None:
    error = failure(body)
    assert says in error.message
    assert error.param == param
    assert error.status == 400


def test_a_name_like_no_other_gets_no_hint() -> None:
    assert failure('{"text": "a", "qqqq": 1}').message == "unknown field 'qqqq'"
    assert failure('{"text": "a", "zeros": 1}').message == "unknown field 'zeros'", "zero would be refused, too"


def test_a_hostile_name_is_shown_short_and_on_one_line() -> None:
    error = failure('{"text": "a", "' + "\\n`x`" * 1000 + '": 1}')
    assert len(error.message) < 300 and "\n" not in error.message
    assert error.param is not None and len(error.param) <= 80


def test_shown() -> None:
    assert shown("hé\n") == "'h\\xe9\\n'"
    assert shown(["é\u2028"]) == "['\\xe9\\u2028']"
    assert len(shown("x" * 10_000)) < 100
    assert shown("x" * 78) == f"'{'x' * 78}'" and shown("x" * 79) == f"'{'x' * 79}..."


def test_fields_are_documented_required_ones_first_and_restricted_ones_last() -> None:
    fields = fields_of(Body)
    assert [one.name for one in fields] == ["text", "inner", "counts", "zero", "false", "things"]
    assert fields[0].required and not fields[1].required
    assert [one.type for one in fields[:2]] == ["string", "Inner or list of Inner"]
    assert [one.allowed for one in fields] == [None, None, None, "null or 0", "null or false", 'null or [] or {"a":1}']


def test_a_field_without_a_description_is_a_mistake() -> None:
    class Careless(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
        field: int = 0

    with pytest.raises(AssertionError, match=r"Careless\.field has no description"):
        fields_of(Careless)


def test_a_long_value_is_quoted_in_part() -> None:
    class Chosen(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
        side: Annotated[Literal["left", "right"], doc("Which")]

    with pytest.raises(InvalidRequest, match="side: invalid enum value 'xxx") as caught:
        BodyCodec(Chosen).decode(b'{"side": "' + b"x" * 100_000 + b'"}')
    assert len(caught.value.message) < 400


class Side(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    side: Annotated[Literal["left", "right"] | None, doc("Which")] = None


class Circle(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="circle"):
    fill: Annotated[Literal["red"] | None, doc("Its colour")] = None


class Square(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="square"):
    fill: Annotated[Literal["blue"] | None, doc("Its colour")] = None


class Drawing(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    sides: Annotated[list[Side] | None, doc("Several")] = None
    shape: Annotated[Circle | Square | None, doc("One")] = None


class Album(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    pages: Annotated[list[Drawing] | None, doc("Several")] = None
    marks: Annotated[list[Literal["new", "old"]] | None, doc("Several")] = None


@pytest.mark.parametrize(
    ("body", "path", "says"),
    [
        (b'{"sides": [{}, {"side": "up"}]}', "sides[1].side", "value 'up'; allowed: left, right"),
        (b'{"sides": [{}, {"side": 1}]}', "sides[1].side", "expected str | null, got int; allowed: left, right"),
        (b'{"shape": {"kind": "up"}}', "shape.kind", "value 'up'; allowed: circle, square"),
        # The path does not tell which of the two objects it is.
        (b'{"shape": {"kind": "square", "fill": "up"}}', "shape.fill", "value 'up'"),
    ],
)
def test_an_error_about_a_choice_lists_what_is_allowed(body: bytes, path: str, says: str) -> None:
    for cls, given, prefix in ((Drawing, body, ""), (Album, b'{"pages": [{}, ' + body + b"]}", "pages[1].")):
        with pytest.raises(InvalidRequest) as caught:
            BodyCodec(cls).decode(given)
        assert caught.value.message.endswith(f" {says}")
        assert caught.value.param == prefix + path


def test_an_error_about_one_of_several_choices_lists_what_is_allowed() -> None:
    with pytest.raises(InvalidRequest, match="value 'up'; allowed: new, old") as caught:
        BodyCodec(Album).decode(b'{"marks": ["new", "up"]}')
    assert caught.value.param == "marks[1]"


class Pair(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    def __post_init__(self) -> None:
        raise InvalidRequest("too much")


class Pairs(Wire, kw_only=True, frozen=True, forbid_unknown_fields=True):
    pairs: Annotated[list[Pair], doc("Several")]


@pytest.mark.parametrize(
    ("cls", "body", "param", "message"),
    [(Pair, b"{}", None, "too much"), (Pairs, b'{"pairs": [{}]}', "pairs[0]", "too much (in pairs[0])")],
)
def test_an_error_about_a_whole_object_has_its_path(cls: type, body: bytes, param: str | None, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        BodyCodec(cls).decode(body)
    assert (caught.value.param, caught.value.message) == (param, message)
