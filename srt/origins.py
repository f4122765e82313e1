"""The setting --allowed-origins: the sites whose web pages may use the server."""

from __future__ import annotations

import re
from typing import Any

import msgspec

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")


def parse_origins(given: str | None) -> tuple[str, ...]:
    """Origins in a list with commas, or in a JSON list as vLLM's flag has it. Raises ValueError."""
    text = (given or "").strip()
    listed: Any = text.split(",")
    if text.startswith("["):
        try:
            listed = msgspec.json.decode(text, type=list[str])
        except msgspec.DecodeError as error:
            raise ValueError(f"--allowed-origins must be a JSON list of origins, got {given!r}: {error}") from error
    origins = tuple(origin.strip().lower().rstrip("/") for origin in listed if origin.strip())
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ValueError(f"--allowed-origins must be * or origins such as https://ui.example:8080, got {origin!r}")
    return origins
