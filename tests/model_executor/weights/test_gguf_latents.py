"""GGUF files with latent attention: the logits of transformers, whatever form the file has."""

from __future__ import annotations

import numpy as np
import pytest
import runners
import torch
from gguf_models import Kind
from latent_gguf import write_latent_gguf
from runner_driver import RunnerDriver
from tiny_models import make_model
from transformers_parity import assert_logits_equal

from tercet.model_executor.weights.loader import load_parameters
from tercet.srt.model_files.load_config import load_model_config

NAMES = ["youtu", "youtu_yarn", "deepseek_v2", "deepseek_v2_groups", "deepseek_v3_one_group", "glm4_moe_lite"]


@pytest.mark.parametrize("divided", [False, True], ids=["old", "new"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers(name, divided, tmp_path):
    model = make_model(name)
    path = write_latent_gguf(tmp_path / "model.gguf", model, divided=divided)
    runner = runners.make_runner(load_model_config(path), dtype="float32", max_total_tokens=400, max_running_requests=6)
    assert_logits_equal(RunnerDriver(runner), model, np.random.default_rng(1).integers(0, 131, 50))


@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q8_0])
def test_both_forms_have_the_same_parameters(kind, tmp_path):
    model = make_model("youtu")
    read = []
    for divided in (False, True):
        path = write_latent_gguf(tmp_path / f"{divided}.gguf", model, divided=divided, kind=kind)
        read.append(load_parameters(load_model_config(path), torch.float32, torch.device("cpu")))
    for name in read[0]:
        ours, theirs = read[0][name], read[1][name]
        # The tensors beside the others have float32 in these files.
        assert torch.allclose(ours, theirs, atol=1e-2 if name.endswith(".kv_b_proj.weight") else 0), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"drop_v": True}, "tensors missing: model.layers.0.self_attn.v_b_proj.weight"),
        ({"columns": 5}, "k_b_proj.weight' has shape .* the config implies 24 columns and 64 rows for each head"),
        ({"is_vector": True}, r"k_b_proj.weight' has shape \(5,\), the config implies 24 columns"),
        ({"heads": 3}, "k_b_proj has 4 heads, but v_b_proj has 3"),
    ],
)
def test_wrong_tensors_are_refused(change, message, tmp_path):
    model = make_model("youtu")
    prefix = "blk.0.attn_"
    beside = {}
    if "columns" in change:
        beside[f"{prefix}k_b.weight"] = np.zeros((4, 64, 5), np.float32)
    if "is_vector" in change:
        beside[f"{prefix}k_b.weight"] = np.zeros(5, np.float32)
    if "heads" in change:
        beside[f"{prefix}v_b.weight"] = np.zeros((3, 40, 64), np.float32)
    without = [f"{prefix}v_b.weight"] if "drop_v" in change else []
    path = write_latent_gguf(tmp_path / "model.gguf", model, divided=True, beside=beside, without=without)
    with pytest.raises(ValueError, match=message):
        load_parameters(load_model_config(path), torch.float32, torch.device("cpu"))
