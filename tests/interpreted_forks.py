"""Runs pytest in forks of this process, which has loaded what takes long to import (see triton_interpreter.py).

A line of the input is a JSON list: the arguments of pytest, and the file for its output. The answer is a line with the
exit code. The process ends with its input.
"""

from __future__ import annotations

import json
import os
import sys

import hypothesis  # noqa: F401
import pytest
import torch._dynamo  # noqa: F401  # torch.use_deterministic_algorithms imports it
import triton.language  # noqa: F401


def run(arguments: list[str], output: str) -> int:
    """The exit code of pytest. Call it in a fork."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    for descriptor, target in ((nothing, 0), (file, 1), (file, 2)):
        os.dup2(descriptor, target)
    code = int(pytest.main(arguments))
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def main() -> None:
    for line in sys.stdin:
        *arguments, output = json.loads(line)
        child = os.fork()
        if not child:
            os._exit(run(arguments, output))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        sys.stdout.write(f"{code}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
