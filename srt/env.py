"""Access to environment variables. No other file reads them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def child_environment(compute_threads: int | None) -> dict[str, str]:
    """The environment of a child process. `compute_threads`: threads of its OpenMP pool; None: not set.

    Threads of an idle pool sleep instead of spinning, because the engine's processes share few cores.
    """
    env = dict(os.environ)
    env.setdefault("TOKENIZERS_PARALLELISM", "false")
    env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if compute_threads is not None:
        env.setdefault("OMP_NUM_THREADS", str(compute_threads))
    return env


def with_added(added: Mapping[str, str]) -> dict[str, str]:
    """The environment of another program: this process's environment and the `added` variables."""
    return {**os.environ, **added}


def api_key() -> str | None:
    """TERCET_API_KEY without white space around it: the API key, if the command line must not show it.

    None if the variable is not set, "" if it is empty.
    """
    key = os.environ.get("TERCET_API_KEY")
    return None if key is None else key.strip()


def base_url() -> str | None:
    """TERCET_BASE_URL: the server that `tercet chat` talks to by default."""
    return os.environ.get("TERCET_BASE_URL") or None


def cache_folder() -> Path | None:
    """The cache folder: `tercet` in XDG_CACHE_HOME, or else in ~/.cache. None if there is no home folder.

    Users may remove the folder at any time.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the XDG specification says to ignore a relative path
        base = os.path.expanduser("~/.cache")
    return Path(base) / "tercet" if os.path.isabs(base) else None


def triton_interpreted() -> bool:
    """Whether TRITON_INTERPRET=1, which makes Triton kernels run on the CPU, for tests."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def set_triton_defaults() -> None:
    """Triton fuses multiplications and additions, as the kernels expect. Triton 3.10 separates them by default."""
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


def set_allocator_defaults() -> None:
    """torch's allocator on a GPU grows its segments, unless the user has set it up otherwise.

    Without this, memory of steps of different sizes stays in segments that no other tensor fits into. torch reads the
    variable when it first uses a GPU.
    """
    if not os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
