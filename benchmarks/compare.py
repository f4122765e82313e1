"""Tercet beside other servers.

The comparison is benchmarks/peers/compare.py. What measures other engines is part of a checkout, not of a wheel.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

NEEDS_CHECKOUT = (
    "comparing with other engines needs a checkout of the repository, because benchmarks/peers is not in the installed "
    "package. In a checkout, run scripts/setup or `pip install --editable .` first"
)


def has_peers() -> bool:
    """Whether benchmarks/peers is here: in a checkout or an editable install."""
    return find_spec(f"{__package__}.peers") is not None


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: that of the comparison, or 2 without a checkout."""
    if not has_peers():
        sys.stderr.write(f"tercet bench compare: {NEEDS_CHECKOUT}\n")
        return 2
    # Imported here: it is not in a wheel.
    from .peers import compare

    return compare.main(argv)


if __name__ == "__main__":
    sys.exit(main())
