"""Types of command-line arguments: numbers in a range, and latency objectives."""

from __future__ import annotations

import argparse
import math

from .metrics import SLO_NAMES


def positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def not_negative_int(text: str) -> int:
    if (value := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, got {text}")
    return value


def above_zero(text: str) -> float:
    if not 0 < (value := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0 and finite, got {text}")
    return value


def rate(text: str) -> float:
    """Of arrivals; inf: all at once."""
    return math.inf if float(text) == math.inf else above_zero(text)


def not_negative(text: str) -> float:
    if not 0 <= (value := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be finite and not negative, got {text}")
    return value


def ratio(text: str) -> float:
    if not 0 <= (value := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"must be in [0, 1], got {text}")
    return value


def slo(text: str) -> tuple[str, float]:
    name, sign, limit = text.partition(":")
    if not sign or name not in SLO_NAMES:
        raise argparse.ArgumentTypeError(f"must be NAME:MS with NAME of {', '.join(SLO_NAMES)}, got {text!r}")
    return name, above_zero(limit)
