"""The frames that a parent and its child exchange."""

from __future__ import annotations

import os

import pytest

from tercet.srt.entrypoints.handshake import LaunchSpec, read_spec, write_spec
from tercet.srt.server_args import ServerArgs


@pytest.mark.parametrize("num_chars", [1, 500_000])
def test_a_spec_is_written_before_the_child_reads(num_chars: int) -> None:
    spec = LaunchSpec(ServerArgs(model_path="A", chat_template="{" * num_chars), "/run", 0, None, -1)
    childs_stdin, stdin = os.pipe()
    os.set_blocking(stdin, False)  # a write that had to wait would raise BlockingIOError
    try:
        write_spec(stdin, spec)
        assert read_spec(childs_stdin) == spec
    finally:
        os.close(stdin)
        os.close(childs_stdin)


def test_the_child_is_gone() -> None:
    childs_stdin, stdin = os.pipe()
    os.close(childs_stdin)
    with pytest.raises(BrokenPipeError):
        write_spec(stdin, LaunchSpec(ServerArgs(model_path="A"), "/run", 0, None, -1))
    os.close(stdin)
