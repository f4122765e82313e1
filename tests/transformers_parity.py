"""Comparisons of a runner with the same model in transformers."""

from __future__ import annotations

import numpy as np
import torch
from runner_driver import RunnerDriver, relative_error
from tiny_models import reference_logits


def assert_logits_equal(driver: RunnerDriver, model: torch.nn.Module, ids: np.ndarray) -> None:
    """Compares the logits of 50 tokens, in chunks of several sizes with decode steps after them. Uses rows 1 to 4."""
    expected = reference_logits(model, ids.tolist())
    for row, chunks in enumerate(([50], [1], [17, 9, 16], [2, 30]), start=1):
        found = driver.logits_along(row, ids, chunks)
        assert len(found) == len(chunks) + 50 - sum(chunks)
        for position, logits in found.items():
            assert relative_error(logits, expected[position]) < 1e-4, (chunks, position)


def assert_greedy_tokens_equal(driver: RunnerDriver, model: torch.nn.Module, ids: np.ndarray) -> None:
    """Compares the 12 most probable tokens after a prompt. Uses row 6."""
    tokens = ids.tolist()
    driver.extend({6: ids}, new_rows=[driver.add(6)])
    for _ in range(12):
        wanted = int(reference_logits(model, tokens)[-1].argmax())
        assert int(driver.logits[-1][0].argmax()) == wanted
        tokens.append(wanted)
        driver.decode([6], [wanted])
