"""Request bodies: one declaration per field that decodes it, refuses what is not there, and writes the documentation.

A body is a `Wire` struct. Every field says what it does (`doc`) or, where its feature is not there, which values ask
for what happens anyway and are therefore accepted (`only`); any other value of such a field, and any field that is not
declared, is refused by name. `null` means absent for every field.
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

_SHOWN_CHARS = 80
_MESSAGE_CHARS = 300
_PATH = re.compile(r" - at `\$\.?([^`]*)`\Z")
_UNKNOWN = re.compile(r"\AObject contains unknown field `(.*)`\Z", re.DOTALL)
_MISSING = re.compile(r"\AObject missing required field `(.*)`\Z")


def doc(description: str, *, max_length: int | None = None) -> Meta:
    """The description of a field that is honoured."""
    return Meta(description=description, max_length=max_length)


def only(why: str, *allowed: Any) -> Meta:
    """A field of which only `allowed` (and null) is accepted; `why` says what is missing."""
    values = [None, *allowed]
    written = " or ".join(msgspec.json.encode(one).decode() for one in values)
    # `written` also keeps apart what Python takes for equal: typing caches Annotated types by their arguments.
    return Meta(description=why, extra={"allowed": allowed, "written": written}, extra_json_schema={"enum": values})


class Wire(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Base of all request bodies and of the objects in them."""

    def __post_init__(self) -> None:
        for name, allowed, meta in _restricted(type(self)):
            value = getattr(self, name)
            if value is not None and not any(_same(value, one) for one in allowed):
                accepted = (meta.extra or {})["written"]
                raise UnsupportedField(
                    f"{name} is not supported: {meta.description}; accepted: {accepted}; got {shown(value)}", param=name
                )


@dataclass(frozen=True)
class FieldDoc:
    """A field as the documentation shows it. `allowed`: the only values accepted, as JSON; None: honoured in full."""

    name: str
    type: str
    required: bool
    description: str
    allowed: str | None


def fields_of(cls: type[Wire]) -> list[FieldDoc]:
    """Fields of a body: the required ones, the honoured ones, then those of which only some values are accepted."""
    info = msgspec.inspect.type_info(cls)
    assert isinstance(info, msgspec.inspect.StructType)
    metas = _metas(cls)
    docs = []
    for field in info.fields:
        meta = metas.get(field.name)
        assert meta is not None and meta.description, f"{cls.__name__}.{field.name} has no description"
        allowed = (meta.extra or {}).get("written")
        docs.append(FieldDoc(field.encode_name, _type_text(field.type), field.required, meta.description, allowed))
    return sorted(docs, key=lambda one: (not one.required, one.allowed is not None))


class BodyCodec(Generic[T]):
    """Decodes JSON bodies of one type; every failure is an InvalidRequest with the field's path in `param`."""

    def __init__(self, cls: type[T]) -> None:
        self.type = cls
        self._decoder = msgspec.json.Decoder(cls)

    def decode(self, body: bytes | bytearray) -> T:
        """Makes an object of everything in the body: `json_limits.check_limits` comes first where a client wrote it."""
        try:
            return self._decoder.decode(body)
        except msgspec.ValidationError as error:
            raise self._explain(error) from None
        except UnicodeDecodeError:
            raise InvalidRequest("the body is not valid UTF-8") from None
        except msgspec.DecodeError as error:
            reason = str(error).removeprefix("JSON is malformed: ")
            raise InvalidRequest(f"the body is not valid JSON: {reason}") from None
        except RecursionError:
            raise InvalidRequest("the body is nested too deeply") from None

    def convert(self, value: Any) -> T:
        """The same from Python values, as JSON would decode to. They may be of any size."""
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
            hint = _hint(name, _struct_at(self.type, path))
            return InvalidRequest(f"unknown field {shown(name)}{place}{hint}", param=_join(path, name[:_SHOWN_CHARS]))
        missing = _MISSING.match(text)
        if missing is not None:
            name = _join(path, missing.group(1)) or ""
            return InvalidRequest(f"{name} is required", param=name)
        lowered = (text[:1].lower() + text[1:_MESSAGE_CHARS]).replace("`", "")  # it may quote what was sent
        return InvalidRequest(f"{path or 'the body'}: {lowered}", param=path or None)


def shown(value: object) -> str:
    """A client's value in a message: short, on one line."""
    text = ascii(value) if isinstance(value, str) else repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."


def _join(path: str, name: str | None) -> str | None:
    return f"{path}.{name}" if path and name else name or path or None


def _same(value: Any, allowed: Any) -> bool:
    return type(value) is type(allowed) and bool(value == allowed)  # 0 is not False here


@functools.cache
def _metas(cls: type[Wire]) -> dict[str, Meta]:
    metas = {}
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        for note in getattr(hint, "__metadata__", ()):
            if isinstance(note, Meta) and note.description:
                metas[name] = note
    return metas


@functools.cache
def _restricted(cls: type[Wire]) -> tuple[tuple[str, tuple[Any, ...], Meta], ...]:
    """Name and accepted values of every field declared by `only`."""
    found = []
    for name, meta in _metas(cls).items():
        if meta.extra is not None and "allowed" in meta.extra:
            found.append((name, meta.extra["allowed"], meta))
    return tuple(found)


def _structs(info: msgspec.inspect.Type) -> Iterator[msgspec.inspect.StructType]:
    """The struct types that a value of this type can be, looking through null, lists and unions."""
    if isinstance(info, msgspec.inspect.Metadata):
        yield from _structs(info.type)
    elif isinstance(info, msgspec.inspect.UnionType):
        for one in info.types:
            yield from _structs(one)
    elif isinstance(info, msgspec.inspect.ListType):
        yield from _structs(info.item_type)
    elif isinstance(info, msgspec.inspect.StructType):
        yield info


def structs_in(cls: type[Wire]) -> list[type[Wire]]:
    """The types of objects directly in the fields of a body."""
    info = msgspec.inspect.type_info(cls)
    assert isinstance(info, msgspec.inspect.StructType)
    inner = [one.cls for field in info.fields for one in _structs(field.type)]
    return [cls for cls in inner if issubclass(cls, Wire)]


def _struct_at(cls: type, path: str) -> msgspec.inspect.StructType | None:
    here = next(_structs(msgspec.inspect.type_info(cls)), None)
    for part in filter(None, path.split(".")):
        name = part.split("[")[0]
        field = next((one for one in here.fields if one.encode_name == name), None) if here else None
        here = next(_structs(field.type), None) if field is not None else here if not name else None
    return here


def _hint(name: str, struct: msgspec.inspect.StructType | None) -> str:
    """Known fields that resemble an unknown one, and where a field of that name does exist."""
    if struct is None:
        return ""
    near: list[str] = []
    for field in struct.fields:
        if any(one.encode_name == name for inner in _structs(field.type) for one in inner.fields):
            near.append(f"{field.encode_name}.{name}")
    near += difflib.get_close_matches(name[:_SHOWN_CHARS], [one.encode_name for one in struct.fields])
    return f"; did you mean {' or '.join(near)}?" if near else ""


_PLAIN: dict[type, str] = {
    msgspec.inspect.StrType: "string",
    msgspec.inspect.IntType: "int",
    msgspec.inspect.FloatType: "number",
    msgspec.inspect.BoolType: "bool",
    msgspec.inspect.AnyType: "any",
}


def _type_text(info: msgspec.inspect.Type) -> str:
    """A type as the documentation writes it; null is left out, as every field may be null."""
    if isinstance(info, msgspec.inspect.Metadata):
        return _type_text(info.type)
    if isinstance(info, msgspec.inspect.UnionType):
        return " or ".join(_type_text(one) for one in info.types if not isinstance(one, msgspec.inspect.NoneType))
    if isinstance(info, msgspec.inspect.ListType):
        inner = _type_text(info.item_type)
        return f"list of ({inner})" if " or " in inner else f"list of {inner}"
    if isinstance(info, msgspec.inspect.DictType):
        return f"object of {_type_text(info.value_type)}"
    if isinstance(info, msgspec.inspect.StructType):
        return info.cls.__name__
    if isinstance(info, msgspec.inspect.LiteralType):
        return " or ".join(f'"{one}"' for one in info.values)
    return _PLAIN[type(info)]
