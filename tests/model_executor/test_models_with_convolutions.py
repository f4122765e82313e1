"""Models with short convolutions: the logits of transformers, and the same bits in any step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu_models import CONFIG, VARIANTS, make_cpu_runner
from runner_driver import RunnerDriver
from runners import make_runner
from same_bits import assert_every_step_has_the_same_bits
from tiny_convolution_configs import CONVOLUTION_CONFIGS
from tiny_models import make_model, save
from transformers_parity import assert_greedy_tokens_equal, assert_logits_equal

from tercet.model_executor import cpu_extension
from tercet.srt.model_files.load_config import load_model_config
from tercet.srt.model_files.short_convolutions import ShortConvolutions

CONVOLUTIONS = ShortConvolutions((0, 2), CONFIG.hidden_size, 4)
KINDS: dict[str, dict[str, Any]] = {
    "lfm2": {"architecture": "Lfm2ForCausalLM", "sliding_windows": (), "convolutions": CONVOLUTIONS},
    "lfm3": {
        "architecture": "Lfm3ForCausalLM",
        "sliding_windows": (None, 70, None, None),
        "convolutions": CONVOLUTIONS._replace(has_bias=True),
        "head_gates": True,
        "output_norms": True,
    },
}


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("name", CONVOLUTION_CONFIGS)
def test_logits_and_greedy_tokens_equal_transformers(name: str, backend: str, tmp_path: Path) -> None:
    if backend == "cpu" and not cpu_extension.load():
        pytest.skip("no build of csrc/cpu for this processor")
    model = make_model(name)
    config = load_model_config(save(model, tmp_path))
    options = {"dtype": "float32", "max_total_tokens": 400, "max_running_requests": 6, "attention_backend": backend}
    driver = RunnerDriver(make_runner(config, **options))
    ids = np.random.default_rng(1).integers(0, 131, 50)
    assert_logits_equal(driver, model, ids)
    assert_greedy_tokens_equal(driver, model, ids[:9])


@pytest.mark.skipif(cpu_extension.load() is None, reason="no build of csrc/cpu for this processor")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "-".join(str(part) for part in variant if part))
def test_every_step_has_the_same_bits(
    variant: tuple[str, str | None, int], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tercet.model_executor.weights.loader._DUMMY_STD", 0.1)
    config = replace(CONFIG, num_layers=4, **KINDS[kind])

    def driver(**options: object) -> RunnerDriver:
        return RunnerDriver(make_cpu_runner(variant, config, max_running_requests=6, **options))

    assert_every_step_has_the_same_bits(driver)
