"""The settings of a server from flags alone, without MODEL."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from tercet.srt.command_line import add_arguments, from_namespace
from tercet.srt.server_args import ServerArgs


def parse_flags(argv: Sequence[str]) -> ServerArgs:
    """Exits with a message (status 2) if they are wrong."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    namespace = parser.parse_args(argv)
    try:
        return from_namespace(namespace)
    except ValueError as error:
        parser.error(str(error))
