"""Runners with fp8 weights on Triton: of checkpoints in every format, rounded at load, and with new weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fake_accelerator import FakeAccelerator, use_fake
from fp8_models import save_pair, wide_model
from runner_driver import RunnerDriver, relative_error
from runners import make_runner, make_settings
from tiny_models import save

from tercet.model_executor.kernels.fp8_linear import fp8_linear_ref
from tercet.model_executor.layers import fp8_layers
from tercet.model_executor.layers.fp8_weight import Fp8Weight
from tercet.model_executor.runner.model_runner import ModelRunner
from tercet.model_executor.runner.warmup import warmup_steps
from tercet.srt.model_files.load_config import load_model_config


def runner_of(path: Path, backend: str = "triton", load_format: str = "auto", **settings) -> ModelRunner:
    return make_runner(
        load_model_config(path, load_format), attention_backend=backend, dtype="float32", max_total_tokens=64,
        max_running_requests=2, max_prefill_tokens=12, **settings,
    )  # fmt: skip


def logits(runner: ModelRunner, *, decode: bool = False) -> torch.Tensor:
    """Of a prompt, and of a decode step if wanted: [1 or 2, vocab]."""
    driver = RunnerDriver(runner)
    driver.extend({1: [5, 6, 7]}, new_rows=[driver.add(1)])
    if decode:
        driver.decode([1], [7])
    runner.sampler.sample = driver._sample
    return torch.cat(driver.logits)


@pytest.mark.parametrize("kind", ["blocks", "tensors"])
def test_logits_are_those_of_the_twin_and_nearly_those_of_the_widened_weights(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fp8, wide = save_pair(tmp_path, kind)
    runner = runner_of(fp8)
    assert isinstance(runner.model.layers[0].qkv_proj.weight, Fp8Weight)
    assert isinstance(runner.model.layers[1].o_proj.weight, torch.Tensor if kind == "tensors" else Fp8Weight)
    found, expected = logits(runner), logits(runner_of(wide, "torch"))
    monkeypatch.setattr(fp8_layers, "fp8_linear", fp8_linear_ref)
    # Both round activations, and a difference in the last bit may send one to another number of 4 bits.
    assert relative_error(found, logits(runner_of(fp8))) < 5e-3
    assert 5e-3 < relative_error(found, expected) < 0.1


def test_weights_rounded_at_load_are_those_that_a_checkpoint_stores(tmp_path: Path) -> None:
    fp8, _ = save_pair(tmp_path, "channels")
    stored = tmp_path / "16 bits"
    save(wide_model(), stored)
    rounded, as_stored = runner_of(stored, quantization="fp8"), runner_of(fp8, quantization="fp8")
    assert torch.equal(logits(rounded), logits(as_stored))
    assert rounded.num_bytes.weights == as_stored.num_bytes.weights < 0.6 * runner_of(stored).num_bytes.weights
    assert set(rounded.settings.weight_forms.values()) == {"fp8"}
    assert rounded.settings.multiplied_dtype == torch.float8_e4m3fn


def test_new_weights_are_written_where_graphs_read_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tercet.model_executor.runner.load.warmup_steps", lambda *sizes: warmup_steps(*sizes)[-1:])
    first, _ = save_pair(tmp_path / "1", "channels")
    second, wide = save_pair(tmp_path / "2", "channels", seed=1)
    expected = logits(runner_of(second), decode=True)
    accelerator = FakeAccelerator()
    use_fake(monkeypatch, accelerator, attention=None)
    runner = runner_of(first, load_format="dummy", cuda_graph_max_bs=1)  # of a GPU: parameters are in memory
    assert accelerator.recorded
    scales = runner.model.layers[1].down_proj.weight.scales.clone()
    with pytest.raises(ValueError, match=r"qkv_proj.weight is float32 .*reads float8_e4m3fn .* with float32"):
        runner.weights.update(load_model_config(wide))
    assert torch.equal(runner.model.layers[1].down_proj.weight.scales, scales)
    runner.weights.update(load_model_config(second))
    assert relative_error(logits(runner, decode=True), expected) < 5e-3 and accelerator.num_replays


def test_dummy_weights_have_the_forms_of_the_config(tmp_path: Path) -> None:
    for kind, form, layers in (("blocks", "fp8_block", 2), ("tensors", "fp8", 1)):
        fp8, _ = save_pair(tmp_path / kind, kind)
        runner = runner_of(fp8, load_format="dummy")
        assert list(runner.settings.weight_forms.values()) == [form] * 4 * layers
        scales = runner.model.layers[0].down_proj.weight.scales
        assert scales.shape == (3 if kind == "blocks" else 1, 160)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"quantization": "fp8", "attention_backend": "torch"},
            "--quantization fp8 needs the attention backend triton",
        ),
        ({"attention_backend": "triton", "fuse_small_steps": True}, "--fuse-small-steps has no kernels for fp8"),
        ({"quantization": "int8", "attention_backend": "triton"}, "--quantization int8 needs a CPU"),
    ],
)
def test_what_has_no_kernel_is_refused_by_name(settings: dict, message: str, tmp_path: Path) -> None:
    fp8, _ = save_pair(tmp_path, "blocks")
    with pytest.raises(ValueError, match=message):
        make_settings(load_model_config(fp8), dtype="bfloat16", **settings)
