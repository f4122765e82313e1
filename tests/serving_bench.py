"""Runs the serving benchmark in the test's process, and keeps what it prints."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tercet.benchmarks.bench_serving import main

SMALL = ["--num-prompts", "6", "--random-input-len", "20", "--random-output-len", "9", "--disable-tqdm"]


class Bench:
    """Runs the benchmark in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], tokenizer: str) -> None:
        self._capsys = capsys
        self.tokenizer = tokenizer
        self.out = self.err = ""

    def __call__(self, url: str, *argv: str, code: int = 0) -> dict[str, Any]:
        """The JSON line; the exit code has to be `code`."""
        assert main(["--base-url", url, "--tokenizer", self.tokenizer, *SMALL, *argv]) == code, self.read()
        self.read()
        return json.loads(self.out.splitlines()[-1])

    def read(self) -> str:
        self.out, self.err = self._capsys.readouterr()
        return self.out + self.err

    def fails(self, url: str, *argv: str) -> str:
        """The one message of a run that measures nothing."""
        assert main(["--base-url", url, "--tokenizer", self.tokenizer, *SMALL, *argv]) == 1
        self.read()
        assert self.out == ""
        return self.err

    def refused(self, *argv: str) -> str:
        """The message about a command line."""
        with pytest.raises(SystemExit) as caught:
            main(argv)
        assert caught.value.code == 2
        return self.read()
