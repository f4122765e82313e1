"""`python -m tercet.launch_server`: SGLang's name for `tercet serve`."""

from __future__ import annotations

import sys


def main() -> int:
    """Returns the exit code."""
    try:
        # Imported here, so that Ctrl-C ends the command as quietly during its imports as later.
        from . import commands

        return commands.launch_server()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
