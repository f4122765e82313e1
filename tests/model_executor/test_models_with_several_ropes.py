"""Models with other norms, factors, activations or rotary embeddings, on a CPU: transformers' logits, and equal bits of
steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cpu_models import CONFIG, VARIANTS, make_cpu_runner
from runner_driver import RunnerDriver, relative_error
from transformers_parity import assert_computes_as_transformers, assert_soft_caps_come_first

from tercet.model_executor import cpu_extension
from tercet.model_executor.runner.cpu_graph_runner import CpuGraphRunner
from tercet.srt.model_files.model_config import ModelConfig
from tercet.srt.model_files.rope_config import NO_ROTATION, QueryScale, RopeConfig

pytestmark = pytest.mark.skipif(cpu_extension.load() is None, reason="no build of csrc/cpu for this processor")

SEVERAL_ROPES = replace(
    CONFIG, layer_ropes=tuple(NO_ROTATION if index == 1 else CONFIG.rope for index in range(CONFIG.num_layers))
)
LIKE_GEMMA = replace(
    SEVERAL_ROPES, output_norms=True, norm_offset=1.0, embedding_scale=8.0, hidden_act="gelu_tanh",
    attention_scale=0.2, scores_soft_cap=0.5, logits_soft_cap=2.0,
)  # fmt: skip
LIKE_GRANITE = replace(CONFIG, embedding_scale=12.0, residual_scale=0.22, attention_scale=0.1, logits_divisor=6.0)
LIKE_ARCEE = replace(CONFIG, hidden_act="squared_relu")
LIKE_MINISTRAL = replace(CONFIG, rope=replace(CONFIG.rope, query_scale=QueryScale(0.5, 8)))
LIKE_HUNYUAN = replace(CONFIG, qk_norm="rotated_heads")
LIKE_OLMO = replace(CONFIG, input_norms=False, output_norms=True, qk_norm="rows")
MODELS = [
    "smollm3",
    "smollm3_window",
    "gemma2",
    "gemma2_scores",
    "gemma2_logits",
    "gemma3",
    "gemma3_scaled",
    "gemma3_images",
    "olmo2",
    "olmo2_scaled",
    "olmo3",
    "olmo3_types",
    "glm",
    "glm_whole",
    "glm4",
    "glm4_yarn",
    "ernie4_5",
    "ernie4_5_biases",
    "seed_oss",
    "seed_oss_out",
    "exaone4",
    "exaone4_types",
    "exaone4_full",
    "arcee",
    "arcee_biases",
    "ministral3",
    "ministral3_window",
    "ministral3_images",
    "hunyuan_v1_dense",
    "hunyuan_v1_dense_tied",
]


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_tokens_equal_transformers(name: str, backend: str, tmp_path: Path) -> None:
    assert_computes_as_transformers(name, backend, tmp_path)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_soft_caps_of_logits_come_before_what_reads_them(backend: str, tmp_path: Path) -> None:
    assert_soft_caps_come_first(backend, tmp_path)


@pytest.mark.parametrize(
    "config",
    [SEVERAL_ROPES, LIKE_GEMMA, LIKE_OLMO, LIKE_GRANITE, LIKE_ARCEE, LIKE_MINISTRAL, LIKE_HUNYUAN],
    ids=["ropes", "gemma", "olmo", "granite", "arcee", "ministral", "hunyuan"],
)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "-".join(str(part) for part in variant if part))
def test_recorded_steps_have_the_bits_of_launched_ones(
    variant: tuple[str, str | None, int], config: ModelConfig
) -> None:
    ids = np.random.default_rng(3).integers(0, 301, 40)

    def logits(*, disable_cuda_graph: bool) -> dict[int, torch.Tensor]:
        runner = make_cpu_runner(variant, config, disable_cuda_graph=disable_cuda_graph)
        assert isinstance(runner._recorded, CpuGraphRunner) != disable_cuda_graph
        return RunnerDriver(runner).logits_along(1, ids, [20, 10])

    recorded, launched = logits(disable_cuda_graph=False), logits(disable_cuda_graph=True)
    assert recorded.keys() == launched.keys()
    assert all(torch.equal(recorded[position], launched[position]) for position in recorded)


def test_a_layer_without_rotation_ignores_positions() -> None:
    """In a model of one layer, keys and values do not depend on earlier tokens. So only a rotation sees their order."""
    ids = np.random.default_rng(3).integers(0, 301, 20)

    def last_logits(order: np.ndarray, rope: RopeConfig) -> torch.Tensor:
        config = replace(CONFIG, num_layers=1, sliding_windows=(None,), layer_ropes=(rope,))
        driver = RunnerDriver(make_cpu_runner(config=config))
        driver.extend({1: order}, new_rows=[driver.add(1)])
        return driver.logits[-1][0]

    swapped = np.concatenate([ids[9::-1], ids[10:]])
    assert relative_error(last_logits(swapped, NO_ROTATION), last_logits(ids, NO_ROTATION)) < 1e-5
    assert relative_error(last_logits(swapped, CONFIG.rope), last_logits(ids, CONFIG.rope)) > 1e-3
