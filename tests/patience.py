"""How long tests wait for something that must happen. It is long, so that no busy machine decides a test."""

from __future__ import annotations

import os

PATIENCE_S = float(os.environ.get("TERCET_PATIENCE_S", "120"))
"""Below the limit of pytest-timeout, so that a test that waits in vain says what it waited for. Emulators need more."""
