"""The real child processes, but one request kills the scheduler: the one with POISON in its prompt.

`python -m faulty_child ROLE`. The scheduler dies in the step that computes the sixth output token of the request.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from tercet.srt.entrypoints import child

MODULE = "faulty_child"
POISON = 11
"""A token that no text of a test has."""
NUM_TOKENS = 5
"""Output tokens that the request gets."""


class PoisonedRunner:
    """A runner that dies by the request."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._fatal_lens: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, step: Any) -> Any:
        for new in step.new_rows:
            self._fatal_lens.pop(new.row, None)
            if POISON in new.prompt_ids:
                self._fatal_lens[new.row] = len(new.prompt_ids) + NUM_TOKENS
        for row, seq_len in zip(step.rows.tolist(), step.seq_lens.tolist(), strict=True):
            if seq_len >= self._fatal_lens.get(row, 1 << 30):
                os._exit(70)
        return self._runner.launch(step)


def load_scheduler(server_args: Any) -> Any:
    from tercet.managers import scheduler_process

    load_runner = scheduler_process.load_runner
    scheduler_process.load_runner = lambda *given: PoisonedRunner(load_runner(*given))
    return child.load_scheduler_role(server_args)


if __name__ == "__main__":
    sys.exit(child.main({**child.ROLES, "scheduler": child.LoadedRole(load_scheduler, child.run_scheduler_role)}))
