"""The logging of all processes: to stderr, one line per entry, with time, role and level."""

from __future__ import annotations

import logging
import sys


def configure(role: str, level: str) -> None:
    """Set up the `tercet` logger of this process. A second call replaces the first."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"[%(asctime)s {role}] %(levelname)s %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("tercet")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
