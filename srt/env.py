"""The one place that reads the process environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def child_environment(compute_threads: int | None) -> dict[str, str]:
    """The environment of a child process; `compute_threads` bounds its OpenMP pool (None: leave as it is).

    Threads of an idle pool sleep instead of spinning: the engine's processes share few cores.
    """
    env = dict(os.environ)
    env.setdefault("TOKENIZERS_PARALLELISM", "false")
    env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if compute_threads is not None:
        env.setdefault("OMP_NUM_THREADS", str(compute_threads))
    return env


def with_added(added: Mapping[str, str]) -> dict[str, str]:
    """The environment of a program that is not the engine's: this one's, and what is added."""
    return {**os.environ, **added}


def api_key() -> str | None:
    """TERCET_API_KEY: the key of a server whose command line must not show it. Without the spaces and line breaks
    around it; None when the variable is not there, "" when it is empty."""
    key = os.environ.get("TERCET_API_KEY")
    return None if key is None else key.strip()


def base_url() -> str | None:
    """TERCET_BASE_URL: the server that `tercet chat` talks to by default."""
    return os.environ.get("TERCET_BASE_URL") or None


def cache_folder() -> Path | None:
    """`tercet` in XDG_CACHE_HOME, or else in ~/.cache: what may be removed at any time. None where there is no home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # which the XDG specification says to ignore
        base = os.path.expanduser("~/.cache")
    return Path(base) / "tercet" if os.path.isabs(base) else None


def triton_interpreted() -> bool:
    """TRITON_INTERPRET=1: Triton kernels run on the CPU, for tests."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"
