"""`python -m endurance.server FLAGS`: `tercet serve` with the faults of hooks and a watched loop."""

from __future__ import annotations

import sys

import uvloop
from endurance import child
from endurance.hooks import Hooks
from server_flags import parse_flags

from tercet.srt.entrypoints.server import serve

if __name__ == "__main__":
    hooks = Hooks.of_this_process()
    hooks.bend_clock()
    uvloop.new_event_loop = hooks.watch_loop(uvloop.new_event_loop)
    sys.exit(serve(parse_flags(sys.argv[1:]), child_module=child.MODULE))
