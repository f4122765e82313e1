"""Comparisons of a runner with the same model in transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from runner_driver import RunnerDriver, relative_error
from runners import make_runner
from tiny_models import make_model, reference_logits, save

from tercet.model_executor import cpu_extension
from tercet.model_executor.step import PromptScore
from tercet.srt.logprobs import LogprobOptions
from tercet.srt.model_files.load_config import load_model_config
from tercet.srt.sampling_params import SamplingParams

BIAS = 7.0
"""More than twice the soft cap of the logits of gemma2, and less than they would differ by without it."""


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


def assert_computes_as_transformers(name: str, backend: str, folder: Path, *, greedy: bool = True) -> None:
    """Compares the logits of a tiny model, saved in `folder`, and if `greedy`, tokens that follow a prompt."""
    if backend == "cpu" and not cpu_extension.load():
        pytest.skip("no build of csrc/cpu for this processor")
    model = make_model(name)
    config = load_model_config(save(model, folder))
    options = {"dtype": "float32", "max_total_tokens": 400, "max_running_requests": 6, "attention_backend": backend}
    driver = RunnerDriver(make_runner(config, **options))
    ids = np.random.default_rng(1).integers(0, 131, 50)
    assert_logits_equal(driver, model, ids)
    if greedy:
        assert_greedy_tokens_equal(driver, model, ids[:9])


def assert_soft_caps_come_first(backend: str, folder: Path) -> None:
    """Checks that log probabilities, biases and the choice of a token have the logits after their soft cap."""
    model = make_model("gemma2")
    config = load_model_config(save(model, folder))
    ids = np.random.default_rng(1).integers(0, 131, 12).astype(np.int32)
    expected = reference_logits(model, ids.tolist()).double()
    least, cap = int(expected[-1].argmin()), config.logits_soft_cap
    uncapped = cap * (expected[-1] / cap).atanh()
    assert 2 * cap < BIAS < uncapped.max() - uncapped[least]
    runner = make_runner(
        config, dtype="float32", max_total_tokens=64, max_running_requests=2, attention_backend=backend
    )
    driver, launch, outputs = RunnerDriver(runner), runner.launch, []

    def with_scores(step):
        step.prompt_scores = [PromptScore(1, 0, ids[1:])]
        launched = launch(step)
        wait = launched.wait
        launched.wait = lambda: outputs.append(wait()) or outputs[-1]
        return launched

    runner.launch = with_scores
    sampling = SamplingParams(temperature=0.0, logit_bias={str(least): BIAS})
    new_row = replace(driver.add(1, sampling), logprobs=LogprobOptions(logprob_start_len=0))
    assert driver.extend({1: ids}, new_rows=[new_row]).tolist() == [least]
    logprobs, (output,) = expected.log_softmax(-1), outputs
    wanted = [(output.logprobs[0], logprobs[-1, [least]]), (output.prompt_logprobs[0], logprobs[range(11), ids[1:]])]
    for found, numbers in wanted:
        own = torch.from_numpy(np.frombuffer(found.own, np.float32).astype(np.float64))
        torch.testing.assert_close(own, numbers, rtol=1e-4, atol=1e-4)
