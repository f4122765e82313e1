"""The names of tenants, as the engine, its settings and its metrics have them."""

from __future__ import annotations

import hashlib

MAX_NAME_CHARS = 64


def tenant_name(given: str) -> str:
    """The name, or a digest of it if it is too long for a label of a metric or cannot be printed."""
    if len(given) <= MAX_NAME_CHARS and given.isprintable():
        return given
    return hashlib.sha256(given.encode("utf-8", "surrogatepass")).hexdigest()[:16]
