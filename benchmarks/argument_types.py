"""The parser of a benchmark, and types of its arguments: numbers in a range, lengths, files, latency objectives."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Collection
from pathlib import Path

from .metrics import SLO_NAMES
from .offline_workloads import Span


def benchmark_parser(
    name: str, description: str | None, usage: str = "[options]", *, allow_abbrev: bool = True
) -> argparse.ArgumentParser:
    """The parser of `tercet bench NAME`. `description`: it keeps its line breaks."""
    return argparse.ArgumentParser(
        prog=f"tercet bench {name}",
        usage=f"%(prog)s {usage}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=allow_abbrev,
    )


def positive(text: str) -> int:
    if (value := _integer(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def numbers(text: str) -> list[int]:
    """ "1,32" -> [1, 32]; "" -> []"""
    try:
        values = [int(word) for word in text.split(",") if word]
    except ValueError:
        values = [0]
    if any(value < 1 for value in values):
        raise argparse.ArgumentTypeError(f"must be N or A,B,... with numbers of at least 1, got {text!r}")
    return values


def lengths(text: str) -> Span:
    try:
        return Span.parse(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be N or A-B with 1 <= A <= B, got {text!r}") from None


def check_file(flag: str, path: str | Path | None) -> None:
    """Raises ValueError if no file can be written to this path. So this is found before the run, not after it.

    An empty path, or None, is not checked.
    """
    if not path:
        return
    try:
        is_file = not Path(path).is_dir() and Path(path).parent.is_dir()
        exists = Path(path).exists()
    except OSError as error:  # a name that no file can have
        raise ValueError(f"{flag}: {error}") from error
    if not is_file:
        raise ValueError(f"{flag} must name a file in a folder that exists, got {str(path)!r}")
    if not os.access(path if exists else Path(path).parent, os.W_OK):
        raise ValueError(f"{flag} must name a file that can be written, got {str(path)!r}")


def names(flag: str, given: str, known: Collection[str]) -> list[str]:
    """The names of a list with commas. Raises ValueError."""
    found = given.split(",")
    for name in found:
        if name not in known:
            raise ValueError(f"{flag}: {name!r} is none of {', '.join(known)}")
    return found


def not_negative_int(text: str) -> int:
    if (value := _integer(text)) < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, got {text}")
    return value


def above_zero(text: str) -> float:
    if not 0 < (value := _number(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0 and finite, got {text}")
    return value


def rate(text: str) -> float:
    """Of arrivals; inf: all at once."""
    return math.inf if _number(text) == math.inf else above_zero(text)


def not_negative(text: str) -> float:
    if not 0 <= (value := _number(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be finite and not negative, got {text}")
    return value


def ratio(text: str) -> float:
    if not 0 <= (value := _number(text)) <= 1:
        raise argparse.ArgumentTypeError(f"must be in [0, 1], got {text}")
    return value


def slo(text: str) -> tuple[str, float]:
    name, sign, limit = text.partition(":")
    if not sign or name not in SLO_NAMES:
        raise argparse.ArgumentTypeError(f"must be NAME:MS with NAME of {', '.join(SLO_NAMES)}, got {text!r}")
    return name, above_zero(limit)


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None
