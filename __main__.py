"""The `tercet` command, and `python -m tercet`."""

from __future__ import annotations

import sys


def main() -> int:
    """Returns the exit code."""
    try:
        # Imported here, so that Ctrl-C ends the command as quietly during its imports as later.
        from . import commands

        return commands.main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
