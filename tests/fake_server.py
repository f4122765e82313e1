"""`python -m fake_server FLAGS`: the server of `tercet serve`, with the child processes of fake_child."""

from __future__ import annotations

import sys

import fake_child

from tercet.srt.command_line import parse_args
from tercet.srt.entrypoints.server import serve

if __name__ == "__main__":
    sys.exit(serve(parse_args(sys.argv[1:]), child_module=fake_child.MODULE))
