"""The logging of all processes: to stderr, one line per entry, as text or as JSON. So are the warnings of libraries."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

import msgspec

from .plain_values import as_utf8

_encode = msgspec.json.Encoder(enc_hook=str).encode


def configure(role: str, level: str, log_format: str = "text") -> None:
    """Set up the loggers of this process. A second call replaces the first. `log_format`: text or json."""
    handler = _Handler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonFormatter(role))
        if isinstance(sys.stderr, io.TextIOWrapper):
            sys.stderr.reconfigure(encoding="utf-8")  # JSON has no other encoding
    else:
        handler.setFormatter(logging.Formatter(f"[%(asctime)s {role}] %(levelname)s %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("tercet")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
    root = logging.getLogger()
    root.handlers[:] = [*(one for one in root.handlers if not isinstance(one, _Handler)), handler]
    logging.captureWarnings(True)


class _Handler(logging.StreamHandler[TextIO]):
    """The handler of a process."""


def event(logger: logging.Logger, level: int, name: str, fields: Mapping[str, Any]) -> None:
    """Log an event with named values. As text, the values are JSON, so a value cannot forge a line of the log."""
    if logger.isEnabledFor(level):
        logger.log(level, "%s %s", name, _Pairs(fields), extra={"event_name": name, "fields": fields})


class _Pairs:
    """Values as `name=value name=value`. They are written only if a text handler shows them."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields

    def __str__(self) -> str:
        return " ".join(f"{name}={_encode(value).decode()}" for name, value in self._fields.items())


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, role, logger, message; the values of an event beside them."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        line = {
            **fields,
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "role": self._role,
            "logger": record.name,
            "message": record.event_name if hasattr(record, "event_name") else as_utf8(record.getMessage()),
        }
        if record.exc_info:
            line["exception"] = as_utf8(self.formatException(record.exc_info))
        return _encode(line).decode()
