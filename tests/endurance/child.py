"""`python -m endurance.child ROLE`: the real child processes, with the faults that the harness asks for (see hooks).

A fault hits the step of the model that is launched next.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from endurance.hooks import Hooks

from tercet.srt.entrypoints import child

MODULE = "endurance.child"
_HOUR_S = 3600.0
_PETABYTE = 1 << 50


class FaultyRunner:
    """A runner whose steps fail on request."""

    def __init__(self, runner: Any, hooks: Hooks) -> None:
        self._runner = runner
        self._hooks = hooks
        self._torch = sys.modules["torch"]  # the roles without a model do not load it

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, step: Any) -> Any:
        fault = self._hooks.take_step_fault()
        if fault == "hang":
            time.sleep(_HOUR_S)
        if fault == "allocation":
            self._torch.empty(_PETABYTE, dtype=self._torch.uint8)
        running = self._runner.launch(step)
        if fault == "nan" and running._forward is not None:
            head, *rows = running._forward
            running._forward = head._replace(greedy=None, logits=lambda: _spoiled(head.logits())), *rows
        return running


def _spoiled(logits: Any) -> Any:
    logits[:1] = float("nan")
    return logits


def load_scheduler(server_args: Any) -> Any:
    # Imported here: the other roles do not load it.
    from tercet.managers import scheduler_process

    load_runner = scheduler_process.load_runner
    hooks = Hooks.of_this_process()
    scheduler_process.load_runner = lambda *given: FaultyRunner(load_runner(*given), hooks)
    return child.load_scheduler_role(server_args)


if __name__ == "__main__":
    Hooks.of_this_process().bend_clock()
    sys.exit(child.main({**child.ROLES, "scheduler": child.LoadedRole(load_scheduler, child.run_scheduler_role)}))
