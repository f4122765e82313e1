"""Logging for every process: one line each, with time, role and level, to stderr."""

from __future__ import annotations

import logging
import sys

LEVELS = ("debug", "info", "warning", "error")


def configure(role: str, level: str) -> None:
    """Sets up the `tercet` logger of this process; a second call replaces the first."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"[%(asctime)s {role}] %(levelname)s %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("tercet")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
