"""Models with latent attention: the logits of transformers, and the same bits in any step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cpu_models import CONFIG, VARIANTS, make_cpu_runner
from runner_driver import RunnerDriver
from same_bits import assert_every_step_has_the_same_bits
from tiny_latent_configs import LATENT_CONFIGS
from transformers_parity import assert_computes_as_transformers

from tercet.model_executor import cpu_extension
from tercet.srt.model_files.latent_config import LatentConfig
from tercet.srt.model_files.model_config import ModelConfig

WITH_RANK = LatentConfig(latent_dim=128, nope_dim=32, rope_dim=32, value_dim=64, query_rank=96)
WITHOUT_RANK = WITH_RANK._replace(query_rank=None, nope_dim=64, value_dim=32)


def with_latent(latent: LatentConfig) -> ModelConfig:
    return replace(
        CONFIG,
        architecture="YoutuForCausalLM",
        latent=latent,
        num_kv_heads=1,
        head_dim=latent.key_dim,
        attention_scale=0.1,
        qk_norm=None,
        sliding_windows=(),
    )


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("name", LATENT_CONFIGS)
def test_logits_and_greedy_tokens_equal_transformers(name: str, backend: str, tmp_path: Path) -> None:
    # transformers changes the frequencies when a request of this model becomes long
    assert_computes_as_transformers(name, backend, tmp_path, greedy=name != "minicpm3_long")


@pytest.mark.skipif(cpu_extension.load() is None, reason="no build of csrc/cpu for this processor")
@pytest.mark.parametrize("latent", [WITH_RANK, WITHOUT_RANK], ids=["rank", "no_rank"])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "-".join(str(part) for part in variant if part))
def test_every_step_has_the_same_bits(
    variant: tuple[str, str | None, int], latent: LatentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tercet.model_executor.weights.loader._DUMMY_STD", 0.1)

    def driver(**options: object) -> RunnerDriver:
        return RunnerDriver(make_cpu_runner(variant, with_latent(latent), max_running_requests=6, **options))

    assert_every_step_has_the_same_bits(driver)
