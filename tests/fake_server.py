"""`python -m fake_server FLAGS`: the server of `tercet serve`, with the child processes of fake_child."""

from __future__ import annotations

import sys

import fake_child
from server_flags import parse_flags

from tercet.srt.entrypoints.server import serve

if __name__ == "__main__":
    sys.exit(serve(parse_flags(sys.argv[1:]), child_module=fake_child.MODULE))
