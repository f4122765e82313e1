"""The result of a benchmark: tables for people and one JSON line for programs, optionally written to files.

The files are `<date>-<hardware>-<name>.md` and `.json`; those of a second run of a day end in `-2`. They
include the machine, the versions, the commit and the command.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .provenance import command_line, provenance
from .report import json_line, show

if TYPE_CHECKING:  # benchmarks of external servers load no torch
    import torch

    from .limits import Ceilings


@dataclass
class Table:
    """A table of text cells, with a title and notes."""

    title: str
    header: Sequence[str]
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def row(self, *cells: str) -> None:
        assert len(cells) == len(self.header), f"{len(cells)} cells under {len(self.header)} headings"
        self.rows.append(list(cells))

    def markdown(self) -> str:
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        table = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
        return "\n\n".join([f"### {self.title}", table, *self.notes]) + "\n"

    def text(self) -> str:
        """The table for a terminal, with aligned columns."""
        lines = [list(self.header), *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.header))]
        shown = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        return "\n".join([self.title, *(line.rstrip() for line in shown), *self.notes]) + "\n"


class Result:
    """The result of one benchmark run. `values`: the values of the JSON line, without the circumstances."""

    def __init__(
        self, name: str, title: str, program: str, argv: Sequence[str] | None, device: torch.device | None
    ) -> None:
        """`name`: part of the file names. `device`: the device under test; None for benchmarks without torch."""
        self.name = name
        self.title = title
        self.where = circumstances(program, argv, device)
        self.ceilings: Ceilings | None = None
        self.tables: list[Table] = []
        self.values: dict[str, Any] = {}

    def table(self, title: str, header: Sequence[str]) -> Table:
        self.tables.append(Table(title, header))
        return self.tables[-1]

    def as_json(self) -> dict[str, Any]:
        ceilings = None if self.ceilings is None else asdict(self.ceilings)
        return {"benchmark": self.name, **self.where, "ceilings": ceilings, **self.values}

    def text(self) -> str:
        return "\n".join(["", *(table.text() for table in self.tables), *self._ceilings_lines()])

    def markdown(self) -> str:
        where = self.where
        versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
        facts = [
            f"- hardware: {hardware_text(where)}",
            f"- date: {where['date']}",
            f"- commit: {where['tercet_commit'] or 'not known'}",
            f"- versions: Python {where['python']}, {versions}",
            f"- command: `{where['command']}`",
            *(f"- {line}" for line in self._ceilings_lines()),
        ]
        return "\n".join([f"# {self.title}", "", *facts, "", *(table.markdown() for table in self.tables)])

    def _ceilings_lines(self) -> list[str]:
        if self.ceilings is None:
            return []
        copy, flops = number(self.ceilings.bytes_per_s / 1e12), number(self.ceilings.flops_per_s / 1e12)
        source = self.ceilings.flops_source
        return [f"ceilings in this run: copy {copy} TB/s (read + write), {flops} TFLOP/s ({source})"]


def circumstances(program: str, argv: Sequence[str] | None, device: torch.device | None) -> dict[str, Any]:
    """The circumstances of a run: date, command, commit, versions and machine."""
    found = provenance(command_line(program, argv))
    found["versions"] = {"tercet": found["tercet_version"]}
    for package in ("torch", "triton", "transformers"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found["versions"][package] = metadata.version(package)
    found["device"] = None if device is None else str(device)
    if device is None:
        return found
    # Imported here: benchmarks of external servers load no torch.
    import torch

    if device.type == "cuda":
        found["hardware"]["gpus"] = [torch.cuda.get_device_name(device)]
        found["versions"]["CUDA" if torch.version.hip is None else "ROCm"] = torch.version.cuda or torch.version.hip
    found["compute_threads"] = torch.get_num_threads()
    return found


def hardware_text(where: dict[str, Any]) -> str:
    machine = where["hardware"]
    gpus = "".join(f"{gpu}, " for gpu in machine["gpus"])
    return f"{gpus}{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB"


def number(value: float | None) -> str:
    """A number with three significant digits, but with all digits before the decimal point. None becomes "-"."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def add_results_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--results", metavar="DIR", type=output_folder, help="write the result to this folder, as .md and .json"
    )


def output_folder(text: str) -> Path:
    """A folder, or a path at which one can be made. So this is found before the run, not after it."""
    path = Path(text)
    try:
        nearest = next(place for place in (path, *path.absolute().parents) if place.exists())
    except OSError as error:  # a name that no folder can have
        raise argparse.ArgumentTypeError(str(error)) from None
    if not nearest.is_dir():
        raise argparse.ArgumentTypeError(f"{str(nearest)!r} is no folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"{str(nearest)!r} cannot be written")
    return path


def finish(result: Result, args: argparse.Namespace, plots: str = "") -> None:
    """Prints the plots and the tables, writes the requested files, and prints the JSON line last.

    If one of these fails, the others are done. Then the program ends with a message and the exit code 1.
    """
    is_shown = show(plots + result.text() + "\n")
    failure = None
    try:
        if args.results is not None:
            for path in write(result, args.results):
                is_shown &= show(f"written: {path}\n")
    except OSError as error:
        failure = f"--results: {error}"
    is_shown &= show(json_line(result.as_json()))
    if failure is not None or not is_shown:
        sys.exit(failure or 1)


def write(result: Result, folder: Path) -> tuple[Path, Path]:
    """Writes the two files and returns their paths. If there are files of that name, the new ones have a number."""
    folder.mkdir(parents=True, exist_ok=True)
    where = result.where
    machine = where["hardware"]
    hardware = machine["gpus"][0] if where["device"] and where["device"].startswith("cuda") else machine["cpu"]
    stem = f"{where['date'][:10]}-{_slug(hardware)}-{_slug(result.name)}"
    for number in itertools.count(1):
        name = stem if number == 1 else f"{stem}-{number}"
        # with_suffix would cut the file name, because model names have dots.
        markdown, plain = folder / f"{name}.md", folder / f"{name}.json"
        if not markdown.exists() and not plain.exists():
            break
    markdown.write_text(result.markdown(), encoding="utf-8")
    plain.write_text(json_line(result.as_json()), encoding="utf-8")
    return markdown, plain


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")
