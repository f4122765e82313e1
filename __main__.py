"""`python -m tercet` is the `tercet` command."""

from __future__ import annotations

import sys

from .launch_server import main

if __name__ == "__main__":
    sys.exit(main())
