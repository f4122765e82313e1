"""Bodies and answers: the decoder, the checks and the documentation of a field come from one declaration.

A body is a `Wire` struct. `doc` declares a field that is honoured. `only` declares a field of an unimplemented feature,
which accepts only its no-op values. Other values of such a field, and undeclared fields, are refused by name. `null`
means absent in every field.

An answer is a plain struct, whose fields are also described with `doc`.
"""

from __future__ import annotations

import difflib
import functools
import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta

from ..errors import InvalidRequest, UnsupportedField

T = TypeVar("T")

Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]

TEXT_ONLY = "prompts and answers are text only"
"""Why fields of images, audio and video are refused."""

_SHOWN_CHARS = 80
_PROMPT_FIELDS = ("prompt", "text", "messages", "input")
"""The field of the prompt, which differs from endpoint to endpoint."""
_MESSAGE_CHARS = 300
_PATH = re.compile(r" - at `\$\.?([^`]*)`\Z")
_UNKNOWN = re.compile(r"\AObject contains unknown field `(.*)`\Z", re.DOTALL)
_TRUNCATED = "Input data was truncated"
_BLANKS = b" " * len(r"\u0000")
_MISSING = re.compile(r"\AObject missing required field `(.*)`\Z")


def doc(description: str) -> Meta:
    """Declares a field of a body that is honoured, or a field of an answer."""
    return Meta(description=description)


def only(why: str, *allowed: Any) -> Meta:
    """Declares a field that accepts only null and the `allowed` values. `why` says what is not implemented."""
    values = [None, *allowed]
    written = " or ".join(msgspec.json.encode(value).decode() for value in values)
    # typing caches Annotated types by their arguments, and False == 0. `written` keeps such types apart.
    return Meta(description=why, extra={"allowed": allowed, "written": written}, extra_json_schema={"enum": values})


class Wire(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Base class of all request bodies and of the objects in them."""

    def __post_init__(self) -> None:
        for name, allowed, meta in _restricted_fields(type(self)):
            value = getattr(self, name)
            if value is not None and not any(_same(value, choice) for choice in allowed):
                accepted = (meta.extra or {})["written"]
                raise UnsupportedField(
                    f"{name} is not supported: {meta.description}; accepted: {accepted}; got {shown(value)}", param=name
                )


@dataclass(frozen=True)
class FieldDoc:
    """One field in the documentation. `allowed`: the only accepted values, as JSON; None for an honoured field."""

    name: str
    type: str
    required: bool
    """In an answer: always there."""
    description: str
    allowed: str | None


def fields_of(cls: type[Wire]) -> list[FieldDoc]:
    """The fields of a body: first the required ones, then the honoured ones, then those with restricted values."""
    docs = []
    for field, meta in _described(cls):
        allowed = (meta.extra or {}).get("written")
        text = _type_text(_without_null(field.type))
        docs.append(FieldDoc(field.encode_name, text, field.required, str(meta.description), allowed))
    return sorted(docs, key=lambda doc: (not doc.required, doc.allowed is not None))


def answer_fields_of(cls: type[msgspec.Struct]) -> list[FieldDoc]:
    """The fields of an answer, or of an object in one, in the order in which they are sent."""
    info = _struct_type(cls)
    docs = []
    if info.tag_field is not None:
        docs.append(FieldDoc(info.tag_field, f'"{info.tag}"', True, "Tells the kinds of this object apart", None))
    for field, meta in _described(cls):
        # Only a field with the value UNSET is left out. A field with another default is always sent.
        always = field.required or field.default is not msgspec.NODEFAULT
        docs.append(FieldDoc(field.encode_name, _type_text(field.type), always, str(meta.description), None))
    return docs


def _described(cls: type[msgspec.Struct]) -> Iterator[tuple[msgspec.inspect.Field, Meta]]:
    metas = _metas(cls)
    for field in _struct_type(cls).fields:
        meta = metas.get(field.name)
        assert meta is not None, f"{cls.__name__}.{field.name} has no description"
        yield field, meta


def _struct_type(cls: type[msgspec.Struct]) -> msgspec.inspect.StructType:
    info = msgspec.inspect.type_info(cls)
    assert isinstance(info, msgspec.inspect.StructType)
    return info


class BodyCodec(Generic[T]):
    """Decodes JSON bodies of one type. Every failure raises InvalidRequest with the field's path in `param`."""

    def __init__(self, cls: type[T]) -> None:
        self.type = cls
        self._decoder = msgspec.json.Decoder(cls)

    def decode(self, body: bytes | bytearray) -> T:
        """Decodes JSON. Call `json_limits.check_limits` before this for a client's body: it bounds time and memory."""
        try:
            return self._decoder.decode(body)
        except msgspec.ValidationError as error:
            raise self._explain(error) from None
        except UnicodeDecodeError:
            raise InvalidRequest("the body is not valid UTF-8") from None
        except msgspec.DecodeError as error:
            if not body.strip():
                raise InvalidRequest("the body is empty; a JSON object is required") from None
            raise InvalidRequest(f"the body is not valid JSON: {self._reason(body, error)}") from None
        except RecursionError:
            raise InvalidRequest("the body is nested too deeply") from None

    def _reason(self, body: bytes | bytearray, error: msgspec.DecodeError) -> str:
        """Why a body is no JSON.

        Near the end of a body, the decoder takes half of a surrogate pair for a truncated body. Blanks show the cause.
        """
        if str(error) == _TRUNCATED:
            try:
                self._decoder.decode(body + _BLANKS)
            except msgspec.DecodeError as later:
                error = later if "surrogate" in str(later) else error
        return str(error).removeprefix("JSON is malformed: ")

    def convert(self, value: Any) -> T:
        """Makes a body from plain Python values, with the same checks. They may be of any size."""
        try:
            return msgspec.convert(value, self.type)
        except msgspec.ValidationError as error:
            raise self._explain(error) from None

    def _explain(self, error: msgspec.ValidationError) -> InvalidRequest:
        text = str(error)
        path = ""
        where = _PATH.search(text)
        if where is not None:
            path, text = where.group(1).replace("[...]", ""), text[: where.start()]
        cause = error.__cause__
        if isinstance(cause, InvalidRequest):
            message = f"{cause.message} (in {path})" if path else cause.message
            return type(cause)(message, param=_join(path, cause.param))
        unknown = _UNKNOWN.match(text)
        if unknown is not None:
            name = unknown.group(1)
            place = f" in {path}" if path else ""
            hint = _hint(name, next(iter(_structs_at(self.type, path)), None))
            return InvalidRequest(f"unknown field {shown(name)}{place}{hint}", param=_join(path, name[:_SHOWN_CHARS]))
        missing = _MISSING.match(text)
        if missing is not None:
            name = _join(path, missing.group(1)) or ""
            return InvalidRequest(f"{name} is required", param=name)
        lowered = (text[:1].lower() + text[1:_MESSAGE_CHARS]).replace("`", "")  # it may quote what was sent
        choices = _choices_at(self.type, path)
        allowed = f"; allowed: {', '.join(choices)}" if choices else ""
        return InvalidRequest(f"{path or 'the body'}: {lowered}{allowed}", param=path or None)


def shown(value: object) -> str:
    """A client's value for an error message: on one line, and cut if it is long."""
    try:
        text = ascii(value)
    except RecursionError:  # the thread that decodes a large body has room for more levels than the event loop
        return "a value that is nested too deeply"
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."


def are_equal(one: object, other: object, param: str) -> bool:
    """Whether two of a client's values are equal. Raises InvalidRequest if they have too many levels to compare."""
    try:
        return one == other
    except RecursionError:
        raise InvalidRequest(f"{param} is nested too deeply", param=param) from None


def _join(path: str, name: str | None) -> str | None:
    return f"{path}.{name}" if path and name else name or path or None


def _same(value: Any, allowed: Any) -> bool:
    return type(value) is type(allowed) and bool(value == allowed)  # 0 is not False here


@functools.cache
def _metas(cls: type[msgspec.Struct]) -> dict[str, Meta]:
    metas = {}
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        for note in getattr(hint, "__metadata__", ()):
            if isinstance(note, Meta) and note.description:
                metas[name] = note
    return metas


@functools.cache
def _restricted_fields(cls: type[Wire]) -> tuple[tuple[str, tuple[Any, ...], Meta], ...]:
    """Name, accepted values and declaration of every field that `only` declares."""
    found = []
    for name, meta in _metas(cls).items():
        if meta.extra is not None and "allowed" in meta.extra:
            found.append((name, meta.extra["allowed"], meta))
    return tuple(found)


def _alternatives(info: msgspec.inspect.Type) -> Iterator[msgspec.inspect.Type]:
    """The types in a type: the type itself, the members of a union, the items of a list."""
    if isinstance(info, msgspec.inspect.Metadata):
        yield from _alternatives(info.type)
    elif isinstance(info, msgspec.inspect.UnionType):
        for member in info.types:
            yield from _alternatives(member)
    elif isinstance(info, msgspec.inspect.ListType):
        yield from _alternatives(info.item_type)
    else:
        yield info


def _structs(info: msgspec.inspect.Type) -> Iterator[msgspec.inspect.StructType]:
    return (one for one in _alternatives(info) if isinstance(one, msgspec.inspect.StructType))


def structs_of(type_: Any) -> list[type[msgspec.Struct]]:
    """The object types of a value of this type, or of the elements of a list."""
    return [one.cls for one in _structs(msgspec.inspect.type_info(type_))]


def structs_in(cls: type[msgspec.Struct]) -> list[type[msgspec.Struct]]:
    """The object types in the fields of a body or an answer itself."""
    return [one.cls for field in _struct_type(cls).fields for one in _structs(field.type)]


def _structs_at(cls: type, path: str) -> list[msgspec.inspect.StructType]:
    here = list(_structs(msgspec.inspect.type_info(cls)))
    for part in filter(None, path.split(".")):
        name = part.split("[")[0]
        here = [inner for one in here for field in _fields(one, name) for inner in _structs(field.type)]
    return here


def _fields(struct: msgspec.inspect.StructType, name: str) -> list[msgspec.inspect.Field]:
    return [field for field in struct.fields if field.encode_name == name]


def _choices_at(cls: type, path: str) -> list[str]:
    """The texts that are allowed at a path. Empty if several objects at the path have the field."""
    parent, _, name = path.rpartition(".")
    structs = _structs_at(cls, parent)
    tags = [str(one.tag) for one in structs if one.tag_field == name]
    fields = [field for one in structs for field in _fields(one, name.split("[")[0])]
    return tags or ([str(value) for value in _literals(fields[0].type)] if len(fields) == 1 else [])


def _literals(info: msgspec.inspect.Type) -> Iterator[Any]:
    for one in _alternatives(info):
        if isinstance(one, msgspec.inspect.LiteralType):
            yield from one.values


def _hint(name: str, struct: msgspec.inspect.StructType | None) -> str:
    """A hint for an unknown field: known fields with a similar name, and nested fields of the same name."""
    if struct is None:
        return ""
    near: list[str] = []
    for field in struct.fields:
        if any(inner_field.encode_name == name for inner in _structs(field.type) for inner_field in inner.fields):
            near.append(f"{field.encode_name}.{name}")
    refused = {other for other, _, _ in _restricted_fields(struct.cls)}
    known = [field.encode_name for field in struct.fields if field.name not in refused]
    near += difflib.get_close_matches(name[:_SHOWN_CHARS], known)
    if not near and name in _PROMPT_FIELDS:
        near = [field for field in known if field in _PROMPT_FIELDS]
    return f"; did you mean {' or '.join(near)}?" if near else ""


_TYPE_NAMES: dict[type, str] = {
    msgspec.inspect.StrType: "string",
    msgspec.inspect.IntType: "int",
    msgspec.inspect.FloatType: "number",
    msgspec.inspect.BoolType: "bool",
    msgspec.inspect.AnyType: "any",
    msgspec.inspect.NoneType: "null",
}


def _without_null(info: msgspec.inspect.Type) -> msgspec.inspect.Type:
    """A body's type without null, because every field of a body may be null."""
    if isinstance(info, msgspec.inspect.Metadata):
        return _without_null(info.type)
    if isinstance(info, msgspec.inspect.UnionType):
        kept = tuple(one for one in info.types if not isinstance(one, msgspec.inspect.NoneType))
        return msgspec.inspect.UnionType(kept)
    return info


def _type_text(info: msgspec.inspect.Type) -> str:
    """A type in the documentation's notation."""
    if isinstance(info, msgspec.inspect.Metadata):
        return _type_text(info.type)
    if isinstance(info, msgspec.inspect.UnionType):
        return " or ".join(_type_text(one) for one in info.types)
    if isinstance(info, msgspec.inspect.ListType):
        inner = _type_text(info.item_type)
        return f"list of ({inner})" if " or " in inner else f"list of {inner}"
    if isinstance(info, msgspec.inspect.DictType):
        return f"object of {_type_text(info.value_type)}"
    if isinstance(info, msgspec.inspect.StructType):
        return info.cls.__name__
    if isinstance(info, msgspec.inspect.LiteralType):
        return " or ".join(msgspec.json.encode(value).decode() for value in info.values)
    return _TYPE_NAMES[type(info)]
