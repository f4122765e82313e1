"""`python -m forking_child PARENT ROLE`: the processes of fake_child, which become fork servers as the real ones do."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import fake_child

from tercet.srt.entrypoints import child
from tercet.srt.server_args import ServerArgs

MODULE = "forking_child"


class Loaded(NamedTuple):
    server_args: ServerArgs
    may_fork: bool = True

    def with_settings(self, server_args: ServerArgs) -> Loaded:
        return Loaded(server_args)


def forking(run: Callable[..., None]) -> child.LoadedRole:
    return child.LoadedRole(Loaded, lambda loaded, *rest: run(loaded.server_args, *rest))


if __name__ == "__main__":
    roles = {"scheduler": fake_child.run_scheduler, "detokenizer": fake_child.run_detokenizer}
    sys.exit(child.main({role: forking(run) for role, run in roles.items()}))
