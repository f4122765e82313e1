"""New weights in a running runner: its logits become those of a fresh runner, or nothing changes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from fake_accelerator import FakeAccelerator, RecordableAttention, use_fake
from mxfp4_models import mxfp4_config
from runner_driver import short_logits
from runners import make_runner
from safetensors.torch import load_file, save_file
from tiny_configs import GEMMA
from tiny_models import checkpoint, initialised, save
from transformers import Gemma3TextConfig

from tercet.model_executor.device.memory import Memory
from tercet.model_executor.runner.model_runner import ModelRunner
from tercet.srt.model_files.load_config import load_model_config
from tercet.srt.model_files.model_config import ModelConfig


def runner_of(config: ModelConfig, backend: str = "cpu", **settings) -> ModelRunner:
    return make_runner(
        config, dtype="float32", max_total_tokens=256, max_running_requests=3, attention_backend=backend, **settings
    )


@pytest.mark.parametrize("settings", [{}, {"disable_cuda_graph": True}, {"quantization": "int8"}], ids=str)
@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize(
    "name",
    [
        "llama", "mixtral", "gpt_oss", "olmo2", "granite", "granitemoe", "qwen2_moe", "glm4_moe", "ernie4_5_moe",
        "dots1", "youtu", "deepseek_v2_groups", "lfm2_bias", "lfm3",
        "qwen3_5", "qwen3_5_moe", "qwen3_next",
        "gemma4_sharing",
    ],
)  # fmt: skip
def test_an_updated_runner_computes_as_a_fresh_one(tmp_path: Path, name: str, backend: str, settings: dict) -> None:
    if backend == "torch" and "quantization" in settings:
        pytest.skip("only the cpu backend has quantized layers")
    first = checkpoint(tmp_path / "1", name)
    second = mxfp4_config(tmp_path / "2") if name == "gpt_oss" else checkpoint(tmp_path / "2", name, seed=2)
    runner, fresh = runner_of(first, backend, **settings), runner_of(second, backend, **settings)
    before, expected = short_logits(runner), short_logits(fresh)
    assert not torch.equal(before, expected)
    settings_then = runner.weights.update(second)
    assert settings_then.weight_dtype == fresh.settings.weight_dtype
    assert settings_then.weight_forms == fresh.settings.weight_forms
    assert torch.equal(short_logits(runner), expected)
    # The files may change now: nothing is mapped.
    for path in (tmp_path / "2").glob("*.safetensors"):
        path.write_bytes(bytes(path.stat().st_size))
    assert torch.equal(short_logits(runner), expected)
    runner.weights.update(first)
    assert torch.equal(short_logits(runner), before)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_a_checkpoint_of_another_dtype(tmp_path: Path, backend: str) -> None:
    """The scale of Gemma's embeddings has the rounding of the checkpoint. With a usual epsilon, only that shows."""
    configs = []
    settings = GEMMA | {"hidden_size": 48, "rms_norm_eps": 1e-6}
    for dtype in (torch.bfloat16, torch.float32):
        model = initialised(Gemma3TextConfig(**settings), seed=len(configs))
        configs.append(load_model_config(save(model.to(dtype), tmp_path / str(dtype))))
    assert configs[0].embedding_scale != configs[1].embedding_scale
    runner, expected = runner_of(configs[0], backend), [short_logits(runner_of(config, backend)) for config in configs]
    for place in (1, 0):
        runner.weights.update(configs[place])
        torch.testing.assert_close(short_logits(runner), expected[place], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("granite", ("embedding_scale", "residual_scale", "logits_divisor")),
        ("gemma2", ("scores_soft_cap", "logits_soft_cap")),
    ],
)
def test_numbers_that_the_layers_have_may_not_change(model: str, names: tuple[str, ...], tmp_path: Path) -> None:
    config = checkpoint(tmp_path / "1", model)
    runner = runner_of(config)
    for name in names:
        with pytest.raises(ValueError, match=f"another model: {name} is 2.0"):
            runner.weights.update(dataclasses.replace(config, **{name: 2.0}))


def test_a_gpus_parameters_are_overwritten_where_graphs_read_them(tmp_path: Path, monkeypatch) -> None:
    """The graphs of the fake accelerator compute with the addresses that they recorded."""
    second = checkpoint(tmp_path / "2", seed=2)
    expected = short_logits(runner_of(second, "torch"))
    accelerator = FakeAccelerator()
    use_fake(monkeypatch, accelerator)
    runner = runner_of(dataclasses.replace(second, load_format="dummy"), "torch", cuda_graph_max_bs=2)
    before, model, num_graphs = short_logits(runner), runner.model, len(accelerator.recorded)
    assert num_graphs
    damage(tmp_path / "2", "model.norm.weight", [3])
    with pytest.raises(ValueError, match="norm"):
        runner.weights.update(second)
    assert torch.equal(short_logits(runner), before)
    checkpoint(tmp_path / "3", seed=2)
    runner.weights.update(dataclasses.replace(second, model_path=str(tmp_path / "3")))
    torch.testing.assert_close(short_logits(runner), expected, rtol=1e-4, atol=1e-4)
    assert len(accelerator.recorded) == num_graphs and runner.model is model


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_oss", "olmo2", "qwen2_moe", "glm4_moe", "gemma3"])
def test_a_gpu_without_graphs_has_no_memory_for_a_second_model(name: str, tmp_path: Path, monkeypatch) -> None:
    class Unrecordable(RecordableAttention):
        def num_splits(self, seq_lens):
            return None

    second = checkpoint(tmp_path / "2", name, seed=2)
    expected = short_logits(runner_of(second, "torch"))
    use_fake(monkeypatch, FakeAccelerator(), Unrecordable)
    runner = runner_of(dataclasses.replace(second, load_format="dummy"), "torch")
    model = runner.model
    assert runner._recorded is None and not torch.equal(short_logits(runner), expected)
    runner.weights.update(second)
    torch.testing.assert_close(short_logits(runner), expected, rtol=1e-4, atol=1e-4)
    assert runner.model is model


@pytest.mark.parametrize("name", ["youtu", "lfm2_bias", "qwen3_5"])
def test_a_gpus_copies_of_weights_are_not_updated(name: str, tmp_path: Path, monkeypatch) -> None:
    use_fake(monkeypatch, FakeAccelerator())
    runner = runner_of(checkpoint(tmp_path / "1", name), "torch", disable_cuda_graph=True)
    before = short_logits(runner)
    with pytest.raises(
        ValueError, match="on a GPU, the weights of a model with latent attention, short convolutions or recurrent"
    ):
        runner.weights.update(checkpoint(tmp_path / "2", name, seed=2))
    assert torch.equal(short_logits(runner), before)


def damage(folder: Path, name: str, shape: list[int]) -> None:
    """Replaces a tensor of a checkpoint."""
    path = folder / "model.safetensors"
    tensors = dict(load_file(path))
    tensors[name] = torch.ones(shape)
    path.unlink()
    save_file(tensors, path)


def test_weights_that_do_not_fit_change_nothing(tmp_path: Path, monkeypatch) -> None:
    first, second = checkpoint(tmp_path / "1"), checkpoint(tmp_path / "2", seed=2)
    monkeypatch.setattr("tercet.model_executor.runner.load.host_memory", lambda: Memory(1 << 34, available[0]))
    available = [1 << 33]
    runner = runner_of(first)
    before, model = short_logits(runner), runner.model
    for name, value in (
        ("num_layers", 2),
        ("rms_norm_eps", 1e-3),
        ("eos_token_ids", (7,)),
        ("tie_word_embeddings", True),
    ):
        with pytest.raises(ValueError, match=f"another model: {name} is"):
            runner.weights.update(dataclasses.replace(second, **{name: value, "sliding_windows": ()}))
    available[0] = 1 << 20
    with pytest.raises(ValueError, match="only 1 MiB of memory are available"):
        runner.weights.update(second)
    available[0] = 1 << 33
    damage(tmp_path / "2", "model.layers.2.mlp.down_proj.weight", [3, 4])  # the last parameter but one
    with pytest.raises(ValueError, match=r"down_proj.weight' has shape \(3, 4\)"):
        runner.weights.update(second)
    with pytest.raises(OSError):
        runner.weights.update(dataclasses.replace(second, model_path=str(tmp_path / "none")))
    assert runner.model is model and torch.equal(short_logits(runner), before)
    runner.weights.update(first)
    assert runner.model is not model and torch.equal(short_logits(runner), before)
