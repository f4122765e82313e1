"""Models of Gemma 4: the logits of transformers, and the same bits in any step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cpu_models import CONFIG, VARIANTS, make_cpu_runner
from gemma4_layers import like_gemma4
from runner_driver import RunnerDriver
from safetensors.torch import load_file, save_file
from same_bits import assert_every_step_has_the_same_bits
from tiny_gemma4_configs import GEMMA4_CONFIGS
from tiny_models import make_model, save
from transformers_parity import assert_computes_as_transformers

from tercet.model_executor import cpu_extension
from tercet.model_executor.weights.loader import load_parameters
from tercet.srt.model_files.load_config import load_model_config


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("name", GEMMA4_CONFIGS)
def test_logits_and_greedy_tokens_equal_transformers(name: str, backend: str, tmp_path: Path) -> None:
    assert_computes_as_transformers(name, backend, tmp_path)


def test_k_and_v_of_layers_that_share_them_are_not_read(tmp_path: Path) -> None:
    """Published checkpoints have them."""
    config = load_model_config(save(make_model("gemma4_sharing"), tmp_path))
    expected = dict(load_parameters(config, torch.float32, torch.device("cpu")))
    stored = load_file(tmp_path / "model.safetensors")
    own = {name for name in stored if name.startswith("model.layers.1.self_attn.") and ".q_" not in name}
    own.discard("model.layers.1.self_attn.o_proj.weight")
    assert len(own) == 3

    def save_with(layer: int) -> None:
        copies = {name.replace(".1.", f".{layer}."): stored[name].clone() for name in own}
        save_file(stored | copies, tmp_path / "model.safetensors", {"format": "pt"})

    save_with(4)
    found = load_parameters(config, torch.float32, torch.device("cpu"))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    save_with(5)
    with pytest.raises(ValueError, match=r"tensors unexpected: model\.layers\.5\.self_attn\.k_norm\.weight"):
        load_parameters(config, torch.float32, torch.device("cpu"))


@pytest.mark.skipif(cpu_extension.load() is None, reason="no build of csrc/cpu for this processor")
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "-".join(str(part) for part in variant if part))
def test_every_step_has_the_same_bits(variant: tuple[str, str | None, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tercet.model_executor.weights.loader._DUMMY_STD", 0.1)
    config = replace(CONFIG, **like_gemma4(CONFIG))

    def driver(**options: object) -> RunnerDriver:
        return RunnerDriver(make_cpu_runner(variant, config, max_running_requests=6, **options))

    assert_every_step_has_the_same_bits(driver, is_recorded=False)
