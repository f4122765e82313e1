"""Models with Gated DeltaNets: the logits of transformers, and the same bits in any step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cpu_models import CONFIG, VARIANTS, make_cpu_runner
from runner_driver import RunnerDriver, relative_error
from runners import make_runner
from same_bits import assert_every_step_has_the_same_bits
from tiny_delta_net_configs import DELTA_NET_CONFIGS
from transformers_parity import assert_computes_as_transformers

from tercet.model_executor import cpu_extension
from tercet.srt.model_files.delta_net_config import DeltaNetConfig


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("name", DELTA_NET_CONFIGS)
def test_logits_and_greedy_tokens_equal_transformers(name: str, backend: str, tmp_path: Path) -> None:
    assert_computes_as_transformers(name, backend, tmp_path)


@pytest.mark.skipif(cpu_extension.load() is None, reason="no build of csrc/cpu for this processor")
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "-".join(str(part) for part in variant if part))
def test_every_step_has_the_same_bits(variant: tuple[str, str | None, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tercet.model_executor.weights.loader._DUMMY_STD", 0.1)
    config = replace(
        CONFIG,
        architecture="Qwen3_5ForCausalLM",
        num_layers=4,
        sliding_windows=(),
        attention_gates="components",
        delta_net=DeltaNetConfig((0, 2), 2, 4, 16, 24, 4),
    )

    def driver(**options: object) -> RunnerDriver:
        return RunnerDriver(make_cpu_runner(variant, config, max_running_requests=6, **options))

    assert_every_step_has_the_same_bits(driver)


def test_an_odd_number_of_values_of_16_bits() -> None:
    """Rows of the output projection are no whole words, which the compiled operations need."""
    config = replace(
        CONFIG,
        architecture="Qwen3_5ForCausalLM",
        num_layers=4,
        sliding_windows=(),
        delta_net=DeltaNetConfig((0, 2), 1, 1, 7, 5, 3),
    )
    options = {"dtype": "bfloat16", "max_total_tokens": 256, "max_running_requests": 3}
    ids = np.arange(20)
    of_cpu, of_torch = (
        RunnerDriver(make_runner(config, attention_backend=backend, **options)).logits_along(1, ids, [17])
        for backend in ("auto", "torch")
    )
    assert all(relative_error(of_cpu[position], of_torch[position]) < 0.05 for position in of_cpu)
