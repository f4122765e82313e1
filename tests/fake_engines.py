"""Entries for the table of compared servers, for tests. Each entry starts fake_peer."""

from __future__ import annotations

import re
from pathlib import Path

import fake_peer

from tercet.benchmarks.peers.engines import Engine, Launch


def fake(trouble: str = "none") -> Engine:
    def launch(python: Path, model: object, capacity: object, port: int) -> Launch:
        return Launch([str(python), fake_peer.__file__, str(port), trouble], "any", {})

    return Engine("python", launch, re.compile(r"KV pool ([\d.]+) (GiB)"), warning=re.compile(r"WARNING (.+)"))
