"""How long tests wait for something that must happen. It is long, so that no busy machine decides a test."""

from __future__ import annotations

PATIENCE_S = 120.0
"""Below the limit of pytest-timeout, so that a test that waits in vain says what it waited for."""
