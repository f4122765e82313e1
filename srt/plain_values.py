"""Python values of a caller as values that JSON and messages can represent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from .errors import InvalidRequest

T = TypeVar("T")

_BYTES = (bytes, bytearray, memoryview)


def plain_value(value: Any) -> Any:
    """The value in builtin types. Arrays and sequences become lists, mappings dicts, and numbers and texts of numpy and
    torch become Python's.

    Bytes stay bytes. Raises InvalidRequest for other values that JSON cannot represent.
    """
    try:
        # msgspec would write bytes in base64, so the request would have another text than the caller's.
        return msgspec.to_builtins(value, str_keys=True, enc_hook=_from_array, builtin_types=_BYTES)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"a request must consist of values that JSON can represent: {error}") from error
    except RecursionError:
        raise InvalidRequest("the request is nested too deeply, or contains itself") from None


def is_utf8(text: str) -> bool:
    """Whether UTF-8 can represent a text. It cannot represent surrogates. Python has one for each byte of a path or an
    argument that is not valid UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def as_utf8(text: str) -> str:
    """The text with escapes for surrogates, as in a path that is not valid UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def reason_of(error: Exception) -> str:
    """What an error says, for a message. It may have names of a file or of JSON that no message can have."""
    return as_utf8(str(error) or type(error).__name__)


def check_in_json(value: Any, path: str) -> None:
    """Raises InvalidRequest for values that JSON cannot represent: numbers that are not finite, text that is not
    Unicode, bytes. Also for integers of more than 64 bits, and for a value that is nested too deeply."""
    try:
        _check_in_json(value, path)
    except RecursionError:
        raise InvalidRequest(f"{path} is nested too deeply", param=path) from None


def _check_in_json(value: Any, path: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest(f"{path} must be a finite number, got {value}", param=path)
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise InvalidRequest(f"{path} must be a number of at most 64 bits", param=path)
    if isinstance(value, _BYTES):
        raise InvalidRequest(f"{path} must be a text, got {type(value).__name__}", param=path)
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"{path} must be valid Unicode: {error}", param=path) from error
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_in_json(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _check_in_json(item, f"{path}[{i}]")


def converted(kind: type[T], values: Mapping[str, Any]) -> T:
    """A struct of these plain values. Raises InvalidRequest for a value of a wrong type or out of range."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, InvalidRequest):
            raise error.__cause__ from None
        text, _, path = str(error).replace("`", "").partition(" - at $.")
        raise InvalidRequest(f"{path}: {text}", param=path) from error


def _from_array(value: Any) -> Any:
    """A numpy array, numpy number, torch tensor, or other object with `tolist`, as plain Python values. Also a
    sequence, such as a range, as a list, and a mapping, such as a UserDict, as a dict. A text or bytes of a class of
    their own, such as numpy's, are no sequence."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    tolist = getattr(value, "tolist", None)
    if tolist is None:
        raise TypeError(f"{type(value).__name__} is not supported")
    return tolist()
