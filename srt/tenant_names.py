"""The names of tenants, as the engine, its settings and its metrics have them."""

from __future__ import annotations

import hashlib

MAX_NAME_CHARS = 64
OTHER_TENANTS = "other"
"""The label of all tenants without metrics of their own. No tenant has this name."""


def tenant_name(given: str) -> str:
    """The name, or a digest of it if it is too long for a label of a metric, cannot be printed, or is OTHER_TENANTS."""
    if len(given) <= MAX_NAME_CHARS and given.isprintable() and given != OTHER_TENANTS:
        return given
    return hashlib.sha256(given.encode("utf-8", "surrogatepass")).hexdigest()[:16]
