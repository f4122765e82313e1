"""Models whose linear layers are oneDNN's: when they are chosen, what is said, and what else follows."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from runner_driver import relative_error, short_logits
from runners import make_settings
from tiny_models import checkpoint

from tercet.managers.scheduler_process import _load_weights, scheduler_facts
from tercet.model_executor import cpu_extension
from tercet.model_executor.cpu_calibration import default_tuning
from tercet.model_executor.layers.linear import can_pack
from tercet.model_executor.layers.onednn_layers import OneDnnLinear, PartShape
from tercet.model_executor.runner import settings as settings_module
from tercet.model_executor.runner.kv_identity import kv_identity
from tercet.model_executor.runner.load import load_runner
from tercet.model_executor.runner.settings import RunnerSettings
from tercet.srt.model_files.model_config import ModelConfig
from tercet.srt.weight_messages import UpdateWeightsReq

pytestmark = pytest.mark.skipif(
    cpu_extension.load() is None or not can_pack(torch.empty(1, 1)), reason="no build of csrc/cpu, or no oneDNN"
)

SettingsOf = Callable[..., RunnerSettings]


@pytest.fixture
def settings_of(tmp_path: Path) -> SettingsOf:
    """The settings of a server that is told to prefer oneDNN for float32."""
    path = tmp_path / "kernels.json"
    path.write_text(json.dumps({"chosen": default_tuning()._replace(onednn="float32")._asdict()}))

    def of(config: ModelConfig, **changes: object) -> RunnerSettings:
        defaults = {"dtype": "float32", "max_total_tokens": 256, "max_running_requests": 3, "cpu_kernels": str(path)}
        return make_settings(config, **{**defaults, **changes})

    return of


@pytest.mark.parametrize("name", ["llama_31_tied", "llama_biases", "qwen3"])
def test_a_file_of_float32(
    settings_of: SettingsOf, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    config = checkpoint(tmp_path / "m", name)
    settings = settings_of(config, weight_cache=str(tmp_path / "cache"))
    runner = load_runner(settings, config)
    assert all(isinstance(layer.down_proj, OneDnnLinear) for layer in runner.model.layers)
    assert runner._recorded is not None and not list(tmp_path.glob("cache/*.packed"))
    own = load_runner(settings_of(config, cpu_kernels="fixed"), config)
    assert relative_error(short_logits(runner), short_logits(own)) < 1e-5
    facts = [scheduler_facts(one, config).cpu_kernels for one in (runner, own)]
    assert [one.linears for one in facts if one is not None] == ["onednn", "tercet"]
    assert "linear layers of onednn" in caplog.text
    assert kv_identity(settings, config) != kv_identity(own.settings, config)


def test_narrower_matrices_keep_their_own_kernels(settings_of: SettingsOf, tmp_path: Path) -> None:
    narrow, wide = checkpoint(tmp_path / "1", dtype=torch.bfloat16), checkpoint(tmp_path / "2", seed=2)
    assert settings_of(wide).onednn
    assert not settings_of(wide, cpu_kernels="fixed").onednn
    assert not settings_of(wide, quantization="int8").onednn
    assert not settings_of(wide, dtype="bfloat16").onednn
    assert not settings_of(narrow).onednn
    odd = dataclasses.replace(wide, intermediate_size=97, load_format="dummy")
    assert settings_of(odd).onednn, "a float32 is a whole word"


def test_new_weights_of_another_type(settings_of: SettingsOf, tmp_path: Path) -> None:
    narrow, wide = checkpoint(tmp_path / "1", dtype=torch.bfloat16), checkpoint(tmp_path / "2", seed=2)
    expected = {config.model_path: short_logits(load_runner(settings_of(config), config)) for config in (narrow, wide)}
    runner = load_runner(settings_of(narrow), narrow)
    for config in (wide, narrow):
        assert runner.weights is not None
        assert runner.weights.update(config).onednn == (config is wide)
        assert torch.equal(short_logits(runner), expected[config.model_path])


def test_new_weights_have_the_kv_of_a_server_that_starts_with_them(settings_of: SettingsOf, tmp_path: Path) -> None:
    """Only the second weights have oneDNN's linear layers."""
    narrow, wide = checkpoint(tmp_path / "1", dtype=torch.bfloat16), checkpoint(tmp_path / "2", seed=2)
    runner = load_runner(settings_of(narrow), narrow)
    for config in (wide, narrow):
        loaded = _load_weights(runner, UpdateWeightsReq(1, config.model_path, "auto", "new"))
        own, other = settings_of(config), settings_of(config, cpu_kernels="fixed")
        assert loaded.identity == kv_identity(own, config, "new")
        assert (loaded.identity == kv_identity(other, config, "new")) == (config is narrow)


def test_layers_whose_bits_depend_on_the_batch_are_not_used(
    settings_of: SettingsOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = checkpoint(tmp_path / "m", "llama_biases")
    compared: set[PartShape] = set()

    def keeps_bits(shape: PartShape) -> bool:
        compared.add(shape)
        return shape.k != config.num_heads * config.head_dim

    monkeypatch.setattr(settings_module, "keeps_bits", keeps_bits)
    assert not settings_of(config).onednn
    assert "bits of a row of layers.0.o_proj.weight depend on the batch" in caplog.text
    assert all(shape.has_bias for shape in compared), "that of this model"
    monkeypatch.setattr(settings_module, "keeps_bits", lambda shape: compared.add(shape) or True)
    settings = settings_of(config)
    assert settings.onednn
    model = load_runner(settings, config).model
    layers = [getattr(layer, name) for layer in model.layers for name in ("down_proj", "inner_proj", "qkv_proj")]
    assert {(part.shape[0], part.shape[1]) for layer in layers for part in layer.parts} <= {one[:2] for one in compared}
