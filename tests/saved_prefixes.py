"""A request on a runner that continues prefixes of another one, whose states were saved."""

from __future__ import annotations

import numpy as np
import torch
from runner_driver import RunnerDriver

from tercet.model_executor.runner.model_runner import ModelRunner


def logits_of_continued_prefixes(runner: ModelRunner) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of requests that continue saved prefixes, and those of the same tokens without."""
    driver = RunnerDriver(runner)
    saved = runner.settings.max_running_requests + 1
    ids = np.random.default_rng(5).integers(0, 99, 12)
    new = [driver.add(row) for row in (1, 4)]
    driver.extend({1: ids[:8], 4: ids[1:4]}, new_rows=new, saves={1: (6, saved), 4: (0, 0)})
    new = [driver.add(2), driver.add(3)]
    driver.share(2, 1, 6)
    driver.copy_state(saved, 2)
    driver.extend({2: ids[6:9], 3: ids[:9]}, new_rows=new)
    driver.decode([2, 3], [ids[9]] * 2)
    driver.copy_state(2, saved + 1)  # while it decodes
    driver.decode([2, 3], [ids[10]] * 2)
    steps = driver.logits[1:]
    driver.add(5)
    driver.share(5, 2, 10)
    driver.copy_state(saved + 1, 5)
    driver.decode([5], [ids[10]])
    continued, whole = ([step[index] for step in steps] for index in (0, 1))
    return torch.stack([*continued, driver.logits[-1][0]]), torch.stack([*whole, whole[-1]])
