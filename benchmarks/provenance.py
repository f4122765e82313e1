"""The provenance of a result: date, command, commit and machine."""

from __future__ import annotations

import os
import platform
import re
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .. import __version__

_CHECKOUT = Path(__file__).resolve().parents[1]


def provenance(command: Sequence[str]) -> dict[str, Any]:
    """The provenance for a result's JSON. `command`: the program and its arguments."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(command),
        "tercet_version": __version__,
        "tercet_commit": commit(_CHECKOUT),
        "python": platform.python_version(),
        "hardware": hardware(),
    }


def hardware() -> dict[str, Any]:
    """The machine of this process. The server under test may run on another machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cpu = re.search(r"^model name\s*: (.*)$", _read(Path("/proc/cpuinfo")), re.MULTILINE)
    memory = re.search(r"^MemTotal:\s*(\d+) kB$", _read(Path("/proc/meminfo")), re.MULTILINE)
    gpus = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    models = [re.search(r"^Model:\s*(.*)$", _read(gpu), re.MULTILINE) for gpu in gpus]
    return {
        "cpu": cpu[1] if cpu else platform.processor() or platform.machine(),
        "cores": cores,
        "memory_gib": round(int(memory[1]) / 2**20, 1) if memory else None,
        "gpus": [model[1] for model in models if model],
    }


def commit(checkout: Path) -> str | None:
    """The commit of a checkout, read from .git without the git program; None outside a checkout."""
    git = checkout / ".git"
    if git.is_file():  # a linked working tree
        git = checkout / _read(git).removeprefix("gitdir:").strip()
    head = _read(git / "HEAD").strip()
    if not head.startswith("ref:"):
        return head or None
    name = head.removeprefix("ref:").strip()
    common = git / (_read(git / "commondir").strip() or ".")
    for place in (git, common):
        if found := _read(place / name).strip():
            return found
    packed = re.search(rf"^(\w+) {re.escape(name)}$", _read(common / "packed-refs"), re.MULTILINE)
    return packed[1] if packed else None


def command_line(program: str, argv: Sequence[str] | None) -> list[str]:
    """The command as a list of arguments, for `provenance`."""
    return [*shlex.split(program), *(sys.argv[1:] if argv is None else argv)]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
