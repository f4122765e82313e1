"""The options that the scripts of docs/endurance.md share."""

from __future__ import annotations

import argparse
from pathlib import Path

from tercet.benchmarks.argument_types import positive


def report_file(text: str) -> Path:
    """The path of a report. A wrong one is found before the run, not after it."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"must name a file in a folder that exists, got {text!r}")
    return path


def parser_of(script: str, description: str | None, *, model: str, clients: int) -> argparse.ArgumentParser:
    """A parser with the common options. `model`, `clients`: their defaults."""
    parser = argparse.ArgumentParser(prog=f"scripts/{script}", description=description)
    parser.add_argument("--clients", type=positive, default=clients, help=f"number of clients (default {clients})")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same run (default 0)")
    parser.add_argument("--model", default=model, help=f"default, toy, or a path (default: {model})")
    parser.add_argument("--report", type=report_file, help="write the report to this JSON file")
    return parser
