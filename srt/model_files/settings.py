"""Access to the settings in a model's files. Each access checks the value, because the files are not trusted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ModelNotSupported

_MAX_INTEGER = 2**31 - 1
_MAX_QUOTE_CHARS = 100


class Settings:
    """The settings of one file, JSON or GGUF. A value of null counts as absent.

    All methods raise ValueError that names the file, the key, the given value and the allowed ones.
    """

    def __init__(self, source: str, values: Mapping[str, Any], prefix: str = "") -> None:
        """
        Args:
            source: the file's name in errors
            prefix: the text before a key in errors
        """
        self.source = source
        self._values = values
        self._prefix = prefix
        self._used: set[str] = set()

    def __contains__(self, key: object) -> bool:
        """Whether the file has the key, even with a value of null."""
        return key in self._values

    def get(self, key: str) -> Any:
        """A value of any type; None if it is absent."""
        self._used.add(key)
        return self._values.get(key)

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = _MAX_INTEGER) -> int:
        """An integer from `minimum` to `maximum`. Without a default the key is required."""
        value = self._get_or(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise self.refusal(key, f"an integer from {minimum} to {maximum}", value)
        return value

    def number(self, key: str, default: float | None = None, *, above: float = 0.0) -> float:
        """A finite number above `above`. Without a default the key is required."""
        value = self._get_or(key, default)
        number = _finite(value)
        if number is None or number <= above:
            allowed = "a finite number" if above == -math.inf else f"a finite number above {above:g}"
            raise self.refusal(key, allowed, value)
        return number

    def optional_number(self, key: str, *, above: float = 0.0) -> float | None:
        return None if self.get(key) is None else self.number(key, above=above)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._get_or(key, default)
        if not isinstance(value, bool):
            raise self.refusal(key, "true or false", value)
        return value

    def text(self, key: str) -> str | None:
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise self.refusal(key, "a string", value)
        return value

    def texts(self, key: str) -> list[str] | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.refusal(key, "a list of strings", value)
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of integers of at least 0; () if it is absent."""
        value = self.get(key)
        items = [] if value is None else value
        if not isinstance(items, list) or any(isinstance(x, bool) or not isinstance(x, int) or x < 0 for x in items):
            raise self.refusal(key, "a list of integers of at least 0", value)
        return tuple(items)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """A list of `count` finite numbers above 0. The key is required."""
        value = self.get(key)
        numbers = [_finite(item) for item in value] if isinstance(value, list) else []
        found = tuple(number for number in numbers if number is not None and number > 0)
        if len(numbers) != count or len(found) != count:
            raise self.refusal(key, f"a list of {count} finite numbers above 0", value)
        return found

    def token_ids(self, key: str) -> tuple[int, ...]:
        """The token ids of a value that is one id or a list of ids; () if it is absent."""
        value = self.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(
            isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= _MAX_INTEGER for token in ids
        ):
            raise self.refusal(key, f"a token id from 0 to {_MAX_INTEGER}, or a list of token ids", value)
        return tuple(ids)

    def nested(self, key: str) -> Settings | None:
        """The settings of a nested object; None if it is absent."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.refusal(key, "an object", value)
        return Settings(self.source, value, f"{self._prefix}{key}.")

    def with_defaults(self, values: Mapping[str, Any]) -> Settings:
        """The settings, with these values for keys that the file does not have."""
        return Settings(self.source, {**values, **self._values}, self._prefix)

    def with_values(self, values: Mapping[str, Any]) -> Settings:
        """The settings, with these values instead of the file's."""
        return Settings(self.source, {**self._values, **values}, self._prefix)

    def unused(self) -> dict[str, Any]:
        """The values that have not been accessed, without nulls."""
        return {key: value for key, value in self._values.items() if key not in self._used and value is not None}

    def refusal(self, key: str, allowed: str, given: object) -> ValueError:
        return ValueError(f"{self.source}: {self._prefix}{key} must be {allowed}, got {quote(given)}")

    def unsupported(self, message: str) -> ModelNotSupported:
        return ModelNotSupported(f"{self.source}: {message}")

    def unsupported_value(self, key: str, allowed: str, given: object) -> ModelNotSupported:
        return ModelNotSupported(str(self.refusal(key, allowed, given)))

    def _get_or(self, key: str, default: object) -> Any:
        value = self.get(key)
        return default if value is None else value


def quote(value: object) -> str:
    """A value as errors show it. Long values, such as vocabularies, are cut."""
    text = repr(value)
    return text if len(text) <= _MAX_QUOTE_CHARS else f"{text[: _MAX_QUOTE_CHARS - 3]}..."


def some_of(names: Sequence[str], most: int) -> str:
    """The first names as errors list them, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _finite(value: object) -> float | None:
    """The value as a float; None if it is not a finite number within the range of floats."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
